"""What to look for: the dataflow types, the pattern language, one folder per family.

Importing the package registers the families, in order of preference.
"""

# isort: off
# A latent and its rope key come before each of them is a K or V write of its own.
from tilewright.patterns.qkv import cache_absent
from tilewright.patterns.mla import mla_latent_store
from tilewright.patterns.qkv import qkv_cache
from tilewright.patterns.lora import lora_qkv
from tilewright.patterns.qkv import cache_store
from tilewright.patterns.mla import mla_prefill

# By another name: `moe` is the folder.
from tilewright.patterns.moe import moe as moe_routed
from tilewright.patterns.moe import moe_dense

# Last: it takes what the families leave.
from tilewright.patterns.grouped import grouped_gemm

__all__ = [
    "cache_absent",
    "cache_store",
    "grouped_gemm",
    "lora_qkv",
    "mla_latent_store",
    "mla_prefill",
    "moe_dense",
    "moe_routed",
    "qkv_cache",
]
