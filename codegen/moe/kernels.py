"""The kernels of a mixture of experts: the sort of its routes, its two GEMMs, and the sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes_kernels import (
    DOWN_CODES,
    WORD_BYTES,
    CodesConfig,
    codes_constants,
    down_codes_statics,
)
from tilewright.codegen.grouped.kernels import (
    GEMM_STRIDES,
    GROUPED,
    GemmConfig,
    all_strides,
    grouped_statics,
    search_steps,
)
from tilewright.codegen.grouped.scaled_kernels import GROUPED_SCALED, SCALED_K, ScaledConfig
from tilewright.codegen.kernel import Kernel, Statics, Strides
from tilewright.codegen.moe.problem import MoeProblem, down_problem

_UP_STRIDES: Strides = {
    "GATE_SCALE_STRIDES": all_strides("gate_scale", 3),
    "UP_SCALE_STRIDES": all_strides("up_scale", 3),
    "BIAS_STRIDES": (*all_strides("gate_bias", 2), *all_strides("up_bias", 2)),
}


def _up_kernel(template: str, name: str, strides: Strides) -> Kernel:
    strides = {**_UP_STRIDES, **strides}
    return Kernel(template, name, strides, types={"distance": "i64"}, divisible=("distance",))


COUNT = Kernel("moe.order", "moe_count")
SCAN = Kernel("moe.order", "moe_scan", ranges=("num_chunks",))
ORDER = Kernel("moe.order", "moe_order")
# The first GEMM. Of gate and up that at the lower address of a tensor of both is its weight.
UP = _up_kernel("moe.gemm", "moe_up", {"X_STRIDE": ("x", 0)})
UP_CODES = _up_kernel("grouped.codes", "moe_up_codes", {"X_STRIDE": ("x", 0)})
UP_SCALED = _up_kernel("grouped.scaled", "moe_up_scaled", {})
# The second one. Its groups' ends are in memory of the call's own.
DOWN = replace(GROUPED, unaligned=())
DOWN_BY_CODES = replace(DOWN_CODES, unaligned=())
DOWN_SCALED = replace(GROUPED_SCALED, strides=GEMM_STRIDES, unaligned=())
COMBINE = Kernel("moe.combine", "moe_combine", {"WEIGHT_STRIDES": all_strides("weights", 2)})

# Up to here every program of the sort counts all routes itself.
COUNTED_BY_ALL = 2048


@dataclass(frozen=True)
class OrderConfig:
    """Routes per program of the counting sort, and how it loads what it compares them with.

    counted: `moe_count` and `moe_scan` count beforehand. row_block: rows of the blocks whose first
    number it gives for each expert, 0: none.
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
    """Tokens and columns of a program."""

    block_t: int
    block_h: int
    num_warps: int = 4


def order_config(problem: MoeProblem, num_routes: int) -> OrderConfig:
    """Short chunks: a program's work is the square of its routes."""
    covered = max(next_power_of_2(num_routes), 16)
    if num_routes <= COUNTED_BY_ALL:
        chunk = min(32 if covered <= 128 else 64, covered)
        return OrderConfig(chunk, False, routes_per_load=min(covered, 512), routes_per_step=chunk)
    if num_routes <= 8 * COUNTED_BY_ALL:
        return OrderConfig(128, True)
    return OrderConfig(256, True, num_warps=8)


def sort_kernels(problem: MoeProblem, config: OrderConfig) -> dict[str, tuple[Kernel, Statics]]:
    """The kernels of the sort by step, with their constants: count and scan, where there are many
    routes, and order."""
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
    """The grids of `sort_kernels`."""
    chunks = cdiv(num_routes, config.chunk)
    scans = cdiv(problem.experts, config.experts_per_scan)
    return {"count": (chunks,), "scan": (scans,), "order": (chunks,)}


def up_kernel(
    problem: MoeProblem, config: GemmConfig, order: tuple[int, int] = (0, 0)
) -> tuple[Kernel, Statics]:
    """The first GEMM with its constants. order: of the result's columns, see `order_of`. distance:
    from gate to up in elements that the kernel counts; None where it is known at the launch."""
    weight, distance = problem.gate_up, problem.distance
    words = WORD_BYTES if isinstance(config, CodesConfig) else 1
    own = weight.constants | {
        "distance": None if distance is None else distance // words,
        "EXPERT_STRIDE": weight.data.strides[0] // words,
        "ROW_STRIDE": weight.row_stride // words,
        "GATED": problem.up is not None,
        "HIDDEN_STEP": order[0],
        "HIDDEN_RUN": order[1],
        "SEARCH_STEPS": search_steps(config, problem.num_experts),
    }
    if isinstance(config, CodesConfig):
        own |= codes_constants(weight, config)
        return UP_CODES, Statics(config, problem, **own)
    kernel = UP_SCALED if isinstance(config, ScaledConfig) else UP
    return kernel, Statics(config, problem, **own)


def down_kernel(problem: MoeProblem, config: GemmConfig) -> tuple[Kernel, Statics]:
    """The second GEMM with its constants. Rows of codes come in whole blocks of columns."""
    down = down_problem(problem)
    if isinstance(config, CodesConfig):
        return DOWN_BY_CODES, Statics(down_codes_statics(down, config), x_stride=down.inner)
    if isinstance(config, ScaledConfig):
        blocks = cdiv(down.inner, SCALED_K)
        made = grouped_statics(down, config)
        scales = (blocks, 1)
        return DOWN_SCALED, Statics(made, x_stride=blocks * SCALED_K, x_scale_strides=scales)
    expert = down.weight.data.strides[0]
    made = grouped_statics(down, config)
    return DOWN, Statics(made, x_stride=down.inner, expert_stride=expert)


def combine_grid(problem: MoeProblem, config: CombineConfig, num_tokens: int) -> tuple[int, int]:
    return (cdiv(num_tokens, config.block_t), cdiv(problem.hidden, config.block_h))
