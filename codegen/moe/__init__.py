"""Mixtures of experts: problems, specs, plans."""
