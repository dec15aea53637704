"""Converts the arguments of `cache_attention` to a problem, and to the run-time values of its
kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.arithmetic import LOG2E, next_power_of_2
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.row_rounding import RowRounding
from tilewright.ops.attention.arguments import AttentionArguments
from tilewright.ops.attention.positions import room, sequences
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.operands import mask_bytes, tma_reaches

# Tensors and numbers, by the names of the kernel's parameters.
Values = dict[str, Any]


@dataclass(frozen=True)
class RopePart:
    """The second part of queries and keys, if queries and keys are given in two parts and all heads
    share the keys. The parts of a query or a key are its first columns and its last columns. The
    first part of a key is also its value.

    Attributes:
        q, k: The second part of the queries [T, Hq, R] and of the keys [N, P, R]. A query or a key
            has the same indices here as in the first part. The tensors may have any strides, but
            the last dimension is contiguous.
        rounding: The rounding of the first part of the queries and keys before they are used; None
            if they are not rounded.
    """

    q: torch.Tensor
    k: torch.Tensor
    rounding: RowRounding | None = None


def cache_sizes(a: AttentionArguments) -> AttentionSizes:
    """Returns the sizes of a call. For ragged sequences, the number of queries is the number in all
    sequences together."""
    num_queries = a.q.shape[0] // (1 if a.row_offsets is not None else a.num_sequences)
    return AttentionSizes(sequences(a), num_queries, room(a))


def cache_problem(a: AttentionArguments, rope: RopePart | None = None) -> CacheProblem:
    """Returns the problem of a call, without the list of blocks of its mask. rope: the second part
    of the keys. If it is given, v is ignored."""
    mask = None if a.attn_mask is None else mask_bytes(a.attn_mask)
    ragged, paged = a.row_offsets is not None, a.block_table is not None
    return CacheProblem(
        num_kv_heads=a.k.shape[2],
        group=a.q.shape[1] // a.k.shape[2],
        head_dim=a.q.shape[2],
        v_dim=a.v.shape[3],
        dtype=TRITON_TYPES[a.q.dtype],
        key_dtype=TRITON_TYPES[a.k.dtype],
        latent=rope is not None,
        rope_dim=0 if rope is None else rope.k.shape[2],
        ragged=ragged,
        paged=paged,
        page_size=a.k.shape[1] if paged else 1,
        mask=a.mask,
        window=a.window,
        attn_mask="" if mask is None else TRITON_TYPES[mask.dtype],
        capped=bool(a.softcap),
        sequences=next_power_of_2(max(sequences(a), 1)) if ragged else 1,
        tma=_descriptors_reach(a),
        rounding=None if rope is None else rope.rounding,
    )


def cache_values(a: AttentionArguments, sizes: AttentionSizes, rope: RopePart | None) -> Values:
    """Returns the tensors and numbers of a call by the names of the kernel's parameters, except the
    result and the numbers that depend on the tile sizes."""
    # tanh(y), for y = scale * q @ k^T / softcap, is computed from exp2(2 y log2(e)).
    factor = 2 * a.scale / a.softcap * LOG2E if a.softcap else a.scale * LOG2E
    return {
        **vars(a),  # kernel parameters with the same names as arguments
        "v": a.v if rope is None else None,
        "q_rope": None if rope is None else rope.q,
        "k_rope": None if rope is None else rope.k,
        "mask": None if a.attn_mask is None else mask_bytes(a.attn_mask),
        "positions": _by_sequence(a),
        "num_sequences": sizes.num_sequences,
        "num_queries": sizes.num_queries,
        "num_keys": sizes.num_keys,
        "num_pages": a.k.shape[0],
        "factor": factor,
        "softcap": a.softcap * LOG2E,
    }


def _descriptors_reach(a: AttentionArguments) -> bool:
    """Whether TMA descriptors can load the queries, keys and values of one head of a sequence."""
    if a.block_table is not None or a.k.dtype != a.q.dtype:
        return False
    return all(tma_reaches(tensor, *tensor.stride()[:-1]) for tensor in (a.q, a.k, a.v))


def _by_sequence(a: AttentionArguments) -> torch.Tensor | None:
    """Returns positions as [B, S] if each token has its own position and all sequences have the
    same number of tokens. Otherwise, returns them unchanged."""
    positions, tokens = a.positions, a.q.shape[0]
    if positions is None or a.row_offsets is not None or positions.shape[0] != tokens:
        return positions
    return positions.unflatten(0, (a.num_sequences, -1))
