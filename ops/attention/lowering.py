"""The steps of `cache_attention`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.plan import (
    decode_config,
    decode_rows,
    decodes,
    prefill_config,
    query_head_group,
)
from tilewright.codegen.attention.prefill_tiles import PrefillConfig, num_tiles, tile_grid
from tilewright.codegen.attention.problem import CacheProblem, CacheSizes
from tilewright.codegen.attention.specs import (
    DecodeConfig,
    decode_spec,
    decode_tiles,
    merge_grid,
    merge_spec,
    prefill_spec,
    workspace_elements,
)
from tilewright.codegen.targets import Target
from tilewright.ops.attention.block_lists import list_steps
from tilewright.ops.attention.library import library_steps, library_wanted
from tilewright.ops.attention.masks import lowest_hides
from tilewright.ops.attention.operands import RopePart, Values, cache_problem, cache_sizes
from tilewright.ops.attention.positions import room
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Step, Steps, chooser

# Tensors with an element for each sequence, which kernels read one after the other.
BY_SEQUENCE = ("row_offsets", "key_lengths", "cache_lengths")

_merge_spec = cache(merge_spec)


_decode_kernel = chooser(decode_config, decode_spec)
_prefill_kernel = chooser(prefill_config, prefill_spec)


def attention_steps(
    a: Any,
    target: Target,
    config: DecodeConfig | PrefillConfig | None = None,
    rope: RopePart | None = None,
) -> Steps:
    """The steps of a call. config: the tiles, and so the kernel; None: what the plan chooses. rope:
    the keys' second part, whose first part is their values: for few queries."""
    if a.q.numel() == 0 or a.v.shape[3] == 0:
        out = yield Buffer((*a.q.shape[:2], a.v.shape[3]), a.q.dtype)
        return Outcome(out, "nothing", "there are no queries, so nothing is launched")
    if config is None and rope is None and library_wanted(a):
        return (yield from library_steps(a))
    out = yield Buffer((*a.q.shape[:2], a.v.shape[3]), a.q.dtype)
    if room(a) == 0:
        yield Library(torch.Tensor.zero_, (out,))
        return Outcome(out, "nothing", "there are no keys, so zeros")
    a = yield from _with_list((yield from with_dense(a, BY_SEQUENCE)), target)
    problem, values = cache_problem(a, rope)
    sizes, values["out_ptr"] = cache_sizes(a), out
    few = rope is not None or isinstance(config, DecodeConfig)
    few = few or (config is None and decodes(problem, sizes))
    if few and problem.mask_blocks is not None and a.attn_mask.shape[1] > 1:
        # A tile has all heads that share keys; the list says what each sees.
        problem, values["mask_blocks_ptr"] = replace(problem, mask_blocks=None), None
    steps = _decode if few else _prefill
    return (yield from steps(problem, sizes, values, target, config))


def _decode(
    problem: CacheProblem, sizes: CacheSizes, values: Values, target: Target, config: Any
) -> Steps:
    config, spec = _decode_kernel(problem, _bucket(sizes), target, config=config)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    if config.splits > 1:
        shape = tiles, workspace_elements(problem, config)
        values["workspace_ptr"] = yield Buffer(shape, torch.float32)
    values["row_tiles"] = cdiv(sizes.num_queries, config.tokens)
    yield Launch(spec, (tiles * config.splits,), values)
    if config.splits > 1:
        merge = _merge_spec(problem, config, target.name)
        yield Launch(merge, merge_grid(problem, config, tiles), values)
    return Outcome(values["out_ptr"], "decode kernel", config)


def _prefill(
    problem: CacheProblem, sizes: CacheSizes, values: Values, target: Target, config: Any
) -> Steps:
    config, spec = _prefill_kernel(problem, target, config=config)
    ragged, queries = problem.row_offsets is not None, sizes.num_queries
    tiles = num_tiles(config.block_m, sizes.num_sequences, queries, queries, ragged=ragged)
    group = query_head_group(problem, sizes, target)
    values |= {"row_tiles": tiles, "head_group": group}
    pairs = problem.num_kv_heads * problem.group * (1 if ragged else sizes.num_sequences)
    yield Launch(spec, tile_grid(pairs, tiles, group), values)
    return Outcome(values["out_ptr"], "prefill kernel", config)


def decode_tile(a: Any, rope: RopePart, num_queries: int) -> int:
    """Rows of a tile of a call with so many queries in a sequence."""
    return decode_rows(cache_problem(a, rope)[0], num_queries)[2]


def with_dense(a: Any, names: Sequence[str]) -> Generator[Step, Any, Any]:
    """The same call with copies of those of its vectors whose elements do not follow each other."""
    made = {}
    for name in names:
        vector = getattr(a, name)
        if vector is not None and vector.shape[0] > 1 and vector.stride(0) != 1:
            made[name] = yield Buffer.like(vector)
            yield Library(torch.Tensor.copy_, (made[name], vector))
    return replace(a, **made) if made else a


def _with_list(a: Any, target: Target) -> Generator[Step, Any, Any]:
    """The same call with the list of blocks of its mask."""
    if a.attn_mask is None or a.mask_blocks is not None:
        return a
    hides = lowest_hides(a, room(a))
    blocks = yield from list_steps(a.attn_mask, target, hide_lowest=hides)
    return replace(a, mask_blocks=blocks)


def _bucket(sizes: CacheSizes) -> CacheSizes:
    """The sizes that a call is planned for, so that a dynamic one has few plans."""
    counts = (sizes.num_sequences, sizes.num_queries, sizes.num_keys)
    return CacheSizes(*map(next_power_of_2, counts))
