"""The arguments of `mla_decode`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from tilewright.ops.schema import SymInt


@dataclass(frozen=True)
class MlaDecodeArguments:
    """The arguments of `mla_decode`: T queries of B sequences; H heads, N, R and V the widths of a
    head's unrotated part, rotated part and values, L the latent rank.

    q [T, H, N + R]: unrotated columns first, the others rotated; bf16, fp16, fp32 or fp64, last
    dimension contiguous. A sequence's queries: row_offsets [B + 1], or num_sequences equal runs.

    latent [P, S, L], rope_keys [P, S, R]: the cache, of q's dtype, any strides, last dimension
    contiguous; normed and rotated. block_table [B, columns]: key j of sequence b is
    latent[block_table[b, j // S], j % S]. None: it is latent[b, j], P = B.

    kv_b_weight [H * (N + V), L]: for each head N rows of keys, W_UK, and V = v_dim rows of values,
    W_UV. Of q's dtype, or float8_e4m3fn with kv_b_scale [ceil(rows / bn), ceil(L / bk)],
    scale_block = [bn, bk]: it is then rounded to q's dtype.

    key_lengths, positions, cache_lengths, mask, window, attn_mask, mask_blocks: which keys a query
    sees, as for `cache_attention`. A query that sees no key gives zeros. Keys that nobody sees may
    hold anything, NaN too. Bad values (offsets, lengths, pages) raise ArgumentError where they are
    on the CPU, and under TILEWRIGHT_DEBUG=1 on a GPU; otherwise a key on a page outside the pool is
    not seen.
    """

    q: torch.Tensor
    latent: torch.Tensor
    rope_keys: torch.Tensor
    kv_b_weight: torch.Tensor
    _: KW_ONLY
    v_dim: SymInt
    scale: float
    num_sequences: SymInt = 1
    row_offsets: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    cache_lengths: torch.Tensor | None = None
    mask: str = "causal"
    window: int = 0
    attn_mask: torch.Tensor | None = None
    mask_blocks: torch.Tensor | None = None
    kv_b_scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
