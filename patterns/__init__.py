"""What to look for: the dataflow types, the pattern language, one file per family.

Importing the package registers the families, in order of preference.
"""

# A latent and its rope key come before each of them is a K or V write of its own.
from tilewright.patterns import cache_absent, mla_latent_store, qkv_cache

# isort: split
from tilewright.patterns import lora_qkv

# isort: split
from tilewright.patterns import cache_store, mla_prefill, moe, moe_dense

# isort: split
# Last: it takes what the families leave.
from tilewright.patterns import grouped_gemm

__all__ = [
    "cache_absent",
    "cache_store",
    "grouped_gemm",
    "lora_qkv",
    "mla_latent_store",
    "mla_prefill",
    "moe",
    "moe_dense",
    "qkv_cache",
]
