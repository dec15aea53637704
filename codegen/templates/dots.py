"""Dot products of one row of x with rows of codes, without tensor cores: for few tokens.

A thread multiplies the codes in the registers that it has loaded them to, so that nothing passes
through shared memory and many small programs keep the memory busy.

4- and 8-bit integers are multiplied as such, four in an instruction. x is turned into integers of
23 bits and a power of two for each RUN of words, which leaves bfloat16 and float16 all their digits
where a number is no smaller than 2 ** -14 (2 ** -11) of the largest beside it, and the rest more
than fp32 sums keep of it. Each integer is three bytes, of which one instruction multiplies four by
four codes: `dp4a`. Codes that stand for floats are multiplied as fp32 numbers, as weights that are
no codes are.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.tables import chosen_bytes, four_bytes, table_pair


@triton.jit
def byte_dots(codes, x, sums, CODES_SIGNED: tl.constexpr, X_SIGNED: tl.constexpr):
    """sums and the products of the four bytes of each word of codes and of x, all int32."""
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
    """Byte BYTE of four int32 each, in one."""
    low = chosen_bytes(first, second, 0x3340 + 0x11 * BYTE)
    high = chosen_bytes(third, fourth, 0x3340 + 0x11 * BYTE)
    return chosen_bytes(low, high, 0x5410)


@triton.jit
def three_bytes(first, second, third, fourth):
    """Bytes 0, 1 and 2 of four int32 each, in one word for each byte."""
    byte0 = byte_of_four(first, second, third, fourth, 0)
    byte1 = byte_of_four(first, second, third, fourth, 1)
    byte2 = byte_of_four(first, second, third, fourth, 2)
    return byte0, byte1, byte2


@triton.jit
def integers_of_x(x, RUN: tl.constexpr):
    """(x [words, columns] as int32 of at most 2 ** 22, the power of two [words / RUN] that they are
    multiples of) of fp32 x.

    Where a number of a run is infinite or none, the power is no number."""
    WORDS: tl.constexpr = x.shape[0]
    RUNS: tl.constexpr = WORDS // RUN
    # As integers: a maximum of floats leaves out what is no number.
    sizes = tl.reshape(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (RUNS, RUN, x.shape[1]))
    # |x| < 2 ** (exponent - 126). Of less than 2 ** -104 the least is lost, not the range.
    exponent = tl.max(tl.max(sizes, axis=2), axis=1) >> 23
    bounded = tl.maximum(exponent, 22)
    up = ((275 - bounded) << 23).to(tl.float32, bitcast=True)
    power = ((bounded - 21) << 23).to(tl.float32, bitcast=True)
    power = tl.where(exponent == 255, float("nan"), power)
    up = tl.reshape(tl.broadcast_to(up[:, None], (RUNS, RUN)), (WORDS,))[:, None]
    # Beside 1.5 * 2 ** 23 fp32 has no digits left behind the point.
    wide = x * up + 12582912.0
    return wide.to(tl.int32, bitcast=True) - 0x4B400000, power


@triton.jit
def eight_columns(x):
    """The columns of x [words, 8], [words] each."""
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
    """The factors by which `code_sums` multiplies codes, of fp32 x [words, PER]: 8 numbers a word
    of nibbles or 4 a word of bytes.

    Returns bytes 0, 1 and 2 of x's integers, [words] each, those of the even nibbles of a word and
    then of the odd ones (with BYTES of the first four and the last, of bytes all four twice); the
    sum of the integers of each run; and the power of two that they are multiples of. REVERSED: a
    byte's first code is on top. INTERLEAVED: the words of eight are in AWQ's order.
    """
    WORDS: tl.constexpr = x.shape[0]
    PER: tl.constexpr = x.shape[1]
    integers, power = integers_of_x(x, RUN)
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
    return low0, low1, low2, high0, high1, high2, total, power


@triton.jit
def run_sums(dots, RUN: tl.constexpr):
    """The sums [rows, words / RUN] of dots [rows, words] over runs of neighbours."""
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
    """Sums over runs, fp32 [rows, words / RUN], of (code - ZERO) times x's integers.

    words: int32 [rows, words] of PER nibbles (8) or bytes (4). The others: what `parts_of_x` makes.
    BYTES: what nibbles stand for, 16 bytes in four words; empty: themselves. SIGNED: bytes are from
    -128 on. A run of nibbles is at most four words.
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
        # 32 codes of at most 15 by 2 ** 22 are less than 2 ** 31.
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
    """The numbers of two codes of each word as the float16 halves of a word, divided by
    `sums_unit`: of a table those of a byte, of float8 (e4m3) the first two or the last."""
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
    """The two float16 halves of int32 words as fp32, each by one instruction."""
    return tl.inline_asm_elementwise(
        "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}",
        "=f,=f,r", [pair], (tl.float32, tl.float32), True, 1,
    )  # fmt: skip


@triton.jit
def sums_unit(NUMBER: tl.constexpr, BYTES: tl.constexpr):
    """The factor by which `code_sums` and `number_sums` are too small: BYTES are those of E2M1,
    twice their numbers."""
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
    """dots [rows, words] and the products of a `half_pair` with two columns of x, fp32."""
    pair = half_pair(words, position, REVERSED, NUMBER)
    low, high = wide_halves(pair)
    dots += low * first[None, :]
    dots += high * second[None, :]
    return dots


@triton.jit
def number_sums(words, x, REVERSED: tl.constexpr, NUMBER: tl.constexpr, RUN: tl.constexpr):
    """Sums over runs, fp32 [rows, words / RUN], of what codes stand for times fp32 x.

    words: int32 [rows, words] of eight nibbles, x [words, 8]; sums are too small by `sums_unit`.
    Without NUMBER: of four float8 (e4m3), x [words, 4].
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
    """Sums over runs, fp32 [rows, columns / RUN], of weights [rows, columns], of any floats, times
    fp32 x [columns, 1]."""
    row = tl.reshape(x, (x.shape[0],))
    return run_sums(weights.to(tl.float32) * row[None, :], RUN)
