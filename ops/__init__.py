"""Fused ops: schema, fake, validation, reference and lowerings, one file per op."""

from tilewright.codegen.build.travel import load_kernels, pack_kernels
from tilewright.ops.attention import mask_blocks as _mask_blocks  # noqa: F401  registers it
from tilewright.ops.attention.cache_attention import cache_attention
from tilewright.ops.checks import ArgumentError
from tilewright.ops.collective.all_reduce_residual_norm import all_reduce_residual_norm
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.grouped.matmul import grouped_matmul
from tilewright.ops.grouped.nvfp4_matmul import grouped_matmul_dynamic_scaled_nvfp4
from tilewright.ops.grouped.quantize_nvfp4 import quantize_nvfp4
from tilewright.ops.lora.expand import lora_expand_add
from tilewright.ops.lora.shrink import shrink_qkv_permute_3mn
from tilewright.ops.mla.decode.decode import mla_decode
from tilewright.ops.mla.latents.latent_store import mla_latent_store
from tilewright.ops.mla.prefill import dense as _mla_prefill_dense  # noqa: F401  registers it
from tilewright.ops.mla.prefill.branch import mla_prefill_branch_fp8
from tilewright.ops.mla.prefill.chunk_plan import mla_prefill_plan
from tilewright.ops.mla.prefill.prefill import mla_prefill
from tilewright.ops.mlp.linear_activation import linear_activation
from tilewright.ops.mlp.linear_residual import linear_residual
from tilewright.ops.moe.moe import fused_moe
from tilewright.ops.moe.router import moe_router
from tilewright.ops.qkv.cache_store import paged_kv_store
from tilewright.ops.qkv.qkv_cache import fused_qkv_paged
from tilewright.ops.qkv.qkv_matmul_ragged import fused_qkv_matmul_kv_cache_paged_ragged

__all__ = [
    "ArgumentError",
    "CacheWindow",
    "all_reduce_residual_norm",
    "cache_attention",
    "fused_moe",
    "fused_qkv_matmul_kv_cache_paged_ragged",
    "fused_qkv_paged",
    "grouped_matmul",
    "grouped_matmul_dynamic_scaled_nvfp4",
    "linear_activation",
    "linear_residual",
    "load_kernels",
    "lora_expand_add",
    "mla_decode",
    "mla_latent_store",
    "mla_prefill",
    "mla_prefill_branch_fp8",
    "mla_prefill_plan",
    "moe_router",
    "pack_kernels",
    "paged_kv_store",
    "quantize_nvfp4",
    "shrink_qkv_permute_3mn",
]
