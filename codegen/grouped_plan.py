"""Which tiles a lone grouped GEMM runs in: by the rows that a group gets on average."""

from __future__ import annotations

from tilewright.codegen.grouped_kernels import GemmConfig, GroupedProblem
from tilewright.codegen.qkv_heads import cdiv, next_power_of_2
from tilewright.codegen.targets import Target

# Rows per group up to which weights stand on the M side.
SWAPPED_ROWS = 48
# Rows per group from which 128-row tiles are taken.
WIDE_ROWS = 192
# The inner dimension comes in blocks of one of these.
BLOCK_K = 64
STREAMED_K = 128


def plan_grouped(problem: GroupedProblem, num_rows: int, target: Target) -> GemmConfig:
    """The tiles for `num_rows` rows on a target."""
    rows = cdiv(num_rows, max(problem.num_groups, 1))
    if rows <= SWAPPED_ROWS:
        # A tile of one group is as long as its rows, within what a row tile may be.
        block_m = min(max(next_power_of_2(rows), 16), 64)
        return GemmConfig(block_m, 128, STREAMED_K, True, 8, 4)
    if rows < WIDE_ROWS:
        return GemmConfig(64, 128, BLOCK_K, False, 4, 4)
    if problem.format != "dense":
        # Dequantised tiles take registers, and Triton does not specialise their warps.
        return GemmConfig(128, 128, BLOCK_K, False, 8, 3)
    # Warps stay together: a tile finds its group by reductions, and no kernel that could leave it
    # in memory runs before. Flattened, a tile's end overlaps the next one's start.
    return GemmConfig(128, 256, BLOCK_K, False, 8, 3, flatten=bool(target.tmem_columns))


def block_k_obstacle(problem: GroupedProblem) -> str | None:
    """Why the scales do not fit the blocks of the inner dimension; None where they do."""
    width = problem.scale_block[1]
    if all(width % size == 0 or size % width == 0 for size in (BLOCK_K, STREAMED_K)):
        return None
    return f"scale_block: {width} columns neither divide {BLOCK_K} nor are divided by it"
