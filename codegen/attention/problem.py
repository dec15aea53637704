"""What is static about a call of `cache_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.attention.blocks import mask_kind


@dataclass(frozen=True)
class CacheProblem:
    """Queries and the cache that they attend to.

    group: heads of q that share a head of keys. dtype, key_dtype: of queries, and of keys and
    values. latent: a key's head_dim columns are its value, and rope_dim more columns of queries and
    keys, the keys' the same for all heads, count for the scores alone. attn_mask: dtype of the mask
    tensor, "" without one. listed: there is a list of the blocks that it lets queries see. ragged,
    paged: there are row offsets, a block table. page_size: keys of a page, 1 without a block table.
    capped: logits are. sequences: a power of two, no fewer than the ragged ones. tma: descriptors
    reach keys and values.
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

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def head_block(self) -> int:
        """Tile width of keys: a power of two that a tensor core takes."""
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
        """Bytes of one key and value of a head."""
        values = 0 if self.latent else self.v_dim
        return (self.head_dim + self.rope_dim + values) * ELEMENT_BYTES[self.key_dtype]


@dataclass(frozen=True)
class AttentionSizes:
    """Extents that a launch knows without reading the device: num_queries of each sequence, of all
    ragged ones together; num_keys that each has room for, or that ragged ones have together where
    keys are ragged, too."""

    num_sequences: int
    num_queries: int
    num_keys: int
