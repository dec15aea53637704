"""Pattern `cache_attention`."""
