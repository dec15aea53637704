"""The attention core of the MLA ops on CUDA tensors, and the merge of partial results."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen import mla_attention_kernels as kernels
from tilewright.codegen.mla_attention_kernels import AttentionConfig, AttentionProblem
from tilewright.codegen.mla_attention_plan import attention_config, head_group
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, Target
from tilewright.ops.kernel_launch import launch
from tilewright.ops.lowerings import device_target
from tilewright.ops.mla_attention_library import (
    NAME,
    join_spec,
    library_wanted,
    run_library,
)
from tilewright.ops.mla_attention_problems import (
    AttentionCall,
    QueryRope,
    attention_problem,
    check_call,
    strides_of,
    tensors_of,
)
from tilewright.ops.mla_queries import finished_queries, query_specs
from tilewright.ops.triton_types import TRITON_TYPES

__all__ = ["AttentionCall", "QueryRope", "attend", "attention_plan", "merge"]

LOG2E = math.log2(math.e)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(softmax(scale * [q . k + q_rope . k_rope], masked) @ v, its log-sum-exp or None).

    q [T, H, N + R], k [K, H, N], v [K, H, V], k_rope [K, R] or [K, H, R] for ragged sequences; with
    a batch dim in front for dense ones. bf16, fp16 or e4m3; q may be wider than 8-bit k: it is cast
    then, saturating, over q_scale. Any strides; the last dims are contiguous, of v its keys may be
    (fastest for 8 bits).

    options:
        scale: positive float.
        query_offsets, key_offsets: int [B + 1], rows of each sequence; None for dense ones.
        query_starts: int [B], the position of a sequence's first query; None: 0.
        query_positions: int [T], [S] or [B, S], in place of query_starts.
        key_starts: int [B], the position of a sequence's first key; None: 0.
        key_lengths: int [B]: keys at positions from there on are not seen.
        block_table: int [B, pages]: k_rope is [pages, page_size, R], a key's row at its position.
        mask, window: "none", "causal", "sliding_window" (causal, of the last `window` keys) or
            "chunked" (causal, within chunks of `window`).
        attn_mask: bool (True is seen) or added, [B or 1, H or 1, S or 1, K]; dense only.
        q_rope: the rotated part of q as a tensor [T, H, R] (q is then [T, H, N] or wider), or a
            QueryRope that says how to rotate it.
        q_scale, k_scale, v_scale: fp32 scalars on the device that 8-bit values are multiplied by.
        out_dtype: by default q's, bf16 where that is 8 bits wide.
        return_lse: fp32 [T, H], natural logarithm, of scaled logits.
        max_query_tokens: a bound on the queries of one ragged sequence.

    A query that sees no key gives zeros, and a log-sum-exp of -inf; tokens outside the offsets are
    not written. Nothing is read back from the device. Raises ArgumentError.
    """
    target = device_target(q.device) or SM90
    a = _call(q, k, v, k_rope, target, **options)
    if a.q.numel() == 0:
        return _results(a)
    problem, sizes = attention_problem(a), a.sizes
    if library_wanted(a, problem, target):
        return run_library(a, problem, target)
    config = attention_config(problem, target)
    spec = _spec(problem, config, target.name)
    out, lse = _results(a)
    tiles = kernels.row_tiles(problem, config, sizes)
    group = head_group(problem, sizes, target)
    strides = strides_of(a)
    values = {
        **tensors_of(a),
        **strides,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_sequences": sizes.num_sequences,
        "num_queries": sizes.num_queries,
        "num_keys": sizes.num_keys,
        "row_tiles": tiles,
        "head_group": group,
        "num_pages": 0 if a.block_table is None else a.k_rope.shape[0],  # type: ignore[union-attr]
        "factor": a.scale * LOG2E,
    }
    grid = kernels.attention_grid(problem, sizes, tiles, group)
    launch(spec, grid, values, a.q.device)
    return out, lse


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor | None,
    target: Target,
    **options: Any,
) -> AttentionCall:
    given = dict(options)
    rope = given.pop("q_rope", None)
    given["out_dtype"] = _out_dtype(q, given)
    positions = given.get("query_positions")
    if positions is not None and given.get("query_offsets") is None and positions.dim() == 1:
        batch, run = q.shape[0], q.shape[1]
        if positions.shape[0] == batch * run and batch > 1:
            given["query_positions"] = positions.unflatten(0, (batch, run))
    nope = k.shape[-1]
    plain = AttentionCall(q, None, k, v, k_rope, **given)
    turned: torch.Tensor | None
    if isinstance(rope, QueryRope) or q.dtype != k.dtype:
        whole = _library_may(plain, rope, target)
        own, turned = finished_queries(plain, rope, whole=whole)
    else:
        own, turned = q[..., :nope], rope if rope is not None else q[..., nope:]
    a = AttentionCall(own, None if k_rope is None else turned, k, v, k_rope, **given)
    check_call(a)
    return a


