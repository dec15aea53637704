"""NVFP4: problems, configs and specs of the `grouped_nvfp4` and `quantize_nvfp4` templates."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.specs import GemmConfig, search_steps
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec, constants_of, operands_of
from tilewright.codegen.targets import Target


@dataclass(frozen=True)
class Nvfp4Problem:
    """The static part of a `grouped_matmul_dynamic_scaled_nvfp4` call.

    a: strides (row,) in bytes; b: (expert, row). offsets, deltas, expert_ids: their own dtypes.
    """

    num_experts: int
    max_groups: int
    rows: int
    inner: int
    a: Operand
    b: Operand
    offsets: Operand
    deltas: Operand
    expert_ids: Operand
    out_dtype: str = "bf16"


# Rows per group up to which weights stand on the M side.
SWAPPED_ROWS = 64


def nvfp4_config(problem: Nvfp4Problem, num_rows: int, target: Target) -> GemmConfig:
    """Tiles by the rows that a group gets on average."""
    rows = cdiv(num_rows, problem.max_groups)
    scaled = "block_scaled_mma" in target.features
    wide = 256 if scaled else 128
    if rows <= SWAPPED_ROWS:
        block_m = min(max(next_power_of_2(rows), 16), 64)
        return GemmConfig(block_m, 128, wide, True, 4, 4)
    if scaled:
        return GemmConfig(128, 128, wide, False, 8, 5, flatten=True, warp_specialize=True)
    return GemmConfig(128, 128, wide, False, 8, 3)


def nvfp4_spec(
    problem: Nvfp4Problem, config: GemmConfig, target: str, *, block_scaled: bool
) -> KernelSpec:
    """block_scaled: the target's tensor core multiplies NVFP4 itself."""
    return KernelSpec.of(
        "grouped.nvfp4",
        "grouped_nvfp4",
        {
            "GROUPS": next_power_of_2(problem.max_groups),
            **constants_of(problem, "num_experts", "inner"),
            "ROWS_OUT": problem.rows,
            "A_STRIDE": problem.a.strides[0],
            "B_EXPERT_STRIDE": problem.b.strides[0],
            "B_STRIDE": problem.b.strides[1],
            **constants_of(config, "block_m", "block_n", "block_k", "swapped", "flatten"),
            **constants_of(config, "warp_specialize"),
            "BLOCK_SCALED": block_scaled,
            "SEARCH_STEPS": search_steps(config, problem.max_groups),
        },
        {
            **operands_of(problem, "a", "b"),
            "a_scales_ptr": Operand("fp8e4nv"),
            "b_scales_ptr": Operand("fp8e4nv"),
            **operands_of(problem, "offsets", "deltas", "expert_ids"),
            "expert_scales_ptr": Operand("fp32", aligned=False),
            "out_ptr": Operand(problem.out_dtype),
            **dict.fromkeys(("num_rows", "num_scale_blocks", "num_groups"), "i32"),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
    )


@dataclass(frozen=True)
class QuantizeProblem:
    """The static part of a `quantize_nvfp4` call. x: strides (row,). num_groups, offsets: None
    where all rows are one group."""

    inner: int
    x: Operand
    num_groups: int | None = None
    offsets: Operand | None = None
    tensor_scales: Operand | None = None


@dataclass(frozen=True)
class QuantizeConfig:
    """Columns of a program, a multiple of 64, and the rows it takes at a time, of its 128."""

    block_r: int = 32
    block_c: int = 256
    num_warps: int = 4


def quantize_spec(problem: QuantizeProblem, config: QuantizeConfig, target: str) -> KernelSpec:
    groups = 1 if problem.num_groups is None else problem.num_groups
    return KernelSpec.of(
        "grouped.quantize_nvfp4",
        "quantize_nvfp4",
        {
            "NUM_GROUPS": groups,
            "GROUPS": next_power_of_2(groups),
            "INNER": problem.inner,
            "X_STRIDE": problem.x.strides[0],
            **constants_of(config, "block_r", "block_c"),
        },
        {
            **operands_of(problem, "x", "offsets", "tensor_scales"),
            "packed_ptr": Operand("u8"),
            "scales_ptr": Operand("fp8e4nv"),
            "num_rows": "i32",
        },
        num_warps=config.num_warps,
        num_stages=1,
        target=target,
    )


def quantize_grid(
    problem: QuantizeProblem, config: QuantizeConfig, num_blocks: int
) -> tuple[int, int]:
    """num_blocks: of 128 rows, in the scale space."""
    return (num_blocks, cdiv(problem.inner, config.block_c))
