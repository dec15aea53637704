"""Which kernels a mixture of experts runs: by the rows that an expert gets on average.

Few rows per expert: the time is that of streaming the weights of the experts in use, and operands
are swapped so that a token tile may be small. Many: tensor cores bound it, and tiles are as large
as registers and shared memory allow. The bounds in between are where the two took equal time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.moe_codes_kernels import codes_config, codes_obstacle
from tilewright.codegen.moe_kernels import (
    CombineConfig,
    GemmConfig,
    MoeProblem,
    OrderConfig,
    cdiv,
    down_problem,
    order_config,
    up_problem,
)
from tilewright.codegen.qkv_heads import next_power_of_2
from tilewright.codegen.targets import Target

# Rows per expert up to which the swapped form is taken.
SWAPPED_ROWS = 48
# Tiles of 64 columns that keep a GPU's memory busy.
STREAMING_TILES = 128
# Rows per expert from which 128-row tiles are taken.
WIDE_ROWS = 192
# Inner columns up to which the down kernel has so few steps that shorter tiles are better.
SHORT_INNER = 768
# Columns of a step where weights stream.
STREAMED_K = 128
# Rows of a tile whose warps are specialised.
SPECIALISED_ROWS = 128


@dataclass(frozen=True)
class MoePlan:
    """The configs of one call, and why."""

    order: OrderConfig
    up: GemmConfig
    down: GemmConfig
    combine: CombineConfig
    reason: str


def plan_moe(problem: MoeProblem, num_tokens: int, target: Target) -> MoePlan:
    """The kernels for `num_tokens` tokens on a target."""
    routes = num_tokens * problem.num_slots
    rows = cdiv(routes, problem.num_experts)
    if rows <= SWAPPED_ROWS:
        if target.tmem_columns:
            up, down = _swapped(problem, rows, routes, target)
        elif streams_codes(problem):
            up, down = _codes(problem, rows, routes)
        else:
            up, down = _streamed(problem, rows, routes)
        kind = "weights stream"
    else:
        up, down = _tiled(problem, rows, target)
        kind = "tensor cores"
    reason = f"{rows} rows per expert, {kind}: up {up}, down {down}"
    order = order_config(problem, routes)
    if up.warp_specialize or down.warp_specialize:
        order = replace(order, row_block=SPECIALISED_ROWS)
    return MoePlan(order, up, down, _combine(problem, num_tokens), reason)


def _swapped(
    problem: MoeProblem, rows: int, routes: int, target: Target
) -> tuple[GemmConfig, GemmConfig]:
    # A tile of one expert is as long as its rows, within what a token tile may be.
    block_m = min(max(next_power_of_2(rows), 16), 64)
    few_tiles = routes * cdiv(problem.inner, 64) < 2 * STREAMING_TILES
    # Two programs on a multiprocessor hide each other's ends; narrower tiles where few experts
    # are in use, so that all multiprocessors stream.
    up = GemmConfig(block_m, 32 if few_tiles else 64, 128, True, 4, 4 if few_tiles else 3, 2)
    down = GemmConfig(block_m, 64, 128, True, 4, 3, 2)
    if not few_tiles:
        down = GemmConfig(block_m, 128, 128, True, 8, 4)
        if target.tmem_columns and problem.format != "dense":
            # Codes fill fewer bytes: more of them in flight, in blocks that fit an SM twice.
            down = GemmConfig(block_m, 128, 128, True, 4, 6)
    return up, down


def _streamed(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Weights by TMA, on the M side: as many bytes in flight as an SM needs, two or three programs
    that hide each other's ends."""
    block_m = _token_tile(rows)
    if problem.format == "fp8":
        up = GemmConfig(block_m, 64, 128, True, 4, 4, 3)
        return up, GemmConfig(block_m, 128, 128, True, 4, 3, 2)
    if _few_tiles(problem, routes):
        return GemmConfig(16, 32, 128, True, 4, 4, 2), GemmConfig(16, 64, 128, True, 4, 3, 2)
    up = GemmConfig(block_m, 64, 128, True, 4, 3, 2)
    if problem.inner <= SHORT_INNER:
        return up, GemmConfig(block_m, 64, 128, True, 4, 3, 2 if problem.inner <= 512 else 3)
    return up, GemmConfig(block_m, 128, 128, True, 4, 3, 2)


def _codes(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    """Weights of 4-bit codes, by words: unpacking them takes as long as reading them."""
    block_m = _token_tile(rows)
    ordered = order_fits(problem)
    if _few_tiles(problem, routes):
        up = codes_config(16, 32, STREAMED_K, 4, 4, 4)
        return up, codes_config(16, 64, STREAMED_K, 4, 4, 4, ordered=ordered)
    up = codes_config(block_m, 64, STREAMED_K, 4, 4, 4)
    return up, codes_config(block_m, 128, STREAMED_K, 4, 4, 3, ordered=ordered)


def streams_codes(problem: MoeProblem) -> bool:
    """Whether both GEMMs can read their weights by words of codes."""
    if any(name.endswith("scale_ptr") for name in problem.unaligned):
        return False
    storages = (up_problem(problem), down_problem(problem))
    return all(codes_obstacle(storage, STREAMED_K) is None for storage in storages)


def order_fits(problem: MoeProblem) -> bool:
    """Whether rows of the hidden activation are whole steps, and so can be written in order."""
    return problem.inner % STREAMED_K == 0


def _few_tiles(problem: MoeProblem, routes: int) -> bool:
    return routes * cdiv(problem.inner, 64) < 2 * STREAMING_TILES


def _token_tile(rows: int) -> int:
    """Rows of a tile: an expert's number of rows varies around its average."""
    return min(max(next_power_of_2(2 * rows - 1), 16), 64)


def _tiled(problem: MoeProblem, rows: int, target: Target) -> tuple[GemmConfig, GemmConfig]:
    if rows < WIDE_ROWS:
        programs = 1 if target.tmem_columns else 2
        up = GemmConfig(64, 64, 64, False, 4, 4, programs)
        return up, GemmConfig(64, 128, 64, False, 4, 4, programs)
    if target.tmem_columns:
        return _in_tensor_memory(problem)
    if problem.format != "dense":
        # Weights are made numbers in every tile.
        tiles = GemmConfig(128, 128, 64, False, 8, 3)
        return tiles, tiles
    up = GemmConfig(128, 128, 64, False, 8, 4)
    return up, GemmConfig(128, 256, 64, False, 8, 4, flatten=True)


def _in_tensor_memory(problem: MoeProblem) -> tuple[GemmConfig, GemmConfig]:
    """The largest tiles whose machine code neither spills nor asks for more tensor memory than
    there is, with every compiler release.

    Warps are not specialised where an operand comes by pointers beside one that comes by TMA, as in
    the up kernel (Triton issue 8311: wrong results), nor where codes are unpacked (spills).
    """
    up = GemmConfig(128, 64, 64, False, 8, 4)
    if problem.format != "dense":
        return up, GemmConfig(128, 128, 64, False, 8, 4)
    down = GemmConfig(SPECIALISED_ROWS, 256, 64, False, 8, 3, flatten=True, warp_specialize=True)
    return up, down


def _combine(problem: MoeProblem, num_tokens: int) -> CombineConfig:
    few = num_tokens < 128
    width = min(next_power_of_2(problem.hidden), 1024 if few else 512)
    return CombineConfig(block_t=1 if few else 4, block_h=width)