def _out_dtype(q: torch.Tensor, options: dict[str, Any]) -> torch.dtype:
    return options.get("out_dtype") or (torch.bfloat16 if q.element_size() == 1 else q.dtype)


def _library_may(plain: AttentionCall, rope: Any, target: Target) -> bool:
    """Whether queries that are rotated first go to the library, which wants them whole."""
    if not isinstance(rope, QueryRope) or plain.q.dtype != plain.k.dtype:
        return False
    own, turned = plain.q[..., : plain.nope], plain.q[..., plain.nope :]
    views = replace(plain, q=own, q_rope=turned)
    return library_wanted(views, attention_problem(views), target)


def _results(a: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (*a.q.shape[:-1], a.v.shape[-1])
    out = a.q.new_empty(shape, dtype=a.out_dtype)
    return out, a.q.new_empty(shape[:-1], dtype=torch.float32) if a.return_lse else None


@cache
def _spec(problem: AttentionProblem, config: AttentionConfig, target: str) -> KernelSpec:
    return kernels.attention_spec(problem, config, target)


def attention_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor | None,
    *,
    target: Target,
    **options: Any,
) -> tuple[tuple[KernelSpec, ...], str]:
    """(the kernels that `attend` launches, why these); the tensors may lie on "meta"."""
    rope = options.get("q_rope")
    before: tuple[KernelSpec, ...] = ()
    if isinstance(rope, QueryRope) or q.dtype != k.dtype:
        given = {name: value for name, value in options.items() if name != "q_rope"}
        given["out_dtype"] = _out_dtype(q, given)
        plain = AttentionCall(q, None, k, v, k_rope, **given)
        before = query_specs(plain, rope, target, whole=_library_may(plain, rope, target))
    a = _call(q, k, v, k_rope, target, **options)
    problem = attention_problem(a)
    if library_wanted(a, problem, target):
        return (*before, join_spec(problem, target.name)), NAME
    config = attention_config(problem, target)
    return (*before, _spec(problem, config, target.name)), f"attention {config}"


def merge(
    outs: torch.Tensor, lses: torch.Tensor, out_dtype: torch.dtype, *, return_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Partial results over disjoint keys, put together: outs [P, T, H, V] and lses fp32 [P, T, H],
    both contiguous, give out [T, H, V] of `out_dtype` and lse [T, H] or None."""
    parts, v_dim = outs.shape[0], outs.shape[-1]
    out = outs.new_empty(outs.shape[1:], dtype=out_dtype)
    lse = lses.new_empty(lses.shape[1:]) if return_lse else None
    rows = lses[0].numel()
    if out.numel() == 0:
        return out, lse
    target = device_target(outs.device) or SM90
    types = TRITON_TYPES[outs.dtype], TRITON_TYPES[out_dtype]
    spec = kernels.merge_spec(parts, v_dim, *types, return_lse, target.name)
    values = {
        "parts_ptr": outs,
        "lses_ptr": lses,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_rows": rows,
        "part_stride": outs.stride(0),
        "lse_stride": lses.stride(0),
    }
    launch(spec, kernels.merge_grid(rows), values, outs.device)
    return out, lse
