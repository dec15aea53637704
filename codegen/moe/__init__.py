"""Mixtures of experts: the static facts of calls (problems), kernels and plans."""
