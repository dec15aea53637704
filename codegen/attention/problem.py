"""What is static about a call of `cache_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.operand import Operand


@dataclass(frozen=True)
class CacheProblem:
    """Queries and the cache that they attend to.

    group: heads of q that share a head of keys. k, v: strides (key,). v None: a key's head_dim
    columns are its value. q_rope, k_rope: more columns of queries and keys, rope_dim of them, the
    keys' the same for all heads; strides of k_rope (key,). attn_mask: strides (1,) where the keys
    of a query follow each other. page_size: keys of a page, 0 without a block table. softcap:
    whether logits are capped. divisible: names of run-time strides that 16 divides. sequences: a
    power of two, no fewer than the ragged ones. tma: descriptors reach keys and values. Tensors are
    None where a call has none.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    v_dim: int
    q: Operand
    k: Operand
    v: Operand | None
    out: Operand
    q_rope: Operand | None = None
    k_rope: Operand | None = None
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
    rope_dim: int = 0
    page_size: int = 0
    mask: str = "causal"
    window: int = 0
    softcap: bool = False
    divisible: tuple[str, ...] = ()
    sequences: int = 1
    tma: bool = False

    @property
    def blocks(self) -> tuple[int, int]:
        """Tile widths of keys and values: powers of two that a tensor core takes."""
        v_block = max(next_power_of_2(self.v_dim), 64)
        if self.v is None:
            return v_block, v_block
        return max(next_power_of_2(self.head_dim), 16), v_block

    @property
    def rope_block(self) -> int:
        """Tile width of the rope columns; 0 without any."""
        return max(next_power_of_2(self.rope_dim), 16) if self.k_rope is not None else 0

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and value of a head."""
        values = 0 if self.v is None else self.v_dim
        return (self.head_dim + self.rope_dim + values) * ELEMENT_BYTES[self.k.dtype]


@dataclass(frozen=True)
class CacheSizes:
    """Extents that a launch knows without reading the device: num_queries of each sequence (of the
    longest at most, where ragged), num_keys that each has room for."""

    num_sequences: int
    num_queries: int
    num_keys: int
