"""Attention to a cache: problems, specs, plans."""
