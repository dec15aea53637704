"""The kernel that decodes a weight of 4- or 8-bit codes for a library's GEMM, and the constants of
all kernels that decode tiles of such a weight."""

from __future__ import annotations

from functools import cache
from math import gcd

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.formats import TABLES, Quantization
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.spec import Constant

DEQUANTIZE = Kernel(
    "dequantize",
    "dequantize_weight",
    num_stages=1,
    unaligned=("factor",),
    role="decodes codes",
)


def tile_constants(
    q: Quantization, index: int, hidden: int, block_columns: int
) -> dict[str, Constant]:
    """Returns the constants with which kernels decode tiles of the weight with this index.

    hidden: the number of columns of the weight. block_columns: the number of columns of a tile.
    """
    # A scale of all columns also covers the columns that a tile masks.
    columns = q.block[1] if q.block[1] < hidden else next_power_of_2(hidden)
    number = q.format.number
    return {
        "BLOCK_STRIDES": q.block_strides(index),
        "PER": q.per_word,
        "PACKED_ROWS": q.packed_rows,
        "ORDER": q.order or tuple(range(q.per_word)),
        "SCALE_ROWS": q.block[0],
        "SCALE_COLUMNS": columns,
        "PACKED_ZEROS": q.packed_zeros,
        "ZERO_ORDER": q.order if len(q.order) == 8 else tuple(range(8)),
        "ZERO_POINT": q.zero_point,
        "UNIT": gcd(columns, block_columns),
        **({"NUMBER": TABLES.get(number, number)} if number else {}),
        **({"ADDED_ZEROS": True} if q.format.added_zeros else {}),
    }


@cache
def dequantize_statics(
    q: Quantization,
    index: int,
    shape: tuple[int, int],
    strides: tuple[int, ...],
    head_dim: int,
    group: int = 0,
) -> Statics:
    """Returns the constants of `dequantize_weight` for the weight with this index.

    shape: the rows and columns of the weight. strides: the strides of (group of heads, head, row,
    column), in words. head_dim: the number of rows of a head. group: the number of heads of a
    group; 0 if heads are not in groups.
    """
    # The tiles are shaped so that both the reads of words and the writes of numbers are contiguous.
    block_r, block_k = (16, 256) if strides[-1] == 1 else (64, 64)
    if q.packed_rows:
        block_r, block_k = 128, 64
    rows, hidden = shape
    return Statics(
        NUM_ROWS=rows,
        HIDDEN=hidden,
        HEAD_DIM=head_dim,
        GROUP=group,
        WEIGHT_STRIDES=strides,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        **tile_constants(q, index, hidden, block_k),
    )


def dequantize_grid(statics: Statics) -> tuple[int, int]:
    return cdiv(statics.num_rows, statics.block_r), cdiv(statics.hidden, statics.block_k)
