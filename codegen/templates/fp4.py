"""Tiles of NVFP4 codes and their scales, decoded."""

import triton
import triton.language as tl


@triton.jit
def e2m1_value(codes):
    """bf16 values of E2M1 codes (any integer type), exact.

    Exponent and mantissa are moved to where bf16 has them; 2 ** 126 corrects the difference in
    bias, also for the one subnormal.
    """
    codes = codes.to(tl.int16)
    bits = ((codes & 7) << 6) | ((codes & 8) << 12)
    return bits.to(tl.bfloat16, bitcast=True) * tl.full((1,), 2.0**126, tl.bfloat16)


@triton.jit
def unpack_codes(packed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Bytes [ROWS, COLUMNS / 2] to codes [ROWS, COLUMNS], the low nibble first."""
    return tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, COLUMNS))


@triton.jit
def dequantize_nvfp4(packed, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """bf16 [ROWS, COLUMNS] of bytes [ROWS, COLUMNS / 2] and e4m3 scales [ROWS, COLUMNS / 16].

    Exact: 2 + 4 significant bits. The scale's sign is ignored, as the tensor core ignores it.
    """
    values = e2m1_value(unpack_codes(packed, ROWS, COLUMNS))
    factor = tl.abs(scales.to(tl.float32)).to(tl.bfloat16)
    blocks = tl.reshape(values, (ROWS, COLUMNS // 16, 16)) * factor[:, :, None]
    return tl.reshape(blocks, (ROWS, COLUMNS))


@triton.jit
def scale_tile(scale_desc, batch, row_block, column_block, ROW_BLOCKS: tl.constexpr,
               COLUMN_BLOCKS: tl.constexpr):  # fmt: skip
    """Scales [128 * ROW_BLOCKS, 4 * COLUMN_BLOCKS] from the 128x4 layout.

    scale_desc: [batch, row blocks, column blocks, 2, 256], a block of the layout as two rows of 256
    bytes: the form in which the scales reach tensor memory without passing through registers.
    """
    raw = scale_desc.load([batch, row_block, column_block, 0, 0])
    atoms = tl.reshape(raw, (ROW_BLOCKS, COLUMN_BLOCKS, 32, 4, 4))
    rows = tl.trans(atoms, 0, 3, 2, 1, 4)
    return tl.reshape(rows, (128 * ROW_BLOCKS, 4 * COLUMN_BLOCKS))


@triton.jit
def scale_rows(scales_ptr, rows, row_mask, first_column, COLUMN_BLOCKS_IN_ALL: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Scales [len(rows), COLUMNS] of any rows of the 128x4 layout, by pointers."""
    columns = first_column + tl.arange(0, COLUMNS)
    within = rows % 128
    blocks = (rows // 128)[:, None] * COLUMN_BLOCKS_IN_ALL + (columns // 4)[None, :]
    place = (within % 32 * 16 + within // 32 * 4)[:, None] + (columns % 4)[None, :]
    mask = row_mask[:, None] & (columns < 4 * COLUMN_BLOCKS_IN_ALL)[None, :]
    return tl.load(scales_ptr + blocks * 512 + place, mask=mask, other=0.0)
