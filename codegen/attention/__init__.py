"""Attention over a cache: problems, specs, plans."""
