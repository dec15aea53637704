"""Looks up the numbers of 4-bit codes in a table of 16 numbers, in registers."""

import triton
import triton.language as tl


@triton.jit
def chosen_bytes(low, high, selectors):
    """Returns four bytes for each pair of words.

    Each of the low four nibbles of `selectors` holds the number (0 to 7) of one of the eight bytes
    of a pair of words. If 8 is added to the number, the result is the top bit of that byte,
    repeated eight times.
    """
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selectors], tl.int32, True, 1
    )


@triton.jit
def four_bytes(words, SECOND: tl.constexpr, TABLE: tl.constexpr, FIRST: tl.constexpr):
    """Returns, for each of four codes, one byte of the number that the code stands for. The codes
    are in the low half of int32 words, or in the high half if SECOND. TABLE holds these bytes of
    the 16 numbers, from word FIRST on."""
    selectors = ((words >> 16) if SECOND else words) & 0x7777
    is_high = chosen_bytes(words, words << 4, 0xBFAE if SECOND else 0x9D8C)
    low = chosen_bytes(TABLE[FIRST], TABLE[FIRST + 1], selectors)
    high = chosen_bytes(TABLE[FIRST + 2], TABLE[FIRST + 3], selectors)
    return low ^ ((low ^ high) & is_high)


@triton.jit
def table_pair(
    words, byte: tl.constexpr, REVERSED: tl.constexpr, DTYPE: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """Returns the numbers that the two codes in a byte of int32 words stand for, as 16-bit floats
    in the two halves of a word. The first number belongs to the low code or, if REVERSED, to the
    high code.

    TABLE: the result of `tilewright.codegen.formats.table_words`. Its last numbers are the factors
    by which the results must be multiplied.
    """
    FIRST: tl.constexpr = 0 if tl.bfloat16 == DTYPE else 8
    low = four_bytes(words, byte >= 2, TABLE, FIRST)
    high = four_bytes(words, byte >= 2, TABLE, FIRST + 4)
    PLACES: tl.constexpr = 0x4051 if REVERSED else 0x5140
    return chosen_bytes(low, high, PLACES + 0x2222 * (byte % 2))


@triton.jit
def table_number(codes, TABLE: tl.constexpr):
    """Returns the fp32 numbers that codes of any integer type stand for. TABLE: the 16 numbers."""
    values = codes.to(tl.float32) * 0.0
    for code in tl.static_range(16):
        values = tl.where(codes == code, TABLE[code], values)
    return values
