"""The kernels that prepare the rows of x for a product, and their launch grids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.kernel import Kernel, Statics

ORDER_X = Kernel("rows", "order_x", num_stages=1, role="prepares x")
NORM_X = Kernel(
    "rows",
    "norm_x",
    {"NORM_STRIDE": ("norm_weight", 0), "NORM_BIAS_STRIDE": ("norm_bias", 0)},
    num_stages=1,
    role="prepares x",
)
# The number of tokens of one program of `order_x`. With ORDER_TOKENS and ORDER_COLUMNS, `order_x`
# takes 1.3 to 1.5 us for 64 tokens of 4096 columns on an H100. Other numbers were not measured.
ORDER_TOKENS = 8
# The smallest number of columns of one program of `order_x`.
ORDER_COLUMNS = 128
# The largest number of columns of a row that one program of `norm_x` holds in registers: 64 numbers
# in each thread of eight warps.
MOST_NORM_COLUMNS = 16384


@dataclass(frozen=True)
class ColumnOrder:
    """The order of x's columns in which a kernel decodes words that are packed along K
    (`x_in_order`).

    Attributes:
        width: The number of columns of a permuted row: the row's columns, rounded up to whole steps
            of the kernel.
        unit: The number of columns of a run. A column is only moved to another place of its own
            run.
        per, interleaved_nibbles: The constants PER and INTERLEAVED_NIBBLES of `x_in_order`.
    """

    width: int
    unit: int
    per: int
    interleaved_nibbles: bool


def column_order(q: Quantization, columns: int, block_k: int, unit: int) -> ColumnOrder:
    """Returns the order for a kernel that reads rows of `columns` codes in steps of block_k."""
    width = cdiv(columns, block_k) * block_k
    return ColumnOrder(width, unit, q.per_word, q.joins_neighbours)


@cache
def order_statics(order: ColumnOrder, columns: int) -> Statics:
    """Returns the constants of `order_x` for rows of `columns` numbers."""
    block_k = max(ORDER_COLUMNS, order.unit)
    return Statics(order, K=columns, BLOCK_T=ORDER_TOKENS, BLOCK_K=block_k)


def order_grid(order: ColumnOrder, num_tokens: int) -> tuple[int, int]:
    return cdiv(order.width, max(ORDER_COLUMNS, order.unit)), cdiv(num_tokens, ORDER_TOKENS)


@cache
def norm_statics(columns: int, order: ColumnOrder | None) -> Statics:
    """Returns the constants of `norm_x` that do not depend on the norm."""
    order = order or ColumnOrder(columns, 0, 1, False)
    block_k = next_power_of_2(order.width)
    # A thread holds at most 64 numbers.
    return Statics(order, K=columns, BLOCK_K=block_k, num_warps=8 if block_k > 4096 else 4)
