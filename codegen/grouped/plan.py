"""Plans of `grouped_matmul`: the kernels for the average number of rows of a group.

The plan depends on the average number of rows of a group. With few rows, the GEMM takes as long as
reading the weights takes. With many rows, the tensor cores limit the GEMM. The GEMM itself
dequantises quantised weights. If there are few rows, the GEMM reads 4-bit codes in the form in
which they are stored. If the GEMM would dequantise each weight too often, a separate kernel
dequantises all weights before the GEMM. Each limit below is the number of rows at which the two
choices that it separates took equal time on an H200.
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

# With at most this many rows in a group, the weights are on the tensor core's M side.
SWAPPED_ROWS = 16
# For dense weights: the number of rows in a group from which tiles have 128 rows.
WIDE_ROWS = 160
# For 4-bit codes that are read as they are stored: the number of rows in a group from which tiles
# have 128 rows.
WIDE_CODES_ROWS = 96
# For quantised rows with quantised weights: the number of rows in a group from which tiles have 128
# rows.
LONG_ROWS = 512
# Maps a format to the number of rows in a group from which weights are dequantised before the GEMM.
DECODED_ROWS = {"fp8": 224, "int4": 224, "nvfp4": 240, "mxfp4": 240}
# The same map for 4-bit codes that the GEMM cannot read as they are stored. The numbers of rows are
# lower than in DECODED_ROWS, because such a GEMM dequantises the codes again for each tile.
DECODED_FROM_TILES = {"int4": 48, "nvfp4": 40, "mxfp4": 48}
# The number of columns of a step over the inner dimension if the tensor cores limit the GEMM.
BLOCK_K = 64
# The number of columns of a step if the GEMM takes as long as reading the weights.
STREAMED_K = 128


@dataclass(frozen=True)
class GroupedPlan:
    """The kernels of a grouped GEMM.

    Attributes:
        gemm: The tiles of the GEMM.
        decode: The tiles of the kernel that dequantises all weights before a dense GEMM; None if
            the GEMM itself dequantises them.
        reason: A description for reports.
    """

    gemm: GemmConfig
    decode: DequantizeConfig | None
    reason: str


def plan_grouped(problem: GroupedProblem, num_rows: int, target: Target) -> GroupedPlan:
    """Returns the kernels for `num_rows` rows on a target."""
    rows = cdiv(num_rows, max(problem.num_groups, 1))
    if problem.coded:
        codes_by_codes = scaled_gemm_config(rows, target)
        return GroupedPlan(codes_by_codes, None, f"{rows} rows per group, {codes_by_codes}")
    form = problem.weight.format
    streams = not target.tmem_columns and codes_obstacle(problem, _codes_config(form, 1)) is None
    bounds = DECODED_ROWS if streams else DECODED_ROWS | DECODED_FROM_TILES
    decode = problem.weight.fits(problem.x) and rows >= bounds.get(form, rows + 1)
    # Dequantised rows are contiguous. TMA needs their size to be a multiple of 16 bytes.
    decode = decode and problem.inner * ELEMENT_BYTES[problem.x] % TMA_BYTES == 0
    if streams and not decode:
        codes = _codes_config(form, rows)
        return GroupedPlan(codes, None, f"{rows} rows per group, {codes}")
    dense = decode or form == "dense"
    config = grouped_config(rows, dense=dense)
    how = ", weights decoded first" if decode else ""
    reason = f"{rows} rows per group, {config}{how}"
    return GroupedPlan(config, DequantizeConfig() if decode else None, reason)


def grouped_config(rows: int, *, dense: bool) -> GemmConfig:
    """Returns the tile sizes for this many rows in a group. dense: whether the weights need no
    dequantisation."""
    if rows <= SWAPPED_ROWS:
        # Two programs on a multiprocessor hide each other's epilogues.
        return GemmConfig(16, 64, STREAMED_K, 4, 4, 2, swapped=True)
    if rows < WIDE_ROWS:
        return GemmConfig(64, 128, BLOCK_K, 4, 3, 2)
    if not dense:
        # Dequantisation takes registers, so these tiles are smaller.
        return GemmConfig(128, 128, BLOCK_K, 8, 3)
    return GemmConfig(128, 256, BLOCK_K, 8, 3, flatten=True)


def _codes_config(name: str, rows: int) -> CodesConfig:
    """Returns the tile sizes of a GEMM that reads 4-bit codes as they are stored. name: the
    format."""
    if rows < WIDE_CODES_ROWS:
        return CodesConfig(token_tile(rows), 64, STREAMED_K, 4, 4, 4)
    if name == "nvfp4":
        return CodesConfig(128, 128, BLOCK_K, 8, 3)
    return CodesConfig(128, 64, STREAMED_K, 8, 3)


def scaled_gemm_config(rows: int, target: Target) -> ScaledConfig:
    """Returns the tile sizes of a GEMM of quantised rows with quantised weights, for this many rows
    in a group. A program cannot multiply while it scales a product, so two or three programs share
    a multiprocessor."""
    if rows <= SWAPPED_ROWS:
        return ScaledConfig(16, 128, SCALED_K, 4, 3, 3, swapped=True)
    if target.tmem_columns:
        wide = rows >= WIDE_ROWS
        return ScaledConfig(128 if wide else 64, 128, SCALED_K, 8 if wide else 4, 4)
    if rows < WIDE_CODES_ROWS:
        return ScaledConfig(64, 128, SCALED_K, 4, 4, 2)
    if rows < LONG_ROWS:
        # With tiles of 128 rows, the last tile of a group would be mostly padding.
        return ScaledConfig(64, 128, SCALED_K, 4, 3, 3)
    return ScaledConfig(128, 128, SCALED_K, 8, 3, 2, parts=2)


def token_tile(rows: int) -> int:
    """Returns the number of rows of a tile. The tile has room for an expert that has more rows than
    the average."""
    return min(max(next_power_of_2(2 * rows - 1), 16), 64)


def block_k_obstacle(weight: WeightOperands) -> str | None:
    """Returns why the scales do not fit the steps over the inner dimension; None if they fit."""
    width = weight.scale_block[1]
    if all(width % size == 0 or size % width == 0 for size in (BLOCK_K, STREAMED_K)):
        return None
    return f"scale_block: expected columns that divide {BLOCK_K} or are divided by it, got {width}"
