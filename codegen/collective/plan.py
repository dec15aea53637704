"""How rows go from rank to rank, by the shape alone: all ranks plan the same."""

from __future__ import annotations

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.collective.problem import ReduceProblem
from tilewright.codegen.collective.specs import ReduceConfig
from tilewright.codegen.targets import Target

# Rows of 16-bit numbers that one program holds in registers.
MOST_COLUMNS = 16384
# Columns that rows are whole words of, aligned to 16 bytes.
COLUMN_STEP = 8
# Up to so many bytes of x the words that show by themselves arrive first; above, half the bytes.
MOST_PACKED_BYTES = 1 << 20
# Every rank gets all rows of all others. Of two ranks that is what a ring sends, too; of more it is
# more, and above so many bytes the ring is faster.
MOST_BYTES_OF_MANY = 1 << 20
PACKED_BLOCKS, FLAGGED_BLOCKS = 64, 256


def most_tokens(columns: int, num_ranks: int) -> int | None:
    """Up to how many tokens each rank reads all others' rows; None: however many."""
    return None if num_ranks <= 2 else MOST_BYTES_OF_MANY // (2 * columns * (num_ranks - 1))


def reduce_config(problem: ReduceProblem, num_tokens: int, target: Target) -> ReduceConfig:
    """For so many tokens."""
    packed = 2 * num_tokens * problem.n <= MOST_PACKED_BYTES
    warps = min(max(next_power_of_2(problem.n) // 512, 4), 16)
    return ReduceConfig(packed, PACKED_BLOCKS if packed else FLAGGED_BLOCKS, warps)
