"""Functions for kernels that stream weights for few tokens: prefetching of rows, and a norm of x
before the product.

An RMS norm multiplies each row of the result by a factor. x times the norm's weight is rounded
before the product, and the sum of x's squares is computed in the same pass over K.

A layer norm cannot be applied in this way, because its mean and bias may be much larger than the
other terms of a sum. For a layer norm, the statistics of whole rows are computed first. Then x is
normalised in each step, and rounded once before the product, as if a separate kernel had computed
the norm.
"""

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(
    rows_ptr, first, K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """Prefetches LINES lines of LINE elements (128 bytes) of each row of K to the L2 cache,
    starting at column `first`. A prefetch is only a hint and returns no data, so another kernel may
    still be writing these rows."""
    columns = tl.minimum(first + tl.arange(0, LINES) * LINE, K - 1)
    lines = rows_ptr[:, None] + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1
    )


@triton.jit
def places_of_norm(norm_weight_ptr, tokens, columns, STRIDE: tl.constexpr):
    """Returns pointers [tokens, columns] to the weight or the bias of a norm. Returns None if the
    norm has no such vector."""
    norm_ptrs = None
    if norm_weight_ptr is not None:
        # Repeat the pointers for each token: Triton can pipeline a load of this size, but not a
        # load of a single row.
        norm_ptrs = tl.broadcast_to(
            norm_weight_ptr + columns[None, :] * STRIDE, (tokens.shape[0], columns.shape[0])
        )
    return norm_ptrs


@triton.jit
def row_statistics(
    x_ptr, first, num_tokens,
    TOKENS: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, EPS: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """Returns (mean, 1 / sqrt(variance + EPS)) of TOKENS rows of x, starting at row `first`, as
    fp32 [TOKENS, 1]. Both are zero for tokens that do not exist. ROW: a power of two that is at
    least K.

    Each row is loaded once. The variance is computed from the differences to the mean, because a
    variance computed from squares would have no accurate digits if the numbers are far from zero.
    """
    mean = tl.zeros((TOKENS,), tl.float32)
    inverse = tl.zeros((TOKENS,), tl.float32)
    columns = tl.arange(0, ROW)
    for token in range(tl.minimum(num_tokens - first, TOKENS)):
        row_ptr = x_ptr + (first + token).to(tl.int64) * X_STRIDE
        row = tl.load(row_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        centre = tl.sum(row, axis=0) / K
        apart = tl.where(columns < K, row - centre, 0.0)
        factor = tl.rsqrt(tl.sum(apart * apart, axis=0) / K + EPS)
        here = tl.arange(0, TOKENS) == token
        mean = tl.where(here, centre, mean)
        inverse = tl.where(here, factor, inverse)
    return mean[:, None], inverse[:, None]


@triton.jit
def layer_step_of_x(
    x_ptrs, norm_ptrs, shift_ptrs, mean, inverse, step, mask,
    NORM_STRIDE: tl.constexpr, NORM_OFFSET: tl.constexpr, SHIFT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Returns x [tokens, columns] of a step, layer-normalised and rounded. It is zero outside of
    the mask.

    mean, inverse: the results of `row_statistics`. shift_ptrs: pointers to the norm's bias.
    """
    x = tl.load(x_ptrs + step, mask=mask, other=0.0)
    wide = (x.to(tl.float32) - mean) * inverse
    if norm_ptrs is not None:
        factor = tl.load(norm_ptrs + step * NORM_STRIDE, mask=mask, other=0.0)
        wide *= factor.to(tl.float32) + NORM_OFFSET
    if shift_ptrs is not None:
        shift = tl.load(shift_ptrs + step * SHIFT_STRIDE, mask=mask, other=0.0)
        wide += shift.to(tl.float32)
    return tl.where(mask, wide, 0.0).to(x_ptrs.dtype.element_ty)


@triton.jit
def step_of_x(
    x_ptrs, norm_ptrs, squares, step, mask,
    NORM: tl.constexpr, NORM_STRIDE: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """Returns (x [tokens, columns] of a step times the weight of an RMS norm, `squares` plus the
    squares of x)."""
    x = tl.load(x_ptrs + step, mask=mask, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += wide * wide
        if norm_ptrs is not None:
            factor = tl.load(norm_ptrs + step * NORM_STRIDE, mask=mask, other=0.0)
            x = (wide * (factor.to(tl.float32) + NORM_OFFSET)).to(x_ptrs.dtype.element_ty)
    return x, squares
