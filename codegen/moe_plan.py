"""Which kernels a mixture of experts runs: by the rows that an expert gets on average.

Few rows per expert: the time is that of streaming the weights of the experts in use, and operands
are swapped so that a token tile may be small. Many: tensor cores bound it, and tiles are as large
as registers and shared memory allow. The bounds in between are where the two took equal time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.moe_kernels import (
    CombineConfig,
    GemmConfig,
    MoeProblem,
    OrderConfig,
    cdiv,
    order_config,
)
from tilewright.codegen.qkv_heads import next_power_of_2

# Rows per expert up to which the swapped form is taken.
SWAPPED_ROWS = 48
# Rows per expert from which 128-row tiles are taken.
WIDE_ROWS = 192


@dataclass(frozen=True)
class MoePlan:
    """The configs of one call, and why."""

    order: OrderConfig
    up: GemmConfig
    down: GemmConfig
    combine: CombineConfig
    reason: str


def plan_moe(problem: MoeProblem, num_tokens: int, target: str) -> MoePlan:
    """The kernels for `num_tokens` tokens on a target."""
    routes = num_tokens * problem.num_slots
    rows = cdiv(routes, problem.num_experts)
    if rows <= SWAPPED_ROWS:
        up, down = _swapped(problem, rows, routes)
        kind = "weights stream"
    else:
        up, down = _tiled(problem, rows)
        kind = "tensor cores"
    reason = f"{rows} rows per expert, {kind}: up {up}, down {down}"
    return MoePlan(order_config(problem, routes), up, down, _combine(problem, num_tokens), reason)


def _swapped(problem: MoeProblem, rows: int, routes: int) -> tuple[GemmConfig, GemmConfig]:
    # A tile of one expert is as long as its rows, within what a token tile may be.
    block_m = min(max(next_power_of_2(rows), 16), 64)
    config = GemmConfig(block_m, 64, 128, True, 4, 4)
    return config, config


def _tiled(problem: MoeProblem, rows: int) -> tuple[GemmConfig, GemmConfig]:
    block_m = 128 if rows >= WIDE_ROWS else 64
    warps = 8 if block_m == 128 else 4
    return (
        GemmConfig(block_m, 64, 64, False, warps, 4),
        GemmConfig(block_m, 128, 64, False, warps, 4),
    )


def _combine(problem: MoeProblem, num_tokens: int) -> CombineConfig:
    few = num_tokens < 128
    width = min(next_power_of_2(problem.hidden), 1024 if few else 512)
    return CombineConfig(block_t=1 if few else 4, block_h=width)
