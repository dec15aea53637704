"""What to look for: the dataflow types, the pattern language, one file per family.

Importing the package registers the families, in order of preference.
"""

from tilewright.patterns import qkv_cache
from tilewright.patterns import cache_store
from tilewright.patterns import cache_absent

__all__ = ["cache_absent", "cache_store", "qkv_cache"]
