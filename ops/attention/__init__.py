"""Attention over a cache."""
