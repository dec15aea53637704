"""Linears of dense layers for few tokens: problems, specs, plans."""
