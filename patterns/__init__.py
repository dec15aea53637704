"""What to look for: the dataflow types, the pattern language, one file per family.

Importing the package registers the families, in order of preference.
"""

from tilewright.patterns import cache_absent, cache_store, moe, qkv_cache

__all__ = ["cache_absent", "cache_store", "moe", "qkv_cache"]
