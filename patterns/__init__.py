"""Patterns: the dataflow types, the pattern language, and one folder per family of fused ops.

Importing the package registers the families, in order of preference.
"""

# isort: off
# Before qkv_cache, which would take a latent and its rope key for a K and a V.
from tilewright.patterns.qkv import cache_absent
from tilewright.patterns.mla import mla_latent_store
from tilewright.patterns.qkv import qkv_cache

# Before lora_qkv, which would name its sum of two products that of a base and adapters.
from tilewright.patterns.mla import mla_decode
from tilewright.patterns.lora import lora_qkv
from tilewright.patterns.qkv import cache_store
from tilewright.patterns.mla import mla_prefill

# After these, which take keys that are latents, or up-projected from them.
from tilewright.patterns.attention import cache_attention

# Under another name: `moe` is the package.
from tilewright.patterns.moe import moe as moe_routed
from tilewright.patterns.moe import moe_dense
from tilewright.patterns.moe import router as moe_router

# Before the linears that read its norm.
from tilewright.patterns.collective import all_reduce_residual_norm

# After all that takes linears as its own: what is left of dense layers.
from tilewright.patterns.mlp import linear_activation, linear_residual

# Last: it takes the grouped GEMMs that no other pattern absorbs.
from tilewright.patterns.grouped import grouped_gemm

__all__ = [
    "all_reduce_residual_norm",
    "cache_absent",
    "cache_attention",
    "cache_store",
    "grouped_gemm",
    "linear_activation",
    "linear_residual",
    "lora_qkv",
    "mla_decode",
    "mla_latent_store",
    "mla_prefill",
    "moe_dense",
    "moe_routed",
    "moe_router",
    "qkv_cache",
]
