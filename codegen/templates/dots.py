"""Dot products of one row of x with rows of codes, without tensor cores, for few tokens.

A thread multiplies codes in the registers into which it loaded them. Nothing passes through shared
memory, so many small programs keep the memory busy.

4- and 8-bit integers are multiplied as integers, four in each instruction. For this, x is converted
to 23-bit integers, with a power of two for each RUN of words. The conversion is exact for numbers
that are not too small compared with the largest number of their run: at least 2 ** -14 of it for
bfloat16, and 2 ** -11 for float16. Smaller numbers lose fewer bits than they would lose in fp32
sums. A sum of integers is first multiplied by its power of two and then by a scale, because the
product of the sum with a large scale could be infinite. Each integer has three bytes, and one
instruction (`dp4a`) multiplies four bytes by four codes. Codes of floats, and weights that are not
quantised, are multiplied as fp32 numbers.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.tables import chosen_bytes, four_bytes, table_pair


@triton.jit
def byte_dots(codes, x, sums, CODES_SIGNED: tl.constexpr, X_SIGNED: tl.constexpr):
    """Returns sums plus the products of the four bytes of each word of `codes` with the four bytes
    of `x`. All are int32."""
    OF_SIGNED: tl.constexpr = "dp4a.s32.s32 $0, $1, $2, $3;"
    OF_UNSIGNED: tl.constexpr = "dp4a.u32.s32 $0, $1, $2, $3;"
    SIGNED_X: tl.constexpr = OF_SIGNED if CODES_SIGNED else OF_UNSIGNED
    BY_SIGNED: tl.constexpr = "dp4a.s32.u32 $0, $1, $2, $3;"
    BY_UNSIGNED: tl.constexpr = "dp4a.u32.u32 $0, $1, $2, $3;"
    UNSIGNED_X: tl.constexpr = BY_SIGNED if CODES_SIGNED else BY_UNSIGNED
    ASM: tl.constexpr = SIGNED_X if X_SIGNED else UNSIGNED_X
    x = tl.broadcast_to(x[None, :], codes.shape)
    return tl.inline_asm_elementwise(ASM, "=r,r,r,r", [codes, x, sums], tl.int32, True, 1)


@triton.jit
def byte_of_four(first, second, third, fourth, BYTE: tl.constexpr):
    """Returns one word with byte number BYTE of each of four int32 words."""
    low = chosen_bytes(first, second, 0x3340 + 0x11 * BYTE)
    high = chosen_bytes(third, fourth, 0x3340 + 0x11 * BYTE)
    return chosen_bytes(low, high, 0x5410)


@triton.jit
def three_bytes(first, second, third, fourth):
    """Returns three words: byte 0, byte 1 and byte 2 of each of four int32 words."""
    byte0 = byte_of_four(first, second, third, fourth, 0)
    byte1 = byte_of_four(first, second, third, fourth, 1)
    byte2 = byte_of_four(first, second, third, fourth, 2)
    return byte0, byte1, byte2


@triton.jit
def integers_of_x(x, RUN: tl.constexpr):
    """Converts fp32 x [words, columns] to integers. Returns (int32 numbers of at most 2 ** 22, two
    powers of two [words / RUN] by which they have to be multiplied).

    The first power is at most 2 ** 90, so that its product with a sum is finite in fp32. This
    product is also exact. Multiply the product by a scale before you multiply it by the second
    power, which is at least 1. If a number of a run is infinite or NaN, the second power of the run
    is NaN.
    """
    WORDS: tl.constexpr = x.shape[0]
    RUNS: tl.constexpr = WORDS // RUN
    # Compare the bits as integers, because a maximum of floats ignores NaN.
    sizes = tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (RUNS, RUN, x.shape[1]))
    # |x| < 2 ** (exponent - 126). Numbers below 2 ** -104 lose their last bits, and subnormal
    # numbers of fp32 lose all bits.
    exponent = tl.max(tl.max(sizes, axis=2), axis=1) >> 23
    bounded = tl.maximum(exponent, 22)
    up = ((275 - bounded) << 23).to(tl.float32, bitcast=True)
    small = tl.minimum(bounded, 238)
    power = ((small - 21) << 23).to(tl.float32, bitcast=True)
    rest = ((bounded - small + 127) << 23).to(tl.float32, bitcast=True)
    rest = tl.where(exponent == 255, float("nan"), rest)
    up = tl.reshape(tl.broadcast_to(up[:, None], (RUNS, RUN)), (WORDS,))[:, None]
    # Adding 1.5 * 2 ** 23 rounds a number to an integer, because fp32 numbers of this size have no
    # fractional bits.
    wide = x * up + 12582912.0
    return wide.to(tl.int32, bitcast=True) - 0x4B400000, power, rest


@triton.jit
def eight_columns(x):
    """Returns the eight columns of x [words, 8], each [words]."""
    WORDS: tl.constexpr = x.shape[0]
    even, odd = tl.split(tl.reshape(x, (WORDS, 4, 2)))
    first, second = tl.split(tl.reshape(even, (WORDS, 2, 2)))
    x0, x4 = tl.split(first)
    x2, x6 = tl.split(second)
    first, second = tl.split(tl.reshape(odd, (WORDS, 2, 2)))
    x1, x5 = tl.split(first)
    x3, x7 = tl.split(second)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def parts_of_x(
    x, RUN: tl.constexpr, REVERSED: tl.constexpr, INTERLEAVED: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Converts fp32 x [words, PER] to the factors by which `code_sums` multiplies codes. A word of
    nibbles uses 8 numbers of x, and a word of bytes uses 4.

    Returns bytes 0, 1 and 2 of the integers of x that belong to the even nibbles of a word; the
    same three bytes of the integers that belong to the odd nibbles; the sum of the integers of each
    run; and the two powers of each run (`integers_of_x`). Each of the bytes has the shape [words].
    If BYTES, the first group of three bytes belongs to the first four nibbles of a word, and the
    second group to its last four nibbles. For words of bytes, both groups of three bytes are equal.

    REVERSED: whether the high nibble of a byte is its first code. INTERLEAVED: whether words of
    eight codes are in AWQ's order.
    """
    WORDS: tl.constexpr = x.shape[0]
    PER: tl.constexpr = x.shape[1]
    integers, power, rest = integers_of_x(x, RUN)
    total = tl.sum(tl.reshape(tl.sum(integers, axis=1), (WORDS // RUN, RUN)), axis=1)
    if PER == 8:
        x0, x1, x2, x3, x4, x5, x6, x7 = eight_columns(integers)
        if len(BYTES) > 0:
            low0, low1, low2 = three_bytes(x0, x1, x2, x3)
            high0, high1, high2 = three_bytes(x4, x5, x6, x7)
        elif INTERLEAVED:
            low0, low1, low2 = three_bytes(x0, x4, x1, x5)
            high0, high1, high2 = three_bytes(x2, x6, x3, x7)
        elif REVERSED:
            low0, low1, low2 = three_bytes(x1, x3, x5, x7)
            high0, high1, high2 = three_bytes(x0, x2, x4, x6)
        else:
            low0, low1, low2 = three_bytes(x0, x2, x4, x6)
            high0, high1, high2 = three_bytes(x1, x3, x5, x7)
    else:
        first, second = tl.split(tl.reshape(integers, (WORDS, 2, 2)))
        x0, x2 = tl.split(first)
        x1, x3 = tl.split(second)
        low0, low1, low2 = three_bytes(x0, x1, x2, x3)
        high0 = low0
        high1 = low1
        high2 = low2
    return low0, low1, low2, high0, high1, high2, total, power, rest


@triton.jit
def run_sums(dots, RUN: tl.constexpr):
    """Returns the sums of dots [rows, words] over runs of RUN words, as [rows, words / RUN]."""
    if RUN == 1:
        return dots
    else:
        ROWS: tl.constexpr = dots.shape[0]
        return tl.sum(tl.reshape(dots, (ROWS, dots.shape[1] // RUN, RUN)), axis=2)


@triton.jit
def code_sums(
    words, low0, low1, low2, high0, high1, high2, total,
    PER: tl.constexpr, SIGNED: tl.constexpr, ZERO: tl.constexpr, BYTES: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Returns the sums of (code - ZERO) times x's integers over runs, as fp32 [rows, words / RUN].

    Args:
        words: int32 [rows, words] of PER nibbles (8) or bytes (4).
        low0, low1, low2, high0, high1, high2, total: Results of `parts_of_x`.
        BYTES: The numbers that nibbles stand for, as 16 bytes in four words. If BYTES is empty,
            nibbles stand for themselves.
        SIGNED: Whether bytes are signed.
        RUN: The number of words of a run. A run of nibbles has at most four words.
    """
    if len(BYTES) > 0:
        first = four_bytes(words, False, BYTES, 0)
        last = four_bytes(words, True, BYTES, 0)
    elif PER == 8:
        first = words & 0x0F0F0F0F
        last = (words >> 4) & 0x0F0F0F0F
    else:
        first = words
    dots0 = tl.zeros(words.shape, tl.int32)
    dots1 = dots0
    dots2 = dots0
    dots0 = byte_dots(first, low0, dots0, SIGNED, False)
    dots1 = byte_dots(first, low1, dots1, SIGNED, False)
    dots2 = byte_dots(first, low2, dots2, SIGNED, True)
    if PER == 8:
        dots0 = byte_dots(last, high0, dots0, SIGNED, False)
        dots1 = byte_dots(last, high1, dots1, SIGNED, False)
        dots2 = byte_dots(last, high2, dots2, SIGNED, True)
    dots0 = run_sums(dots0, RUN)
    dots1 = run_sums(dots1, RUN)
    dots2 = run_sums(dots2, RUN)
    if PER == 8:
        # The sum of 32 products, each at most 15 * 2 ** 22, is less than 2 ** 31.
        sums = (dots2 << 16) + (dots1 << 8) + dots0
        if ZERO != 0:
            sums -= ZERO * total[None, :]
        return sums.to(tl.float32)
    else:
        sums = dots2.to(tl.float32) * 65536.0 + dots1.to(tl.float32) * 256.0
        sums += dots0.to(tl.float32)
        if ZERO != 0:
            sums -= ZERO * total.to(tl.float32)[None, :]
        return sums


@triton.jit
def half_pair(words, position: tl.constexpr, REVERSED: tl.constexpr, NUMBER: tl.constexpr):
    """Returns the numbers that two codes of each word stand for, divided by `sums_unit`, as the two
    float16 halves of a word. If the codes have a table, these are the codes in byte `position`. For
    float8 (e4m3), these are the first two or the last two codes."""
    if NUMBER == "":
        FIRST: tl.constexpr = "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, a;}"
        LAST: tl.constexpr = "{.reg .b16 a, b; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 $0, b;}"
        ASM: tl.constexpr = FIRST if position == 0 else LAST
        pair = tl.inline_asm_elementwise(ASM, "=r,r", [words], tl.int32, True, 1)
    else:
        pair = table_pair(words, position, REVERSED, tl.float16, NUMBER)
    return pair


@triton.jit
def wide_halves(pair):
    """Converts the two float16 halves of int32 words to fp32, with one instruction for each."""
    return tl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
        "=f,=f,r", [pair], (tl.float32, tl.float32), True, 1,
    )  # fmt: skip


@triton.jit
def sums_unit(NUMBER: tl.constexpr, BYTES: tl.constexpr):
    """Returns the factor by which the results of `code_sums` and `number_sums` must be multiplied.
    For E2M1, BYTES holds the numbers times two."""
    if len(BYTES) > 0:
        return 0.5
    elif NUMBER == "":
        return 1.0
    else:
        return NUMBER[17]


@triton.jit
def add_half_pair(
    dots, words, first, second, position: tl.constexpr, REVERSED: tl.constexpr,
    NUMBER: tl.constexpr,
):  # fmt: skip
    """Returns dots [rows, words] plus the products of a `half_pair` with two fp32 columns of x."""
    pair = half_pair(words, position, REVERSED, NUMBER)
    low, high = wide_halves(pair)
    dots += low * first[None, :]
    dots += high * second[None, :]
    return dots


@triton.jit
def number_sums(words, x, REVERSED: tl.constexpr, NUMBER: tl.constexpr, RUN: tl.constexpr):
    """Returns the sums of codes' numbers times fp32 x over runs, as fp32 [rows, words / RUN],
    divided by `sums_unit`.

    If NUMBER is given, words are int32 [rows, words] of eight nibbles, and x is [words, 8]. If not,
    a word has four float8 (e4m3) codes, and x is [words, 4].
    """
    dots = tl.zeros(words.shape, tl.float32)
    if NUMBER == "":
        even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        dots = add_half_pair(dots, words, x0, x1, 0, False, NUMBER)
        dots = add_half_pair(dots, words, x2, x3, 1, False, NUMBER)
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = eight_columns(x)
        dots = add_half_pair(dots, words, x0, x1, 0, REVERSED, NUMBER)
        dots = add_half_pair(dots, words, x2, x3, 1, REVERSED, NUMBER)
        dots = add_half_pair(dots, words, x4, x5, 2, REVERSED, NUMBER)
        dots = add_half_pair(dots, words, x6, x7, 3, REVERSED, NUMBER)
    return run_sums(dots, RUN)


@triton.jit
def dense_sums(weights, x, RUN: tl.constexpr):
    """Returns the sums of weights [rows, columns] times fp32 x [columns, 1] over runs, as fp32
    [rows, columns / RUN]. The weights may have any float dtype."""
    row = tl.reshape(x, (x.shape[0],))
    return run_sums(weights.to(tl.float32) * row[None, :], RUN)
