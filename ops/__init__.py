"""Fused ops: schema, fake, validation, reference and lowerings, one file per op."""

from tilewright.ops.cache_store import paged_kv_store
from tilewright.ops.checks import ArgumentError
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.fused_moe import OP as _fused_moe  # noqa: F401  registers the op
from tilewright.ops.qkv_cache import fused_qkv_paged
from tilewright.ops.qkv_matmul_ragged import fused_qkv_matmul_kv_cache_paged_ragged

__all__ = [
    "ArgumentError",
    "CacheWindow",
    "fused_qkv_matmul_kv_cache_paged_ragged",
    "fused_qkv_paged",
    "paged_kv_store",
]
