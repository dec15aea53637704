"""Linears of dense layers for few tokens: the static facts of calls (problems), kernels and
plans."""
