"""The `scaled` template: e4m3 rows by e4m3 expert weights, and their tiles.

Both have scales by blocks of 128 columns (SCALED_K), which is a step of the inner dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv
from tilewright.codegen.grouped.kernels import GEMM_STRIDES, INDICES, GemmConfig, all_strides
from tilewright.codegen.kernel import Kernel, Statics

# Columns that share a scale, and those of a step.
SCALED_K = 128
# 32-bit registers of a multiprocessor, of a thread at most; the same on all targets.
REGISTERS, MAX_REGISTERS, WARP_SIZE = 65536, 255, 32

GROUPED_SCALED = Kernel(
    "grouped.scaled",
    "grouped_scaled",
    {**GEMM_STRIDES, "X_SCALE_STRIDES": all_strides("x_scale", 2)},
    unaligned=INDICES,
)
# Codes and scales of rows.
QUANTIZE_ROWS = Kernel("grouped.scaled", "quantize_rows", {"X_STRIDE": ("x", 0)}, num_stages=1)


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
    def maxnreg(self) -> int | None:
        """Limits the registers of a thread, so that `programs_per_sm` fit; None: no limit."""
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


def quantize_rows_statics(columns: int, config: QuantizeConfig) -> Statics:
    """The constants for rows [M, columns]."""
    return Statics(config, columns=columns, blocks=cdiv(columns, SCALED_K), group=SCALED_K)


def quantize_rows_grid(columns: int, config: QuantizeConfig, num_rows: int) -> tuple[int, int]:
    padded = cdiv(columns, SCALED_K) * SCALED_K
    return cdiv(num_rows, config.block_m), cdiv(padded, config.block_k)
