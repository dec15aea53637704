"""Linears for few tokens with weights of 4- or 8-bit codes, read as they are stored.

    w[n, k] = (code[n, k] - zero[n // bn, k // bk]) * scale[n // bn, k // bk]

As in `qkv_quantized`: the tensor core multiplies codes, which are exact in 16 bits, and scales and
zeros are applied to the fp32 sums of a group, so that no weight is ever rounded. x is permuted to
the order in which words give up their codes.
"""

import triton
import triton.language as tl

from tilewright.codegen.mlp.templates.finish import bias_column, finish_linear, residual_tile
from tilewright.codegen.mlp.templates.linear import prefetch_rows, weight_tile
from tilewright.codegen.templates.codes import (
    add_scaled_groups,
    code_unit,
    codes_in_order,
    codes_of_rows,
    load_blocks,
    x_in_order,
)


@triton.jit
def decoded(
    words, DTYPE: tl.constexpr, PER: tl.constexpr, PACKED_ROWS: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr, REVERSED: tl.constexpr, OFFSET: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The codes of words less OFFSET; along K in the order of `x_in_order`, but of PACKED_ROWS."""
    if PACKED_ROWS:
        return codes_of_rows(words, DTYPE, PER, INTERLEAVED_NIBBLES, REVERSED, OFFSET)
    else:
        return codes_in_order(words, DTYPE, PER, REVERSED, OFFSET, GROUPS)


@triton.jit
def load_zeros(
    zero_ptr, otherwise, rows, row_mask, columns, row_stride, column_stride,
    PACKED: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Zeros [rows, columns] in fp32; `otherwise` where there is no tensor of them."""
    zeros = otherwise
    if zero_ptr is not None:
        zeros = load_blocks(
            zero_ptr, rows, row_mask, columns, row_stride, column_stride,
            PACKED, INTERLEAVED_NIBBLES, BOUND,
        )  # fmt: skip
    return zeros


@triton.jit
def scaled_whole(
    product, sums, scale, zero,
    HAS_ZEROS: tl.constexpr, ZERO_TENSOR: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """(product - zero * sums) * scale, of scales and zeros [rows, 1] for whole rows."""
    if HAS_ZEROS:
        zeros = ZERO_OFFSET
        if ZERO_TENSOR:
            zeros = zero + ZERO_OFFSET
        product -= zeros / UNIT * sums
    return product * (scale * UNIT)


@triton.jit
def streamed_codes(
    x_ptr, norm_weight_ptr, weight_ptr, up_weight_ptr,
    weight_scale_ptr, up_scale_ptr, weight_zero_ptr, up_zero_ptr,
    bias_ptr, up_bias_ptr, residual_ptr, out_ptr, workspace_ptr, counters_ptr,
    num_tokens,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr, UP_STRIDES: tl.constexpr,
    BLOCK_STRIDES: tl.constexpr, UP_BLOCK_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    PER: tl.constexpr, PACKED_ROWS: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr,
    REVERSED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    PACKED_ZEROS: tl.constexpr, CODE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    LINE: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr, LETS_IN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """`streamed_linear` with weights of codes: the same result, grid, workspace and counters.

    A weight is 8-bit (PER 1), or words of PER codes along K or, with PACKED_ROWS, along the rows;
    its strides (row, column) count words. BLOCK_STRIDES: (scale row, scale column, zero row, zero
    column). A scale is for SCALE_ROWS rows by SCALE_COLUMNS columns, a multiple of BLOCK_K, a half,
    a quarter or all of it, or at least K. The zero of a code is CODE_OFFSET + ZERO_OFFSET + the
    zero tensor's value; PACKED_ZEROS: words of eight rows. As many bytes of each row are asked for
    early as PREFETCH 16-bit numbers have. LINE: words in 128 bytes.
    """
    row_tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    PART: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    first = part * PART
    columns = first + tl.arange(0, BLOCK_K)
    # Words of the tile: PER rows, or columns, share one.
    ROWS: tl.constexpr = PER if PACKED_ROWS else 1
    STEP: tl.constexpr = 1 if PACKED_ROWS else PER
    word_rows = row_tile * (BLOCK_N // ROWS) + tl.arange(0, BLOCK_N // ROWS)
    word_row_mask = (word_rows < N // ROWS)[:, None]
    word_columns = first // STEP + tl.arange(0, BLOCK_K // STEP)
    word_lines = weight_ptr + word_rows.to(tl.int64) * WEIGHT_STRIDES[0]
    if up_weight_ptr is not None:
        up_lines = up_weight_ptr + word_rows.to(tl.int64) * UP_STRIDES[0]
    if LAUNCH_PDL:
        if PREFETCH > 0:
            WORDS: tl.constexpr = K // STEP
            LINES: tl.constexpr = PREFETCH // 64
            last = (N // ROWS - 1 - row_tile * (BLOCK_N // ROWS)).to(tl.int64)
            inside = tl.minimum(tl.arange(0, BLOCK_N // ROWS), last)
            inside += row_tile * (BLOCK_N // ROWS)
            prefetch_rows(
                weight_ptr + inside * WEIGHT_STRIDES[0], first // STEP, WORDS, LINES, LINE
            )
            if up_weight_ptr is not None:
                prefetch_rows(
                    up_weight_ptr + inside * UP_STRIDES[0], first // STEP, WORDS, LINES, LINE
                )
        tl.extra.cuda.gdc_wait()
        if LETS_IN:
            tl.extra.cuda.gdc_launch_dependents()
    places = tokens.to(tl.int64)[None, :]
    there = row_mask[:, None] & token_mask[None, :]
    # Before the loop: after it nothing would hide the latency of these loads.
    residual = residual_tile(residual_ptr, places, rows, there, RESIDUAL_STRIDE)
    bias = bias_column(bias_ptr, rows, row_mask, BIAS_STRIDES[0])
    up_bias = bias_column(up_bias_ptr, rows, row_mask, BIAS_STRIDES[1])
    word_ptrs = word_lines[:, None] + word_columns[None, :] * WEIGHT_STRIDES[1]
    if up_weight_ptr is not None:
        up_ptrs = up_lines[:, None] + word_columns[None, :] * UP_STRIDES[1]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * X_STRIDE + columns[None, :]
    if NORM:
        squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        if norm_weight_ptr is not None:
            norm_ptrs = tl.broadcast_to(
                norm_weight_ptr + columns[None, :] * NORM_STRIDE, (BLOCK_T, BLOCK_K)
            )
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    UNIT: tl.constexpr = code_unit(DTYPE) if PER == 8 and not PACKED_ROWS else 1.0
    # Scales of groups are applied to each step's sums, scales of whole rows to the final sum.
    WHOLE_ROWS: tl.constexpr = SCALE_COLUMNS >= K
    ZERO_TENSOR: tl.constexpr = weight_zero_ptr is not None
    HAS_ZEROS: tl.constexpr = ZERO_TENSOR or ZERO_OFFSET != 0
    GROUPS: tl.constexpr = max(BLOCK_K // SCALE_COLUMNS, 1)
    BLOCKS: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    block_rows = rows // SCALE_ROWS
    groups = tl.arange(0, GROUPS)
    blocks = first // SCALE_COLUMNS + groups
    scale = load_blocks(
        weight_scale_ptr, block_rows, row_mask, blocks,
        BLOCK_STRIDES[0], BLOCK_STRIDES[1], False, False, BLOCKS,
    )  # fmt: skip
    zero = load_zeros(
        weight_zero_ptr, scale, block_rows, row_mask, blocks,
        BLOCK_STRIDES[2], BLOCK_STRIDES[3], PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
    )  # fmt: skip
    product = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    sums = product
    up = product
    up_scale = scale
    up_zero = zero
    if up_weight_ptr is not None:
        up_scale = load_blocks(
            up_scale_ptr, block_rows, row_mask, blocks,
            UP_BLOCK_STRIDES[0], UP_BLOCK_STRIDES[1], False, False, BLOCKS,
        )  # fmt: skip
        up_zero = load_zeros(
            up_zero_ptr, scale, block_rows, row_mask, blocks,
            UP_BLOCK_STRIDES[2], UP_BLOCK_STRIDES[3], PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
        )  # fmt: skip
    for step in range(0, PART, BLOCK_K):
        x_mask = token_mask[:, None]
        word_mask = (word_columns + step // STEP < K // STEP)[None, :]
        if not EVEN:
            x_mask = x_mask & (columns + step < K)[None, :]
        x = tl.load(x_ptrs + step, mask=x_mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            if norm_weight_ptr is not None:
                factor = tl.load(norm_ptrs + step * NORM_STRIDE, mask=x_mask, other=0.0)
                x = (wide * (factor.to(tl.float32) + NORM_OFFSET)).to(DTYPE)
        words = weight_tile(
            word_ptrs + step // STEP * WEIGHT_STRIDES[1], word_row_mask, word_mask,
            N % BLOCK_N == 0, EVEN,
        )  # fmt: skip
        if up_weight_ptr is not None:
            up_words = weight_tile(
                up_ptrs + step // STEP * UP_STRIDES[1], word_row_mask, word_mask,
                N % BLOCK_N == 0, EVEN,
            )  # fmt: skip
        # A step ahead: Triton does not pipeline these loads through shared memory.
        next_scale = scale
        next_zero = zero
        next_up_scale = up_scale
        next_up_zero = up_zero
        if not WHOLE_ROWS:
            blocks = (first + step + BLOCK_K) // SCALE_COLUMNS + groups
            next_scale = load_blocks(
                weight_scale_ptr, block_rows, row_mask, blocks,
                BLOCK_STRIDES[0], BLOCK_STRIDES[1], False, False, BLOCKS,
            )  # fmt: skip
            next_zero = load_zeros(
                weight_zero_ptr, next_scale, block_rows, row_mask, blocks,
                BLOCK_STRIDES[2], BLOCK_STRIDES[3], PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
            )  # fmt: skip
            if up_weight_ptr is not None:
                next_up_scale = load_blocks(
                    up_scale_ptr, block_rows, row_mask, blocks,
                    UP_BLOCK_STRIDES[0], UP_BLOCK_STRIDES[1], False, False, BLOCKS,
                )  # fmt: skip
                next_up_zero = load_zeros(
                    up_zero_ptr, next_up_scale, block_rows, row_mask, blocks,
                    UP_BLOCK_STRIDES[2], UP_BLOCK_STRIDES[3],
                    PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
                )  # fmt: skip
        if not PACKED_ROWS:
            x = x_in_order(x, PER, INTERLEAVED_NIBBLES, GROUPS)
        codes = decoded(
            words, DTYPE, PER, PACKED_ROWS, INTERLEAVED_NIBBLES, REVERSED, CODE_OFFSET, GROUPS
        )
        if WHOLE_ROWS:
            product = tl.dot(codes, x.T, product)
            if HAS_ZEROS:
                sums = tl.dot(tl.full((BLOCK_N, BLOCK_K), 1.0, DTYPE), x.T, sums)
        else:
            product = add_scaled_groups(
                product, codes, x, scale, zero, None,
                GROUPS, HAS_ZEROS, ZERO_TENSOR, ZERO_OFFSET, False, UNIT,
            )  # fmt: skip
        if up_weight_ptr is not None:
            codes = decoded(
                up_words, DTYPE, PER, PACKED_ROWS, INTERLEAVED_NIBBLES, REVERSED, CODE_OFFSET,
                GROUPS,
            )  # fmt: skip
            if WHOLE_ROWS:
                up = tl.dot(codes, x.T, up)
            else:
                up = add_scaled_groups(
                    up, codes, x, up_scale, up_zero, None,
                    GROUPS, HAS_ZEROS, ZERO_TENSOR, ZERO_OFFSET, False, UNIT,
                )  # fmt: skip
        scale = next_scale
        zero = next_zero
        up_scale = next_up_scale
        up_zero = next_up_zero
    if WHOLE_ROWS:
        product = scaled_whole(
            product, sums, scale, zero, HAS_ZEROS, ZERO_TENSOR, ZERO_OFFSET, UNIT
        )
        if up_weight_ptr is not None:
            up = scaled_whole(
                up, sums, up_scale, up_zero, HAS_ZEROS, ZERO_TENSOR, ZERO_OFFSET, UNIT
            )
    square = 0.0
    if NORM:
        square = tl.sum(squares, axis=1)
    finish_linear(
        product, up, square, bias, up_bias, residual,
        up_weight_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, workspace_ptr, counters_ptr,
        row_tile, part, rows, places, there, token_mask,
        N, K, NORM, NORM_EPS, ACTIVATION, SCALE, RESIDUAL_STRIDE,
        BLOCK_N, BLOCK_T, SPLIT_K,
    )  # fmt: skip
