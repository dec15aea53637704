"""Quantises rows to NVFP4: packed codes, and their scales in the layout of the tensor core.

Scales are stored in blocks. Each block has the scales of 128 rows of one group. A program quantises
some columns of a block. It performs the same operations as `ops.formats.nvfp4` in the same order
and with IEEE division, so every device gives the same codes.
"""

import triton
import triton.language as tl


@triton.jit
def e2m1_code(x):
    """Returns the nearest 4-bit codes of fp32 numbers, as int32. Ties are rounded to even, and
    large numbers saturate. A NaN becomes 6.

    Let e be the exponent of a number. Adding 2 ** (22 + e) to the number rounds it to a mantissa of
    one bit; numbers below 1 are rounded to multiples of 0.5. The last bits of the sum are the code
    minus 2 * e, and the exponent of the sum is known from e.
    """
    number = x.to(tl.int32, bitcast=True)
    # Compare the bits as integers, so that NaN and infinity also exceed 6.
    magnitude = tl.minimum(number & 0x7FFFFFFF, 0x40C00000)
    shift = (tl.maximum(magnitude, 0x3F800000) & 0x7F800000) + (22 << 23)
    rounded = magnitude.to(tl.float32, bitcast=True) + shift.to(tl.float32, bitcast=True)
    bits = rounded.to(tl.int32, bitcast=True)
    return ((bits >> 22) + (bits & 7) - 2 * (127 + 22)) | ((number >> 28) & 8)


@triton.jit
def group_rows(block, offsets_ptr, num_rows, NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr):
    """Returns (first row, end of the rows, group) of a block of scales. A block has 128 rows.

    Rows after the last group count as one more group, which has the number NUM_GROUPS.
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
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Quantises x [num_rows, INNER] to NVFP4: packed codes [num_rows, INNER / 2], and e4m3 scales
    [S, cdiv(INNER, 64), 32, 4, 4] in the layout of the tensor core.

    Grid (S, cdiv(INNER, BLOCK_C)). A program quantises BLOCK_C columns, BLOCK_R rows at a time.
    BLOCK_C is a multiple of 64, and BLOCK_R divides 128.

    Args:
        offsets: [NUM_GROUPS + 1], the first row of each group, then the end of the last group. If
            it is None, all rows are one group.
        tensor_scales: [NUM_GROUPS]. If it is None, all of them are 1.
    """
    block = tl.program_id(0)
    if offsets_ptr is None:
        first = block * 128
        stop = num_rows
        group = 0
    else:
        first, stop, group = group_rows(block, offsets_ptr, num_rows, NUM_GROUPS, GROUPS)
    here = tl.minimum(stop - first, 128)
    # Rows without a group have zero codes and zero scales.
    scaled = tl.where(group < NUM_GROUPS, here, 0)
    if tensor_scales_ptr is None:
        own = 1.0
    else:
        own = tl.load(tensor_scales_ptr + group, mask=group < NUM_GROUPS, other=1.0)
    COLUMN_BLOCKS: tl.constexpr = (INNER + 63) // 64
    SCALES: tl.constexpr = BLOCK_C // 16
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    pairs = tl.program_id(1) * (BLOCK_C // 2) + tl.arange(0, BLOCK_C // 2)
    places = tl.program_id(1) * SCALES + tl.arange(0, SCALES)
    place_mask = (places < 4 * COLUMN_BLOCKS)[None, :]
    # Within a block of the layout, row r and column c are at r % 32 * 16 + r // 32 * 4 + c.
    layout = scales_ptr + (block * COLUMN_BLOCKS).to(tl.int64) * 512
    layout_columns = places // 4 * 512 + places % 4
    tensor_scale = tl.zeros((BLOCK_R, SCALES), tl.float32) + own
    for start in range(0, here, BLOCK_R):
        within = start + tl.arange(0, BLOCK_R)
        rows = (first + within).to(tl.int64)
        x = tl.load(
            x_ptr + rows[:, None] * X_STRIDE + columns[None, :],
            mask=(within < scaled)[:, None] & (columns < INNER)[None, :], other=0.0,
        )  # fmt: skip
        parts = tl.reshape(x.to(tl.float32), (BLOCK_R, SCALES, 16))
        # Compare the bits as integers, so that NaN is the largest number. A maximum of floats may
        # ignore NaN.
        largest = tl.max(parts.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
        amax = tl.minimum(largest, 0x7F800000).to(tl.float32, bitcast=True)
        exact = tl.div_rn(tensor_scale * amax, tl.full((BLOCK_R, SCALES), 6.0, tl.float32))
        scales = tl.minimum(exact, 448.0).to(tl.float8e4nv)
        stored = scales.to(tl.float32)
        factor = tl.div_rn(tensor_scale, tl.where(stored == 0.0, 1.0, stored))
        kept = tl.where((stored == 0.0) | (factor == 0.0), 0, 255)
        codes = e2m1_code(parts * factor[:, :, None])
        low, high = tl.split(tl.reshape(codes, (BLOCK_R, SCALES, 8, 2)))
        packed = tl.reshape((low | (high << 4)) & kept[:, :, None], (BLOCK_R, BLOCK_C // 2))
        tl.store(
            packed_ptr + rows[:, None] * (INNER // 2) + pairs[None, :], packed.to(tl.uint8),
            mask=(within < here)[:, None] & (pairs < INNER // 2)[None, :],
        )  # fmt: skip
        layout_rows = within % 32 * 16 + within // 32 * 4
        tl.store(
            layout + layout_rows[:, None] + layout_columns[None, :], scales,
            mask=(within < scaled)[:, None] & place_mask,
        )  # fmt: skip
    rest = tl.arange(0, 128)
    rest_rows = rest % 32 * 16 + rest // 32 * 4
    tl.store(
        layout + rest_rows[:, None] + layout_columns[None, :],
        tl.zeros((128, SCALES), tl.float8e4nv),
        mask=(rest >= scaled)[:, None] & place_mask,
    )
