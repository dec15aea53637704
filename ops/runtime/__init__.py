"""Launching a kernel, recording and replaying a call, timing."""
