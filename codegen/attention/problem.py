"""What is static about a call of `cache_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.operand import Operand


@dataclass(frozen=True)
class CacheProblem:
    """Queries and the cache that they attend to.

    group: heads of q that share a head of keys. k, v: strides (key,). page_size: keys of a page, 0
    without a block table. softcap: whether logits are capped. divisible: names of run-time strides
    that 16 divides. sequences: a power of two, no fewer than the ragged ones. tma: descriptors
    reach keys and values. Tensors are None where a call has none.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    v_dim: int
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    row_offsets: Operand | None = None
    block_table: Operand | None = None
    key_lengths: Operand | None = None
    positions: Operand | None = None
    cache_lengths: Operand | None = None
    attn_mask: Operand | None = None
    mask_blocks: Operand | None = None
    sinks: Operand | None = None
    k_scale: Operand | None = None
    v_scale: Operand | None = None
    page_size: int = 0
    mask: str = "causal"
    window: int = 0
    softcap: bool = False
    divisible: tuple[str, ...] = ()
    sequences: int = 1
    tma: bool = False

    @property
    def mask_kind(self) -> str:
        if self.attn_mask is None:
            return "none"
        return "bool" if self.attn_mask.dtype == "u8" else "additive"

    @property
    def blocks(self) -> tuple[int, int]:
        """Tile widths of keys and values: powers of two that a tensor core takes."""
        return max(next_power_of_2(self.head_dim), 16), max(next_power_of_2(self.v_dim), 64)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and value of a head."""
        return (self.head_dim + self.v_dim) * ELEMENT_BYTES[self.k.dtype]


@dataclass(frozen=True)
class CacheSizes:
    """Extents that a launch knows without reading the device: num_queries of each sequence (of the
    longest at most, where ragged), num_keys that each has room for."""

    num_sequences: int
    num_queries: int
    num_keys: int
