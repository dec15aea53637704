"""Linears of codes for one or two tokens: a program of few rows, all of K, no tensor core."""

import triton
import triton.language as tl

from tilewright.codegen.mlp.templates.finish import bias_column, finish_linear, residual_tile
from tilewright.codegen.templates.codes import load_scales
from tilewright.codegen.templates.dots import code_sums, half_unit, number_sums, parts_of_x
from tilewright.codegen.templates.streaming import prefetch_rows


@triton.jit
def words_of_row(x_ptr, norm_weight_ptr, first, K: tl.constexpr, WORDS: tl.constexpr,
                 PER: tl.constexpr, NORM: tl.constexpr, NORM_STRIDE: tl.constexpr,
                 NORM_OFFSET: tl.constexpr):  # fmt: skip
    """(x of a row, fp32 [WORDS, PER] from column `first` on, times an RMS norm's weight and rounded
    as such a product is; x's squares)."""
    columns = first + tl.arange(0, WORDS)[:, None] * PER + tl.arange(0, PER)[None, :]
    mask = columns < K
    x = tl.load(x_ptr + columns, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    squares = wide * wide
    if NORM and norm_weight_ptr is not None:
        factor = tl.load(norm_weight_ptr + columns * NORM_STRIDE, mask=mask, other=0.0)
        wide *= factor.to(tl.float32) + NORM_OFFSET
        wide = wide.to(x_ptr.dtype.element_ty).to(tl.float32)
    return wide, squares


@triton.jit
def words_of_step(
    lines, columns, first, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, EVEN: tl.constexpr
):
    """Words [rows, columns] from word `first` of each row on, zeros past COLUMNS; EVEN: none is."""
    places = (columns + first)[None, :]
    ptrs = lines[:, None] + places * STRIDE
    if EVEN:
        words = tl.load(ptrs, eviction_policy="evict_first")
    else:
        words = tl.load(ptrs, mask=places < COLUMNS, other=0.0, eviction_policy="evict_first")
    return words


@triton.jit
def add_scaled_sums(
    total, sums, scale, zero, power, x_sums, UNIT: tl.constexpr, ZERO_TENSOR: tl.constexpr,
    ADDED_ZEROS: tl.constexpr,
):  # fmt: skip
    """total and, for each run of columns [rows, runs], scale * (sums - zero * x_sums), or with
    ADDED_ZEROS scale * sums + zero * x_sums; power: of two, of which sums and x_sums are
    multiples, as the sums are of UNIT."""
    if ZERO_TENSOR and ADDED_ZEROS:
        part = scale * (sums * UNIT) + zero * x_sums[None, :]
    elif ZERO_TENSOR:
        part = scale * (sums * UNIT - zero * x_sums[None, :])
    else:
        part = scale * (sums * UNIT)
    return total + part * power[None, :]


@triton.jit
def dotted_linear(
    x_ptr, norm_weight_ptr, weight_ptr, up_weight_ptr,
    weight_scale_ptr, up_scale_ptr, weight_zero_ptr, up_zero_ptr,
    bias_ptr, up_bias_ptr, residual_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr, UP_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr, LINE: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
    BLOCK_STRIDES: tl.constexpr, UP_BLOCK_STRIDES: tl.constexpr,
    PER: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr = False, REVERSED: tl.constexpr = False,
    PACKED_ZEROS: tl.constexpr = False, ZERO: tl.constexpr = 0, NUMBER: tl.constexpr = "",
    BYTES: tl.constexpr = (),
    FLOATS: tl.constexpr = False, SIGNED: tl.constexpr = False, ADDED_ZEROS: tl.constexpr = False,
    weight_factor_ptr=None, up_factor_ptr=None,
):  # fmt: skip
    """`streamed_linear` of codes, with a program for each token and BLOCK_N rows.

    Grid (cdiv(N, BLOCK_N), T). A step takes BLOCK_K columns, in int32 words of PER codes. Sums of
    RUN words have one scale, or a part of one. FLOATS: codes are float8 (e4m3) or stand for NUMBER,
    a table (`formats.table_words`), else they are integers, less ZERO, or stand for BYTES
    (`code_sums`); SIGNED: from -128 on. LINE: words in 128 bytes of a row; 0:
    the rows of a column lie next to each other.
    """
    row_tile = tl.program_id(0)
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    token = tl.program_id(1) + tl.arange(0, 1)
    WORDS: tl.constexpr = BLOCK_K // PER
    RUNS: tl.constexpr = WORDS // RUN
    COLUMNS: tl.constexpr = K // PER
    word_columns = tl.arange(0, WORDS)
    inside = tl.minimum(rows, N - 1).to(tl.int64)
    lines = weight_ptr + inside * WEIGHT_STRIDES[0]
    if up_weight_ptr is not None:
        up_lines = up_weight_ptr + inside * UP_STRIDES[0]
    if LAUNCH_PDL:
        if LINE > 0:
            prefetch_rows(lines, 0, COLUMNS, max(WORDS // LINE, 1), LINE)
            if up_weight_ptr is not None:
                prefetch_rows(up_lines, 0, COLUMNS, max(WORDS // LINE, 1), LINE)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    places = token.to(tl.int64)[None, :]
    there = row_mask[:, None] & (token >= 0)[None, :]
    residual = residual_tile(residual_ptr, places, rows, there, RESIDUAL_STRIDE)
    bias = bias_column(bias_ptr, rows, row_mask, BIAS_STRIDES[0])
    up_bias = bias_column(up_bias_ptr, rows, row_mask, BIAS_STRIDES[1])
    ZERO_TENSOR: tl.constexpr = weight_zero_ptr is not None
    WHOLE_ROWS: tl.constexpr = SCALE_COLUMNS >= K
    BLOCKS: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    # E2M1's bytes are twice their numbers.
    UNIT: tl.constexpr = half_unit(NUMBER) if len(BYTES) == 0 else 0.5
    scale_rows = rows // SCALE_ROWS
    product = tl.zeros((BLOCK_N, RUNS), tl.float32)
    up = product
    squares = tl.zeros((1, WORDS), tl.float32)
    x_row = x_ptr + tl.program_id(1).to(tl.int64) * X_STRIDE
    EVEN: tl.constexpr = K % BLOCK_K == 0
    words = words_of_step(lines, word_columns, 0, COLUMNS, WEIGHT_STRIDES[1], EVEN)
    up_words = words
    if up_weight_ptr is not None:
        up_words = words_of_step(up_lines, word_columns, 0, COLUMNS, UP_STRIDES[1], EVEN)
    for start in range(0, K, BLOCK_K):
        x, square = words_of_row(
            x_row, norm_weight_ptr, start, K, WORDS, PER, NORM, NORM_STRIDE, NORM_OFFSET
        )
        if NORM:
            squares += tl.sum(square, axis=1)[None, :]
        # A step ahead of what is multiplied.
        next_words = words
        next_up_words = up_words
        if K > BLOCK_K:
            step = start // PER + WORDS
            next_words = words_of_step(lines, word_columns, step, COLUMNS, WEIGHT_STRIDES[1], False)
            if up_weight_ptr is not None:
                next_up_words = words_of_step(
                    up_lines, word_columns, step, COLUMNS, UP_STRIDES[1], False
                )
        if WHOLE_ROWS:
            blocks = tl.arange(0, 1)
        else:
            blocks = (start + tl.arange(0, RUNS) * (RUN * PER)) // SCALE_COLUMNS
        scale, zero = load_scales(
            weight_scale_ptr, weight_zero_ptr, scale_rows, row_mask, blocks, BLOCK_STRIDES,
            ZERO_TENSOR, PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
        )  # fmt: skip
        if FLOATS:
            sums = number_sums(words, x, REVERSED, NUMBER, RUN)
            power = tl.full((RUNS,), 1.0, tl.float32)
            x_sums = power
        else:
            low0, low1, low2, high0, high1, high2, x_total, power = parts_of_x(
                x, RUN, REVERSED, INTERLEAVED_NIBBLES, BYTES
            )
            x_sums = x_total.to(tl.float32)
            sums = code_sums(
                words, low0, low1, low2, high0, high1, high2, x_total,
                PER, SIGNED, ZERO, BYTES, RUN,
            )  # fmt: skip
        product = add_scaled_sums(
            product, sums, scale, zero, power, x_sums, UNIT, ZERO_TENSOR, ADDED_ZEROS
        )
        if up_weight_ptr is not None:
            up_scale, up_zero = load_scales(
                up_scale_ptr, up_zero_ptr, scale_rows, row_mask, blocks, UP_BLOCK_STRIDES,
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
                up, sums, up_scale, up_zero, power, x_sums, UNIT, ZERO_TENSOR, ADDED_ZEROS
            )
        words = next_words
        up_words = next_up_words
    product = tl.sum(product, axis=1)[:, None]
    up = tl.sum(up, axis=1)[:, None]
    if weight_factor_ptr is not None:
        product *= tl.load(weight_factor_ptr)
    if up_factor_ptr is not None:
        up *= tl.load(up_factor_ptr)
    finish_linear(
        product, up, squares, bias, up_bias, residual, up_weight_ptr, bias_ptr, up_bias_ptr,
        residual_ptr, out_ptr, None, None, row_tile, 0, rows, places, there, token >= 0,
        N, K, NORM, NORM_EPS, ACTIVATION, SCALE, BLOCK_N, 1, 1,
    )  # fmt: skip
