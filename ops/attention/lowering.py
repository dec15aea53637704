"""The steps of `cache_attention`."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.plan import decode_config
from tilewright.codegen.attention.problem import CacheProblem, CacheSizes
from tilewright.codegen.attention.specs import (
    DecodeConfig,
    decode_spec,
    decode_tiles,
    merge_grid,
    merge_spec,
    workspace_elements,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.attention.operands import RopePart, cache_problem, cache_sizes
from tilewright.ops.runtime.program import Buffer, Launch, Outcome, SplitK, Steps

_merge_spec = cache(merge_spec)


@cache
def _chosen_decode(
    problem: CacheProblem, sizes: CacheSizes, target: Target
) -> tuple[DecodeConfig, KernelSpec]:
    config = decode_config(problem, sizes, target)
    return config, decode_spec(problem, config, target.name)


def attention_steps(
    a: Any, target: Target, config: DecodeConfig | None = None, rope: RopePart | None = None
) -> Steps:
    """The steps of a call. config: the tiles; None: what the plan chooses. rope: the keys' second
    part, whose first part is their values."""
    out = yield Buffer((a.q.shape[0], a.q.shape[1], a.v.shape[3]), a.q.dtype)
    if out.numel() == 0:
        return Outcome(out, "nothing", "there are no queries, so nothing is launched")
    problem, values = cache_problem(a, rope)
    sizes = cache_sizes(a)
    if config is None:
        config, spec = _chosen_decode(problem, _bucket(sizes), target)
    else:
        spec = decode_spec(problem, config, target.name)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    merges, elements = config.splits > 1 and problem.merges, workspace_elements(problem, config)
    if merges:
        values["workspace_ptr"] = yield Buffer((tiles, elements), torch.float32)
    elif config.splits > 1:
        scratch = yield SplitK(tiles, elements)
        values["workspace_ptr"], values["counters_ptr"] = scratch
    values |= {"out_ptr": out, "row_tiles": cdiv(sizes.num_queries, config.tokens)}
    yield Launch(spec, (tiles * config.splits,), values)
    if merges:
        merge = _merge_spec(problem, config, target.name)
        yield Launch(merge, merge_grid(problem, config, tiles), values)
    return Outcome(out, "decode kernel", config)


def _bucket(sizes: CacheSizes) -> CacheSizes:
    """The sizes that a call is planned for, so that a dynamic one has few plans."""
    counts = (sizes.num_sequences, sizes.num_queries, sizes.num_keys)
    return CacheSizes(*map(next_power_of_2, counts))
