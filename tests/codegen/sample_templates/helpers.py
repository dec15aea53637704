"""Helper functions that the sample templates share. Their local names clash on purpose."""

import triton
import triton.language as tl


@triton.jit
def square(value):
    result = value * value
    return result


@triton.jit
def activate(accumulator, KIND: tl.constexpr):
    """Computes relu, squared relu, or nothing. Returns from inside compile-time branches."""
    if KIND == "none":
        return accumulator
    positive = tl.where(accumulator > 0, accumulator, 0.0)
    if KIND == "relu":
        return positive
    return square(positive)


@triton.jit
def clamp(value, BOUND: tl.constexpr):
    limit = BOUND
    return tl.minimum(tl.maximum(value, -limit), limit)


@triton.jit
def double_and_half(value):
    """Assigns to its own parameter, and names a local as the caller does."""
    result = value * 2.0
    value = value * 0.5
    return result, value
