"""Grouped GEMMs and their quantisers: the static facts of calls (problems), kernels and plans."""
