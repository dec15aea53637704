"""Rotates the queries of MLA attention as they are loaded."""

import triton
import triton.language as tl

from tilewright.codegen.mla.templates.entries import load_pairs, pair_angles, rotated_by
from tilewright.codegen.templates.rounding import rounded


@triton.jit
def column_angles(
    pointer, rows, known, ROPE: tl.constexpr, FULL_WIDTH: tl.constexpr, STRIDES: tl.constexpr
):
    """Loads the values of a cos or sin table for all columns, as fp32 [rows, ROPE]. Rows that
    `known` masks out are zeros. The members of a pair are half the columns apart."""
    columns = tl.arange(0, ROPE)
    taken = columns if FULL_WIDTH else columns % (ROPE // 2)
    places = pointer + (rows * STRIDES[0])[:, None] + (taken * STRIDES[1])[None, :]
    return tl.load(places, mask=known[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_rotation(
    base, cos_ptr, sin_ptr, first_row, own_queries, token_stride, positions, first_token, rope_rows,
    ROPE: tl.constexpr, ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr, BY_POSITION: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Loads the operands of `rotated_queries`: the first and the second members of pairs, their
    cosines, and their sines.

    For the style "half" with two tables, loads instead all columns, the other member of each
    column's pair, the cosines and the sines.

    BY_POSITION: whether the position of a query selects its row of cos and sin. If not, the row is
    the query's number modulo rope_rows. first_token: the number of the sequence's first query.
    ROPE: a power of two.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    real = rows < own_queries
    places = rows.to(tl.int64) * token_stride
    if BY_POSITION:
        turns = positions.to(tl.int64)
        known = real & (turns >= 0) & (turns < rope_rows)
    else:
        turns = ((first_token.to(tl.int32) + rows) % rope_rows).to(tl.int64)
        known = real
    if ROPE_STYLE == "half" and sin_ptr is not None:
        columns = tl.arange(0, ROPE)
        first = tl.load(base + places[:, None] + columns[None, :], mask=real[:, None], other=0.0)
        others = (columns + ROPE // 2) % ROPE
        second = tl.load(base + places[:, None] + others[None, :], mask=real[:, None], other=0.0)
        first_cos = column_angles(cos_ptr, turns, known, ROPE, FULL_WIDTH, COS_STRIDES)
        first_sin = column_angles(sin_ptr, turns, known, ROPE, FULL_WIDTH, SIN_STRIDES)
        second_cos = first_cos
        second_sin = first_sin
    else:
        first, second = load_pairs(
            base, places, real, ROPE, ROPE // 2,
            ROPE_STYLE == "interleaved" or ROPE_STYLE == "interleaved_to_half", 1,
        )  # fmt: skip
        first_cos, second_cos, first_sin, second_sin = pair_angles(
            cos_ptr, sin_ptr, turns, known, ROPE, ROPE // 2, ROPE_STYLE, FULL_WIDTH, COS_STRIDES,
            SIN_STRIDES,
        )  # fmt: skip
    return first, second, first_cos, second_cos, first_sin, second_sin


@triton.jit
def rotated_queries(
    first, second, first_cos, second_cos, first_sin, second_sin, base, first_row, token_stride,
    ROPE: tl.constexpr, ROPE_STYLE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns the rope columns [BLOCK_M, ROPE] of a tile's queries, rotated in fp32 and rounded
    once."""
    DTYPE: tl.constexpr = base.dtype.element_ty
    columns = tl.arange(0, ROPE)
    wide = first.to(tl.float32)
    other = second.to(tl.float32)
    if first.shape[1] == ROPE:
        other = tl.where(columns < ROPE // 2, -other, other)
        turned = rounded(tl.fma(wide, first_cos, other * first_sin), DTYPE)
    else:
        low, high = rotated_by(wide, other, first_cos, second_cos, first_sin, second_sin)
        pairs = tl.join(rounded(low, DTYPE), rounded(high, DTYPE))
        if ROPE_STYLE != "interleaved":
            pairs = tl.permute(pairs, (0, 2, 1))
        turned = tl.reshape(pairs, (BLOCK_M, ROPE))
    # On Hopper, Triton keeps the operand of a loop in shared memory if the operand comes from a
    # load. Any other operand is read into registers again in each step, which makes the kernel a
    # tenth slower. Therefore the columns pass through a load whose mask is false everywhere.
    rows = first_row + tl.arange(0, BLOCK_M)
    places = base + rows.to(tl.int64)[:, None] * token_stride + columns[None, :]
    return tl.load(places, mask=(rows < 0)[:, None], other=turned)
