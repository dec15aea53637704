"""Grouped GEMMs and their quantisers: problems, specs, plans."""
