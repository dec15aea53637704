"""Converts scales of weights to bfloat16. Gluon templates use these functions, too."""

import triton
import triton.language as tl


@triton.jit
def bfloat16_powers(codes):
    """Converts e8m0 codes (uint8) to bfloat16: 2 ** (code - 127), and NaN for 255."""
    # The codes 0 and 255 need a bit of the mantissa. With this bit, code 0 is the subnormal number
    # 2 ** -127, and code 255 is NaN. Without the bit, they would be zero and infinity.
    codes = codes.to(tl.int16)
    is_edge = ((codes + 1) & 254) == 0
    bits = codes << 7 | tl.where(is_edge, 0x0040, 0).to(tl.int16)
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def bfloat16_parts(numbers):
    """Returns (fp32 numbers rounded to bfloat16, the remainders of this rounding in bfloat16). The
    remainder of NaN, and of a number that is rounded to infinity, is zero."""
    high = numbers.to(tl.bfloat16)
    is_finite = tl.abs(high.to(tl.float32)) < float("inf")
    low = tl.where(is_finite, numbers - high.to(tl.float32), 0.0)
    return high, low.to(tl.bfloat16)
