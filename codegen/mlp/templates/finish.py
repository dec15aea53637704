"""Finishes a linear for few tokens: adds the parts of K, and applies norm, activation and
residual."""

import triton
import triton.language as tl

from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.split_k import arrive, sum_of_parts


@triton.jit
def bias_column(bias_ptr, rows, row_mask, STRIDE: tl.constexpr):
    """Loads a bias as fp32 [rows, 1]. Returns 0.0 if bias_ptr is None."""
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows * STRIDE, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    return bias


@triton.jit
def residual_tile(residual_ptr, places, rows, there, STRIDE: tl.constexpr):
    """Loads the residual [rows, tokens]. Returns 0.0 if residual_ptr is None. places [1, tokens]:
    the indices of the tokens."""
    residual = 0.0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + places * STRIDE + rows[:, None], mask=there, other=0.0)
    return residual


@triton.jit
def norm_rows(
    made_ptr, norm_weight_ptr, residual_ptr, out_ptr,
    N: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [T, N] = residual + SCALE * made / rms(made) * (NORM_OFFSET + norm_weight).
    made: fp32 [T, N].

    Grid (T,). A program computes one token, BLOCK columns at a time.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        made = tl.load(made_ptr + row * N + columns, mask=columns < N, other=0.0)
        squares += made * made
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / N + NORM_EPS)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        made = tl.load(made_ptr + row * N + columns, mask=columns < N, other=0.0)
        made *= inverse
        if norm_weight_ptr is not None:
            factor = tl.load(norm_weight_ptr + columns * NORM_STRIDE, mask=columns < N, other=0.0)
            made *= factor.to(tl.float32) + NORM_OFFSET
        if SCALE != 1.0:
            made *= SCALE
        residual = tl.load(
            residual_ptr + row * RESIDUAL_STRIDE + columns, mask=columns < N, other=0.0
        )
        made += residual.to(tl.float32)
        tl.store(out_ptr + row * N + columns, made.to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def finish_linear(
    product, up, squares, bias, up_bias, residual,
    up_weight_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, workspace_ptr, counters_ptr,
    row_tile, part, rows, places, there, token_mask,
    N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, NORM_EPS: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Stores out = residual + SCALE * activation(product + bias) * (up + up_bias) for one tile.

    If K is split, each program stores its sums, and the last program to arrive adds the sums of all
    programs.

    Args:
        product: fp32 [BLOCK_N, BLOCK_T], the sums over this program's part of K.
        up: The same sums for the up weight. They are used only if up_weight_ptr is given.
        squares: fp32 [BLOCK_T, columns], the squares of this program's part of x. They are used
            only if NORM.
        bias, up_bias, residual: These are used only if their pointers are given.
        places: [1, BLOCK_T], the indices of the tokens.
        there: Whether each number of the tile exists in the result.
    """
    if NORM:
        square = tl.sum(squares, axis=1)
    is_last = True
    if SPLIT_K > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_T
        tile = tl.program_id(1) * (tl.num_programs(0) // SPLIT_K) + row_tile
        NUMBERS: tl.constexpr = SIZE * (1 if up_weight_ptr is None else 2) + BLOCK_T * NORM
        parts = workspace_ptr + tile.to(tl.int64) * (SPLIT_K * NUMBERS)
        offsets = tl.arange(0, BLOCK_T)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        # Numbers in the padding of the tile are not stored.
        real = token_mask[None, :] & (rows >= 0)[:, None]
        tl.store(parts + part * SIZE + offsets, product, mask=real)
        up_parts = parts + SPLIT_K * SIZE
        if up_weight_ptr is not None:
            tl.store(up_parts + part * SIZE + offsets, up, mask=real)
        square_parts = parts + SPLIT_K * (NUMBERS - BLOCK_T)
        own = tl.arange(0, BLOCK_T)
        if NORM:
            tl.store(square_parts + part * BLOCK_T + own, square, mask=token_mask)
        is_last = arrive(counters_ptr + tile, SPLIT_K)
    if is_last:
        if SPLIT_K > 1:
            product = sum_of_parts(parts, offsets, real, SIZE, SPLIT_K)
            if up_weight_ptr is not None:
                up = sum_of_parts(up_parts, offsets, real, SIZE, SPLIT_K)
            if NORM:
                square = sum_of_parts(square_parts, own, token_mask, BLOCK_T, SPLIT_K)
        if NORM:
            inverse = tl.rsqrt(square / K + NORM_EPS)[None, :]
            product *= inverse
            if up_weight_ptr is not None:
                up *= inverse
        if bias_ptr is not None:
            product += bias
        if up_bias_ptr is not None:
            up += up_bias
        if ACTIVATION != "":
            if up_weight_ptr is None:
                product = activate(product, product, ACTIVATION, 1.0, 0.0, False)
            else:
                product = activate(product, up, ACTIVATION, 1.0, 0.0, True)
        if SCALE != 1.0:
            product *= SCALE
        if residual_ptr is not None:
            product += residual.to(tl.float32)
        tl.store(
            out_ptr + places * N + rows[:, None], product.to(out_ptr.dtype.element_ty), mask=there
        )
