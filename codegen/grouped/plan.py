"""Which kernels `grouped_matmul` runs: by the rows that a group gets on average.

Few rows: the time is that of streaming the weights in use. Many: tensor cores bound it. Quantised
weights are dequantised in the GEMM, codes of 4 bits as they lie where rows are few, or, where each
weight would be dequantised too often, all of them before it. The bounds are where the two took
equal time on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.grouped.codes import codes_obstacle
from tilewright.codegen.grouped.problem import TMA_BYTES, GroupedProblem, WeightOperands
from tilewright.codegen.grouped.tiles import (
    SCALED_K,
    CodesConfig,
    DequantizeConfig,
    GemmConfig,
    ScaledConfig,
)
from tilewright.codegen.targets import Target

# Rows per group up to which weights stand on the M side.
SWAPPED_ROWS = 16
# Rows per group from which 128-row tiles are taken: of numbers, of codes that reach the tensor core
# as they lie, of codes by codes.
WIDE_ROWS = 160
WIDE_CODES_ROWS = 96
LONG_ROWS = 512
# Rows per group from which weights are dequantised before the GEMM.
DECODED_ROWS = {"fp8": 224, "int4": 224, "nvfp4": 240, "mxfp4": 240}
# The same of 4-bit codes that are dequantised by tile, which takes far longer.
DECODED_FROM_TILES = {"int4": 48, "nvfp4": 40, "mxfp4": 48}
# The inner dimension comes in blocks of so many, or, where weights stream, of STREAMED_K.
BLOCK_K = 64
STREAMED_K = 128


@dataclass(frozen=True)
class GroupedPlan:
    """decode: tiles of what dequantises all weights before a dense GEMM; None: the GEMM does."""

    gemm: GemmConfig
    decode: DequantizeConfig | None
    reason: str


def plan_grouped(problem: GroupedProblem, num_rows: int, target: Target) -> GroupedPlan:
    """The kernels for `num_rows` rows on a target."""
    rows = cdiv(num_rows, max(problem.num_groups, 1))
    if problem.coded:
        codes_by_codes = scaled_gemm_config(rows, target)
        return GroupedPlan(codes_by_codes, None, f"{rows} rows per group, {codes_by_codes}")
    form = problem.weight.format
    streams = not target.tmem_columns and codes_obstacle(problem, _codes_config(form, 1)) is None
    bounds = DECODED_ROWS if streams else DECODED_ROWS | DECODED_FROM_TILES
    decode = rows >= bounds.get(form, rows + 1)
    # Rows of dequantised weights follow each other without a gap.
    decode = decode and problem.inner * ELEMENT_BYTES[problem.x] % TMA_BYTES == 0
    if streams and not decode:
        codes = _codes_config(form, rows)
        return GroupedPlan(codes, None, f"{rows} rows per group, {codes}")
    dense = decode or form == "dense"
    config = grouped_config(rows, dense=dense)
    how = ", weights decoded before it" if decode else ""
    reason = f"{rows} rows per group, {config}{how}"
    return GroupedPlan(config, DequantizeConfig() if decode else None, reason)


def grouped_config(rows: int, *, dense: bool) -> GemmConfig:
    """Tiles for so many rows per group; dense: of weights that need no dequantisation."""
    if rows <= SWAPPED_ROWS:
        # Two programs on a multiprocessor hide each other's ends.
        return GemmConfig(16, 64, STREAMED_K, 4, 4, 2, swapped=True)
    if rows < WIDE_ROWS:
        return GemmConfig(64, 128, BLOCK_K, 4, 3, 2)
    if not dense:
        # Dequantising takes registers.
        return GemmConfig(128, 128, BLOCK_K, 8, 3)
    return GemmConfig(128, 256, BLOCK_K, 8, 3, flatten=True)


def _codes_config(name: str, rows: int) -> CodesConfig:
    """Tiles of 4-bit codes as they lie; name: the format."""
    if rows < WIDE_CODES_ROWS:
        return CodesConfig(token_tile(rows), 64, STREAMED_K, 4, 4, 4)
    if name == "nvfp4":
        return CodesConfig(128, 128, BLOCK_K, 8, 3)
    return CodesConfig(128, 64, STREAMED_K, 8, 3)


def scaled_gemm_config(rows: int, target: Target) -> ScaledConfig:
    """Tiles for so many rows per group of codes by codes. A product is scaled while nothing else of
    its program multiplies: two or three of them share a multiprocessor."""
    if rows <= SWAPPED_ROWS:
        return ScaledConfig(16, 128, SCALED_K, 4, 3, 3, swapped=True)
    if target.tmem_columns:
        wide = rows >= WIDE_ROWS
        return ScaledConfig(128 if wide else 64, 128, SCALED_K, 8 if wide else 4, 4)
    if rows < WIDE_CODES_ROWS:
        return ScaledConfig(64, 128, SCALED_K, 4, 4, 2)
    if rows < LONG_ROWS:
        # With 128-row tiles a group's last is mostly padding.
        return ScaledConfig(64, 128, SCALED_K, 4, 3, 3)
    return ScaledConfig(128, 128, SCALED_K, 8, 3, 2, parts=2)


def token_tile(rows: int) -> int:
    """Rows of a tile: an expert's number of rows varies around its average."""
    return min(max(next_power_of_2(2 * rows - 1), 16), 64)


def block_k_obstacle(weight: WeightOperands) -> str | None:
    """Why the scales do not fit the blocks of the inner dimension; None where they do."""
    width = weight.scale_block[1]
    if all(width % size == 0 or size % width == 0 for size in (BLOCK_K, STREAMED_K)):
        return None
    return f"scale_block: {width} columns neither divide {BLOCK_K} nor are divided by it"
