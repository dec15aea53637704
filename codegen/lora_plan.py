"""Which kernel a LoRA shrink or expand runs, by its rows."""

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


def plan_shrink(problem: ShrinkProblem, num_rows: int, target: Target) -> ShrinkConfig:
    """The kernel for up to `num_rows` rows on a target."""
    if num_rows <= 2:
        return RowShrink(1, min(next_power_of_2(problem.hidden), 4096), 4)
    if num_rows <= 64:
        columns = min(padded_rank(problem.rank), 16)
        return FewShrink(16, columns, 128, 4, 4, 3)
    block_m = 64 if num_rows < 4096 else 128
    tiles = cdiv(num_rows, block_m)
    split = 1
    while split < 16 and tiles * split < 2 * target.num_sms and problem.hidden >= 256 * split:
        split *= 2
    return TiledShrink(block_m, 64, split, 4 if block_m == 64 else 8, 4)


def plan_expand(problem: ExpandProblem, num_rows: int, target: Target) -> ExpandConfig:
    """The kernel for up to `num_rows` rows on a target."""
    block_r = min(padded_rank(problem.rank), 64)
    if num_rows <= 4:
        return ExpandConfig(1, 128, block_r, 4)
    if num_rows <= 256:
        return ExpandConfig(16, 128, block_r, 4)
    return ExpandConfig(64, 128, block_r, 4)
