"""Kernel specs of the `scaled` template: e4m3 rows by e4m3 expert weights, as plain data.

Both have scales by blocks of 128 columns (SCALED_K), which is a step of the inner dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.grouped.problem import GroupedProblem
from tilewright.codegen.grouped.specs import (
    Arguments,
    GemmConfig,
    gemm_spec,
    grouped_arguments,
    grouped_constants,
    storage_constants,
)
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec, constants_of

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


def scaled_spec(
    kernel: str,
    constants: Mapping[str, Constant],
    arguments: Arguments,
    config: ScaledConfig,
    target: str,
    divisible: tuple[str, ...] = (),
) -> KernelSpec:
    """One of the template's GEMMs."""
    return gemm_spec(
        "grouped.scaled", kernel, constants, arguments, config, target, divisible=divisible,
        maxnreg=config.max_registers,
    )  # fmt: skip


def grouped_scaled_spec(problem: GroupedProblem, config: ScaledConfig, target: str) -> KernelSpec:
    """A grouped GEMM whose x has scales."""
    assert problem.x_scale is not None
    constants = {
        **grouped_constants(problem),
        **storage_constants(problem.weight),
        "X_SCALE_STRIDES": problem.x_scale.strides,
        "PARTS": config.parts,
    }
    return scaled_spec("grouped_scaled", constants, grouped_arguments(problem), config, target)


@dataclass(frozen=True)
class QuantizeConfig:
    """Tiles of `quantize_rows`."""

    block_m: int = 4
    block_k: int = 512
    num_warps: int = 4


def quantize_rows_spec(x: Operand, columns: int, config: QuantizeConfig, target: str) -> KernelSpec:
    """Codes and scales of rows [M, columns]; x: strides (row,)."""
    constants = {
        "COLUMNS": columns,
        "X_STRIDE": x.strides[0],
        "BLOCKS": cdiv(columns, SCALED_K),
        "GROUP": SCALED_K,
        **constants_of(config, "block_m", "block_k"),
    }
    arguments: Arguments = {
        "x_ptr": x,
        "codes_ptr": Operand(CODE_TYPE),
        "scale_ptr": Operand("fp32"),
        "num_rows": "i32",
    }
    return KernelSpec.of(
        "grouped.scaled",
        "quantize_rows",
        constants,
        arguments,
        target=target,
        num_warps=config.num_warps,
        num_stages=1,
        dependent=True,
    )


def quantize_rows_grid(columns: int, config: QuantizeConfig, num_rows: int) -> tuple[int, int]:
    padded = cdiv(columns, SCALED_K) * SCALED_K
    return cdiv(num_rows, config.block_m), cdiv(padded, config.block_k)
