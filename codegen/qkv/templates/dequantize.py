"""Dequantises a weight of 4- or 8-bit codes for a library GEMM:

    w[n, k] = (code[n, k] - zero[n // bn, k // bk]) * scale[n // bn, k // bk] * factor

The weight is computed in fp32 and rounded once. Nibbles may have any order. Strides and blocks of
scales may have any size.
"""

import triton
import triton.language as tl

from tilewright.codegen.qkv.templates.loads import grouped
from tilewright.codegen.templates.fp4 import e2m1_value, e8m0_value
from tilewright.codegen.templates.tables import table_number


@triton.jit
def nibble_at(words, shift: tl.constexpr):
    """Returns 4 bits of each word, starting at bit `shift`, as fp32."""
    return ((words >> shift) & 0xF).to(tl.float32)


@triton.jit
def two_nibbles(words, first: tl.constexpr, ORDER: tl.constexpr):
    """Returns the elements `first` and `first` + 1 of each word, along a new last axis."""
    return tl.join(nibble_at(words, 4 * ORDER[first]), nibble_at(words, 4 * ORDER[first + 1]))


@triton.jit
def nibbles(words, PER: tl.constexpr, ORDER: tl.constexpr):
    """Returns the codes of words [A, B] as fp32 [A, B, PER]."""
    if PER == 1:
        codes = tl.expand_dims(words.to(tl.float32), 2)
    elif PER == 2:
        codes = two_nibbles(words, 0, ORDER)
    else:
        low = tl.join(two_nibbles(words, 0, ORDER), two_nibbles(words, 2, ORDER))
        high = tl.join(two_nibbles(words, 4, ORDER), two_nibbles(words, 6, ORDER))
        codes = tl.permute(tl.join(low, high), (0, 1, 4, 3, 2))
        codes = tl.reshape(codes, (words.shape[0], words.shape[1], 8))
    return codes


@triton.jit
def dequantize_weight(
    weight_ptr, scale_ptr, zero_ptr, out_ptr,
    NUM_ROWS: tl.constexpr, HIDDEN: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr, BLOCK_STRIDES: tl.constexpr,
    PER: tl.constexpr, PACKED_ROWS: tl.constexpr, ORDER: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED_ZEROS: tl.constexpr,
    ZERO_ORDER: tl.constexpr, ZERO_POINT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, UNIT: tl.constexpr, NUMBER: tl.constexpr = "",
    ADDED_ZEROS: tl.constexpr = False, factor_ptr=None,
):  # fmt: skip
    """Dequantises a projection weight: out [NUM_ROWS, HIDDEN] = (code - zero) * scale * factor in
    fp32, rounded once to out's dtype.

    Grid (cdiv(NUM_ROWS, BLOCK_R), cdiv(HIDDEN, BLOCK_K)). out is contiguous. The weight is [heads,
    HEAD_DIM, HIDDEN]. If GROUP is not 0, the weight has groups of GROUP heads. The strides (group,
    head, row, column) of the weight count words.

    Args:
        PER, PACKED_ROWS: A word has the codes of PER columns or, if PACKED_ROWS, of PER rows.
        BLOCK_STRIDES: The strides of (scale row, scale column, zero row, zero column).
        ORDER: The nibble of each element of a word.
        ZERO_ORDER: The nibble of each of eight rows in a word of zeros.
        UNIT: The number of columns that share a scale; a divisor of SCALE_COLUMNS and BLOCK_K.
        NUMBER: The kind of numbers that codes stand for: "e2m1", or the 16 numbers of a table.
        ADDED_ZEROS: Zeros are added after the multiplication by the scale. If not, they are
            subtracted before it.

    Scales that are bytes are e8m0.
    """
    first_row = tl.program_id(0) * BLOCK_R
    first_column = tl.program_id(1) * BLOCK_K
    if PACKED_ROWS:
        word_rows = first_row + PER * tl.arange(0, BLOCK_R // PER)
        word_columns = first_column + tl.arange(0, BLOCK_K)
        word_dims = word_rows % HEAD_DIM // PER
        columns_in_all = HIDDEN
    else:
        word_rows = first_row + tl.arange(0, BLOCK_R)
        word_columns = first_column // PER + tl.arange(0, BLOCK_K // PER)
        word_dims = word_rows % HEAD_DIM
        columns_in_all = HIDDEN // PER
    word_mask = (word_rows < NUM_ROWS)[:, None] & (word_columns < columns_in_all)[None, :]
    offsets = grouped(
        (word_rows // HEAD_DIM).to(tl.int64), GROUP, WEIGHT_STRIDES[0], WEIGHT_STRIDES[1]
    )
    offsets += word_dims * WEIGHT_STRIDES[2]
    words = tl.load(
        weight_ptr + offsets[:, None] + (word_columns * WEIGHT_STRIDES[3])[None, :],
        mask=word_mask,
        other=0.0,
    )
    codes = nibbles(words, PER, ORDER)
    if NUMBER == "e2m1":
        codes = e2m1_value(codes).to(tl.float32)
    elif NUMBER != "":
        codes = table_number(codes, NUMBER)
    if PACKED_ROWS:
        codes = tl.permute(codes, (0, 2, 1))
    codes = tl.reshape(codes, (BLOCK_R, BLOCK_K // UNIT, UNIT))
    rows = first_row + tl.arange(0, BLOCK_R)
    row_mask = rows < NUM_ROWS
    blocks = (first_column + UNIT * tl.arange(0, BLOCK_K // UNIT)) // SCALE_COLUMNS
    block_rows = (rows // SCALE_ROWS)[:, None]
    block_mask = row_mask[:, None] & (blocks * SCALE_COLUMNS < HIDDEN)[None, :]
    places = block_rows * BLOCK_STRIDES[0] + (blocks * BLOCK_STRIDES[1])[None, :]
    if scale_ptr.dtype.element_ty == tl.uint8:
        exponents = tl.load(scale_ptr + places, mask=block_mask, other=0)
        scale = e8m0_value(exponents.to(tl.int32))
    else:
        scale = tl.load(scale_ptr + places, mask=block_mask, other=0.0).to(tl.float32)
    codes -= ZERO_POINT
    if zero_ptr is not None:
        columns = (blocks * BLOCK_STRIDES[3])[None, :]
        if PACKED_ZEROS:
            places = block_rows // 8 * BLOCK_STRIDES[2] + columns
            packed = tl.load(zero_ptr + places, mask=block_mask, other=0)
            shift = block_rows * 0
            for element in tl.static_range(8):
                shift = tl.where(block_rows % 8 == element, 4 * ZERO_ORDER[element], shift)
            zero = ((packed >> shift) & 0xF).to(tl.float32)
        else:
            places = block_rows * BLOCK_STRIDES[2] + columns
            zero = tl.load(zero_ptr + places, mask=block_mask, other=0.0).to(tl.float32)
        if not ADDED_ZEROS:
            codes -= zero[:, :, None]
    values = tl.reshape(codes * scale[:, :, None], (BLOCK_R, BLOCK_K))
    if ADDED_ZEROS and zero_ptr is not None:
        added = tl.broadcast_to(zero[:, :, None], (BLOCK_R, BLOCK_K // UNIT, UNIT))
        values += tl.reshape(added, (BLOCK_R, BLOCK_K))
    if factor_ptr is not None:
        values *= tl.load(factor_ptr)
    columns = first_column + tl.arange(0, BLOCK_K)
    out = out_ptr + rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    mask = row_mask[:, None] & (columns < HIDDEN)[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask)
