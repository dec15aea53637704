"""Rounds fp32 results to the dtype in which they are stored."""

import triton
import triton.language as tl


@triton.jit
def rounded(values, DTYPE: tl.constexpr, SATURATES: tl.constexpr = True):
    """Rounds fp32 values to DTYPE.

    If DTYPE is an 8-bit float, values outside of its range become its largest number if SATURATES.
    If not, they become infinity, or NaN for a type without infinity. NaN stays NaN.
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
