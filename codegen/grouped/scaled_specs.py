"""Kernel specs of the `grouped_scaled` template: e4m3 rows by e4m3 expert weights, as plain data.

Both have scales by blocks of 128 columns (SCALED_K), which is a step of the inner dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.grouped.specs import (
    GemmConfig,
    GroupedProblem,
    grouped_arguments,
    grouped_constants,
    make_spec,
)
from tilewright.codegen.moe.specs import MoeProblem, down_problem, up_arguments, up_constants
from tilewright.codegen.spec import Constant, KernelSpec

# Columns that share a scale, and those of a step.
SCALED_K = 128
CODE_TYPE = "fp8e4nv"
# 32-bit registers of a multiprocessor, of a thread at most; the same on all targets.
REGISTERS, MAX_REGISTERS, WARP_SIZE = 65536, 255, 32


@dataclass(frozen=True)
class ScaledConfig(GemmConfig):
    """Tiles of a GEMM of codes by codes. parts: into how many a tile's columns go, 1 or 2; gate and
    up are parts by nature. codes: the first GEMM quantises its result, of SCALED_K columns a tile;
    else a kernel after it does."""

    parts: int = 1
    codes: bool = False

    def __str__(self) -> str:
        more = f" in {self.parts}" if self.parts > 1 else ""
        return super().__str__() + more + (" to codes" if self.codes else "")

    @property
    def max_registers(self) -> int | None:
        """Of a thread, so that as many programs as are meant fit a multiprocessor; None: any."""
        share = REGISTERS // (WARP_SIZE * self.num_warps * self.programs_per_sm)
        return share // 8 * 8 if share < MAX_REGISTERS else None


def scaled_config(
    block_m: int, block_n: int, num_warps: int, num_stages: int, programs_per_sm: int = 1, *,
    swapped: bool = False, parts: int = 1, codes: bool = False,
) -> ScaledConfig:  # fmt: skip
    """Such tiles, of SCALED_K columns of the inner dimension."""
    return ScaledConfig(
        block_m, block_n, SCALED_K, swapped, num_warps, num_stages, programs_per_sm, parts=parts,
        codes=codes,
    )  # fmt: skip


@dataclass(frozen=True)
class QuantizeConfig:
    """Tiles of `quantize_rows`."""

    block_m: int = 4
    block_k: int = 512
    num_warps: int = 4


def quantize_rows_spec(
    dtype: str, columns: int, stride: int, config: QuantizeConfig, target: str,
    *, aligned: bool = True,
) -> KernelSpec:  # fmt: skip
    """Codes and scales of rows [M, columns], `stride` elements apart."""
    constants: dict[str, Constant] = {
        "COLUMNS": columns,
        "X_STRIDE": stride,
        "BLOCKS": cdiv(columns, SCALED_K),
        "GROUP": SCALED_K,
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
    }
    arguments = {
        "x_ptr": f"*{dtype}", "codes_ptr": f"*{CODE_TYPE}", "scale_ptr": "*fp32", "num_rows": "i32",
    }  # fmt: skip
    return make_spec(
        "grouped.scaled", "quantize_rows", constants, arguments, () if aligned else ("x_ptr",),
        config.num_warps, 1, target, dependent=True,
    )  # fmt: skip


def quantize_rows_grid(columns: int, config: QuantizeConfig, num_rows: int) -> tuple[int, int]:
    padded = cdiv(columns, SCALED_K) * SCALED_K
    return cdiv(num_rows, config.block_m), cdiv(padded, config.block_k)


def grouped_scaled_spec(problem: GroupedProblem, config: ScaledConfig, target: str) -> KernelSpec:
    """A grouped GEMM whose x has scales."""
    constants: dict[str, Constant] = {
        **grouped_constants(problem),
        "X_SCALE_STRIDES": problem.x_scale,
        **_tiles(config),
        "PARTS": config.parts,
    }
    for name in ("N_MAJOR", "FORMAT", "PER_BYTE"):
        del constants[name]
    return make_spec(
        "grouped.scaled", "grouped_scaled", constants, grouped_arguments(problem),
        problem.unaligned, config.num_warps, config.num_stages, target, dependent=True,
        max_registers=config.max_registers,
    )  # fmt: skip


def down_scaled_problem(problem: MoeProblem) -> GroupedProblem:
    """The second GEMM, whose rows are codes in whole blocks of columns."""
    blocks = cdiv(problem.inner, SCALED_K)
    return replace(
        down_problem(problem), dtype=CODE_TYPE, x_stride=blocks * SCALED_K, x_scale=(blocks, 1)
    )


def up_scaled_spec(problem: MoeProblem, config: ScaledConfig, target: str) -> KernelSpec:
    """The first GEMM."""
    codes = config.codes
    arguments: dict[str, str | None] = {
        "x_ptr": f"*{CODE_TYPE}",
        "x_scale_ptr": "*fp32",
        **{name: kind for name, kind in up_arguments(problem).items() if name != "x_ptr"},
        "hidden_ptr": f"*{CODE_TYPE if codes else problem.dtype}",
        "hidden_scale_ptr": "*fp32" if codes else None,
        "tile_ptr": f"*{problem.dtype}" if codes else None,
    }
    constants: dict[str, Constant] = {
        **up_constants(problem),
        "EXPERT_STRIDE": problem.gate_up.expert_stride,
        "ROW_STRIDE": problem.gate_up.row_stride,
        "SCALE_BLOCK": problem.scale_block,
        "GATE_SCALE_STRIDES": problem.scale_strides[0],
        "UP_SCALE_STRIDES": problem.scale_strides[1],
        **_tiles(config),
    }
    del constants["X_STRIDE"]
    if problem.distance is not None:
        constants["distance"] = problem.distance
        del arguments["distance"]
    return make_spec(
        "grouped.scaled", "moe_up_scaled", constants, arguments, problem.unaligned,
        config.num_warps, config.num_stages, target, dependent=True,
        max_registers=config.max_registers,
    )  # fmt: skip


def _tiles(config: ScaledConfig) -> dict[str, Constant]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWAPPED": config.swapped,
    }
