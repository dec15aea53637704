"""The steps of the attention of MLA ops, and of the merge of partial results."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.attention.prefill_tiles import PrefillConfig, schedule
from tilewright.codegen.mla import attention_kernels as kernels
from tilewright.codegen.mla.attention_plan import attention_config, rotates_queries
from tilewright.codegen.mla.query_kernels import QUERY, query_grid
from tilewright.codegen.targets import Target
from tilewright.ops.attention.block_lists import list_steps
from tilewright.ops.attention.lowering import with_dense
from tilewright.ops.attention.masks import lowest_hides
from tilewright.ops.mla.attention.cudnn import library_steps, library_wanted, whole_steps
from tilewright.ops.mla.attention.operands import (
    AttentionCall,
    attention_problem,
    check_call,
    constant_strides,
    launch_values,
    query_call,
    rotation_of,
)
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Step, Steps

# The fields that are tensors with an element for each sequence. Kernels read them with stride 1.
BY_SEQUENCE = ("query_offsets", "key_offsets", "query_starts", "key_starts", "key_lengths")

_statics = cache(kernels.attention_statics)
_merge_statics = cache(kernels.merge_statics)


def attention_steps(a: AttentionCall, target: Target, joined: torch.Tensor | None = None) -> Steps:
    """Performs the steps of the attention of an MLA op. The result is (out,), or (out, lse) if the
    call has return_lse. Raises ArgumentError.

    joined: a tensor [.., H, R + N + V] with as many keys as queries, of which the call's k and v
    are views. If it is given, the steps fill its rope columns, and cuDNN computes the attention.
    """
    if joined is not None:
        check_call(a)
        _, turned = yield from query_steps(a, target, whole=True, joined=joined)
        keys = joined[..., : a.rope + a.nope]
        return (yield from whole_steps(a, turned, keys))
    a = yield from _ready_queries((yield from with_dense(a, BY_SEQUENCE)), target)
    check_call(a)
    if a.q.numel() == 0:
        return Outcome((yield from _results(a)), "mla attention", "there are no queries")
    if library_wanted(a, target):
        return (yield from library_steps(a, target))
    if a.attn_mask is not None and a.mask_blocks is None:
        hides = lowest_hides(a, a.sizes.num_keys)
        blocks = yield from list_steps(a.attn_mask, target, hide_lowest=hides)
        a = replace(a, mask_blocks=blocks)
    problem = attention_problem(a)
    config = attention_config(problem, a.sizes, target)
    results = yield from _results(a)
    yield core_launch(a, problem, results, target, config)
    return Outcome(results, "mla attention", f"attention {config}")


def core_launch(
    a: AttentionCall,
    problem: kernels.AttentionProblem,
    results: tuple[torch.Tensor, ...],
    target: Target,
    config: PrefillConfig,
    *,
    head_group: int | None = None,
) -> Launch:
    """Returns the launch of `mla_attention` that fills `results`, which are (out,) or (out, lse).
    head_group: the number of heads in a group, to use instead of the plan's number."""
    tiles = schedule(
        config,
        a.sizes,
        target,
        heads=problem.num_heads,
        key_bytes=problem.key_bytes,
        ragged=problem.ragged,
        head_group=head_group,
    )
    rotation, rotated = rotation_of(a.tables, a.rope)
    values = launch_values(a) | rotated | tiles._asdict()
    values |= {"out": results[0], "lse": results[1] if a.return_lse else None}
    statics, known = _statics(problem, config), constant_strides(a)
    return launch(kernels.ATTENTION, target, tiles.grid, values, statics, rotation, **known)


def _results(a: AttentionCall) -> Generator[Step, Any, tuple[torch.Tensor, ...]]:
    """Allocates (out,) or (out, lse)."""
    out = yield Buffer((*a.q.shape[:-1], a.v.shape[-1]), a.out_dtype)
    return (out, (yield Buffer(a.q.shape[:-1], torch.float32))) if a.return_lse else (out,)


def _ready_queries(a: AttentionCall, target: Target) -> Generator[Step, Any, AttentionCall]:
    """Returns the call with its queries in the form that attention needs. For the emitted kernel,
    the queries are passed unchanged if they need no rotation, or if the kernel rotates them.
    Otherwise, they are rotated and cast first. For cuDNN, they are rotated first, with both parts
    adjacent in memory."""
    whole = False
    if a.q.dtype == a.k.dtype:
        parts = a.in_parts()
        if a.tables is None:
            return parts
        whole = library_wanted(parts, target)
        if not whole and _rotates_itself(parts, target):
            return parts
    ready = a.with_queries(*(yield from query_steps(a, target, whole=whole)))
    return replace(ready, tables=None)


def _rotates_itself(a: AttentionCall, target: Target) -> bool:
    """Whether the emitted kernel rotates the queries of a call."""
    problem = attention_problem(a)
    return rotates_queries(problem, attention_config(problem, a.sizes, target))


def query_steps(
    a: AttentionCall,
    target: Target,
    *,
    whole: bool = False,
    joined: torch.Tensor | None = None,
) -> Generator[Step, Any, tuple[torch.Tensor, torch.Tensor]]:
    """Returns two tensors: the unrotated columns of q, and the other columns, rotated by a.tables.
    Both are cast to k's dtype. A part that needs no change is a view of a.q.

    whole: whether both parts are adjacent views of one new tensor. joined: a contiguous tensor [..,
    H, R + ..] with as many keys as tokens. If it is given, the rotated columns of q come first in
    the new tensor, and the rope keys are written to the first columns of joined.
    """
    problem, rotation, values = query_call(a, whole, joined)
    rows = values["num_rows"]
    out = yield Buffer((*a.q.shape[:-1], problem.out_width), a.k.dtype)
    if rows:
        grid = query_grid(problem, rows)
        yield launch(QUERY, target, grid, values | {"out": out}, problem, rotation)
    if joined is not None:
        return out[..., a.rope :], out[..., : a.rope]
    if problem.whole:
        return out[..., : a.nope], out[..., a.nope :]
    return a.q[..., : a.nope], out


def merge_steps(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out_dtype: torch.dtype,
    target: Target,
) -> Steps:
    """Merges partial results of attention to disjoint sets of keys. outs: the results [T, H, V].
    lses: their log-sum-exps, fp32 [T, H]. The merged result is [T, H, V] of `out_dtype`."""
    shape, rows = outs[0].shape, lses[0].numel()
    parts, part_lses = (yield from _stack(outs)), (yield from _stack(lses))
    out = yield Buffer(shape, out_dtype)
    values = {
        "parts": parts,
        "lses": part_lses,
        "out": out,
        "num_rows": rows,
        "part_stride": out.numel(),
        "lse_stride": rows,
    }
    statics = _merge_statics(len(outs), shape[-1])
    yield launch(kernels.MERGE, target, kernels.merge_grid(rows), values, statics)
    return Outcome(out, "mla merge")


def _stack(parts: Sequence[torch.Tensor]) -> Generator[Step, Any, torch.Tensor]:
    made = Buffer((len(parts), *parts[0].shape), parts[0].dtype)
    return (yield Library(_stacked, tuple(parts), makes=made))


def _stacked(*parts: torch.Tensor) -> torch.Tensor:
    return torch.stack(parts)
