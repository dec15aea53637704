"""The kernel `mla_query`, which rotates queries before attention or casts them to 8 bits, and the
static facts about rotations."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.kernel import Kernel, strides_of

# TMA needs strides and base addresses that are multiples of 16 bytes.
TMA_BYTES = 16
Q_STRIDES = strides_of("q", sequence=-4, token=-3, head=-2)

QUERY = Kernel(
    "mla.query",
    "mla_query",
    {
        "BATCH_STRIDES": (("row_offsets", 0), ("starts", 0), ("positions", 0)),
        "KEY_STRIDES": (("k_rope", -2), ("joined", -2)),
    },
    Q_STRIDES,
    ranges=("token_run", "rope_rows"),
)


@dataclass(frozen=True)
class Rotation:
    """The static part of a rotation (RoPE) of queries or keys. The fields have the names of the
    kernels' constants.

    Attributes:
        rope_style: A style of ops/reference/rope.py; "none" if there is no rotation.
        full_width: Whether the tables have a column for each rotated column. If not, they have a
            column for each pair.
        by_position: Whether a token uses the row of the tables at its position. If not, it uses the
            row at its index among the tokens.
        cos_strides, sin_strides: The strides (row, column) of the tables.
    """

    rope_style: str = "none"
    full_width: bool = False
    by_position: bool = False
    cos_strides: tuple[int, ...] = (0, 0)
    sin_strides: tuple[int, ...] = (0, 0)


NO_ROTATION = Rotation()


@dataclass(frozen=True)
class QueryProblem:
    """The static part of a launch of `mla_query`.

    Attributes:
        num_heads: The number of heads.
        nope, rope_dim: The number of columns of a query that are not rotated, and the number of
            rotated columns after them.
        search_steps: The number of steps of the binary search for the sequence of a row.
        whole: Whether the kernel stores all columns. If not, it stores only the rotated columns.
        casts: Whether the result has another dtype than the query.
    """

    num_heads: int
    nope: int
    rope_dim: int
    search_steps: int
    whole: bool
    casts: bool

    @property
    def nope_block(self) -> int:
        return next_power_of_2(max(self.nope, 1))

    @property
    def pairs(self) -> int:
        return next_power_of_2(max(self.rope_dim // 2, 1))

    @property
    def block_r(self) -> int:
        """The number of rows of a program. A program loads at least 8 KiB, and takes so few
        registers that eight programs fit a multiprocessor. For whole queries without a cast, 16
        rows take 2 to 5 % less time than 64 rows on an H200."""
        return 16 if self.whole and not self.casts else 64

    @property
    def out_width(self) -> int:
        return self.nope + self.rope_dim if self.whole else self.rope_dim


def query_grid(problem: QueryProblem, num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, problem.block_r),)
