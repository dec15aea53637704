"""What to look for: the dataflow types, the pattern language, one file per family.

Importing the package registers the families, in order of preference.
"""

from tilewright.patterns import cache_absent, cache_store, moe, qkv_cache

# isort: split
# Last: it takes what the families leave.
from tilewright.patterns import grouped_gemm

__all__ = ["cache_absent", "cache_store", "grouped_gemm", "moe", "qkv_cache"]
