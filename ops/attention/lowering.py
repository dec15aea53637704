"""The steps of `cache_attention`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS, QUERIES
from tilewright.codegen.attention.kernels import (
    DECODE,
    MERGE,
    PREFILL,
    ROPE_STRIDES,
    V_STRIDES,
    DecodeConfig,
    decode_tiles,
    merge_grid,
    merged_columns,
    workspace_elements,
)
from tilewright.codegen.attention.plan import (
    decode_config,
    decodes,
    prefill_config,
)
from tilewright.codegen.attention.prefill_tiles import PrefillConfig, schedule
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.kernel import Statics
from tilewright.codegen.targets import Target
from tilewright.ops.attention.arguments import AttentionArguments
from tilewright.ops.attention.block_lists import list_steps
from tilewright.ops.attention.library import library_steps, library_wanted
from tilewright.ops.attention.masks import known_strides, lowest_hides
from tilewright.ops.attention.operands import (
    RopePart,
    Values,
    cache_problem,
    cache_sizes,
    cache_values,
)
from tilewright.ops.attention.positions import room
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import Buffer, Library, Outcome, Step, Steps

# Tensors that have an element for each sequence. Kernels read them with stride 1.
BY_SEQUENCE = ("row_offsets", "key_lengths", "cache_lengths")

#: A record of arguments in which some vectors may be replaced by copies.
Record = TypeVar("Record")


def attention_steps(
    a: AttentionArguments,
    target: Target,
    config: DecodeConfig | PrefillConfig | None = None,
    rope: RopePart | None = None,
) -> Steps:
    """Performs the steps of a `cache_attention` call.

    config: the tile sizes, whose type selects the kernel. If it is None, the plan chooses them.
    rope: the second part of queries and keys, which only the kernel for few queries supports. If it
    is given, the first part of the keys is also the values.
    """
    if a.q.numel() == 0 or a.v.shape[3] == 0:
        out = yield Buffer((*a.q.shape[:2], a.v.shape[3]), a.q.dtype)
        return Outcome(out, "nothing", "there are no queries, so nothing is launched")
    if config is None and rope is None and library_wanted(a):
        return (yield from library_steps(a))
    out = yield Buffer((*a.q.shape[:2], a.v.shape[3]), a.q.dtype)
    if room(a) == 0:
        yield Library(torch.Tensor.zero_, (out,))
        return Outcome(out, "nothing", "there are no keys, so the result is zeros")
    a = yield from with_dense(a, BY_SEQUENCE)
    sizes, problem = cache_sizes(a), cache_problem(a, rope)
    few = rope is not None or isinstance(config, DecodeConfig)
    few = few or (config is None and decodes(problem, sizes))
    if few and a.attn_mask is not None and a.attn_mask.shape[1] > 1:
        # A tile of this kernel has queries of all heads that share keys. If each head has its own
        # mask, each head also has its own list of blocks, so the tile cannot use a list.
        a = replace(a, mask_blocks=None)
    else:
        a = yield from _with_list(a, target)
    problem = replace(problem, listed=a.mask_blocks is not None)
    values = cache_values(a, sizes, rope) | {"out": out}
    steps = _decode if few else _prefill
    return (yield from steps(problem, sizes, values, target, config))


def _decode(
    problem: CacheProblem, sizes: AttentionSizes, values: Values, target: Target, config: Any
) -> Steps:
    config, statics, merging = _decode_kernel(problem, _bucket(sizes), target, config)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    values["workspace"] = None
    if config.splits > 1:
        shape = tiles, workspace_elements(problem, config)
        values["workspace"] = yield Buffer(shape, torch.float32)
    # Ragged sequences have different numbers of tiles.
    row_tiles = None if problem.ragged else cdiv(sizes.num_queries, config.tokens)
    values["row_tiles"] = row_tiles
    values["num_sequences"] = sizes.num_sequences if problem.ragged else None
    known = known_strides(values["mask"]) | dict.fromkeys(
        V_STRIDES if problem.latent else ROPE_STRIDES, 0
    )
    yield launch(DECODE, target, (tiles * config.splits,), values, statics, **known)
    if config.splits > 1:
        yield launch(MERGE, target, merge_grid(problem, config, tiles), values, merging)
    return Outcome(values["out"], "decode kernel", config)


@cache
def _decode_kernel(
    problem: CacheProblem, sizes: AttentionSizes, target: Target, config: DecodeConfig | None
) -> tuple[DecodeConfig, Statics, Statics]:
    """Returns the tile sizes (`config`, if it is given), the constants of the attention kernel, and
    the constants of the kernel that merges the results of the parts of the keys."""
    config = config or decode_config(problem, sizes, target)
    shared = Statics(
        problem,
        tile_heads=config.heads,
        tokens=config.tokens,
        splits=config.splits,
        real=config.real_rows,
        # Before Triton 3.9, an accumulator in tensor memory that two products share has a wrong
        # value.
        chained=not target.tmem_columns,
        stages=config.num_stages,
        split_block=next_power_of_2(config.splits),
        columns=merged_columns(problem, config),
        keys=KEYS,
        queries=QUERIES,
    )
    rounding = {} if problem.rounding is None else problem.rounding.constants
    return config, Statics(config, shared, **rounding), shared


def _prefill(
    problem: CacheProblem, sizes: AttentionSizes, values: Values, target: Target, config: Any
) -> Steps:
    config, statics = _prefill_kernel(problem, target, config)
    tiles = schedule(
        config,
        sizes,
        target,
        heads=problem.num_kv_heads,
        key_bytes=problem.key_bytes,
        ragged=problem.ragged,
        sharing=problem.group,
    )
    yield launch(
        PREFILL,
        target,
        tiles.grid,
        values | tiles._asdict(),
        statics,
        **known_strides(values["mask"]),
    )
    return Outcome(values["out"], "prefill kernel", config)


@cache
def _prefill_kernel(
    problem: CacheProblem, target: Target, config: PrefillConfig | None
) -> tuple[PrefillConfig, Statics]:
    """Returns the tile sizes (`config`, if it is given) and the constants of the kernel."""
    config = config or prefill_config(problem, target)
    return config, Statics(config, problem, keys=KEYS, queries=QUERIES)


def with_dense(a: Record, names: Sequence[str]) -> Generator[Step, Any, Record]:
    """Returns the call with contiguous copies of the vectors whose stride is not 1."""
    made = {}
    for name in names:
        vector = getattr(a, name)
        if vector is not None and vector.shape[0] > 1 and vector.stride(0) != 1:
            made[name] = yield Buffer.like(vector)
            yield Library(torch.Tensor.copy_, (made[name], vector))
    return replace(a, **made) if made else a  # type: ignore[type-var]


def _with_list(a: AttentionArguments, target: Target) -> Generator[Step, Any, Any]:
    """Returns the call with the list of blocks of its mask. Performs the steps that compute the
    list, if the call has a mask and no list."""
    if a.attn_mask is None or a.mask_blocks is not None:
        return a
    hides = lowest_hides(a, room(a))
    blocks = yield from list_steps(a.attn_mask, target, hide_lowest=hides)
    return replace(a, mask_blocks=blocks)


def _bucket(sizes: AttentionSizes) -> AttentionSizes:
    """Rounds up the sizes of a call for its plan, so that dynamic sizes need few plans."""
    counts = (sizes.num_sequences, sizes.num_queries, sizes.num_keys)
    return AttentionSizes(*map(next_power_of_2, counts))
