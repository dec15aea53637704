"""The steps of `cache_attention`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import cache
from typing import Any

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.plan import decode_config, decodes, head_group, prefill_config
from tilewright.codegen.attention.problem import CacheProblem, CacheSizes
from tilewright.codegen.attention.specs import (
    DecodeConfig,
    PrefillConfig,
    decode_spec,
    decode_tiles,
    prefill_grid,
    prefill_spec,
    prefill_tiles,
    workspace_elements,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.attention.library import library_steps, library_wanted
from tilewright.ops.attention.mask_blocks import list_steps
from tilewright.ops.attention.operands import Values, cache_problem, cache_sizes
from tilewright.ops.runtime.program import Buffer, Launch, Outcome, SplitK, Step, Steps


@cache
def _chosen_decode(
    problem: CacheProblem, sizes: CacheSizes, target: Target
) -> tuple[DecodeConfig, KernelSpec]:
    config = decode_config(problem, sizes, target)
    return config, decode_spec(problem, config, target.name)


@cache
def _chosen_prefill(problem: CacheProblem, target: Target) -> tuple[PrefillConfig, KernelSpec]:
    config = prefill_config(problem, target)
    return config, prefill_spec(problem, config, target.name)


def attention_steps(
    a: Any, target: Target, config: DecodeConfig | PrefillConfig | None = None
) -> Steps:
    """The steps of a call. config: the tiles, and so the kernel; None: what the plan chooses."""
    if a.q.numel() == 0 or a.v.shape[3] == 0:
        out = yield Buffer((*a.q.shape[:2], a.v.shape[3]), a.q.dtype)
        return Outcome(out, "nothing", "there are no queries, so nothing is launched")
    if config is None and library_wanted(a):
        return (yield from library_steps(a))
    out = yield Buffer((*a.q.shape[:2], a.v.shape[3]), a.q.dtype)
    a = yield from _with_list(a, target)
    problem, values = cache_problem(a)
    sizes, values["out_ptr"] = cache_sizes(a), out
    few = decodes(problem, sizes) if config is None else isinstance(config, DecodeConfig)
    if few and problem.mask_blocks is not None and a.attn_mask.shape[1] > 1:
        # A tile has all heads that share keys; the list says what each sees.
        problem, values["mask_blocks_ptr"] = replace(problem, mask_blocks=None), None
    steps = _decode if few else _prefill
    return (yield from steps(problem, sizes, values, target, config))


def _decode(
    problem: CacheProblem, sizes: CacheSizes, values: Values, target: Target, config: Any
) -> Steps:
    if config is None:
        config, spec = _chosen_decode(problem, _bucket(sizes), target)
    else:
        spec = decode_spec(problem, config, target.name)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    if config.splits > 1:
        scratch = yield SplitK(tiles, workspace_elements(problem, config))
        values["workspace_ptr"], values["counters_ptr"] = scratch
    values["row_tiles"] = cdiv(sizes.num_queries, config.tokens)
    yield Launch(spec, (tiles * config.splits,), values)
    return Outcome(values["out_ptr"], "decode kernel", config)


def _prefill(
    problem: CacheProblem, sizes: CacheSizes, values: Values, target: Target, config: Any
) -> Steps:
    if config is None:
        config, spec = _chosen_prefill(problem, target)
    else:
        spec = prefill_spec(problem, config, target.name)
    tiles, group = prefill_tiles(problem, config, sizes), head_group(problem, sizes, target)
    values |= {"row_tiles": tiles, "head_group": group}
    yield Launch(spec, prefill_grid(problem, sizes, tiles, group), values)
    return Outcome(values["out_ptr"], "prefill kernel", config)


def _with_list(a: Any, target: Target) -> Generator[Step, Any, Any]:
    """The same call with the list of blocks of its mask."""
    if a.attn_mask is None or a.mask_blocks is not None:
        return a
    return replace(a, mask_blocks=(yield from list_steps(a.attn_mask, target)))


def _bucket(sizes: CacheSizes) -> CacheSizes:
    """The sizes that a call is planned for, so that a dynamic one has few plans."""
    counts = (sizes.num_sequences, sizes.num_queries, sizes.num_keys)
    return CacheSizes(*map(next_power_of_2, counts))
