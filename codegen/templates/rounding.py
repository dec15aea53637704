"""Rounding of fp32 results to the dtype in which they are stored."""

import triton
import triton.language as tl


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """fp32 values in DTYPE; 8-bit floats saturate, and NaN stays NaN."""
    if tl.float8e4nv == DTYPE:
        values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if tl.float8e5 == DTYPE:
        values = tl.clamp(values, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(DTYPE)
