"""Decodes tiles of quantised expert weights for the tensor core."""

import triton
import triton.language as tl

from tilewright.codegen.templates.codes import nibble_pair
from tilewright.codegen.templates.fp4 import (
    e2m1_pair,
    e2m1_value,
    e8m0_value,
    halves_of,
    unpack_codes,
)


@triton.jit
def block_scales(
    scale_ptr, rows, row_mask, first_k, K: tl.constexpr, COLUMNS: tl.constexpr,
    STRIDES: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Loads the scales of weight rows, starting at column first_k, as fp32 [rows, COLUMNS /
    BLOCK[1]].

    BLOCK: how many (rows, columns) share a scale. COLUMNS is a multiple of BLOCK[1] or divides it.
    Scales that are bytes are e8m0.
    """
    WIDTH: tl.constexpr = max(COLUMNS // BLOCK[1], 1)
    columns = first_k // BLOCK[1] + tl.arange(0, WIDTH)
    places = (rows // BLOCK[0])[:, None] * STRIDES[1] + columns[None, :] * STRIDES[2]
    mask = row_mask[:, None] & (columns * BLOCK[1] < K)[None, :]
    if scale_ptr.dtype.element_ty == tl.uint8:
        return e8m0_value(tl.load(scale_ptr + places, mask=mask, other=0).to(tl.int32))
    values = tl.load(scale_ptr + places, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def dequantize_tile(
    stored, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Decodes stored codes, with their scales, to weights [ROWS, COLUMNS] of DTYPE.

    This is exact for NVFP4 and MXFP4. For int4 and fp8, the product with the scale is rounded once.
    MXFP4 numbers may be beyond the range of fp16. Their weights are bf16 if DTYPE is fp16.
    """
    WIDE: tl.constexpr = FORMAT == "mxfp4" and tl.float16 == DTYPE
    if FORMAT == "fp8":
        values = stored.to(tl.float32)
    elif FORMAT == "int4":
        values = unpack_codes(stored, ROWS, COLUMNS).to(tl.float32) - 8.0
    else:
        values = e2m1_value(unpack_codes(stored, ROWS, COLUMNS)).to(tl.float32)
    GROUPS: tl.constexpr = scales.shape[1]
    blocks = tl.reshape(values, (ROWS, GROUPS, COLUMNS // GROUPS)) * scales[:, :, None]
    return tl.reshape(blocks, (ROWS, COLUMNS)).to(tl.bfloat16 if WIDE else DTYPE)


@triton.jit
def times(pair, factor):
    """Multiplies words that hold two bf16 numbers each. If the numbers were multiplied one by one,
    the compiler would also combine two products in one instruction. It would combine them in
    another order, however, and need two more instructions to exchange the halves."""
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [pair, factor], tl.int32, True, 1
    )


@triton.jit
def scale_codes(scales, COUNT: tl.constexpr):
    """Returns integers [rows, 4, COUNT]. Their low bytes are the COUNT low bytes of integers [rows,
    4]. The other bits are not cleared."""
    codes = scales.to(tl.int32)
    if COUNT == 4:
        pair = tl.join(codes, codes >> 16)
        codes = tl.join(pair, pair >> 8)
    elif COUNT == 2:
        codes = tl.join(codes, codes >> 8)
    return codes


@triton.jit
def word_scales(scales, WORDS: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the scale of each word, as fp32 [rows, 4, WORDS]. scales: integers [rows, 4] that
    hold one-byte scales."""
    ROWS: tl.constexpr = scales.shape[0]
    COUNT: tl.constexpr = WORDS // 2 if FORMAT == "nvfp4" else WORDS // 4
    codes = scale_codes(scales, COUNT)
    if FORMAT == "nvfp4":
        # The shifted bits are those of an fp32 number that is too small by a factor of 2 ** 120.
        # The sign is moved separately.
        magnitude = codes & 0x7F
        bits = (magnitude << 20) + ((codes & 0x80) << 24)
        bits = tl.where(magnitude == 0x7F, 0x7FFFFFFF, bits)
        values = bits.to(tl.float32, bitcast=True) * 2.0**120
    else:
        values = e8m0_value(codes & 0xFF)
    REPEAT: tl.constexpr = WORDS // COUNT
    values = tl.broadcast_to(tl.reshape(values, (ROWS, 4, COUNT, 1)), (ROWS, 4, COUNT, REPEAT))
    return tl.reshape(values, (ROWS, 4, WORDS))


@triton.jit
def joined_in_order(pairs, ROWS: tl.constexpr, WORDS: tl.constexpr, RUN: tl.constexpr,
                    SWAPPED: tl.constexpr):  # fmt: skip
    """Reshapes codes [ROWS, 4, WORDS, 2, 2, 2] to [ROWS, K], or to [K, ROWS] if not SWAPPED. K is
    in the order of `rows_in_order`.

    The last three axes of the codes are the half of the word, the low bit of the place in that
    half, and its high bit.
    """
    K: tl.constexpr = 32 * WORDS
    if SWAPPED:
        order: tl.constexpr = (
            (0, 2, 5, 4, 1, 3) if RUN == 2 else (0, 2, 5, 1, 4, 3) if RUN == 4
            else (0, 2, 1, 5, 4, 3)
        )  # fmt: skip
        codes = tl.reshape(tl.permute(pairs, order), (ROWS, K))
    else:
        turned: tl.constexpr = (
            (2, 5, 4, 1, 3, 0) if RUN == 2 else (2, 5, 1, 4, 3, 0) if RUN == 4
            else (2, 1, 5, 4, 3, 0)
        )  # fmt: skip
        codes = tl.reshape(tl.permute(pairs, turned), (K, ROWS))
    return codes


@triton.jit
def rows_in_order(x, RUN: tl.constexpr):
    """Returns x [tokens, K], with K permuted to the order in which the tensor core's threads hold
    words of eight codes.

    RUN: how many neighbouring columns of an operand a thread holds (2, 4 or 8). Four threads share
    a row, and each of them has a quarter of the row's words.
    """
    TOKENS: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    order: tl.constexpr = (
        (0, 2, 4, 5, 1, 3) if RUN == 2 else (0, 2, 4, 1, 5, 3) if RUN == 4
        else (0, 2, 1, 4, 5, 3)
    )  # fmt: skip
    x = tl.reshape(x, (TOKENS, 4, K // 32, 2, 2, 2))
    return tl.reshape(tl.permute(x, order), (TOKENS, K))


@triton.jit
def place_in_order(columns, STEP: tl.constexpr, RUN: tl.constexpr):
    """Returns the columns to which `rows_in_order` moves the given columns, if it permutes steps of
    STEP columns."""
    column = columns % STEP
    quarter = column // (STEP // 4)
    word = column // 8 % (STEP // 32)
    half = column // 4 % 2
    high = column // 2 % 2
    low = column % 2
    if RUN == 2:
        place = high * 16 + low * 8 + quarter * 2 + half
    elif RUN == 4:
        place = high * 16 + quarter * 4 + low * 2 + half
    else:
        place = quarter * 8 + high * 4 + low * 2 + half
    return columns - column + word * 32 + place


@triton.jit
def e2m1_unit(DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the factor by which the results of `e2m1_codes` must be multiplied."""
    return 256.0 if FORMAT == "nvfp4" and tl.bfloat16 == DTYPE else 1.0


@triton.jit
def e4m3_pairs(scales, WORDS: tl.constexpr):
    """Returns the e4m3 scale of each word, as two equal bf16 numbers in an integer, [rows, 4 *
    WORDS].

    scales: as in `word_scales`. The results are multiplied by 2 ** 118. Together with the factor 2
    ** -126 of `e2m1_pair`, the products are the weights divided by `e2m1_unit`.
    """
    ROWS: tl.constexpr = scales.shape[0]
    COUNT: tl.constexpr = WORDS // 2
    # The shifted bits are those of a bf16 number that is too small by a factor of 2 ** 120. The
    # sign is moved separately.
    codes = scale_codes(scales, COUNT)
    magnitude = codes & 0x7F
    pairs = magnitude * 0x00100010 + (codes & 0x80) * 0x01000100
    pairs = tl.where(magnitude == 0x7F, 0x7FFF7FFF, pairs)
    power = tl.full(pairs.shape, 0x7B007B00, tl.int32)  # 2 ** 119
    pairs = times(pairs, power)
    pairs = times(pairs, power)
    pairs = tl.broadcast_to(tl.reshape(pairs, (ROWS, 4, COUNT, 1)), (ROWS, 4, COUNT, 2))
    return tl.reshape(pairs, (ROWS, 4 * WORDS))


@triton.jit
def e2m1_codes(words, scales, DTYPE: tl.constexpr, FORMAT: tl.constexpr, RUN: tl.constexpr,
               SWAPPED: tl.constexpr):  # fmt: skip
    """Decodes words [rows, K / 8] of E2M1 codes and multiplies them by their scales, divided by
    `e2m1_unit`. The result has the shape and order of `joined_in_order`.

    scales: as in `word_scales`. The result is exact, unless a scale is outside of DTYPE's range.
    """
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1] // 4
    first = e2m1_pair(words, 0, DTYPE)
    second = e2m1_pair(words, 1, DTYPE)
    third = e2m1_pair(words, 2, DTYPE)
    fourth = e2m1_pair(words, 3, DTYPE)
    if FORMAT == "nvfp4" and tl.bfloat16 == DTYPE:
        factor = e4m3_pairs(scales, WORDS)
        first = times(first, factor)
        second = times(second, factor)
        third = times(third, factor)
        fourth = times(fourth, factor)
    even = tl.join(halves_of(first, DTYPE), halves_of(second, DTYPE))
    odd = tl.join(halves_of(third, DTYPE), halves_of(fourth, DTYPE))
    codes = tl.reshape(tl.join(even, odd), (ROWS, 4, WORDS, 2, 2, 2))
    if not (FORMAT == "nvfp4" and tl.bfloat16 == DTYPE):
        # Multiply by the factor first and then by the scale, so that the two numbers of a register
        # stay in the same register.
        codes *= tl.full((1,), 2.0**126 if tl.bfloat16 == DTYPE else 2.0**14, DTYPE)
        factor = word_scales(scales, WORDS, FORMAT).to(DTYPE)
        codes *= tl.reshape(factor, (ROWS, 4, WORDS, 1, 1, 1))
    return joined_in_order(codes, ROWS, WORDS, RUN, SWAPPED)


@triton.jit
def int4_codes(words, DTYPE: tl.constexpr, RUN: tl.constexpr, SWAPPED: tl.constexpr):
    """Decodes words [rows, K / 8] of int4 codes to codes minus 8, divided by `code_unit`. The
    result has the shape and order of `joined_in_order`."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1] // 4
    even = tl.join(nibble_pair(words, 0, 8.0, DTYPE), nibble_pair(words, 1, 8.0, DTYPE))
    odd = tl.join(nibble_pair(words, 2, 8.0, DTYPE), nibble_pair(words, 3, 8.0, DTYPE))
    codes = tl.reshape(tl.join(even, odd), (ROWS, 4, WORDS, 2, 2, 2))
    return joined_in_order(codes, ROWS, WORDS, RUN, SWAPPED)
