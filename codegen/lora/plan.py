"""Plans of a LoRA shrink or expand: the kernel for given rows, columns and K.

Unless a comment says otherwise, each bound below is the number at which two kernels took equal time
on an H200 (docs/lora-performance.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.lora.kernels import (
    ExpandConfig,
    FewShrink,
    RowShrink,
    ShrinkConfig,
    TiledShrink,
    padded_rank,
)
from tilewright.codegen.lora.problem import ShrinkProblem
from tilewright.codegen.targets import Target

# The largest number of unsorted rows for which each program finds its own rows. More rows are
# sorted first.
UNSORTED_ROWS = 512
# The largest number of rows for which a kernel without tensor cores is faster.
SINGLE_ROWS = 64
# The largest number of multiply-adds (rows * columns * K) for which a kernel without tensor cores
# is faster. If q, k and v together have more than WIDE_COLUMNS columns, the number may be twice as
# large.
ROW_PRODUCTS = 1536 * 4096
# The largest number of columns of q, k and v together that does not count as wide.
WIDE_COLUMNS = 96
# If there would be more programs than this on each multiprocessor, a program computes two columns,
# so that x is read half as often. On an H100, 64 rows of rank 8 take 4.4 us with two columns and
# 5.0 us with one column. 16 rows of rank 64 take 8.0 us with two columns and 8.6 us with four
# columns.
SINGLE_COLUMN_PROGRAMS = 4
# For a single adapter: the largest product rows * columns for which tiles of `lora_shrink_few` have
# 8 columns.
NARROW_PRODUCTS = 64 * 48
# Maps the largest number of columns of q, k and v together to the largest number of rows for which
# each program sums over all of K.
FEW_ROWS = {48: 2048, WIDE_COLUMNS: 1024}
# The same number of rows if there are more columns than in FEW_ROWS.
FEW_ROWS_WIDE = 256
# The constants from here to TALL are the tiles of `lora_shrink_few` for several adapters, on chips
# that were measured. In a sweep on an H100 with 8 adapters of ranks 8 to 128 and 16 to 1024 rows,
# the chosen tiles were at most 4 % slower than the fastest tiles. Tiles of 8 rows need less padding
# and have more programs than larger tiles, but they read the weights more often.
NARROW = FewShrink(8, 8, 256, 4, 4, 4)
LONG = FewShrink(8, 16, 256, 4, 4, 3)
SMALL = FewShrink(8, 8, 128, 4, 4, 3)
WIDER = FewShrink(8, 16, 128, 4, 4, 3)
SQUARE = FewShrink(16, 16, 128, 4, 4, 3)
TALL = FewShrink(32, 16, 128, 4, 4, 3)
# Maps tiles to a number of programs. The tiles are used only if each multiprocessor gets at most
# this many programs. With longer steps, shared memory has room for fewer programs.
MOST_PROGRAMS = {NARROW: 1, LONG: 1, SMALL: 4, SQUARE: 2}
# For weights whose columns are contiguous: the largest product rows * columns for which the kernel
# without tensor cores is used.
ACROSS_PRODUCTS = 1024
# The largest number of rows for which K is split and a tile has 64 columns, as many as a plane of
# rank 64 has.
COLUMN_BLOCK_ROWS = 2048
# The number of parts of K is doubled, as long as each multiprocessor then has at most this many
# programs.
PROGRAMS_PER_SM = 2.2
# The largest number of programs that share K.
MAX_SPLIT = 4
# The fewest columns that a program sums over if programs share K.
LEAST_PART = 512
# The fewest columns that a program sums over for each row of its tile if programs share K. Programs
# that share K exchange their sums, and a tile of more rows has more sums. For 1024 rows of 8
# adapters of rank 64, tiles of 64 rows on an H100 take 15.4 us if they split K = 4096 in 2 parts,
# and 16.2 us if they split it in 4 parts.
LEAST_ROW_PART = 32
# The largest number of rows that plans round up to a power of two.
ROUND_ROWS = 4096
# Plans round a number of rows above ROUND_ROWS up to a multiple of this number.
ROWS_STEP = 512


def takes_row_kernel(num_rows: int, columns: int, hidden: int) -> bool:
    """Whether the kernel without tensor cores is faster for this number of rows and of
    multiply-adds."""
    most = ROW_PRODUCTS * (2 if columns > WIDE_COLUMNS else 1)
    return num_rows <= SINGLE_ROWS and num_rows * columns * hidden <= most


def planned_rows(num_rows: int) -> int:
    """Returns the rounded number of rows of a plan. Many numbers of rows share one plan."""
    if num_rows <= ROUND_ROWS:
        return next_power_of_2(max(num_rows, 1))
    return cdiv(num_rows, ROWS_STEP) * ROWS_STEP


def plan_shrink(problem: ShrinkProblem, num_rows: int, target: Target) -> ShrinkConfig:
    """Returns the kernel for up to `num_rows` rows on a target."""
    columns, hidden = problem.planes * problem.rank, problem.hidden
    wide = columns > WIDE_COLUMNS
    if any(weight.strides[2] != 1 for weight in problem.weights):
        across = _plan_across(problem, num_rows, target)
        if across is not None:
            return across
    if takes_row_kernel(num_rows, columns, hidden):
        if num_rows * columns > SINGLE_COLUMN_PROGRAMS * target.num_sms:
            return RowShrink(1, 2, min(next_power_of_2(hidden), 4096), 8)
        return RowShrink(1, 1, min(next_power_of_2(hidden), 8192), 8)
    if problem.a.dtype == "fp32":
        return TiledShrink(16, 32, _split(problem, num_rows, 16, 1, target), 4, 2)
    if num_rows <= _few_rows(columns):
        return _plan_few(problem, num_rows, target)
    if not wide:
        # Split K in two if the tiles occupy at most half of the multiprocessors.
        split = 2 if num_rows <= 32 * target.num_sms else 1
        if columns > 64 and split == 2 and (num_rows <= 2048 or problem.form.num_adapters > 1):
            # Two programs share a multiprocessor.
            return TiledShrink(64, 64, split, 4, 4, (128,))
        return TiledShrink(64, 128, split, 4, 3)
    if num_rows <= COLUMN_BLOCK_ROWS:
        rows = 32 if num_rows <= 512 and columns <= 192 else 64
        least = LEAST_ROW_PART * rows
        split = _split(problem, num_rows, rows, cdiv(columns, 64), target, least)
        config = TiledShrink(rows, 128, split, 4, 3, (64,))
        # A program that is alone on a multiprocessor needs more bytes in flight. On an H100, 1024
        # rows of 8 adapters of rank 64 take 14.0 us with four stages and 15.6 us with three stages.
        alone = split * _programs(problem, num_rows, config) <= target.num_sms
        return replace(config, num_stages=4) if alone and target.measured else config
    return _plan_many_rows(problem, num_rows, target)


def _plan_few(problem: ShrinkProblem, num_rows: int, target: Target) -> FewShrink:
    """Returns the tiles of the kernel in which a program sums over all of K."""
    columns = problem.planes * problem.rank
    if problem.form.addressing == "single" or not target.measured:
        narrow = num_rows * columns <= NARROW_PRODUCTS
        return FewShrink(16, 8, 256, 4, 4, 3) if narrow else SQUARE
    adapters = min(problem.form.num_adapters, num_rows)
    rows = cdiv(num_rows, adapters)  # the rows of one adapter, on average

    def fits(config: FewShrink) -> bool:
        """Whether the programs are few enough to run at the same time."""
        programs = adapters * cdiv(rows, config.block_m) * cdiv(columns, config.columns)
        return programs <= MOST_PROGRAMS[config] * target.num_sms

    few = next((config for config in (NARROW, LONG, SMALL) if fits(config)), None)
    if few is not None:
        return few
    if rows <= WIDER.block_m:
        return WIDER
    # If the programs cannot all run at the same time, larger tiles are better, because they read
    # the weights less often.
    tall = columns > WIDE_COLUMNS and rows > SQUARE.block_m and not fits(SQUARE)
    return TALL if tall else SQUARE


def _plan_across(problem: ShrinkProblem, num_rows: int, target: Target) -> ShrinkConfig | None:
    """Returns the kernel for weights [K, R] that are used as [R, K], so that their columns are
    contiguous.

    The result is the kernel in which the fewest programs read parts of the same row of memory.
    Returns None if all kernels are alike in this respect.
    """
    columns, hidden = problem.planes * problem.rank, problem.hidden
    single = problem.a.dtype == "fp32"
    if (single and takes_row_kernel(num_rows, columns, hidden)) or (
        num_rows <= SINGLE_ROWS and num_rows * columns <= ACROSS_PRODUCTS
    ):
        return RowShrink(1, 4, min(next_power_of_2(hidden), 4096), 8)
    if single or num_rows > COLUMN_BLOCK_ROWS:
        return None
    split = _split(problem, num_rows, 64, cdiv(columns, 64), target)
    return TiledShrink(64, 128, split, 4, 3, (64,))


def _few_rows(columns: int) -> int:
    return next((rows for most, rows in FEW_ROWS.items() if columns <= most), FEW_ROWS_WIDE)


def _plan_many_rows(problem: ShrinkProblem, num_rows: int, target: Target) -> TiledShrink:
    """Returns the fastest tiles for many rows and more than WIDE_COLUMNS columns."""
    columns = problem.planes * problem.rank
    if columns <= 128:
        return TiledShrink(64, 64, 1, 4, 4, (128,))
    # The values of `choices` are the relative times of one wave of tiles.
    if columns <= 192:
        choices = {
            TiledShrink(64, 64, 1, 4, 4, (128, 64)): 1.0,
            TiledShrink(128, 64, 1, 8, 4, (128, 64)): 1.55,
        }
    elif columns <= 256:
        return TiledShrink(64, 64, 1, 8, 4, (256,))
    else:
        choices = {TiledShrink(128, 64, 1, 8, 4, (128,)): 1.0}
        if columns <= 384:
            choices[TiledShrink(128, 64, 1, 8, 4, (128, 64))] = 1.35
            choices[TiledShrink(64, 64, 1, 8, 3, (256, 128))] = 1.6

    def time(config: TiledShrink) -> float:
        return cdiv(_programs(problem, num_rows, config), target.num_sms) * choices[config]

    return min(choices, key=time)


def _programs(problem: ShrinkProblem, num_rows: int, config: TiledShrink) -> int:
    """Estimates how many programs have work, assuming that the last tile of each adapter is half
    padding."""
    apart = 0 if problem.form.addressing == "single" else min(problem.form.num_adapters, num_rows)
    tiles = cdiv(num_rows, config.block_m) + apart // 2
    return tiles * cdiv(problem.planes * problem.rank, sum(config.widths))


def _split(
    problem: ShrinkProblem,
    num_rows: int,
    block_m: int,
    column_blocks: int,
    target: Target,
    least_part: int = LEAST_PART,
) -> int:
    """Returns the number of programs that share the K of each tile."""
    apart = 0 if problem.form.addressing == "single" else min(problem.form.num_adapters, num_rows)
    programs = (apart + cdiv(num_rows, block_m)) * column_blocks
    split = 1
    while split < MAX_SPLIT and 2 * split * programs <= PROGRAMS_PER_SM * target.num_sms:
        if problem.hidden < 2 * split * least_part:
            break
        split *= 2
    return split


@cache
def plan_expand(rank: int, dtype: str, num_rows: int) -> ExpandConfig:
    """Returns the tile sizes for up to `num_rows` rows. rank: the largest rank of q, k and v."""
    block_r = min(padded_rank(rank), 64)
    if num_rows * rank <= 32 * 16:
        return ExpandConfig(1, 128, block_r, 4)
    if dtype == "fp32":
        rows = 1 if num_rows <= SINGLE_ROWS else 16
        return ExpandConfig(rows, 128 if rows == 1 else 64, min(block_r, 32), 4)
    if num_rows <= 256:
        return ExpandConfig(16, 128, block_r, 4)
    return ExpandConfig(32 if rank <= 32 else 64, 128, block_r, 4)
