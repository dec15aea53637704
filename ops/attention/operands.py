"""From the arguments of `cache_attention` to the problem and the run-time values of its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.attention.problem import CacheProblem, CacheSizes
from tilewright.codegen.attention.specs import ROPE_STRIDES, STRIDES, TENSORS
from tilewright.codegen.operand import Operand
from tilewright.ops.attention.positions import room, sequences
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.operands import broadcast_strides, mask_bytes, operand, tma_reaches

# Softmax in powers of two.
LOG2E = math.log2(math.e)
# Run-time arguments by the kernels' parameter names.
Values = dict[str, Any]


@dataclass(frozen=True)
class RopePart:
    """More columns of queries and of keys, the keys' the same for all heads: q [T, Hq, R], k [N, P,
    R], where the others lie. Any strides, last dimension contiguous. A key's other columns are its
    value then."""

    q: torch.Tensor
    k: torch.Tensor


def cache_sizes(a: Any) -> CacheSizes:
    """The extents of a call. Of ragged sequences any may have all the queries."""
    num_queries = a.q.shape[0] // (1 if a.row_offsets is not None else a.num_sequences)
    return CacheSizes(sequences(a), num_queries, room(a))


def cache_problem(a: Any, rope: RopePart | None = None) -> tuple[CacheProblem, Values]:
    """The problem of a call, and its values but for the result and the tiles. rope: the keys'
    second part; v is not looked at then."""
    strides, sizes = _strides(a) | _rope_strides(rope), cache_sizes(a)
    tensors = {name: getattr(a, field) for name, field in TENSORS.items()}
    if a.attn_mask is not None:
        tensors["mask_ptr"] = mask_bytes(a.attn_mask)
    given: Any = {TENSORS[name]: operand(tensor) for name, tensor in tensors.items()}
    if strides["mask_column_stride"] == 1:
        given["attn_mask"] = operand(tensors["mask_ptr"], 1)
    problem = CacheProblem(
        num_kv_heads=a.k.shape[2],
        group=a.q.shape[1] // a.k.shape[2],
        head_dim=a.q.shape[2],
        v_dim=a.v.shape[3],
        q=operand(a.q),
        k=operand(a.k, a.k.stride(1)),
        v=operand(a.v, a.v.stride(1)) if rope is None else None,
        out=Operand(TRITON_TYPES[a.q.dtype]),
        q_rope=None if rope is None else operand(rope.q),
        k_rope=None if rope is None else operand(rope.k, rope.k.stride(1)),
        **given,
        rope_dim=0 if rope is None else rope.k.shape[2],
        page_size=0 if a.block_table is None else a.k.shape[1],
        mask=a.mask,
        window=a.window,
        softcap=bool(a.softcap),
        divisible=tuple(name for name, stride in strides.items() if stride % 16 == 0),
        sequences=1 if a.row_offsets is None else next_power_of_2(max(sizes.num_sequences, 1)),
        tma=_descriptors_reach(a),
    )
    # tanh(y) of y = scale * q @ k^T / softcap is taken through exp2(2 y log2(e)).
    factor = 2 * a.scale / a.softcap * LOG2E if a.softcap else a.scale * LOG2E
    values: Values = {
        "q_ptr": a.q,
        "k_ptr": a.k,
        "v_ptr": a.v,
        "q_rope_ptr": None if rope is None else rope.q,
        "k_rope_ptr": None if rope is None else rope.k,
        **tensors,
        "num_sequences": sizes.num_sequences,
        "num_queries": sizes.num_queries,
        "num_keys": sizes.num_keys,
        "num_pages": a.k.shape[0],
        "factor": factor,
        "softcap": a.softcap * LOG2E,
        **strides,
    }
    return problem, values


def _descriptors_reach(a: Any) -> bool:
    """Whether descriptors can read a sequence's queries, keys and values of a head."""
    if a.block_table is not None or a.k.dtype != a.q.dtype:
        return False
    return all(tma_reaches(tensor, *tensor.stride()[:-1]) for tensor in (a.q, a.k, a.v))


def _strides(a: Any) -> dict[str, int]:
    """The strides of a launch by the kernel's parameter names."""
    positions = a.positions
    each = positions is not None and positions.shape[0] == a.q.shape[0] != 0
    step = 0 if positions is None else positions.stride(0)
    own_run = step * (a.q.shape[0] // max(sequences(a), 1)) if each else 0
    scales = [0 if s is None or s.numel() == 1 else s.stride(0) for s in (a.k_scale, a.v_scale)]
    given = (
        a.q.stride(0),
        a.q.stride(1),
        a.k.stride(0),
        a.k.stride(2),
        a.v.stride(0),
        a.v.stride(2),
        own_run,
        step,
        0 if a.block_table is None else a.block_table.stride(0),
        *broadcast_strides(a.attn_mask),
        *broadcast_strides(a.mask_blocks)[:3],
        *scales,
    )
    return dict(zip(STRIDES, given, strict=True))


def _rope_strides(rope: RopePart | None) -> dict[str, int]:
    if rope is None:
        return {}
    given = (rope.q.stride(0), rope.q.stride(1), rope.k.stride(0))
    return dict(zip(ROPE_STRIDES, given, strict=True))
