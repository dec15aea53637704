"""Launching kernels, recording and replaying calls, and timing."""
