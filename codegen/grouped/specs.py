"""Kernel specs of a grouped GEMM of numbers, `grouped_gemm`, and of `dequantize_experts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.problem import PER_BYTE, GroupedProblem, WeightOperands
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec, constants_of, operands_of

# Of a kernel by parameter name, as `KernelSpec.of` takes them.
Arguments = dict[str, Operand | str | int | None]


@dataclass(frozen=True)
class GemmConfig:
    """Tiles of one grouped GEMM: block_m rows of x, block_n columns, block_k of the inner dim.
    swapped: weights stand on the tensor core's M side."""

    block_m: int
    block_n: int
    block_k: int
    swapped: bool
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    flatten: bool = False
    warp_specialize: bool = False

    def __str__(self) -> str:
        kind = "swapped " if self.swapped else ""
        more = f" p{self.programs_per_sm}" + ("f" if self.flatten else "")
        more += " ws" if self.warp_specialize else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{kind}{tile} w{self.num_warps} s{self.num_stages}{more}"


def gemm_spec(
    template: str,
    kernel: str,
    constants: Mapping[str, Constant],
    arguments: Arguments,
    config: GemmConfig,
    target: str,
    *,
    divisible: tuple[str, ...] = (),
    maxnreg: int | None = None,
) -> KernelSpec:
    """The spec of a grouped GEMM in the tiles of a config, whichever its template."""
    tiles = constants_of(config, "block_m", "block_n", "block_k", "swapped")
    return KernelSpec.of(
        template,
        kernel,
        {**constants, **tiles},
        arguments,
        target=target,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        divisible=divisible,
        dependent=True,
        maxnreg=maxnreg,
    )


def grouped_spec(problem: GroupedProblem, config: GemmConfig, target: str) -> KernelSpec:
    """The kernel of a grouped GEMM whose x is no codes."""
    weight, arguments = problem.weight, grouped_arguments(problem)
    del arguments["x_scale_ptr"]
    constants = {
        **grouped_constants(problem),
        **storage_constants(weight),
        **constants_of(weight, "format", "n_major"),
        "PER_BYTE": PER_BYTE[weight.format],
        **constants_of(config, "flatten", "warp_specialize"),
        "SEARCH_STEPS": search_steps(config, problem.num_groups) if problem.order else 0,
    }
    return gemm_spec("grouped.gemm", "grouped_gemm", constants, arguments, config, target)


def grouped_arguments(problem: GroupedProblem) -> Arguments:
    """The run-time arguments, with the scales of x."""
    return {
        **operands_of(problem, "x", "x_scale", "order", "ends", "expert_ids"),
        "weight_ptr": problem.weight.data,
        **operands_of(problem.weight, "scale", "factor", "bias"),
        "y_ptr": problem.out,
        "num_rows": "i32",
    }


def grouped_constants(problem: GroupedProblem) -> dict[str, Constant]:
    """What is known of the operands, but for the weight's storage."""
    # One more group has the rows that belong to none.
    groups = problem.num_groups if problem.order else problem.num_groups + 1
    return {
        **constants_of(problem, "num_groups", "num_experts", "inner"),
        "GROUPS": next_power_of_2(groups),
        "HIDDEN": problem.rows,
        "X_STRIDE": problem.x.strides[0],
        **constants_of(problem.weight, "scale_strides", "bias_strides"),
    }


def storage_constants(weight: WeightOperands) -> dict[str, Constant]:
    """Where a weight's rows lie, and which of its elements share a scale."""
    return {
        "EXPERT_STRIDE": weight.data.strides[0],
        **constants_of(weight, "row_stride", "scale_block"),
    }


def search_steps(config: GemmConfig, num_experts: int) -> int:
    """Steps in which a tile of `config` finds its expert in memory; 0: not there."""
    return next_power_of_2(max(num_experts, 2)).bit_length() - 1 if config.warp_specialize else 0


def gemm_grid(config: GemmConfig, num_sms: int) -> tuple[int]:
    """Persistent: the tiles are known on the device only."""
    return (num_sms * config.programs_per_sm,)


@dataclass(frozen=True)
class DequantizeConfig:
    """Tiles of `dequantize_experts`: rows and columns of a weight."""

    block_n: int = 32
    block_k: int = 128
    num_warps: int = 4


def dequantize_spec(problem: GroupedProblem, config: DequantizeConfig, target: str) -> KernelSpec:
    """What dequantises all weights of a problem before its GEMM."""
    weight = problem.weight
    constants = {
        "HIDDEN": problem.rows,
        "INNER": problem.inner,
        **storage_constants(weight),
        **constants_of(weight, "format", "scale_strides"),
        "PER_BYTE": PER_BYTE[weight.format],
        **constants_of(config, "block_n", "block_k"),
    }
    arguments = {
        "weight_ptr": weight.data,
        "scale_ptr": weight.scale,
        "out_ptr": Operand(problem.x.dtype),
    }
    return KernelSpec.of(
        "grouped.dequantize_experts",
        "dequantize_experts",
        constants,
        arguments,
        target=target,
        num_warps=config.num_warps,
        num_stages=1,
    )


def dequantize_grid(problem: GroupedProblem, config: DequantizeConfig) -> tuple[int, int, int]:
    columns = cdiv(problem.inner, config.block_k)
    return (columns, cdiv(problem.rows, config.block_n), problem.num_experts)
