"""Patterns `qkv_cache` and `cache_store`."""
