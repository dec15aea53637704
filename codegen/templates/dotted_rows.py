"""The loop over K that multiplies rows of codes by one row of x, without tensor cores."""

import triton
import triton.language as tl

from tilewright.codegen.templates.codes import load_scales
from tilewright.codegen.templates.dots import code_sums, number_sums, parts_of_x, sums_unit


@triton.jit
def words_of_row(x_ptr, x_scale_ptr, norm_weight_ptr, first, K: tl.constexpr, WORDS: tl.constexpr,
                 PER: tl.constexpr, X_SCALE_BLOCK: tl.constexpr, X_SCALE_STRIDE: tl.constexpr,
                 NORM: tl.constexpr, NORM_STRIDE: tl.constexpr,
                 NORM_OFFSET: tl.constexpr):  # fmt: skip
    """Returns (x, the squares of x) of one row, starting at column `first`. x is fp32 [WORDS, PER].
    If NORM, x is multiplied by the weight of an RMS norm and rounded to x's dtype. If x_scale_ptr
    is given, x has codes, and X_SCALE_BLOCK columns share a scale. X_SCALE_BLOCK is a multiple of
    PER."""
    columns = first + tl.arange(0, WORDS)[:, None] * PER + tl.arange(0, PER)[None, :]
    mask = columns < K
    x = tl.load(x_ptr + columns, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if x_scale_ptr is not None:
        starts = first + tl.arange(0, WORDS) * PER
        blocks = starts // X_SCALE_BLOCK
        scale = tl.load(x_scale_ptr + blocks * X_SCALE_STRIDE, mask=starts < K, other=0.0)
        wide *= scale.to(tl.float32)[:, None]
    squares = wide * wide
    if NORM and norm_weight_ptr is not None:
        factor = tl.load(norm_weight_ptr + columns * NORM_STRIDE, mask=mask, other=0.0)
        wide *= factor.to(tl.float32) + NORM_OFFSET
        wide = wide.to(x_ptr.dtype.element_ty).to(tl.float32)
    return wide, squares


@triton.jit
def words_of_step(lines, columns, first, end, STRIDE: tl.constexpr, EVEN: tl.constexpr):
    """Loads the words [rows, columns] of each row, starting at word `first`. Words from `end` on
    are zeros. EVEN: whether all words are before `end`."""
    places = (columns + first)[None, :]
    ptrs = lines[:, None] + places * STRIDE
    if EVEN:
        words = tl.load(ptrs, eviction_policy="evict_first")
    else:
        words = tl.load(ptrs, mask=places < end, other=0.0, eviction_policy="evict_first")
    return words


@triton.jit
def add_scaled_sums(
    total, sums, scale, zero, power, rest, x_sums, UNIT: tl.constexpr, ZERO_TENSOR: tl.constexpr,
    ADDED_ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns total plus scale * (sums - zero * x_sums) for each run of columns [rows, runs]. If
    ADDED_ZEROS, the second summand is scale * sums + zero * x_sums instead. power, rest: two powers
    of two by which sums and x_sums are multiplied (`integers_of_x`). UNIT: one more factor of the
    sums."""
    if ZERO_TENSOR and ADDED_ZEROS:
        part = scale * (sums * (power * UNIT)[None, :]) + zero * (x_sums * power)[None, :]
    elif ZERO_TENSOR:
        part = scale * ((sums * UNIT - zero * x_sums[None, :]) * power[None, :])
    else:
        part = scale * (sums * (power * UNIT)[None, :])
    return total + part * rest[None, :]


@triton.jit
def dotted_rows(
    x_row, x_scale_row, norm_weight_ptr, lines, up_lines, scale_ptr, up_scale_ptr, zero_ptr,
    up_zero_ptr, scale_rows, row_mask, first, strides, up_strides,
    STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    K: tl.constexpr, PART: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    NORM: tl.constexpr, NORM_STRIDE: tl.constexpr, NORM_OFFSET: tl.constexpr,
    ZERO_TENSOR: tl.constexpr, PER: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr, REVERSED: tl.constexpr, PACKED_ZEROS: tl.constexpr,
    ZERO: tl.constexpr, NUMBER: tl.constexpr, BYTES: tl.constexpr, FLOATS: tl.constexpr,
    SIGNED: tl.constexpr, ADDED_ZEROS: tl.constexpr,
    X_SCALE_BLOCK: tl.constexpr = 1, X_SCALE_STRIDE: tl.constexpr = 0,
):  # fmt: skip
    """Multiplies rows by one row of x over PART columns, starting at column `first`. Returns
    (products of the rows, products of the rows of an up weight, squares of x). The products are
    fp32 [rows, 1]. The squares are [1, words], and are not summed.

    Args:
        x_row: A pointer to K numbers. If NORM, they are multiplied by the weight of an RMS norm
            before the product.
        x_scale_row: If x has codes, a pointer to their scales, one for X_SCALE_BLOCK columns; else
            None.
        lines, up_lines: Pointers [rows] to int32 words of PER codes, STRIDE apart. If up_lines is
            None, there is no up weight, and its products are zero.
        scale_rows: The row of scales for each row.
        strides, up_strides: As in `load_scales`.
        BLOCK_K: The number of columns of a step.
        RUN: The number of words that share a sum and a scale.
        FLOATS: Whether codes stand for floats. These are the numbers of the table NUMBER
            (`formats.table_words`) or, if there is no table, of float8 (e4m3). If not FLOATS, codes
            stand for integers minus ZERO, or for the numbers in BYTES (`code_sums`).
        SIGNED: Whether bytes are signed.
        ADDED_ZEROS: Whether zeros are added after the multiplication by the scale.
    """
    WORDS: tl.constexpr = BLOCK_K // PER
    RUNS: tl.constexpr = WORDS // RUN
    COLUMNS: tl.constexpr = K // PER
    ROWS: tl.constexpr = scale_rows.shape[0]
    BLOCKS: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    UNIT: tl.constexpr = sums_unit(NUMBER, BYTES)
    EVEN: tl.constexpr = K % PART == 0 and PART % BLOCK_K == 0
    word_columns = tl.arange(0, WORDS)
    end = COLUMNS
    if PART < K:
        end = tl.minimum((first + PART) // PER, COLUMNS)
    product = tl.zeros((ROWS, RUNS), tl.float32)
    up = product
    squares = tl.zeros((1, WORDS), tl.float32)
    words = words_of_step(lines, word_columns, first // PER, end, STRIDE, EVEN)
    up_words = words
    if up_lines is not None:
        up_words = words_of_step(up_lines, word_columns, first // PER, end, UP_STRIDE, EVEN)
    if SCALE_COLUMNS >= K:  # one scale a row: no step waits for its load
        scale, zero = load_scales(
            scale_ptr, zero_ptr, scale_rows, row_mask, tl.arange(0, 1), strides,
            ZERO_TENSOR, PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
        )  # fmt: skip
        if up_lines is not None:
            up_scale, up_zero = load_scales(
                up_scale_ptr, up_zero_ptr, scale_rows, row_mask, tl.arange(0, 1), up_strides,
                ZERO_TENSOR, PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
            )  # fmt: skip
    for step in range(0, PART, BLOCK_K):
        start = first + step
        x, square = words_of_row(
            x_row, x_scale_row, norm_weight_ptr, start, K, WORDS, PER,
            X_SCALE_BLOCK, X_SCALE_STRIDE, NORM, NORM_STRIDE, NORM_OFFSET,
        )  # fmt: skip
        if NORM:
            squares += tl.sum(square, axis=1)[None, :]
        # Load the words of the next step.
        next_words = words
        next_up_words = up_words
        if PART > BLOCK_K:
            ahead = start // PER + WORDS
            next_words = words_of_step(lines, word_columns, ahead, end, STRIDE, False)
            if up_lines is not None:
                next_up_words = words_of_step(up_lines, word_columns, ahead, end, UP_STRIDE, False)
        if SCALE_COLUMNS < K:
            blocks = (start + tl.arange(0, RUNS) * (RUN * PER)) // SCALE_COLUMNS
            scale, zero = load_scales(
                scale_ptr, zero_ptr, scale_rows, row_mask, blocks, strides,
                ZERO_TENSOR, PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
            )  # fmt: skip
        if FLOATS:
            sums = number_sums(words, x, REVERSED, NUMBER, RUN)
            power = tl.full((RUNS,), 1.0, tl.float32)
            rest = power
            x_sums = power
        else:
            low0, low1, low2, high0, high1, high2, x_total, power, rest = parts_of_x(
                x, RUN, REVERSED, INTERLEAVED_NIBBLES, BYTES
            )
            x_sums = x_total.to(tl.float32)
            sums = code_sums(
                words, low0, low1, low2, high0, high1, high2, x_total,
                PER, SIGNED, ZERO, BYTES, RUN,
            )  # fmt: skip
        product = add_scaled_sums(
            product, sums, scale, zero, power, rest, x_sums, UNIT, ZERO_TENSOR, ADDED_ZEROS
        )
        if up_lines is not None:
            if SCALE_COLUMNS < K:
                up_scale, up_zero = load_scales(
                    up_scale_ptr, up_zero_ptr, scale_rows, row_mask, blocks, up_strides,
                    ZERO_TENSOR, PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
                )  # fmt: skip
            if FLOATS:
                sums = number_sums(up_words, x, REVERSED, NUMBER, RUN)
            else:
                sums = code_sums(
                    up_words, low0, low1, low2, high0, high1, high2, x_total,
                    PER, SIGNED, ZERO, BYTES, RUN,
                )  # fmt: skip
            up = add_scaled_sums(
                up,
                sums,
                up_scale,
                up_zero,
                power,
                rest,
                x_sums,
                UNIT,
                ZERO_TENSOR,
                ADDED_ZEROS,
            )
        words = next_words
        up_words = next_up_words
    return tl.sum(product, axis=1)[:, None], tl.sum(up, axis=1)[:, None], squares
