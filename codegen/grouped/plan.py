"""Which kernels a lone grouped GEMM runs: by the rows that a group gets on average.

Few rows: the time is that of streaming the weights in use. Many: tensor cores bound it. Codes are
decoded in the GEMM, those of 4 bits as they lie where rows are few, or, where each weight would be
decoded too often, all of them before it. The bounds are where the two took equal time on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv
from tilewright.codegen.grouped.codes_plan import STREAMED_K, token_tile
from tilewright.codegen.grouped.codes_specs import CodesConfig, codes_config, codes_obstacle
from tilewright.codegen.grouped.scaled_specs import ScaledConfig, scaled_config
from tilewright.codegen.grouped.specs import TMA_BYTES, GemmConfig, GroupedProblem
from tilewright.codegen.targets import Target

# Rows per group up to which weights stand on the M side.
SWAPPED_ROWS = 16
# Rows per group from which 128-row tiles are taken: of numbers, of codes that reach the tensor core
# as they lie, of codes by codes.
WIDE_ROWS = 160
WIDE_CODES_ROWS = 96
LONG_ROWS = 512
# Rows per group from which weights are decoded before the GEMM: on an H200 the two took equal time.
DECODED_ROWS = {"fp8": 224, "int4": 224, "nvfp4": 240, "mxfp4": 240}
# The same of 4-bit codes that are decoded by tile, which takes far longer.
DECODED_FROM_TILES = {"int4": 48, "nvfp4": 40, "mxfp4": 48}
# The inner dimension comes in blocks of so many, or of STREAMED_K.
BLOCK_K = 64


@dataclass(frozen=True)
class GroupedPlan:
    """decode: the weights' codes are decoded by a kernel of their own, before a dense GEMM."""

    gemm: GemmConfig
    decode: bool
    reason: str


def plan_grouped(problem: GroupedProblem, num_rows: int, target: Target) -> GroupedPlan:
    """The kernels for `num_rows` rows on a target."""
    rows = cdiv(num_rows, max(problem.num_groups, 1))
    if problem.x_scale is not None:
        codes_by_codes = scaled_gemm_config(rows, target)
        return GroupedPlan(codes_by_codes, False, f"{rows} rows per group, {codes_by_codes}")
    streams = not target.tmem_columns and streams_codes(problem)
    bounds = DECODED_ROWS if streams else DECODED_ROWS | DECODED_FROM_TILES
    decode = rows >= bounds.get(problem.format, rows + 1)
    # Rows of numbers follow each other without a gap.
    decode = decode and problem.inner * ELEMENT_BYTES[problem.dtype] % TMA_BYTES == 0
    if streams and not decode:
        codes = _codes_config(problem.format, rows)
        return GroupedPlan(codes, False, f"{rows} rows per group, {codes}")
    dense = decode or problem.format == "dense"
    config = grouped_config(rows, dense=dense)
    how = ", weights decoded before it" if decode else ""
    return GroupedPlan(config, decode, f"{rows} rows per group, {config}{how}")


def grouped_config(rows: int, *, dense: bool) -> GemmConfig:
    """Tiles for so many rows per group; dense: of weights that need no decoding."""
    if rows <= SWAPPED_ROWS:
        # Two programs on a multiprocessor hide each other's ends.
        return GemmConfig(16, 64, STREAMED_K, True, 4, 4, 2)
    if rows < WIDE_ROWS:
        return GemmConfig(64, 128, BLOCK_K, False, 4, 3, 2)
    if not dense:
        # Decoding takes registers.
        return GemmConfig(128, 128, BLOCK_K, False, 8, 3)
    return GemmConfig(128, 256, BLOCK_K, False, 8, 3, flatten=True)


def streams_codes(problem: GroupedProblem) -> bool:
    """Whether the GEMM can read its weights by words of codes."""
    plain = problem.ids_dtype is None and "scale_ptr" not in problem.unaligned
    return plain and codes_obstacle(problem, _codes_config(problem.format, 1)) is None


def _codes_config(name: str, rows: int) -> CodesConfig:
    """Tiles of 4-bit codes as they lie; name: the format."""
    if rows < WIDE_CODES_ROWS:
        return codes_config(token_tile(rows), 64, STREAMED_K, 4, 4, 4)
    if name == "nvfp4":
        return codes_config(128, 128, BLOCK_K, 8, 3)
    return codes_config(128, 64, STREAMED_K, 8, 3)


def scaled_gemm_config(rows: int, target: Target) -> ScaledConfig:
    """Tiles for so many rows per group of codes by codes. A product is scaled while nothing else of
    its program multiplies: two or three of them share a multiprocessor."""
    if rows <= SWAPPED_ROWS:
        return scaled_config(16, 128, 4, 3, 3, swapped=True)
    if target.tmem_columns:
        wide = rows >= WIDE_ROWS
        return scaled_config(128 if wide else 64, 128, 8 if wide else 4, 4)
    if rows < WIDE_CODES_ROWS:
        return scaled_config(64, 128, 4, 4, 2)
    if rows < LONG_ROWS:
        # Of 128-row tiles a group's last is mostly empty.
        return scaled_config(64, 128, 4, 3, 3)
    return scaled_config(128, 128, 8, 3, 2, parts=2)


def block_k_obstacle(problem: GroupedProblem) -> str | None:
    """Why the scales do not fit the blocks of the inner dimension; None where they do."""
    width = problem.scale_block[1]
    if all(width % size == 0 or size % width == 0 for size in (BLOCK_K, STREAMED_K)):
        return None
    return f"scale_block: {width} columns neither divide {BLOCK_K} nor are divided by it"
