"""Tiles of a mixture's GEMMs that stream weights of 4-bit codes, by an expert's number of rows."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.grouped.codes_kernels import (
    CodesConfig,
    codes_config,
    codes_obstacle,
    scale_bytes,
)
from tilewright.codegen.grouped.kernels import GemmConfig
from tilewright.codegen.grouped.plan import STREAMED_K, token_tile
from tilewright.codegen.moe.problem import MoeProblem, down_problem, up_problem

# Rows per expert from which 128-row tiles are taken.
WIDE_ROWS = 96
# Tiles of 64 columns that keep a GPU's memory busy.
STREAMING_TILES = 128
# Inner columns up to which the down kernel has so few steps that shorter tiles are better.
SHORT_INNER = 768
# Rows per expert up to which each warp has columns of its own, and tokens come by eight.
SPLIT_ROWS = 4


def codes_configs(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Weights of 4-bit codes, by words: unpacking them takes longer than reading them."""
    block_m = token_tile(rows)
    if rows <= SPLIT_ROWS and problem.format != "mxfp4":
        up, down = _split_codes(problem, routes)
        whole = problem.hidden % up.block_k == 0 and problem.inner % down.block_k == 0
        if whole and _fit(problem, up, down):
            return up, down
    if block_m == 16:
        return _codes_of_few(problem, routes)
    if rows < WIDE_ROWS:
        up = codes_config(block_m, 64, STREAMED_K, 4, 3, 2)
        return up, codes_config(block_m, 128, STREAMED_K, 4, 3, 2)
    if problem.format == "nvfp4":
        return codes_config(128, 128, 64, 8, 3), codes_config(128, 256, 64, 8, 3)
    return codes_config(128, 64, STREAMED_K, 8, 3), codes_config(128, 128, STREAMED_K, 8, 3)


def _split_codes(problem: MoeProblem, routes: int) -> tuple[CodesConfig, CodesConfig]:
    """Warps with columns of their own and the older instruction: registers bound how many weights
    are on their way, and small programs use them best. Of one token every route is a block of rows.
    """
    up = codes_config(8, 32, 256, 2, 3, 6, split=2)
    if routes == problem.num_slots:
        if problem.inner <= 2 * SHORT_INNER:
            up = codes_config(8, 16, 256, 2, 4, 8, split=2, by_route=True)
            return up, codes_config(8, 16, 256, 2, 2, 8, split=2, by_route=True)
        return replace(up, by_route=True), codes_config(
            8, 32, 1024, 8, 3, 2, split=8, by_route=True
        )
    if problem.inner <= 2 * SHORT_INNER:
        ordered = problem.inner % STREAMED_K == 0
        return up, codes_config(8, 64, 256, 2, 3, 6, split=2, ordered=ordered)
    return up, codes_config(8, 32, 512, 4, 4, 4, split=4)


def _codes_of_few(problem: MoeProblem, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Hidden rows are written in the order of the codes: longer tiles take longer to be stored so
    than to be put in order later."""
    ordered = problem.inner % STREAMED_K == 0
    few = codes_config(16, 32, 256, 4, 4, 2, part_k=256)
    few_down = codes_config(16, 64, 256, 4, 4, 2, part_k=256, ordered=True)
    if ordered and few_tiles(problem, routes) and _fit(problem, few, few_down):
        return few, few_down
    # Rows that begin anywhere in a sector of memory.
    up = codes_config(16, 64, STREAMED_K, 4, 4, 3, swapped=False)
    down = codes_config(16, 64, 256, 4, 3, 3, swapped=False, part_k=256)
    if not ordered and problem.format != "int4" and _fit(problem, up, down):
        return up, down
    up = codes_config(16, 64, STREAMED_K, 4, 4, 3)
    if problem.inner > 2 * SHORT_INNER:
        return up, codes_config(16, 64, STREAMED_K, 4, 4, 4, ordered=ordered)
    return up, codes_config(16, 128, STREAMED_K, 4, 4, 3, ordered=ordered)


def streams_codes(problem: MoeProblem) -> bool:
    """Whether both GEMMs can read their weights by words of codes."""
    tiles = codes_config(16, 64, STREAMED_K, 4, 4)
    return _fit(problem, tiles, tiles)


def _fit(problem: MoeProblem, up: CodesConfig, down: CodesConfig) -> bool:
    """Whether GEMMs in these tiles can stream the codes."""
    if problem.format == "int4" and up.part_k != STREAMED_K:
        return False  # its parts are its groups, whatever the tiles
    gate_up = [weight for weight in (problem.gate, problem.up) if weight is not None]
    weights = [replace(problem.gate_up, scale=weight.scale) for weight in gate_up]
    gemms = [(up_problem(problem, weight), up) for weight in weights]
    for gemm, config in (*gemms, (down_problem(problem), down)):
        if codes_obstacle(gemm, config) is not None:
            return False
        scale = gemm.weight.scale
        wide = problem.format != "int4" and scale_bytes(gemm.weight, config) > 1
        if wide and not (scale and scale.aligned):
            return False
    return True


def few_tiles(problem: MoeProblem, routes: int) -> bool:
    """Whether tiles of 64 columns leave a part of the GPU without work."""
    return routes * cdiv(problem.inner, 64) < 2 * STREAMING_TILES
