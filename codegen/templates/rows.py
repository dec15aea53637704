"""Kernels that prepare the rows of x for a product. One kernel normalises the rows, and another
kernel permutes their columns to the order in which quantised weights are decoded along K."""

import triton
import triton.language as tl

from tilewright.codegen.templates.codes import x_in_order


@triton.jit
def order_x(
    x_ptr, ordered_ptr, num_tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr,
    PER: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Permutes the columns of x [tokens, K] to the order in which words of codes are decoded.
    Writes ordered [tokens, WIDTH], padded with zeros.

    Grid (cdiv(WIDTH, BLOCK_K), cdiv(tokens, BLOCK_T)). Each run of UNIT columns is permuted
    separately, as in `x_in_order`. UNIT divides BLOCK_K.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    tokens = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    mask = tokens < num_tokens
    x = tl.load(
        x_ptr + tokens.to(tl.int64) * X_STRIDE + columns[None, :],
        mask=mask & (columns < K)[None, :],
        other=0.0,
    )
    x = x_in_order(x, PER, INTERLEAVED_NIBBLES, BLOCK_K // UNIT)
    ordered = ordered_ptr + tokens.to(tl.int64) * WIDTH + columns[None, :]
    tl.store(ordered, x, mask=mask & (columns < WIDTH)[None, :])


@triton.jit
def load_factors(
    norm_weight_ptr, columns, K: tl.constexpr, STRIDE: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Loads the factors of a norm as fp32. Returns 1.0 if norm_weight_ptr is None."""
    factors = 1.0
    if norm_weight_ptr is not None:
        weight = tl.load(norm_weight_ptr + columns * STRIDE, mask=columns < K, other=0.0)
        factors = weight.to(tl.float32) + OFFSET
    return factors


@triton.jit
def norm_x(
    x_ptr, norm_weight_ptr, norm_bias_ptr, normed_ptr,
    K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr,
    NORM_STRIDE: tl.constexpr, NORM_BIAS_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr, SUBTRACTS_MEAN: tl.constexpr,
    PER: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes (x - mean) / sqrt(mean((x - mean)²) + NORM_EPS) * (NORM_OFFSET + norm_weight) +
    norm_bias for each row of x [tokens, K], in fp32, rounded once. Writes normed [tokens, WIDTH],
    padded with zeros.

    Grid (tokens,). BLOCK_K: a power of two that is at least WIDTH. If not SUBTRACTS_MEAN, the mean
    is 0. If UNIT > 0, columns are permuted as in `order_x`.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    there = columns < K
    x = tl.load(x_ptr + row * X_STRIDE + columns, mask=there, other=0.0).to(tl.float32)
    if SUBTRACTS_MEAN:
        # If the numbers are far from zero, a variance computed from their squares would have no
        # accurate digits.
        x = tl.where(there, x - tl.sum(x, axis=0) / K, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / K + NORM_EPS)
    x *= load_factors(norm_weight_ptr, columns, K, NORM_STRIDE, NORM_OFFSET)
    if norm_bias_ptr is not None:
        shift = tl.load(norm_bias_ptr + columns * NORM_BIAS_STRIDE, mask=there, other=0.0)
        x += shift.to(tl.float32)
    normed = x.to(normed_ptr.dtype.element_ty)
    if UNIT > 0:
        ordered = x_in_order(normed[None, :], PER, INTERLEAVED_NIBBLES, BLOCK_K // UNIT)
        normed = tl.reshape(ordered, (BLOCK_K,))
    tl.store(normed_ptr + row * WIDTH + columns, normed, mask=columns < WIDTH)
