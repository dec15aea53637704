"""Decodes weights of 4- or 8-bit codes:

    w[n, k] = (code[n, k] - zero[n // bn, k // bk]) * scale[n // bn, k // bk] * factor

The weight is computed in fp32. Nibbles may have any order. Strides and blocks of scales may have
any size. `dequantize_weight` decodes a whole weight for a library's GEMM. Other kernels decode
tiles of a weight with the functions of this module.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.fp4 import e2m1_value, scale_value
from tilewright.codegen.templates.tables import table_number


@triton.jit
def nibble_at(words, shift: tl.constexpr):
    """Returns 4 bits of each word, starting at bit `shift`."""
    return (words >> shift) & 0xF


@triton.jit
def two_nibbles(words, first: tl.constexpr, ORDER: tl.constexpr):
    """Returns the elements `first` and `first` + 1 of each word, along a new last axis."""
    return tl.join(nibble_at(words, 4 * ORDER[first]), nibble_at(words, 4 * ORDER[first + 1]))


@triton.jit
def stored_codes(words, PER: tl.constexpr, ORDER: tl.constexpr):
    """Returns the codes of words [A, B] as [A, B, PER]. Nibbles are integers."""
    if PER == 1:
        codes = tl.expand_dims(words, 2)
    elif PER == 2:
        codes = two_nibbles(words, 0, ORDER)
    else:
        low = tl.join(two_nibbles(words, 0, ORDER), two_nibbles(words, 2, ORDER))
        high = tl.join(two_nibbles(words, 4, ORDER), two_nibbles(words, 6, ORDER))
        codes = tl.permute(tl.join(low, high), (0, 1, 4, 3, 2))
        codes = tl.reshape(codes, (words.shape[0], words.shape[1], 8))
    return codes


@triton.jit
def code_numbers(codes, PER: tl.constexpr, ZERO_POINT: tl.constexpr, NUMBER: tl.constexpr):
    """Returns the numbers that codes stand for, minus ZERO_POINT, in fp32. `dequantize_weight`
    explains ZERO_POINT and NUMBER."""
    if NUMBER == "e2m1":
        return e2m1_value(codes).to(tl.float32)
    elif NUMBER != "":
        return table_number(codes, NUMBER)
    elif PER == 1:
        return codes.to(tl.float32) - ZERO_POINT
    else:
        # Write the nibble to the last bits of the mantissa of 2 ** 23. This takes fewer cycles than
        # a conversion.
        bits = codes.to(tl.int32) | 0x4B000000
        return bits.to(tl.float32, bitcast=True) - (8388608.0 + ZERO_POINT)


@triton.jit
def word_places(
    first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
):  # fmt: skip
    """Returns (the first row of each word, the column of each word in words) of a tile of ROWS rows
    and COLUMNS columns of codes."""
    if PACKED_ROWS:
        rows = first_row + PER * tl.arange(0, ROWS // PER)
        columns = first_column + tl.arange(0, COLUMNS)
    else:
        rows = first_row + tl.arange(0, ROWS)
        columns = first_column // PER + tl.arange(0, COLUMNS // PER)
    return rows, columns


@triton.jit
def tile_scales(
    scale_ptr, zero_ptr, rows, row_mask, first_column, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_STRIDES: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, PACKED_ZEROS: tl.constexpr, ZERO_ORDER: tl.constexpr,
):  # fmt: skip
    """Loads (scales, zeros) of a tile as fp32 [rows, COLUMNS // UNIT]. If there are no zeros,
    returns the scales in their place.

    rows: the rows of the tile, whose columns begin at first_column. The weight has HIDDEN columns.
    `dequantize_weight` explains the other arguments.
    """
    blocks = (first_column + UNIT * tl.arange(0, COLUMNS // UNIT)) // SCALE_COLUMNS
    block_rows = (rows // SCALE_ROWS)[:, None]
    mask = row_mask[:, None] & (blocks * SCALE_COLUMNS < HIDDEN)[None, :]
    places = block_rows * BLOCK_STRIDES[0] + (blocks * BLOCK_STRIDES[1])[None, :]
    scale = scale_value(tl.load(scale_ptr + places, mask=mask, other=0.0))
    zero = scale
    if zero_ptr is not None:
        columns = (blocks * BLOCK_STRIDES[3])[None, :]
        if PACKED_ZEROS:
            places = block_rows // 8 * BLOCK_STRIDES[2] + columns
            packed = tl.load(zero_ptr + places, mask=mask, other=0)
            shift = block_rows * 0
            for element in tl.static_range(8):
                shift = tl.where(block_rows % 8 == element, 4 * ZERO_ORDER[element], shift)
            zero = ((packed >> shift) & 0xF).to(tl.float32)
        else:
            places = block_rows * BLOCK_STRIDES[2] + columns
            zero = tl.load(zero_ptr + places, mask=mask, other=0.0).to(tl.float32)
    return scale, zero


@triton.jit
def tile_numbers(
    words, scale, zero, HAS_ZEROS: tl.constexpr, PER: tl.constexpr, PACKED_ROWS: tl.constexpr,
    ORDER: tl.constexpr, ZERO_POINT: tl.constexpr, NUMBER: tl.constexpr, ADDED_ZEROS: tl.constexpr,
):  # fmt: skip
    """Decodes the words of a tile to fp32 numbers [rows, columns], without the factor.

    scale, zero: the result of `tile_scales`. HAS_ZEROS: whether there are zeros besides ZERO_POINT.
    `dequantize_weight` explains the other arguments.
    """
    ROWS: tl.constexpr = PER * words.shape[0] if PACKED_ROWS else words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1] if PACKED_ROWS else PER * words.shape[1]
    UNITS: tl.constexpr = scale.shape[1]
    codes = code_numbers(stored_codes(words, PER, ORDER), PER, ZERO_POINT, NUMBER)
    if PACKED_ROWS:
        codes = tl.permute(codes, (0, 2, 1))
    codes = tl.reshape(codes, (ROWS, UNITS, COLUMNS // UNITS))
    if HAS_ZEROS and not ADDED_ZEROS:
        codes -= zero[:, :, None]
    numbers = codes * scale[:, :, None]
    if HAS_ZEROS and ADDED_ZEROS:
        numbers += zero[:, :, None]
    return tl.reshape(numbers, (ROWS, COLUMNS))


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
    """Dequantises a weight: out [NUM_ROWS, HIDDEN] = (code - zero) * scale * factor in fp32,
    rounded once to out's dtype.

    Grid (cdiv(NUM_ROWS, BLOCK_R), cdiv(HIDDEN, BLOCK_K)). out is contiguous. The weight is [heads,
    HEAD_DIM, HIDDEN]. If GROUP is not 0, the weight has groups of GROUP heads. The strides (group,
    head, row, column) of the weight count words.

    Args:
        PER, PACKED_ROWS: A word has the codes of PER columns or, if PACKED_ROWS, of PER rows.
        BLOCK_STRIDES: The strides of (scale row, scale column, zero row, zero column).
        ORDER: The nibble of each element of a word.
        ZERO_ORDER: The nibble of each of eight rows in a word of zeros.
        ZERO_POINT: The part of the zero that all codes have.
        UNIT: The number of columns that share a scale; a divisor of SCALE_COLUMNS and BLOCK_K.
        NUMBER: The kind of number that codes stand for: "" for the code itself, "e2m1", or the 16
            numbers of a table.
        ADDED_ZEROS: Zeros are added after the multiplication by the scale. If not, they are
            subtracted before it.

    Scales that are bytes are e8m0.
    """
    first_row = tl.program_id(0) * BLOCK_R
    first_column = tl.program_id(1) * BLOCK_K
    word_rows, word_columns = word_places(
        first_row, first_column, BLOCK_R, BLOCK_K, PER, PACKED_ROWS
    )
    word_dims = word_rows % HEAD_DIM
    columns_in_all = HIDDEN
    if PACKED_ROWS:
        word_dims = word_dims // PER
    else:
        columns_in_all = HIDDEN // PER
    word_mask = (word_rows < NUM_ROWS)[:, None] & (word_columns < columns_in_all)[None, :]
    heads = (word_rows // HEAD_DIM).to(tl.int64)
    offsets = heads * WEIGHT_STRIDES[1] + word_dims * WEIGHT_STRIDES[2]
    if GROUP > 0:
        # The distance from the end of a group to the beginning of the next group.
        offsets += heads // GROUP * (WEIGHT_STRIDES[0] - GROUP * WEIGHT_STRIDES[1])
    words = tl.load(
        weight_ptr + offsets[:, None] + (word_columns * WEIGHT_STRIDES[3])[None, :],
        mask=word_mask,
        other=0.0,
    )
    rows = first_row + tl.arange(0, BLOCK_R)
    row_mask = rows < NUM_ROWS
    scale, zero = tile_scales(
        scale_ptr, zero_ptr, rows, row_mask, first_column, HIDDEN, BLOCK_K, UNIT, BLOCK_STRIDES,
        SCALE_ROWS, SCALE_COLUMNS, PACKED_ZEROS, ZERO_ORDER,
    )  # fmt: skip
    values = tile_numbers(
        words, scale, zero, zero_ptr is not None, PER, PACKED_ROWS, ORDER, ZERO_POINT, NUMBER,
        ADDED_ZEROS,
    )  # fmt: skip
    if factor_ptr is not None:
        values *= tl.load(factor_ptr)
    columns = first_column + tl.arange(0, BLOCK_K)
    out = out_ptr + rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    mask = row_mask[:, None] & (columns < HIDDEN)[None, :]
    tl.store(out, values.to(out_ptr.dtype.element_ty), mask=mask)
