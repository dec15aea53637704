"""Decodes E2M1 codes and the scales of NVFP4 and MXFP4."""

import triton
import triton.language as tl


@triton.jit
def e2m1_value(codes):
    """Converts E2M1 codes (any integer type) to bf16, exactly.

    Exponent and mantissa are moved to their places in bf16. The factor 2 ** 126 corrects the
    difference between the exponent biases. This is also right for the only subnormal number of
    E2M1.
    """
    codes = codes.to(tl.int16)
    bits = ((codes & 7) << 6) | ((codes & 8) << 12)
    return bits.to(tl.bfloat16, bitcast=True) * tl.full((1,), 2.0**126, tl.bfloat16)


@triton.jit
def e2m1_number(codes, DTYPE: tl.constexpr):
    """Converts E2M1 codes (int16) to 16-bit floats, exactly, as in `e2m1_value`."""
    if tl.bfloat16 == DTYPE:
        bits = ((codes & 7) << 6) | ((codes & 8) << 12)
        return bits.to(DTYPE, bitcast=True) * 2.0**126
    else:
        bits = ((codes & 7) << 9) | ((codes & 8) << 12)
        return bits.to(DTYPE, bitcast=True) * 2.0**14


@triton.jit
def e2m1_pair(words, position: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the E2M1 codes at `position` and `position` + 4 of each word, as 16-bit floats in the
    two halves of a word.

    The results are exact, except for a factor of 2 ** -126 in bf16 or 2 ** -14 in fp16. Exponent
    and mantissa are moved to their places in DTYPE, for both codes at once. This is also right for
    the only subnormal number of E2M1.
    """
    if tl.bfloat16 == DTYPE:
        # Multiply by a constant to move the sign and the other bits to their places, and remove the
        # bits next to them by a mask. This takes one instruction less than shifts would, and the
        # multiplier is less busy than the unit that shifts.
        if position >= 2:
            words = words >> 8
        if position % 2 == 0:
            both = (words & 0x000F000F) * ((1 << 12) + (1 << 6))
        else:
            both = (words & 0x00F000F0) * ((1 << 8) + (1 << 2))
        both &= -0x7E3F7E40
    else:
        top = words << (12 - 4 * position)
        both = ((top >> 3) & 0x0E000E00) | (top & -0x7FFF8000)
    return both


@triton.jit
def halves_of(pair, DTYPE: tl.constexpr):
    """Returns the two numbers of each word, along a new last axis."""
    low = pair.to(tl.int16).to(DTYPE, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def e8m0_value(codes):
    """Converts e8m0 codes in integers to fp32: 2 ** (code - 127), and NaN for 255."""
    # Code 0 stands for 2 ** -127, which is a subnormal number. Code 255 stands for NaN. If it were
    # shifted like the other codes, it would be infinity.
    bits = tl.where(codes == 0, 0x00400000, codes << 23)
    bits = tl.where(codes == 255, 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_value(stored):
    """Converts loaded scales to fp32. Bytes are e8m0."""
    if stored.dtype == tl.uint8:
        return e8m0_value(stored.to(tl.int32))
    else:
        return stored.to(tl.float32)


@triton.jit
def unpack_codes(packed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Unpacks bytes [ROWS, COLUMNS / 2] to codes [ROWS, COLUMNS], the low nibble first."""
    return tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, COLUMNS))


@triton.jit
def dequantize_nvfp4(packed, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decodes bytes [ROWS, COLUMNS / 2] with e4m3 scales [ROWS, COLUMNS / 16] to bf16 [ROWS,
    COLUMNS].

    The result is exact, because it has 2 + 4 significant bits. The sign of a scale is ignored,
    because the tensor core ignores it too.
    """
    values = e2m1_value(unpack_codes(packed, ROWS, COLUMNS))
    factor = tl.abs(scales.to(tl.float32)).to(tl.bfloat16)
    blocks = tl.reshape(values, (ROWS, COLUMNS // 16, 16)) * factor[:, :, None]
    return tl.reshape(blocks, (ROWS, COLUMNS))


@triton.jit
def scale_tile(scale_desc, batch, row_block, column_block, ROW_BLOCKS: tl.constexpr,
               COLUMN_BLOCKS: tl.constexpr):  # fmt: skip
    """Loads scales [128 * ROW_BLOCKS, 4 * COLUMN_BLOCKS] from the 128x4 layout.

    scale_desc: a descriptor of [batch, row blocks, column blocks, 2, 256], in which a block of the
    layout is two rows of 256 bytes. In this form, scales are copied to tensor memory without
    passing through registers.
    """
    raw = scale_desc.load([batch, row_block, column_block, 0, 0])
    atoms = tl.reshape(raw, (ROW_BLOCKS, COLUMN_BLOCKS, 32, 4, 4))
    rows = tl.trans(atoms, 0, 3, 2, 1, 4)
    return tl.reshape(rows, (128 * ROW_BLOCKS, 4 * COLUMN_BLOCKS))


@triton.jit
def scale_rows(scales_ptr, rows, row_mask, first_column, COLUMN_BLOCKS_IN_ALL: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Loads scales [len(rows), COLUMNS] of any rows from the 128x4 layout, by pointers."""
    columns = first_column + tl.arange(0, COLUMNS)
    within = rows % 128
    blocks = (rows // 128)[:, None] * COLUMN_BLOCKS_IN_ALL + (columns // 4)[None, :]
    place = (within % 32 * 16 + within // 32 * 4)[:, None] + (columns % 4)[None, :]
    mask = row_mask[:, None] & (columns < 4 * COLUMN_BLOCKS_IN_ALL)[None, :]
    return tl.load(scales_ptr + blocks * 512 + place, mask=mask, other=0.0)
