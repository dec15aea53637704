"""Which kernel a LoRA shrink or expand runs: by its rows, its columns and K.

The bounds are where kernels of these tiles took equal time on an H200 (docs/lora-performance.md).
"""

from __future__ import annotations

from tilewright.codegen.lora_kernels import (
    ExpandConfig,
    ExpandProblem,
    FewShrink,
    RowShrink,
    ShrinkConfig,
    ShrinkProblem,
    TiledShrink,
    padded_rank,
)
from tilewright.codegen.qkv_heads import cdiv, next_power_of_2
from tilewright.codegen.targets import Target

# Rows in any order up to which each program finds its own; more are sorted first.
UNSORTED_ROWS = 512
# Rows, and products in all, up to which a tensor core is not worth its way.
SINGLE_ROWS = 64
ROW_PRODUCTS = 1536 * 4096
# Columns of q, k and v together from which on tensor cores count.
WIDE_COLUMNS = 96
# Rows up to which a program has all of K, for few columns and for more.
FEW_ROWS = (512, 256)
# Programs for each multiprocessor up to which K is split further, likewise.
PROGRAMS_PER_SM = (1.0, 0.5)
MAX_SPLIT = 8
# What a program reads of K at least.
LEAST_PART = 512


def takes_row_kernel(num_rows: int, columns: int, hidden: int) -> bool:
    """Whether so few rows and products go to the kernel without tensor cores."""
    return num_rows <= SINGLE_ROWS and num_rows * columns * hidden <= ROW_PRODUCTS


def plan_shrink(problem: ShrinkProblem, num_rows: int, target: Target) -> ShrinkConfig:
    """The kernel for up to `num_rows` rows on a target."""
    columns = problem.planes * problem.rank
    wide = columns > WIDE_COLUMNS
    if takes_row_kernel(num_rows, columns, problem.hidden):
        return RowShrink(1, 1, min(next_power_of_2(problem.hidden), 4096), 8)
    if problem.dtype == "fp32":
        return TiledShrink(16, 32, _split(problem, cdiv(num_rows, 16), 1, target), 4, 2)
    if num_rows <= FEW_ROWS[wide]:
        if num_rows * columns <= 64 * 48:
            return FewShrink(16, 8, 256, 4, 4, 3)
        return FewShrink(16, 16, 128, 4, 4, 3)
    if wide and num_rows <= 512:
        return TiledShrink(32, 128, 4, 4, 3)
    tiles = cdiv(num_rows, 64)
    split = _split(problem, tiles, 1 if wide or tiles > target.num_sms else 2, target)
    return TiledShrink(64, 64, split, 8, 4) if wide else TiledShrink(64, 128, split, 4, 3)


def _split(problem: ShrinkProblem, tiles: int, least: int, target: Target) -> int:
    """Over how many programs the K of each tile is split."""
    wide = problem.planes * problem.rank > WIDE_COLUMNS
    split = least
    while split < MAX_SPLIT and 2 * split * tiles <= PROGRAMS_PER_SM[wide] * target.num_sms:
        if problem.hidden < 2 * split * LEAST_PART:
            break
        split *= 2
    return split


def plan_expand(problem: ExpandProblem, num_rows: int, target: Target) -> ExpandConfig:
    """The kernel for up to `num_rows` rows on a target."""
    block_r = min(padded_rank(problem.rank), 64)
    if num_rows * problem.rank <= 32 * 16:
        return ExpandConfig(1, 128, block_r, 4)
    if problem.dtype == "fp32":
        return ExpandConfig(16, 64, min(block_r, 32), 4)
    if num_rows <= 256:
        return ExpandConfig(16, 128, block_r, 4)
    return ExpandConfig(32 if problem.rank <= 32 else 64, 128, block_r, 4)
