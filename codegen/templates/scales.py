"""Writes the scales of a weight in float32."""

import triton
import triton.language as tl

from tilewright.codegen.templates.fp4 import scale_value


@triton.jit
def widen_scales(
    scale_ptr, out_ptr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    SCALE_STRIDES: tl.constexpr, BLOCK: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Writes scales [cdiv(ROWS, GROUP), COLUMNS] to fp32 out [ROWS, WIDTH], padded with zeros.
    GROUP rows of out share a row of scales. Scales that are bytes are e8m0.

    Grid (cdiv(ROWS * WIDTH, BLOCK),).
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = places < ROWS * WIDTH
    row = (places // WIDTH // GROUP).to(tl.int64)
    column = places % WIDTH
    scale = tl.load(
        scale_ptr + row * SCALE_STRIDES[0] + column * SCALE_STRIDES[1],
        mask=there & (column < COLUMNS),
        other=0.0,
    )
    tl.store(out_ptr + places, scale_value(scale), mask=there)
