"""QKV projections with norm, RoPE and cache write: static facts (problems), kernels and plans."""
