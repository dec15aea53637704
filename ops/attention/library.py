"""PyTorch's own attention as a way to compute `cache_attention`, for calls with many queries and no
masks."""

from __future__ import annotations

from functools import partial

import torch

from tilewright.ops.attention.arguments import AttentionArguments
from tilewright.ops.attention.positions import room
from tilewright.ops.runtime.program import Buffer, Library, Outcome, Steps

# The smallest number of queries for which the library's kernel is faster than tilewright's.
LIBRARY_QUERIES = 512


def library_wanted(a: AttentionArguments) -> bool:
    """Whether PyTorch's attention computes the same result and is faster. Reads only metadata."""
    places = (a.row_offsets, a.block_table, a.key_lengths, a.positions, a.cache_lengths)
    others = (*places, a.attn_mask, a.sinks, a.k_scale, a.v_scale)
    if any(tensor is not None for tensor in others) or a.softcap or a.k.dtype != a.q.dtype:
        return False
    queries = a.q.shape[0] // a.num_sequences
    # is_causal aligns the mask at the top left, which is correct for positions that start at 0.
    return queries >= LIBRARY_QUERIES and (
        a.mask == "none" or (a.mask == "causal" and queries == room(a))
    )


def library_steps(a: AttentionArguments) -> Steps:
    function = partial(_attention, a.num_sequences, a.mask == "causal", a.scale)
    made = Buffer((*a.q.shape[:2], a.v.shape[3]), a.q.dtype)
    out = yield Library(function, (a.q, a.k, a.v), makes=made)
    return Outcome(
        out, "library attention", "the keys that each query attends to follow from the shapes"
    )


def _attention(
    batch: int, causal: bool, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q.unflatten(0, (batch, -1)), k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1).contiguous()
