"""Attention to a cache: the static facts of calls (problems), kernels and plans."""
