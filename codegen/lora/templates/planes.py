"""Copies the result of one library GEMM for q, k and v to three separate planes."""

import triton
import triton.language as tl


@triton.jit
def lora_planes(
    rows_ptr, offsets_ptr, out_ptr, num_rows,
    N: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr, INCLUSIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Copies the result of a LoRA shrink by a library GEMM to planes: out [PLANES, num_rows, N] =
    rows [num_rows, PLANES, N], with a plane for each of q, k and v.

    Grid (cdiv(num_rows, BLOCK_M), PLANES). WIDTH: the smallest power of two that is at least N.
    offsets: [start, end] of one group, or [end] if INCLUSIVE. Rows outside of the group become
    zeros.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    plane = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, WIDTH)
    there = (rows < num_rows)[:, None] & (columns < N)[None, :]
    filled = there
    if offsets_ptr is not None:
        if INCLUSIVE:
            end = tl.load(offsets_ptr).to(tl.int32)
        else:
            end = tl.load(offsets_ptr + 1).to(tl.int32)
            filled = filled & (rows >= tl.load(offsets_ptr).to(tl.int32))[:, None]
        filled = filled & (rows < end)[:, None]
    sources = rows.to(tl.int64)[:, None] * (PLANES * N) + (plane * N + columns)[None, :]
    values = tl.load(rows_ptr + sources, mask=filled, other=0.0)
    places = (plane.to(tl.int64) * num_rows + rows)[:, None] * N + columns[None, :]
    tl.store(out_ptr + places, values, mask=there)
