"""QKV projections with norm, RoPE and cache write: problems, specs, plans."""
