"""Rounds fp32 numbers to the dtype in which they are stored, and rounds rows of numbers to float8
codes, whose scales are computed from the rows."""

import triton
import triton.language as tl


@triton.jit
def rounded(values, DTYPE: tl.constexpr, SATURATES: tl.constexpr = True):
    """Rounds fp32 values to DTYPE.

    Values outside of the range of an 8-bit float become its largest number if SATURATES. If not
    SATURATES, they become infinity, or NaN if the type has no infinity. NaN stays NaN.
    """
    if not SATURATES:
        magnitude = tl.abs(values)
    if tl.float8e4nv == DTYPE:
        values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if tl.float8e5 == DTYPE:
        values = tl.clamp(values, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
    if SATURATES:
        return values.to(DTYPE)
    else:
        # A value overflows if it is more than half a step above the largest number. At exactly half
        # a step, the last bit of the largest number decides. The hardware's cast saturates, so it
        # gives neither infinity nor NaN.
        codes = values.to(DTYPE).to(tl.int8, bitcast=True)
        if tl.float8e4nv == DTYPE:
            codes = tl.where(magnitude > 464.0, codes | 0x7F, codes)
        if tl.float8e5 == DTYPE:
            codes = tl.where(magnitude >= 61440.0, (codes & -128) | 0x7C, codes)
        return codes.to(DTYPE, bitcast=True)


@triton.jit
def largest_magnitudes(x, AXIS: tl.constexpr):
    """Returns the largest magnitudes of fp32 x along a dimension. If one of the numbers is NaN, the
    result is NaN."""
    # Compare as integers: a maximum of floats ignores NaN.
    sizes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(sizes, axis=AXIS).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(
    largest, DTYPE: tl.constexpr, ROUNDED: tl.constexpr, ZERO_SCALE: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Returns the scales for the largest magnitudes of groups."""
    if LEAST > 0.0:
        largest = tl.maximum(largest, LEAST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.math.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    if ROUNDED:
        scale = scale.to(DTYPE).to(tl.float32)
    if ZERO_SCALE > 0.0:
        scale = tl.where(scale == 0.0, ZERO_SCALE, scale)
    return scale


@triton.jit
def divisor_of(scale, LEAST_DIVISOR: tl.constexpr):
    """Returns the numbers by which values are divided to get codes with these scales. They are at
    least LEAST_DIVISOR."""
    divisor = scale
    if LEAST_DIVISOR > 0.0:
        divisor = tl.maximum(scale, LEAST_DIVISOR, propagate_nan=tl.PropagateNan.ALL)
    return divisor


@triton.jit
def codes_of(
    numbers, scale, DTYPE: tl.constexpr, ROUNDED: tl.constexpr, LEAST_DIVISOR: tl.constexpr
):  # fmt: skip
    """Returns the e4m3 codes of fp32 numbers, with scales that broadcast to their shape.

    ROUNDED: quotients are rounded to DTYPE first. LEAST_DIVISOR: the smallest number by which
    numbers are divided.
    """
    divisor = divisor_of(scale, LEAST_DIVISOR)
    quotient = tl.math.div_rn(numbers, tl.broadcast_to(divisor, numbers.shape))
    if ROUNDED:
        quotient = quotient.to(DTYPE).to(tl.float32)
    return rounded(quotient, tl.float8e4nv)


@triton.jit
def quotients(groups, divisor, LEAST_DIVISOR: tl.constexpr):
    """Returns groups [rows, groups, columns] / divisor [rows, groups, 1]. Each quotient is rounded
    once, if none is above 2^10. A remainder corrects the product with the rounded reciprocal
    (Markstein, IBM J. Res. Dev. 1990), which takes fewer instructions than a division."""
    if LEAST_DIVISOR < 1e-18:
        # If a divisor is very small, multiply it and its numbers by a power of two. Otherwise, the
        # remainders or the inverse of the divisor would be out of range.
        lift = tl.where(divisor < 1e-18, 18446744073709551616.0, 1.0)
        divisor = divisor * lift
        groups = groups * lift
    inverse = tl.math.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
    inverse = tl.broadcast_to(inverse, groups.shape)
    quotient = groups * inverse
    remainder = tl.fma(-quotient, tl.broadcast_to(divisor, groups.shape), groups)
    return tl.fma(remainder, inverse, quotient)


@triton.jit
def numbers_of_codes(
    x, GROUP: tl.constexpr, ZERO_SCALE: tl.constexpr, LEAST: tl.constexpr,
    LEAST_DIVISOR: tl.constexpr,
):  # fmt: skip
    """Rounds rows x [rows, columns] to the numbers that e4m3 codes stand for. GROUP columns share a
    scale. The result has x's dtype. The scales are computed as in `round_rows`, in fp32."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    groups = tl.reshape(x.to(tl.float32), (ROWS, COLUMNS // GROUP, GROUP))
    scale = scale_of(largest_magnitudes(groups, 2), x.dtype, False, ZERO_SCALE, LEAST)
    scale = scale[:, :, None]
    quotient = quotients(groups, divisor_of(scale, LEAST_DIVISOR), LEAST_DIVISOR)
    # No quotient is above 450. This number rounds to 448, so no quotient has to saturate.
    made = quotient.to(tl.float8e4nv).to(tl.float32) * scale
    return tl.reshape(made, (ROWS, COLUMNS)).to(x.dtype)
