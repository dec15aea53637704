"""Tiles of quantised expert weights, as the numbers that the tensor core multiplies."""

import triton
import triton.language as tl

from tilewright.codegen.templates.fp4_tiles import e2m1_value, unpack_codes


@triton.jit
def block_scales(
    scale_ptr, rows, row_mask, first_k, K: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STRIDES: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """fp32 scales [ROWS, COLUMNS / BLOCK[1]] of weight rows from k = first_k on.

    BLOCK: (rows, columns) that share a scale; COLUMNS is a multiple of BLOCK[1] or divides it.
    e8m0 becomes the power of two that it stands for.
    """
    WIDTH: tl.constexpr = max(COLUMNS // BLOCK[1], 1)
    columns = first_k // BLOCK[1] + tl.arange(0, WIDTH)
    places = (rows // BLOCK[0])[:, None] * STRIDES[1] + columns[None, :] * STRIDES[2]
    mask = row_mask[:, None] & (columns * BLOCK[1] < K)[None, :]
    if FORMAT == "mxfp4":
        # 2 ** -127, code 0, has no exponent bits of its own.
        exponent = tl.load(scale_ptr + places, mask=mask, other=0).to(tl.int32)
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        return bits.to(tl.float32, bitcast=True)
    values = tl.load(scale_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if FORMAT == "nvfp4":
        values = tl.abs(values)
    return values


@triton.jit
def dequantize_tile(
    stored, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, COLUMNS] of DTYPE out of their storage and their scales.

    NVFP4 and MXFP4 are exact; int4 and fp8 are rounded once, after the product with the scale.
    """
    if FORMAT == "fp8":
        values = stored.to(tl.float32)
    elif FORMAT == "int4":
        values = unpack_codes(stored, ROWS, COLUMNS).to(tl.float32) - 8.0
    else:
        values = e2m1_value(unpack_codes(stored, ROWS, COLUMNS)).to(tl.float32)
    GROUPS: tl.constexpr = scales.shape[1]
    blocks = tl.reshape(values, (ROWS, GROUPS, COLUMNS // GROUPS)) * scales[:, :, None]
    return tl.reshape(blocks, (ROWS, COLUMNS)).to(DTYPE)
