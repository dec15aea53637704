"""The static part of a call of `cache_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.attention.blocks import mask_kind
from tilewright.codegen.row_rounding import RowRounding


@dataclass(frozen=True)
class CacheProblem:
    """The static part of a call: its queries, and the cache that they attend to.

    Attributes:
        num_kv_heads: The number of heads of keys.
        group: The number of query heads that share a head of keys.
        head_dim, v_dim: The width of a key and of a value.
        dtype, key_dtype: The dtype of the queries, and the dtype of keys and values.
        latent: Whether the first head_dim columns of a key are also its value. Queries and keys
            then have rope_dim more columns, which are used for the scores only. All heads share the
            rope columns of a key.
        rope_dim: The number of rope columns.
        ragged: Whether the sequences are given by row offsets.
        paged: Whether the cache has a block table.
        page_size: The number of keys in a page; 1 if there is no block table.
        mask: The kind of mask that follows from positions, such as "causal".
        window: The size of a sliding window; 0 for none.
        attn_mask: The dtype of the mask tensor; "" if there is none.
        listed: Whether there is a list of the blocks that the mask tensor leaves visible.
        capped: Whether the logits are capped (softcap).
        sequences: The number of ragged sequences, rounded up to a power of two.
        tma: Whether tensor descriptors can load keys and values.
        rounding: The rounding of latents before they are used; None if they are not rounded.
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
        """The width of a tile of keys: a power of two that tensor cores support."""
        return self.v_block if self.latent else max(next_power_of_2(self.head_dim), 16)

    @property
    def v_block(self) -> int:
        """The width of a tile of values."""
        return max(next_power_of_2(self.v_dim), 64)

    @property
    def rope_block(self) -> int:
        """The width of a tile of rope columns; 0 if there are none."""
        return max(next_power_of_2(self.rope_dim), 16) if self.latent else 0

    @property
    def mask_kind(self) -> str:
        return mask_kind(self.attn_mask)

    @property
    def key_bytes(self) -> int:
        """The number of bytes of a key and its value, for one head."""
        values = 0 if self.latent else self.v_dim
        return (self.head_dim + self.rope_dim + values) * ELEMENT_BYTES[self.key_dtype]


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes that a launch knows without reading from the device.

    Attributes:
        num_sequences: The number of sequences.
        num_queries: The number of queries of each sequence, or of all sequences together if they
            are ragged.
        num_keys: The number of keys that each sequence has room for. If keys are ragged too, the
            number of keys of all sequences together.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
