"""The kernels of grouped GEMMs, and the kernels that quantise rows and dequantise weights for these
GEMMs, with their constants and launch grids."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes import codes_constants
from tilewright.codegen.grouped.problem import GroupedProblem
from tilewright.codegen.grouped.tiles import (
    SCALED_K,
    CodesConfig,
    DequantizeConfig,
    GemmConfig,
    QuantizeConfig,
    ScaledConfig,
)
from tilewright.codegen.kernel import Kernel, Statics, Stride, Strides
from tilewright.codegen.spec import Constant


def all_strides(tensor: str, dims: int) -> tuple[Stride, ...]:
    return tuple((tensor, dim) for dim in range(dims))


_SCALES: Strides = {"SCALE_STRIDES": all_strides("scale", 3)}
_WEIGHT: Strides = {**_SCALES, "BIAS_STRIDES": all_strides("bias", 2)}
_CODED_ROWS: Strides = {"X_SCALE_STRIDES": all_strides("x_scale", 2)}
# Tensors that have one number for each group. Kernels load these numbers one by one.
_INDICES = ("ends", "expert_ids")
# The GEMM kernel for each kind of tiles: for dense weights, for words of 4-bit codes, and for e4m3
# rows with e4m3 weights.
GROUPED = {
    GemmConfig: Kernel("grouped.gemm", "grouped_gemm", _WEIGHT, unaligned=_INDICES),
    CodesConfig: Kernel("grouped.codes", "moe_down_codes", _WEIGHT, unaligned=("ends",)),
    ScaledConfig: Kernel(
        "grouped.scaled", "grouped_scaled", {**_WEIGHT, **_CODED_ROWS}, unaligned=_INDICES
    ),
}
# The GEMM kernels for calls whose rows, scales and ends of groups were computed by an earlier
# kernel of the same call. These tensors are contiguous.
OWN_ROWS = {
    tiles: replace(kernel, strides=_WEIGHT, unaligned=()) for tiles, kernel in GROUPED.items()
}
# Dequantises all weights before a dense GEMM.
DEQUANTIZE = Kernel("grouped.dequantize_experts", "dequantize_experts", _SCALES, num_stages=1)
# Quantises rows to codes and scales.
QUANTIZE_ROWS = Kernel("grouped.scaled", "quantize_rows", num_stages=1)


def gemm_kernel(problem: GroupedProblem, config: GemmConfig) -> tuple[Kernel, Statics]:
    """Returns the kernel of a grouped GEMM with these tiles, and its constants except the strides
    of its tensors."""
    # The kernel counts the rows that belong to no group as one more group.
    groups = next_power_of_2(problem.num_groups + (not problem.ordered))
    weight = problem.weight
    own: dict[str, Constant] = {"num_experts": problem.num_experts}
    if isinstance(config, CodesConfig):
        own |= {"num_experts": problem.num_groups, "x_in_order": config.ordered}
        own |= codes_constants(weight, config)
        weight = weight.in_words
    made = Statics(
        config,
        num_groups=problem.num_groups,
        groups=groups,
        experts=groups,
        hidden=problem.rows,
        inner=problem.inner,
        search_steps=config.search_steps(problem.num_groups) if problem.ordered else 0,
        **weight.constants,
        **own,
    )
    if not problem.ordered:
        return GROUPED[type(config)], made
    # Quantised rows are padded to whole blocks of columns.
    blocks = cdiv(problem.inner, SCALED_K)
    columns = blocks * SCALED_K if isinstance(config, ScaledConfig) else problem.inner
    return OWN_ROWS[type(config)], Statics(made, x_stride=columns, x_scale_strides=(blocks, 1))


def dequantize_statics(problem: GroupedProblem, config: DequantizeConfig) -> Statics:
    """Returns the constants of the kernel that dequantises all weights of a problem before its
    GEMM."""
    constants = problem.weight.constants
    return Statics(config, hidden=problem.rows, inner=problem.inner, **constants)


def dequantize_grid(problem: GroupedProblem, config: DequantizeConfig) -> tuple[int, int, int]:
    columns = cdiv(problem.inner, config.block_k)
    return (columns, cdiv(problem.rows, config.block_n), problem.num_experts)


def quantize_rows_statics(columns: int, config: QuantizeConfig) -> Statics:
    """Returns the constants of the kernel that quantises rows [M, columns]."""
    return Statics(config, columns=columns, blocks=cdiv(columns, SCALED_K), group=SCALED_K)


def quantize_rows_grid(columns: int, config: QuantizeConfig, num_rows: int) -> tuple[int, int]:
    padded = cdiv(columns, SCALED_K) * SCALED_K
    return cdiv(num_rows, config.block_m), cdiv(padded, config.block_k)
