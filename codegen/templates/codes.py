"""Decodes words of 4- and 8-bit codes to operands of the tensor cores, and applies scales and
zeros."""

import triton
import triton.language as tl

from tilewright.codegen.templates.fp4 import e2m1_number, e2m1_pair, e8m0_value, halves_of
from tilewright.codegen.templates.parts import part_of
from tilewright.codegen.templates.tables import table_pair


@triton.jit
def nibble(words, position: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Returns (4-bit code at `position` of each word) - OFFSET, exactly."""
    code = ((words >> (4 * position)) & 0xF).to(tl.int16)
    # Write the code to the last bits of the mantissa of 128 (bf16) or 1024 (fp16).
    if tl.bfloat16 == DTYPE:
        return (code | 0x4300).to(DTYPE, bitcast=True) - (128.0 + OFFSET)
    else:
        return (code | 0x6400).to(DTYPE, bitcast=True) - (1024.0 + OFFSET)


@triton.jit
def code_unit(DTYPE: tl.constexpr):
    """Returns the factor by which the results of `nibble_pair` must be multiplied."""
    return 64.0 if tl.bfloat16 == DTYPE else 512.0


@triton.jit
def nibble_pair(words, position: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the codes at `position` and `position` + 4 of each word, along a new last axis of two
    elements.

    The values are codes minus OFFSET, divided by `code_unit`. One mask leaves both codes in one
    register, as the tensor core needs them. Read as 16-bit floats, these low bits are subnormal
    numbers, which one fused multiply-add converts to the values.
    """
    BIGGEST: tl.constexpr = 2.0**127 if tl.bfloat16 == DTYPE else 2.0**15
    UNIT: tl.constexpr = 1.0 / code_unit(DTYPE)
    both = (words >> (4 * position)) & 0x000F000F
    if position == 3:
        # Set one more bit. Without it, the compiler would simplify the mask of the last bits and
        # use two registers.
        both |= 0x40004000
    low = both.to(tl.int16).to(DTYPE, bitcast=True)
    high = (both >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    if position == 3:
        return tl.join(low, high) - (2.0 + OFFSET * UNIT)
    else:
        return tl.join(low, high) * BIGGEST - OFFSET * UNIT


@triton.jit
def number_at(
    words, position: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr, NUMBER: tl.constexpr
):  # fmt: skip
    """Returns the number that the 4-bit code at `position` of each byte stands for, divided by
    `number_unit` (see `decoded`)."""
    if NUMBER == "":
        return nibble(words, position, OFFSET, DTYPE)
    elif NUMBER == "e2m1":
        return e2m1_number(((words >> (4 * position)) & 0xF).to(tl.int16), DTYPE)
    else:
        both = table_pair(words.to(tl.int32), 0, False, DTYPE, NUMBER)
        return (both >> (16 * position)).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def number_pair(
    words, position: tl.constexpr, REVERSED: tl.constexpr, OFFSET: tl.constexpr,
    DTYPE: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Returns the numbers that two codes of each word stand for, divided by `number_unit`, along a
    new last axis. The codes are at `position` and `position` + 4 or, if there is a table, in byte
    `position`."""
    if NUMBER == "":
        return nibble_pair(words, position, OFFSET, DTYPE)
    elif NUMBER == "e2m1":
        LOST: tl.constexpr = 2.0**126 if tl.bfloat16 == DTYPE else 2.0**14
        return halves_of(e2m1_pair(words, position, DTYPE), DTYPE) * LOST
    else:
        pair = table_pair(words, position, REVERSED, DTYPE, NUMBER)
        return halves_of(pair, DTYPE)


@triton.jit
def number_unit(
    DTYPE: tl.constexpr, PER: tl.constexpr, PACKED_ROWS: tl.constexpr, NUMBER: tl.constexpr,
    SCALED: tl.constexpr = False,
):  # fmt: skip
    """Returns the factor by which the results of `decoded` must be multiplied. If SCALED, this is
    the factor for the results of `scaled_numbers`."""
    if SCALED:
        return 128.0
    elif NUMBER == "e2m1":
        return 1.0
    elif NUMBER != "":
        return NUMBER[16] if tl.bfloat16 == DTYPE else NUMBER[17]
    elif PER == 8 and not PACKED_ROWS:
        return code_unit(DTYPE)
    else:
        return 1.0


@triton.jit
def widened(codes, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Converts int8, uint8 or fp8 codes minus OFFSET to DTYPE, exactly."""
    if codes.dtype == tl.float8e4nv and tl.bfloat16 == DTYPE:
        # Convert fp8 in steps, because a direct conversion takes four times as long on SM90.
        return codes.to(tl.float16).to(tl.float32).to(DTYPE)
    elif OFFSET != 0:
        return codes.to(DTYPE) - OFFSET
    else:
        return codes.to(DTYPE)


@triton.jit
def codes_in_order(
    words, DTYPE: tl.constexpr, PER: tl.constexpr, REVERSED: tl.constexpr,
    OFFSET: tl.constexpr, GROUPS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Decodes words [rows, columns] to [rows, PER * columns], with K in the order of `x_in_order`.

    PER: the number of codes of a word along K: 1, 2 (uint8) or 8 (int32). REVERSED: whether the
    high nibble of a byte is its first code.
    """
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1]
    if PER == 8:
        # Write each call as a separate statement, because the emitter requires that for inline
        # instructions.
        pair = number_pair(words, 0, REVERSED, OFFSET, DTYPE, NUMBER)
        second_pair = number_pair(words, 1, REVERSED, OFFSET, DTYPE, NUMBER)
        even = tl.join(pair, second_pair)
        pair = number_pair(words, 2, REVERSED, OFFSET, DTYPE, NUMBER)
        second_pair = number_pair(words, 3, REVERSED, OFFSET, DTYPE, NUMBER)
        codes = pairs_in_order(even, tl.join(pair, second_pair), GROUPS)
    else:
        if PER == 2:
            first = number_at(words, 1 if REVERSED else 0, OFFSET, DTYPE, NUMBER)
            second = number_at(words, 0 if REVERSED else 1, OFFSET, DTYPE, NUMBER)
            codes = tl.join(first, second)
        else:
            codes = widened(words, OFFSET, DTYPE)
        codes = tl.reshape(codes, (ROWS, GROUPS, 4, PER * COLUMNS // (8 * GROUPS), 2))
        codes = tl.permute(codes, (0, 1, 3, 2, 4))
    return tl.reshape(codes, (ROWS, PER * COLUMNS))


@triton.jit
def pairs_in_order(even, odd, GROUPS: tl.constexpr):
    """Joins pairs [rows, words, 2, 2] to numbers in the order of `x_in_order`, eight for each word.
    even: the pairs at places 0 and 4 and at places 1 and 5 of each word. odd: the pairs at places 2
    and 6 and at places 3 and 7."""
    ROWS: tl.constexpr = even.shape[0]
    WORDS: tl.constexpr = even.shape[1]
    pairs = tl.reshape(tl.join(even, odd), (ROWS, GROUPS, 4, WORDS // (4 * GROUPS), 2, 2, 2))
    return tl.permute(pairs, (0, 1, 3, 6, 5, 2, 4))


@triton.jit
def scaled_numbers(words, scale, DTYPE: tl.constexpr):
    """Returns E2M1 codes of int32 words [rows, words] times e4m3 scales [rows, groups], divided by
    `number_unit`. The result is [rows, 8 * words], with K in the order of `x_in_order` with one
    group.

    The products are exact, because they have 2 + 4 significant bits. The numbers of `e2m1_pair` are
    too small by a factor of 2 ** 126 (bf16) or 2 ** 14 (fp16). The scales are multiplied by this
    factor divided by 2 ** 7, because the whole factor would exceed their range.
    """
    LOST: tl.constexpr = 2.0**119 if tl.bfloat16 == DTYPE else 2.0**7
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = scale.shape[1]
    factor = (scale.to(tl.float16).to(tl.float32) * LOST).to(DTYPE)
    factor = tl.broadcast_to(factor[:, :, None], (ROWS, GROUPS, WORDS // GROUPS))
    factor = tl.reshape(factor, (ROWS, WORDS))[:, :, None]
    # With the addition of 0.0, both numbers of a pair take one fused multiply-add. With plain
    # products, ptxas would swap the two numbers and swap them back.
    first = halves_of(e2m1_pair(words, 0, DTYPE), DTYPE) * factor + 0.0
    second = halves_of(e2m1_pair(words, 1, DTYPE), DTYPE) * factor + 0.0
    third = halves_of(e2m1_pair(words, 2, DTYPE), DTYPE) * factor + 0.0
    fourth = halves_of(e2m1_pair(words, 3, DTYPE), DTYPE) * factor + 0.0
    numbers = pairs_in_order(tl.join(first, second), tl.join(third, fourth), 1)
    return tl.reshape(numbers, (ROWS, 8 * WORDS))


@triton.jit
def x_in_order(x, PER: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr, GROUPS: tl.constexpr):
    """Returns x [tokens, K] with K permuted to the order of `codes_in_order`.

    INTERLEAVED_NIBBLES: whether neighbouring codes of a word of eight are decoded together. They
    are decoded together for tables, and for AWQ, whose words have the even codes in the low half.
    If not, codes whose places differ by four are decoded together.
    """
    TOKENS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if PER == 8:
        WORDS: tl.constexpr = COLUMNS // (32 * GROUPS)
        if INTERLEAVED_NIBBLES:
            x = tl.reshape(x, (TOKENS, GROUPS, 4, WORDS, 4, 2))
            x = tl.permute(x, (0, 1, 3, 4, 2, 5))
        else:
            x = tl.reshape(x, (TOKENS, GROUPS, 4, WORDS, 2, 4))
            x = tl.permute(x, (0, 1, 3, 5, 2, 4))
    else:
        x = tl.reshape(x, (TOKENS, GROUPS, 4, COLUMNS // (8 * GROUPS), 2))
        x = tl.permute(x, (0, 1, 3, 2, 4))
    return tl.reshape(x, (TOKENS, COLUMNS))


@triton.jit
def codes_of_rows(
    words, DTYPE: tl.constexpr, PER: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr,
    REVERSED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Decodes words [rows / PER, K], packed along the rows, to [rows, K]."""
    ROWS: tl.constexpr = PER * words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1]
    if PER == 2:
        first = nibble(words, 1 if REVERSED else 0, OFFSET, DTYPE)
        second = nibble(words, 0 if REVERSED else 1, OFFSET, DTYPE)
        codes = tl.permute(tl.join(first, second), (0, 2, 1))
    else:
        # Perform one join for each bit of a row's place in the word, starting with the lowest bit.
        STEP: tl.constexpr = 4 if INTERLEAVED_NIBBLES else 1
        NEXT: tl.constexpr = 1 if INTERLEAVED_NIBBLES else 2
        LAST: tl.constexpr = 2 if INTERLEAVED_NIBBLES else 4
        low = tl.join(
            tl.join(nibble(words, 0, OFFSET, DTYPE), nibble(words, STEP, OFFSET, DTYPE)),
            tl.join(nibble(words, NEXT, OFFSET, DTYPE), nibble(words, NEXT + STEP, OFFSET, DTYPE)),
        )
        high = tl.join(
            tl.join(nibble(words, LAST, OFFSET, DTYPE), nibble(words, LAST + STEP, OFFSET, DTYPE)),
            tl.join(
                nibble(words, LAST + NEXT, OFFSET, DTYPE),
                nibble(words, LAST + NEXT + STEP, OFFSET, DTYPE),
            ),
        )
        codes = tl.permute(tl.join(low, high), (0, 4, 3, 2, 1))
    return tl.reshape(codes, (ROWS, COLUMNS))


@triton.jit
def decoded(
    words, DTYPE: tl.constexpr, PER: tl.constexpr, PACKED_ROWS: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr, REVERSED: tl.constexpr, OFFSET: tl.constexpr,
    GROUPS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Decodes words to codes minus OFFSET. If NUMBER is "e2m1" or a table, decodes them to the
    numbers that the codes stand for. K is in the order of `x_in_order`, unless PACKED_ROWS."""
    if PACKED_ROWS:
        return codes_of_rows(words, DTYPE, PER, INTERLEAVED_NIBBLES, REVERSED, OFFSET)
    else:
        return codes_in_order(words, DTYPE, PER, REVERSED, OFFSET, GROUPS, NUMBER)


@triton.jit
def load_blocks(
    pointer, rows, row_mask, columns, row_stride, column_stride,
    PACKED: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Loads scales or zeros [rows, columns] as fp32, with 0 from column BOUND on.

    PACKED: whether a word holds the values of eight rows.
    """
    mask = row_mask[:, None] & (columns < BOUND)[None, :]
    offsets = columns[None, :] * column_stride
    if PACKED:
        words = tl.load(pointer + (rows // 8 * row_stride)[:, None] + offsets, mask=mask, other=0)
        place = rows % 8
        if INTERLEAVED_NIBBLES:
            place = place % 2 * 4 + place // 2
        values = (words >> (4 * place)[:, None]) & 0xF
    else:
        values = tl.load(pointer + (rows * row_stride)[:, None] + offsets, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def load_scales(
    scale_ptr, zero_ptr, rows, row_mask, blocks, strides,
    ZERO_TENSOR: tl.constexpr, PACKED_ZEROS: tl.constexpr, INTERLEAVED_NIBBLES: tl.constexpr,
    BOUND: tl.constexpr,
):  # fmt: skip
    """Loads (scales, zeros) [rows, blocks] of a weight. If there is no zero tensor, returns the
    scales in place of the zeros.

    strides: the strides of (scale row, scale column, zero row, zero column). Scales that are bytes
    are e8m0.
    """
    if scale_ptr.dtype.element_ty == tl.uint8:
        mask = row_mask[:, None] & (blocks < BOUND)[None, :]
        places = (rows * strides[0])[:, None] + blocks[None, :] * strides[1]
        scale = e8m0_value(tl.load(scale_ptr + places, mask=mask, other=0).to(tl.int32))
    else:
        scale = load_blocks(
            scale_ptr, rows, row_mask, blocks, strides[0], strides[1], False, False, BOUND
        )
    zero = scale
    if ZERO_TENSOR:
        zero = load_blocks(
            zero_ptr, rows, row_mask, blocks, strides[2], strides[3],
            PACKED_ZEROS, INTERLEAVED_NIBBLES, BOUND,
        )  # fmt: skip
    return scale, zero


@triton.jit
def add_scaled_groups(
    total, codes, x, scale, zero, x_scale,
    PER: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr, ZERO_TENSOR: tl.constexpr,
    ZERO_OFFSET: tl.constexpr, X_SCALED: tl.constexpr, UNIT: tl.constexpr,
    ADDED_ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns total [rows, tokens] plus (codes - zero) * scale times x [tokens, K]. The columns are
    in GROUPS groups.

    Args:
        scale, zero: fp32 [rows, GROUPS]. If ZERO_TENSOR, zero is added to ZERO_OFFSET.
        x_scale: [1, tokens].
        PER: The number of codes of a word.
        UNIT: The factor by which the codes must be multiplied.
        ADDED_ZEROS: Whether the weight is (codes - ZERO_OFFSET) * scale + zero. There can be no
            x_scale then.
    """
    # In an operand that is joined from bytes, Triton gives 8 columns (kWidth 8, mma.sync) to each
    # of the four threads that share a row. If a product has only 16 columns, two of the threads
    # repeat the columns of the other two: half of the columns are counted twice, and the other half
    # is not counted (Triton 3.6 to 3.9). Therefore groups of 16 columns are multiplied in pairs,
    # and x is zero in the other group.
    PAIRED: tl.constexpr = PER == 2 and codes.shape[1] == 16 * GROUPS
    PARTS: tl.constexpr = GROUPS // 2 if PAIRED else GROUPS
    ROWS: tl.constexpr = codes.shape[0]
    WIDTH: tl.constexpr = codes.shape[1] // PARTS
    for group in tl.static_range(GROUPS):
        part: tl.constexpr = group // 2 if PAIRED else group
        x_part = part_of(x, part, PARTS)
        if PAIRED:
            own = tl.arange(0, WIDTH) // 16 == group % 2
            x_part = tl.where(own[None, :], x_part, 0.0)
        product = tl.dot(part_of(codes, part, PARTS), x_part.T)
        if ZERO_TENSOR and ADDED_ZEROS:
            ones = tl.full((ROWS, WIDTH), 1.0, x.dtype)
            added = part_of(zero, group, GROUPS)
            if ZERO_OFFSET != 0:
                added -= ZERO_OFFSET * part_of(scale, group, GROUPS)
            total += added * tl.dot(ones, x_part.T)
        elif HAS_ZEROS:
            ones = tl.full((ROWS, WIDTH), 1.0, x.dtype)
            zeros = ZERO_OFFSET
            if ZERO_TENSOR:
                zeros = part_of(zero, group, GROUPS) + ZERO_OFFSET
            product -= zeros / UNIT * tl.dot(ones, x_part.T)
        if X_SCALED:
            product *= x_scale
        total += product * (part_of(scale, group, GROUPS) * UNIT)
    return total


@triton.jit
def scaled_whole(
    product, sums, scale, zero, x_scale,
    ZERO_TENSOR: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    X_SCALED: tl.constexpr, UNIT: tl.constexpr, ADDED_ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns (product - zero * sums) * scale. Scales and zeros are [rows, 1], one for each row.
    `add_scaled_groups` explains the other arguments."""
    if ZERO_OFFSET != 0 or (ZERO_TENSOR and not ADDED_ZEROS):
        zeros = ZERO_OFFSET
        if ZERO_TENSOR and not ADDED_ZEROS:
            zeros = zero + ZERO_OFFSET
        product -= zeros / UNIT * sums
    if X_SCALED:
        product *= x_scale
    if ZERO_TENSOR and ADDED_ZEROS:
        return product * (scale * UNIT) + zero * sums
    else:
        return product * (scale * UNIT)
