"""The grouped GEMM of numbers and `dequantize_experts`, their tiles and their launch grids."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.problem import GroupedProblem
from tilewright.codegen.kernel import Kernel, Statics, Stride, Strides


def all_strides(tensor: str, dims: int) -> tuple[Stride, ...]:
    return tuple((tensor, dim) for dim in range(dims))


# What GEMMs with one weight have.
GEMM_STRIDES: Strides = {
    "X_STRIDE": ("x", 0),
    "EXPERT_STRIDE": ("weight", 0),
    "SCALE_STRIDES": all_strides("scale", 3),
    "BIAS_STRIDES": all_strides("bias", 2),
}
# A number per group, which kernels load one by one.
INDICES = ("ends", "expert_ids")
GROUPED = Kernel("grouped.gemm", "grouped_gemm", GEMM_STRIDES, unaligned=INDICES)
DEQUANTIZE = Kernel(
    "grouped.dequantize_experts",
    "dequantize_experts",
    {"EXPERT_STRIDE": ("weight", 0), "SCALE_STRIDES": all_strides("scale", 3)},
    num_stages=1,
)


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


def grouped_statics(problem: GroupedProblem, config: GemmConfig) -> Statics:
    """The constants of a grouped GEMM that are no strides of its tensors."""
    # One more group has the rows that belong to none.
    groups = problem.num_groups if problem.ordered else problem.num_groups + 1
    return Statics(
        config,
        num_groups=problem.num_groups,
        num_experts=problem.num_experts,
        groups=next_power_of_2(groups),
        experts=next_power_of_2(groups),
        hidden=problem.rows,
        inner=problem.inner,
        search_steps=search_steps(config, problem.num_groups) if problem.ordered else 0,
        **problem.weight.constants,
    )


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


def dequantize_statics(problem: GroupedProblem, config: DequantizeConfig) -> Statics:
    """The constants of what dequantises all weights of a problem before its GEMM."""
    constants = problem.weight.constants
    return Statics(config, hidden=problem.rows, inner=problem.inner, **constants)


def dequantize_grid(problem: GroupedProblem, config: DequantizeConfig) -> tuple[int, int, int]:
    columns = cdiv(problem.inner, config.block_k)
    return (columns, cdiv(problem.rows, config.block_n), problem.num_experts)
