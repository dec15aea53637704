"""Rows to NVFP4: packed codes, and their scales in the layout of the tensor core.

A program has a block of 128 rows of the scale space, which lie within one group, and some columns.
The arithmetic is that of `ops.formats.nvfp4`, operation by operation: IEEE division, so that one
definition holds on every device.
"""

import triton
import triton.language as tl


@triton.jit
def e2m1_code(x):
    """The nearest 4-bit codes of fp32 numbers, as int32: ties to even, saturating; NaN is +6."""
    magnitude = tl.abs(x)
    sign = tl.where(magnitude == magnitude, (x.to(tl.int32, bitcast=True) >> 28) & 8, 0)
    magnitude = tl.where(magnitude <= 6.0, magnitude, 6.0)
    # Below 1 codes are 0.5 apart, as fp32 is at 2 ** 22.
    small = (magnitude + 4194304.0).to(tl.int32, bitcast=True) & 3
    # Else exponent and one bit of mantissa stay of fp32's own, rounded to even.
    bits = magnitude.to(tl.int32, bitcast=True)
    large = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - 252
    return sign | tl.where(magnitude < 1.0, small, large)


@triton.jit
def group_rows(block, offsets_ptr, num_rows, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr):
    """(first row, one past the last, group) of a block of the scale space.

    Blocks past those of all groups get the rows of no group, 128 each, and group NUM_GROUPS.
    """
    groups = tl.arange(0, GROUPS)
    real = groups < NUM_GROUPS
    start = tl.load(offsets_ptr + groups, mask=real, other=0).to(tl.int32)
    end = tl.load(offsets_ptr + groups + 1, mask=real, other=0).to(tl.int32)
    start = tl.maximum(start, 0)
    end = tl.minimum(end, num_rows)
    blocks = (tl.maximum(end - start, 0) + 127) // 128
    last = tl.cumsum(blocks, axis=0)
    total = tl.sum(blocks, axis=0)
    group = tl.sum((last <= block).to(tl.int32), axis=0)
    chosen = groups == group
    within = block - tl.sum(tl.where(chosen, last - blocks, 0), axis=0)
    first = tl.sum(tl.where(chosen, start, 0), axis=0) + within * 128
    stop = tl.sum(tl.where(chosen, end, 0), axis=0)
    inside = block < total
    first = tl.where(inside, first, tl.max(end, axis=0) + (block - total) * 128)
    return first, tl.where(inside, stop, num_rows), tl.where(inside, group, NUM_GROUPS)


@triton.jit
def quantize_nvfp4(
    x_ptr, offsets_ptr, tensor_scales_ptr, packed_ptr, scales_ptr, num_rows,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, INNER: tl.constexpr, X_STRIDE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """packed [num_rows, INNER / 2] and scales [S, ceil(INNER / 64), 32, 4, 4] of x.

    offsets [NUM_GROUPS + 1], exclusive; None: all rows are one group. tensor_scales [NUM_GROUPS];
    None: 1. Grid (S, ceil(INNER / BLOCK_C)); BLOCK_C columns, a multiple of 64.
    """
    block = tl.program_id(0)
    if offsets_ptr is None:
        first = block * 128
        stop = num_rows
        group = 0
        loaded = stop
    else:
        first, stop, group = group_rows(block, offsets_ptr, num_rows, NUM_GROUPS, GROUPS)
        # Rows of no group are zeros.
        loaded = tl.where(group < NUM_GROUPS, stop, 0)
    COLUMN_BLOCKS: tl.constexpr = (INNER + 63) // 64
    SCALES: tl.constexpr = BLOCK_C // 16
    rows = first + tl.arange(0, 128)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x = tl.load(
        x_ptr + rows.to(tl.int64)[:, None] * X_STRIDE + columns[None, :],
        mask=(rows < loaded)[:, None] & (columns < INNER)[None, :], other=0.0,
    )  # fmt: skip
    parts = tl.reshape(x.to(tl.float32), (128, SCALES, 16))
    magnitude = tl.abs(parts)
    # tl.max may pass over a NaN.
    amax = tl.max(tl.where(magnitude == magnitude, magnitude, float("inf")), axis=2)
    if tensor_scales_ptr is None:
        tensor_scale = tl.full((128, SCALES), 1.0, tl.float32)
    else:
        own = tl.load(tensor_scales_ptr + group, mask=group < NUM_GROUPS, other=1.0)
        tensor_scale = tl.zeros((128, SCALES), tl.float32) + own
    exact = tl.div_rn(tensor_scale * amax, tl.full((128, SCALES), 6.0, tl.float32))
    scales = tl.minimum(exact, 448.0).to(tl.float8e4nv)
    stored = scales.to(tl.float32)
    factor = tl.div_rn(tensor_scale, tl.where(stored == 0.0, 1.0, stored))
    factor = tl.where(stored == 0.0, 0.0, factor)
    scaled = tl.where((factor == 0.0)[:, :, None], 0.0, parts * factor[:, :, None])
    codes = tl.reshape(e2m1_code(scaled), (128, BLOCK_C // 2, 2))
    low, high = tl.split(codes)
    pairs = tl.program_id(1) * (BLOCK_C // 2) + tl.arange(0, BLOCK_C // 2)
    tl.store(
        packed_ptr + rows.to(tl.int64)[:, None] * (INNER // 2) + pairs[None, :],
        (low | (high << 4)).to(tl.uint8),
        mask=(rows < stop)[:, None] & (pairs < INNER // 2)[None, :],
    )
    within = tl.arange(0, 128)
    places = tl.program_id(1) * SCALES + tl.arange(0, SCALES)
    in_block = (within % 32 * 16 + within // 32 * 4)[:, None] + (places % 4)[None, :]
    first_scale = (block * COLUMN_BLOCKS).to(tl.int64) * 512
    tl.store(
        scales_ptr + first_scale + (places // 4 * 512)[None, :] + in_block,
        scales, mask=(places < 4 * COLUMN_BLOCKS)[None, :],
    )  # fmt: skip
