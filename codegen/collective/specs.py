"""The kernel spec of `all_reduce_residual_norm`, its grid, and the memory that ranks share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.collective.problem import ReduceProblem
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec, constants_of

# Slots of a program, see the template.
RING = 2
WORD_BYTES = 8
# Looks at what is not there yet, each half a microsecond or more: some ten minutes.
PATIENCE = 1 << 30


@dataclass(frozen=True)
class ReduceConfig:
    """blocks: programs at most, each with slots of its own."""

    blocks: int
    num_warps: int

    def __str__(self) -> str:
        return f"x{self.blocks} w{self.num_warps}"


def reduce_spec(problem: ReduceProblem, config: ReduceConfig, target: str) -> KernelSpec:
    """One rank's kernel, the same on all."""
    alone = problem.num_ranks == 1
    out = Operand(problem.x.dtype)
    return KernelSpec.of(
        "collective.reduce",
        "all_reduce_residual_norm",
        {
            **constants_of(problem, "n", "norm_eps", "norm_offset"),
            "X_STRIDE": problem.x.strides[0],
            "RESIDUAL_STRIDE": problem.residual.strides[0],
            "NORM_STRIDE": problem.norm_weight.strides[0] if problem.norm_weight else 0,
            "BLOCK": next_power_of_2(problem.n),
            "RANKS": problem.num_ranks,
            "FLAGS": math.prod(flags_shape(problem, config)),
            "LIMIT": PATIENCE,
        },
        {
            "x_ptr": problem.x,
            "residual_ptr": problem.residual,
            "norm_weight_ptr": problem.norm_weight,
            "summed_ptr": out,
            "normed_ptr": out,
            "peers_ptr": None if alone else Operand("i64"),
            "steps_ptr": None if alone else Operand("i32"),
            "rank": None if alone else "i32",
            "num_tokens": "i32",
        },
        num_warps=config.num_warps,
        target=target,
        ranges=("num_tokens",),
        dependent=True,
    )


def reduce_grid(config: ReduceConfig, num_tokens: int) -> tuple[int]:
    return (min(num_tokens, config.blocks),)


def flags_shape(problem: ReduceProblem, config: ReduceConfig) -> tuple[int, int, int]:
    """Of the words before the slots: one for each slot of each rank's rows."""
    return config.blocks, RING, problem.num_ranks


def shared_bytes(problem: ReduceProblem, config: ReduceConfig) -> int:
    """What each rank gives the others to write into: flags, then slots."""
    flags = math.prod(flags_shape(problem, config))
    row = ELEMENT_BYTES[problem.x.dtype] * problem.n
    return int(flags * (WORD_BYTES + row))


def shared_form(problem: ReduceProblem, config: ReduceConfig) -> str:
    """What kernels that use the same memory have in common. Where a rank's tensors lie is no part
    of it."""
    return f"{problem.num_ranks} x {problem.x.dtype}[{problem.n}] x{config.blocks}"
