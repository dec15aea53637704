"""What kernels that stream weights for few tokens do besides: rows asked for early, an RMS norm of
x on its way to the product.

Such a norm is a factor of each row of the result. Only x times the norm's weight is rounded before
the product; the sum of x's squares is taken in the same pass over K.
"""

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(
    rows_ptr, first, K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """Asks the L2 cache for LINES lines of LINE elements, 128 bytes, of each row of K, from column
    `first` on: a hint, which reads nothing, so that whoever still writes there is not disturbed."""
    columns = tl.minimum(first + tl.arange(0, LINES) * LINE, K - 1)
    lines = rows_ptr[:, None] + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1
    )


@triton.jit
def places_of_norm(norm_weight_ptr, tokens, columns, STRIDE: tl.constexpr):
    """Pointers [tokens, columns] to a norm's weight; None where it has none."""
    norm_ptrs = None
    if norm_weight_ptr is not None:
        # The same for each token: a load of so many bytes can be made ahead, a row's not.
        norm_ptrs = tl.broadcast_to(
            norm_weight_ptr + columns[None, :] * STRIDE, (tokens.shape[0], columns.shape[0])
        )
    return norm_ptrs


@triton.jit
def step_of_x(
    x_ptrs, norm_ptrs, squares, step, mask,
    NORM: tl.constexpr, NORM_STRIDE: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """(x [tokens, columns] of a step, times the norm's weight; squares, with x's added)."""
    x = tl.load(x_ptrs + step, mask=mask, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += wide * wide
        if norm_ptrs is not None:
            factor = tl.load(norm_ptrs + step * NORM_STRIDE, mask=mask, other=0.0)
            x = (wide * (factor.to(tl.float32) + NORM_OFFSET)).to(x_ptrs.dtype.element_ty)
    return x, squares
