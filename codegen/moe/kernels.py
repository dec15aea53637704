"""The kernels of a mixture of experts: the sort of its routes, its two GEMMs, and the sum.

A route is a pair of a token and an expert that the token chose."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes import codes_constants
from tilewright.codegen.grouped.kernels import all_strides
from tilewright.codegen.grouped.problem import WORD_BYTES
from tilewright.codegen.grouped.tiles import CodesConfig, GemmConfig, ScaledConfig
from tilewright.codegen.kernel import Kernel, Statics, Strides
from tilewright.codegen.moe.problem import MoeProblem

_UP_STRIDES: Strides = {
    "GATE_SCALE_STRIDES": all_strides("gate_scale", 3),
    "UP_SCALE_STRIDES": all_strides("up_scale", 3),
    "BIAS_STRIDES": (*all_strides("gate_bias", 2), *all_strides("up_bias", 2)),
}


def _up_kernel(template: str, name: str) -> Kernel:
    return Kernel(template, name, _UP_STRIDES, types={"distance": "i64"}, divisible=("distance",))


COUNT = Kernel("moe.order", "moe_count")
SCAN = Kernel("moe.order", "moe_scan", ranges=("num_chunks",))
ORDER = Kernel("moe.order", "moe_order")
# The kernel of the first GEMM for each kind of tiles. If gate and up are in one tensor, the
# kernel's weight is the half at the lower address.
UP = {
    GemmConfig: _up_kernel("moe.gemm", "moe_up"),
    CodesConfig: _up_kernel("grouped.codes", "moe_up_codes"),
    ScaledConfig: _up_kernel("grouped.scaled", "moe_up_scaled"),
}
# Adds the rows of the experts of each token.
COMBINE = Kernel("moe.combine", "moe_combine", {"WEIGHT_STRIDES": all_strides("weights", 2)})

# The largest number of routes for which every program of the sort counts all routes itself.
COUNTED_BY_ALL = 2048


@dataclass(frozen=True)
class OrderConfig:
    """The tile sizes of the counting sort.

    Attributes:
        chunk: The number of routes for which a program finds the sorted places.
        counted: Whether `moe_count` and `moe_scan` count the routes beforehand.
        num_warps: The number of warps of a program.
        routes_per_load: The number of routes that a program counts at a time.
        routes_per_step: The number of routes that a program places at a time.
        chunks_per_load: The number of chunks that `moe_scan` adds at a time.
        experts_per_scan: The number of experts of a program of `moe_scan`.
        row_block: If this number is not 0, rows are also counted in blocks of row_block rows, and
            the sort returns the index of the first block of each expert.
    """

    chunk: int
    counted: bool
    num_warps: int = 4
    routes_per_load: int = 512
    routes_per_step: int = 32
    chunks_per_load: int = 64
    experts_per_scan: int = 8
    row_block: int = 0


@dataclass(frozen=True)
class CombineConfig:
    """The tile sizes of `moe_combine`: block_t tokens and block_h columns for each program."""

    block_t: int
    block_h: int
    num_warps: int = 4


def order_config(problem: MoeProblem, num_routes: int) -> OrderConfig:
    """Returns the tile sizes of the sort. Chunks are short, because the work of a program grows
    with the square of its number of routes."""
    covered = max(next_power_of_2(num_routes), 16)
    if num_routes <= COUNTED_BY_ALL:
        chunk = min(32 if covered <= 128 else 64, covered)
        return OrderConfig(chunk, False, routes_per_load=min(covered, 512), routes_per_step=chunk)
    if num_routes <= 8 * COUNTED_BY_ALL:
        return OrderConfig(128, True)
    return OrderConfig(256, True, num_warps=8)


def sort_kernels(problem: MoeProblem, config: OrderConfig) -> dict[str, tuple[Kernel, Statics]]:
    """Returns the kernels of the sort and their constants, by the name of the step. The steps are
    "order" and, if there are many routes, "count" and "scan" before it."""
    statics = Statics(
        config,
        experts=problem.experts,
        num_experts=problem.num_experts,
        block_e=min(config.experts_per_scan, problem.experts),
    )
    first = {"count": (COUNT, statics), "scan": (SCAN, statics)} if config.counted else {}
    return first | {"order": (ORDER, statics)}


def sort_grids(
    problem: MoeProblem, config: OrderConfig, num_routes: int
) -> dict[str, tuple[int, ...]]:
    """Returns the grids of `sort_kernels`."""
    chunks = cdiv(num_routes, config.chunk)
    scans = cdiv(problem.experts, config.experts_per_scan)
    return {"count": (chunks,), "scan": (scans,), "order": (chunks,)}


def up_kernel(
    problem: MoeProblem, config: GemmConfig, order: tuple[int, int] = (0, 0)
) -> tuple[Kernel, Statics]:
    """Returns the first GEMM and its constants.

    order: the order of the columns of the result, as `order_of` returns it. The constant "distance"
    is the distance from gate to up, in elements as the kernel reads them; None if it is known only
    at the launch.
    """
    weight, distance, own = problem.gate_up, problem.distance, {}
    if isinstance(config, CodesConfig):
        own = codes_constants(weight, config)
        weight, distance = weight.in_words, distance and distance // WORD_BYTES
    made = Statics(
        config,
        problem,
        distance=distance,
        gated=problem.up is not None,
        hidden_step=order[0],
        hidden_run=order[1],
        search_steps=config.search_steps(problem.num_experts),
        **weight.constants,
        **own,
    )
    return UP[type(config)], made


def combine_grid(problem: MoeProblem, config: CombineConfig, num_tokens: int) -> tuple[int, int]:
    return (cdiv(num_tokens, config.block_t), cdiv(problem.hidden, config.block_h))
