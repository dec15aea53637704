"""The attention core of the MLA ops on CUDA tensors, and the merge of partial results."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.mla import attention_specs as kernels
from tilewright.codegen.mla.attention_plan import attention_config, head_group, rotates_queries
from tilewright.codegen.mla.attention_specs import AttentionConfig, AttentionProblem
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, Target
from tilewright.ops.mla.attention_operands import (
    AttentionCall,
    QueryRope,
    attention_problem,
    check_call,
    query_views,
    strides_of,
    tensors_of,
    with_query_parts,
)
from tilewright.ops.mla.cudnn import (
    NAME,
    join_spec,
    library_wanted,
    library_wanted_rotated,
    run_library,
)
from tilewright.ops.mla.query_lowering import finished_queries, query_specs
from tilewright.ops.runtime.device import device_target
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.launch import launch

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
    plain, rope = _given(q, k, v, k_rope, **options)
    a = _with_queries(plain, rope, _query_way(plain, rope, target))
    if a.q.numel() == 0:
        return _results(a)
    problem, sizes = attention_problem(a), a.sizes
    if library_wanted(a, problem, target):
        return run_library(a, problem, target)
    config = attention_config(problem, sizes, target)
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
        "table_rows": 1 if a.turn is None else a.turn.rows,
        "factor": a.scale * LOG2E,
    }
    grid = kernels.attention_grid(problem, sizes, tiles, group)
    launch(spec, grid, values, a.q.device)
    return out, lse


def _given(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None, **options: Any
) -> tuple[AttentionCall, QueryRope | torch.Tensor | None]:
    """(a call whose q has all columns, what is said of its rope part)."""
    given = dict(options)
    rope = given.pop("q_rope", None)
    default = torch.bfloat16 if q.element_size() == 1 else q.dtype
    given["out_dtype"] = given.get("out_dtype") or default
    positions = given.get("query_positions")
    if positions is not None and given.get("query_offsets") is None and positions.dim() == 1:
        batch, run = q.shape[0], q.shape[1]
        if positions.shape[0] == batch * run and batch > 1:
            given["query_positions"] = positions.unflatten(0, (batch, run))
    return AttentionCall(q, None, k, v, k_rope, **given), rope


def _query_way(plain: AttentionCall, rope: QueryRope | torch.Tensor | None, target: Target) -> str:
    """How queries come to attention: "given" as they are; rotated, or cast, "before" it, "whole"
    where the library takes them side by side; or rotated "inside" our kernel."""
    if plain.q.dtype != plain.k.dtype:
        return "before"
    if not isinstance(rope, QueryRope):
        return "given"
    if library_wanted_rotated(plain, rope, target):
        return "whole"
    problem = attention_problem(replace(query_views(plain, rope), turn=rope))
    inside = rotates_queries(problem, attention_config(problem, plain.sizes, target))
    return "inside" if inside else "before"


def _with_queries(
    plain: AttentionCall, rope: QueryRope | torch.Tensor | None, way: str
) -> AttentionCall:
    """The call of the core, checked, and what goes before it launched."""
    if way in ("before", "whole"):
        a = with_query_parts(plain, *finished_queries(plain, rope, whole=way == "whole"))
    else:
        a = query_views(plain, rope)
        a = replace(a, turn=rope if isinstance(rope, QueryRope) else None)
    check_call(a)
    return a


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
    plain, rope = _given(q, k, v, k_rope, **options)
    way = _query_way(plain, rope, target)
    before: tuple[KernelSpec, ...] = ()
    if way in ("before", "whole"):
        before = query_specs(plain, rope, target, whole=way == "whole")
    a = _with_queries(plain, rope, way)
    problem = attention_problem(a)
    if library_wanted(a, problem, target):
        return (*before, join_spec(problem, target.name)), NAME
    config = attention_config(problem, a.sizes, target)
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
