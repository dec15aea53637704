"""Linears with quantised weights for few tokens, without tensor cores. A program multiplies a few
whole rows of the weight with one token."""

import triton
import triton.language as tl

from tilewright.codegen.mlp.templates.finish import bias_column, finish_linear, residual_tile
from tilewright.codegen.templates.dotted_rows import dotted_rows
from tilewright.codegen.templates.streaming import prefetch_rows


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
    """Computes `streamed_linear` for quantised weights. Each program computes BLOCK_N rows for one
    token.

    Grid (cdiv(N, BLOCK_N), T). LINE: the number of words in 128 bytes of a row. `dotted_rows`
    explains the parameters of the codes, of the steps over K and of the sums.
    """
    row_tile = tl.program_id(0)
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    token = tl.program_id(1) + tl.arange(0, 1)
    WORDS: tl.constexpr = BLOCK_K // PER
    COLUMNS: tl.constexpr = K // PER
    inside = tl.minimum(rows, N - 1).to(tl.int64)
    lines = weight_ptr + inside * WEIGHT_STRIDES[0]
    up_lines = None
    if up_weight_ptr is not None:
        up_lines = up_weight_ptr + inside * UP_STRIDES[0]
    if LAUNCH_PDL:
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
    x_row = x_ptr + tl.program_id(1).to(tl.int64) * X_STRIDE
    product, up, squares = dotted_rows(
        x_row, None, norm_weight_ptr, lines, up_lines,
        weight_scale_ptr, up_scale_ptr, weight_zero_ptr, up_zero_ptr,
        rows // SCALE_ROWS, row_mask, 0, BLOCK_STRIDES, UP_BLOCK_STRIDES,
        WEIGHT_STRIDES[1], UP_STRIDES[1], K, K, BLOCK_K, RUN, NORM, NORM_STRIDE, NORM_OFFSET,
        weight_zero_ptr is not None, PER, SCALE_COLUMNS, INTERLEAVED_NIBBLES, REVERSED,
        PACKED_ZEROS, ZERO, NUMBER, BYTES, FLOATS, SIGNED, ADDED_ZEROS,
    )  # fmt: skip
    if weight_factor_ptr is not None:
        product *= tl.load(weight_factor_ptr)
    if up_factor_ptr is not None:
        up *= tl.load(up_factor_ptr)
    finish_linear(
        product, up, squares, bias, up_bias, residual, up_weight_ptr, bias_ptr, up_bias_ptr,
        residual_ptr, out_ptr, None, None, row_tile, 0, rows, places, there, token >= 0,
        N, K, NORM, NORM_EPS, ACTIVATION, SCALE, BLOCK_N, 1, 1,
    )  # fmt: skip
