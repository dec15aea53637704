"""Patterns `qkv_cache`, `cache_store` and `cache_absent`."""
