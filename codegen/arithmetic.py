"""Constants and integer arithmetic for problems, plans and launch grids."""

from __future__ import annotations

import math

# The number of bytes of an element, for each Triton dtype name.
ELEMENT_BYTES = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8e4nv": 1, "fp8e5": 1,
    "i8": 1, "u8": 1, "i32": 4, "u32": 4, "i64": 8,
}  # fmt: skip
# The number of bytes of a line of the L2 cache. Kernels prefetch whole lines.
LINE_BYTES = 128
INT32_MAX = 2**31 - 1
# Converts natural logarithms to base 2, in which the kernels compute the softmax.
LOG2E = math.log2(math.e)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)
