"""The plan of a sum over ranks. It depends only on the shape, so that all ranks make the same
plan."""

from __future__ import annotations

from functools import cache

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.collective.kernels import ReduceConfig

# The largest number of columns of a row. One program holds the whole row in registers.
MOST_COLUMNS = 16384
# The number of columns must be a multiple of this number: this many 16-bit numbers take 16 bytes.
COLUMN_STEP = 8
# The largest number of bytes that a rank sends with the kernel if there are more than two ranks.
# The kernel sends every row to every other rank. With two ranks, the library's ring sends the same
# number of bytes. On two H200s, the kernel is faster than NCCL and a separate norm: for rows of
# 8192 columns, the kernel takes 0.38 times as long for 1 token, and 0.63 times as long for 8192
# tokens. With more ranks, a ring sends fewer bytes than the kernel. This limit was not measured.
MOST_BYTES_OF_MANY = 1 << 20
# The largest number of programs. With 128 programs, two H200s take 1.5 times as long for 8192
# tokens; 512 programs are not faster.
BLOCKS = 256
# The number of columns of a warp. A program has at least 4 and at most 16 warps.
COLUMNS_PER_WARP = 512


def most_tokens(columns: int, num_ranks: int) -> int | None:
    """Returns the largest number of tokens for which the kernel is faster than the library's
    all-reduce; None if the kernel is faster for any number of tokens."""
    return None if num_ranks <= 2 else MOST_BYTES_OF_MANY // (2 * columns * (num_ranks - 1))


@cache
def reduce_config(columns: int, num_ranks: int) -> ReduceConfig:
    """Returns the launch parameters for any number of tokens up to `most_tokens`."""
    most = most_tokens(columns, num_ranks)
    blocks = BLOCKS if most is None else min(next_power_of_2(most), BLOCKS)
    warps = next_power_of_2(columns) // COLUMNS_PER_WARP
    return ReduceConfig(blocks, min(max(warps, 4), 16))
