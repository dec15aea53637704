"""The static part of a call of `cache_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.attention.blocks import mask_kind
from tilewright.codegen.row_rounding import RowRounding


@dataclass(frozen=True)
class CacheProblem:
    """The static part of queries and of the cache that they attend to.

    Attributes:
        group: heads of q that share a head of keys.
        dtype, key_dtype: dtype of the queries; dtype of keys and values.
        latent: the head_dim columns of a key are also its value. Queries and keys have rope_dim
            more columns, which only count for the scores; those of a key are shared by all heads.
        ragged: whether there are row offsets. paged: whether there is a block table.
        page_size: keys of a page; 1 without a block table.
        attn_mask: dtype of the mask tensor; "" without one.
        listed: whether there is a list of the blocks that the mask tensor lets queries see.
        capped: whether logits are capped (softcap).
        sequences: number of ragged sequences, rounded up to a power of two.
        tma: whether descriptors can load keys and values.
        rounding: the rounding of latents before they are used; None without one.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    v_dim: int
    dtype: str
    key_dtype: str
    latent: bool = False
    rope_dim: int = 0
    ragged: bool = False
    paged: bool = False
    page_size: int = 1
    mask: str = "causal"
    window: int = 0
    attn_mask: str = ""
    listed: bool = False
    capped: bool = False
    sequences: int = 1
    tma: bool = False
    rounding: RowRounding | None = None

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def head_block(self) -> int:
        """Tile width of keys: a power of two that tensor cores support."""
        return self.v_block if self.latent else max(next_power_of_2(self.head_dim), 16)

    @property
    def v_block(self) -> int:
        """Tile width of values."""
        return max(next_power_of_2(self.v_dim), 64)

    @property
    def rope_block(self) -> int:
        """Tile width of the rope columns; 0 without any."""
        return max(next_power_of_2(self.rope_dim), 16) if self.latent else 0

    @property
    def mask_kind(self) -> str:
        return mask_kind(self.attn_mask)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value, of one head."""
        values = 0 if self.latent else self.v_dim
        return (self.head_dim + self.rope_dim + values) * ELEMENT_BYTES[self.key_dtype]


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes that a launch knows without reading from the device.

    num_queries: queries of each sequence, or of all ragged sequences together. num_keys: keys that
    each sequence has room for, or, if keys are ragged too, keys of all sequences together."""

    num_sequences: int
    num_queries: int
    num_keys: int
