"""The two GEMMs of a mixture whose rows are quantised to e4m3: see grouped.scaled_specs."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.grouped.problem import GroupedProblem
from tilewright.codegen.grouped.scaled_specs import CODE_TYPE, SCALED_K, ScaledConfig, scaled_spec
from tilewright.codegen.grouped.specs import storage_constants
from tilewright.codegen.moe.problem import MoeProblem, down_problem
from tilewright.codegen.moe.specs import divisible, up_arguments, up_constants
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec


def up_scaled_spec(problem: MoeProblem, config: ScaledConfig, target: str) -> KernelSpec:
    """The first GEMM. The tile is where a program turns its result into codes."""
    scales = Operand("fp32")
    own = {"x_ptr": Operand(CODE_TYPE), "x_scale_ptr": scales}
    arguments = own | up_arguments(problem) | own
    if config.codes:
        arguments["hidden_ptr"] = Operand(CODE_TYPE)
    arguments["hidden_scale_ptr"] = scales if config.codes else None
    arguments["tile_ptr"] = Operand(problem.dtype) if config.codes else None
    constants = {**up_constants(problem), **storage_constants(problem.gate_up)}
    del constants["X_STRIDE"]
    return scaled_spec("moe_up_scaled", constants, arguments, config, target, divisible(problem))


def down_scaled_problem(problem: MoeProblem) -> GroupedProblem:
    """The second GEMM, whose rows are codes in whole blocks of columns."""
    blocks = cdiv(problem.inner, SCALED_K)
    return replace(
        down_problem(problem),
        x=Operand(CODE_TYPE, (blocks * SCALED_K,)),
        x_scale=Operand("fp32", (blocks, 1)),
    )
