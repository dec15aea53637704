"""Rounds rows to float8 codes and computes the scales of the codes, after an optional norm or
activation."""

import triton
import triton.language as tl

from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.rounding import codes_of, largest_magnitudes, scale_of
from tilewright.codegen.templates.rows import load_factors
from tilewright.codegen.templates.streaming import prefetch_rows


@triton.jit
def load_numbers(
    x_ptr, up_ptr, columns, K: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Loads numbers of a row as fp32: x, or activation(x) * up rounded to x's dtype. Columns after
    the last one are zero."""
    there = columns < K
    x = tl.load(x_ptr + columns, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        if up_ptr is None:
            x = activate(x, x, ACTIVATION, 1.0, 0.0, False)
        else:
            up = tl.load(up_ptr + columns, mask=there, other=0.0).to(tl.float32)
            x = activate(x, up, ACTIVATION, 1.0, 0.0, True)
        x = tl.where(there, x, 0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def round_rows(
    x_ptr, up_ptr, norm_weight_ptr, given_scale_ptr, out_ptr, scale_ptr,
    K: tl.constexpr, X_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    NORM: tl.constexpr, NORM_STRIDE: tl.constexpr, NORM_EPS: tl.constexpr,
    NORM_OFFSET: tl.constexpr, NORM_LINE: tl.constexpr, ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr, ROUNDED: tl.constexpr, ZERO_SCALE: tl.constexpr, LEAST: tl.constexpr,
    LEAST_DIVISOR: tl.constexpr, DECODED: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Rounds rows [T, K] to codes with fp32 scales.

    The scales are [K / GROUP, T]; [1, T] if GROUP is 0; and [1, 1] if the caller gives the scale.
    If DECODED, the result holds the numbers that the codes stand for, instead of the codes.

    Grid (T, cdiv(K, WIDTH)). A program rounds WIDTH columns of a row. If the norm or the scale
    depends on the whole row, the program reads all columns, in one block of ROW columns.

    Args:
        NORM_LINE: The number of elements of the norm's weight in 128 bytes, the unit of
            prefetching; 0 if the weight is not prefetched.
        ROUNDED: Scales and quotients are rounded to x's dtype.

    `tilewright.ops.mlp.round_rows` explains the other options.
    """
    COMPUTED: tl.constexpr = given_scale_ptr is None
    WHOLE: tl.constexpr = NORM or (GROUP == 0 and COMPUTED)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # If a program rounds a whole row, it loads the row once.
    ALONE: tl.constexpr = WIDTH == ROW
    own = tl.arange(0, WIDTH)
    if not ALONE:
        own += tl.program_id(1) * WIDTH
    row_columns = tl.arange(0, ROW)
    if LAUNCH_PDL:
        # Allow the next kernel to start now. The next kernel only prefetches its own weights before
        # it waits for this kernel.
        tl.extra.cuda.gdc_launch_dependents()
        if norm_weight_ptr is not None and NORM_LINE > 0:
            LINES: tl.constexpr = ROW // NORM_LINE
            prefetch_rows(norm_weight_ptr + tl.arange(0, 1), 0, K, LINES, NORM_LINE)
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * X_STRIDE
    up_row = None
    if up_ptr is not None:
        up_row = up_ptr + row * UP_STRIDE
    x = load_numbers(x_row, up_row, own, K, ACTIVATION)
    whole = x
    if WHOLE and not ALONE:
        whole = load_numbers(x_row, up_row, row_columns, K, ACTIVATION)
    if NORM:
        # Load the norm's factors before the sum, because the sum waits for all threads.
        factors = load_factors(norm_weight_ptr, own, K, NORM_STRIDE, NORM_OFFSET)
        row_factors = factors
        if GROUP == 0 and COMPUTED and not ALONE:
            row_factors = load_factors(norm_weight_ptr, row_columns, K, NORM_STRIDE, NORM_OFFSET)
        inverse = tl.rsqrt(tl.sum(whole * whole, axis=0) / K + NORM_EPS)
        x = (x * inverse * factors).to(DTYPE).to(tl.float32)
        if ALONE:
            whole = x
        elif GROUP == 0 and COMPUTED:
            whole = (whole * inverse * row_factors).to(DTYPE).to(tl.float32)
    RUN: tl.constexpr = WIDTH if GROUP == 0 else GROUP
    numbers = tl.reshape(x, (WIDTH // RUN, RUN))
    if not COMPUTED:
        scale = tl.load(given_scale_ptr + tl.arange(0, 1)).to(tl.float32)
    else:
        groups = numbers if GROUP > 0 else tl.reshape(whole, (1, ROW))
        scale = scale_of(largest_magnitudes(groups, 1), DTYPE, ROUNDED, ZERO_SCALE, LEAST)
    codes = codes_of(numbers, scale[:, None], DTYPE, ROUNDED, LEAST_DIVISOR)
    made = codes.to(tl.float32) * scale[:, None] if DECODED else codes
    out = tl.reshape(made, (WIDTH,)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * K + own, out, mask=own < K)
    own_groups = tl.program_id(1) * (WIDTH // RUN) + tl.arange(0, WIDTH // RUN)
    if not COMPUTED:
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(scale_ptr + tl.arange(0, 1), scale, mask=first)
    elif GROUP == 0:
        tl.store(scale_ptr + row + tl.arange(0, 1), scale, mask=tl.program_id(1) == 0)
    else:
        COUNT: tl.constexpr = K // GROUP
        places = own_groups.to(tl.int64) * tl.num_programs(0) + row
        tl.store(scale_ptr + places, scale, mask=own_groups < COUNT)
