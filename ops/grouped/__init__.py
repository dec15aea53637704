"""Grouped GEMMs, and the NVFP4 quantiser."""
