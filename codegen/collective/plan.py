"""How rows go from rank to rank, by the shape alone: all ranks plan the same."""

from __future__ import annotations

from functools import cache

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.collective.kernels import ReduceConfig

# Rows of 16-bit numbers that one program holds in registers.
MOST_COLUMNS = 16384
# Columns that rows are whole words of, aligned to 16 bytes.
COLUMN_STEP = 8
# Every rank gets all rows of all others. Of two ranks that is what a ring sends, too: on two H200s
# the kernel takes 0.38 (1 x 8192) to 0.63 (8192 x 8192) of the time of NCCL and a norm. Of more
# ranks it is more than a ring sends: so many bytes to each, not measured here.
MOST_BYTES_OF_MANY = 1 << 20
# With 128, two H200s take 1.5 times as long for 8192 tokens; with 512 no less time.
BLOCKS = 256
COLUMNS_PER_WARP = 512


def most_tokens(columns: int, num_ranks: int) -> int | None:
    """Up to how many tokens each rank reads all others' rows; None: however many."""
    return None if num_ranks <= 2 else MOST_BYTES_OF_MANY // (2 * columns * (num_ranks - 1))


@cache
def reduce_config(columns: int, num_ranks: int) -> ReduceConfig:
    """The tiles for any number of tokens that ranks read of each other."""
    most = most_tokens(columns, num_ranks)
    blocks = BLOCKS if most is None else min(next_power_of_2(most), BLOCKS)
    warps = next_power_of_2(columns) // COLUMNS_PER_WARP
    return ReduceConfig(blocks, min(max(warps, 4), 16))
