"""Computes a linear with a quantised weight and many tokens, on Hopper's tensor cores (Gluon).

A block has one warp that loads tiles by TMA, and two consumers of four warps each. A consumer
decodes 64 rows of the weight in registers. These rows are the left operand of its products. While
the tensor core multiplies, the consumer decodes the same rows for the next step. The right operand,
x, is read from shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.scale_numbers import bfloat16_parts, bfloat16_powers

# Releases of Triton have different names for these functions.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.constexpr_function
def words_layout(ROWS, BLOCK_K, PER):
    """Returns a layout of words [ROWS, BLOCK_K / PER, PER]. It puts each code into the thread and
    register that hold its element in the left operand of a product."""

    def column(k):
        return [0, k // PER, k % PER]

    registers = [column(1), [8, 0, 0]]
    k = 8
    while k < BLOCK_K:
        registers.append(column(k))
        k *= 2
    lanes = [column(2), column(4), [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, BLOCK_K // PER, PER])


@gluon.constexpr_function
def blocks_layout(ROWS, GROUPS, WIDTH):
    """Returns the layout of [ROWS, GROUPS, WIDTH] that keeps each element in the thread and
    register that `words_layout` gives it."""

    def column(k):
        return [0, k // WIDTH, k % WIDTH]

    registers = [column(1), [8, 0, 0]]
    k = 8
    while k < GROUPS * WIDTH:
        registers.append(column(k))
        k *= 2
    lanes = [column(2), column(4), [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [ROWS, GROUPS, WIDTH]
    )


@gluon.constexpr_function
def tile_layout(ROWS, BLOCK_K):
    """Returns the layout of a tile [ROWS, BLOCK_K] that keeps each element in the thread and
    register that `words_layout` gives it."""
    registers = [[0, 1], [8, 0]]
    k = 8
    while k < BLOCK_K:
        registers.append([0, k])
        k *= 2
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS, BLOCK_K])


@gluon.jit
def place_of(tile, TILES_N: gl.constexpr, tiles_t, GROUP: gl.constexpr):
    """Returns (tile of rows, tile of tokens). Tiles that run at the same time share operands."""
    area = GROUP * tiles_t
    first = tile // area * GROUP
    size = min(TILES_N - first, GROUP)
    return first + tile % area % size, tile % area // size


@gluon.jit
def share_of(whole, num_tiles, UNITS: gl.constexpr, PROGRAMS: gl.constexpr):
    """Returns this program's share of the work, as five numbers.

    A unit is UNIT columns of K of one tile, and a tile has UNITS units. The whole tiles are
    computed by one program each. The units of the other tiles, the split tiles, are numbered across
    these tiles and divided among all programs. A segment consists of the units of one tile that one
    program computes.

    The five numbers are: the number of the program's whole tiles; the number of its segments,
    including the whole tiles; the first unit of its range in the split tiles; the end of this
    range; and the number of units that each program gets.
    """
    program = gl.program_id(0)
    units = (num_tiles - whole) * UNITS
    span = (units + PROGRAMS - 1) // PROGRAMS
    begin = min(program * span, units)
    end = min(begin + span, units)
    count = (whole - program + PROGRAMS - 1) // PROGRAMS
    parts = 0
    if begin < end:
        parts = (end - 1) // UNITS - begin // UNITS + 1
    return count, count + parts, begin, end, span


@gluon.jit
def segment_of(
    number, count, whole, begin, end, UNITS: gl.constexpr, PROGRAMS: gl.constexpr
):  # fmt: skip
    """Returns (tile, first unit, end of the units) of one segment of this program. number: the
    number of the segment."""
    start = begin
    if number > count:
        start = (begin // UNITS + number - count) * UNITS
    tile = whole + start // UNITS
    first = start % UNITS
    last = min(UNITS, first + end - start)
    if number < count:
        tile = number * PROGRAMS + gl.program_id(0)
        first = 0
        last = UNITS
    return tile, first, last


@gluon.jit
def load_tiles(
    x_desc, words_desc, more_words_desc, x_tiles, word_tiles, full, empty, whole, num_tiles,
    tiles_t, N: gl.constexpr, UNITS: gl.constexpr, UNIT: gl.constexpr, PER: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Loads tiles into the pipeline stages, in the order in which the consumers read them."""
    STAGE_BYTES: gl.constexpr = BLOCK_T * BLOCK_K * 2 + 2 * ROWS * BLOCK_K * 4 // PER
    step = 0
    count, segments, begin, end, _ = share_of(whole, num_tiles, UNITS, PROGRAMS)
    for number in range(segments):
        tile, first, last = segment_of(number, count, whole, begin, end, UNITS, PROGRAMS)
        rows, tokens = place_of(tile, (N + BLOCK_N - 1) // BLOCK_N, tiles_t, GROUP)
        for block in range(first * (UNIT // BLOCK_K), last * (UNIT // BLOCK_K)):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), STAGE_BYTES)
            load_tile(
                x_desc, [tokens * BLOCK_T, block * BLOCK_K], full.index(stage),
                x_tiles.index(stage),
            )  # fmt: skip
            column = block * (BLOCK_K // PER)
            load_tile(
                words_desc, [rows * BLOCK_N, column], full.index(stage), word_tiles.index(stage * 2)
            )
            load_tile(
                more_words_desc, [rows * BLOCK_N + BLOCK_N - ROWS, column], full.index(stage),
                word_tiles.index(stage * 2 + 1),
            )  # fmt: skip
            step += 1


@gluon.jit
def load_blocks(
    scale_ptr, zero_ptr, rows, span, N: gl.constexpr, K: gl.constexpr, SPAN: gl.constexpr,
    GROUPS: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    SCALE_ROW_STRIDE: gl.constexpr, SCALE_COLUMN_STRIDE: gl.constexpr,
    ZERO_ROW_STRIDE: gl.constexpr, ZERO_COLUMN_STRIDE: gl.constexpr,
    PACKED_ZEROS: gl.constexpr, ORDER: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Returns (scales, zeros), each [rows, GROUPS], for SPAN columns.

    Scales keep the dtype in which they are stored, and zeros are converted to int32. If there are
    no zeros, the scales are returned in place of the zeros.
    """
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, BLOCKS)).expand_dims(0)
    column = (span * SPAN) // SCALE_COLUMNS + group
    row = rows.expand_dims(1)
    there = (row < N) & (column * SCALE_COLUMNS < K)
    block_row = row // SCALE_ROWS
    scale_at = scale_ptr + block_row * SCALE_ROW_STRIDE + column * SCALE_COLUMN_STRIDE
    if scale_ptr.dtype.element_ty == gl.uint8:
        scale = gl.load(scale_at, mask=there, other=0)
    else:
        scale = gl.load(scale_at, mask=there, other=0.0)
    zero = scale
    if zero_ptr is not None:
        if PACKED_ZEROS:
            words = gl.load(
                zero_ptr + block_row // 8 * ZERO_ROW_STRIDE + column * ZERO_COLUMN_STRIDE,
                mask=there, other=0,
            )  # fmt: skip
            nibble = (row * 0 + ORDER) >> (block_row % 8 * 4) & 7
            zero = words >> (nibble * 4) & 15
        else:
            zero = gl.load(
                zero_ptr + block_row * ZERO_ROW_STRIDE + column * ZERO_COLUMN_STRIDE, mask=there,
                other=0,
            ).to(gl.int32)  # fmt: skip
    return scale, zero


@gluon.jit
def factors_of(
    scale, zero, UNIT_OF_CODES: gl.constexpr, HAS_ZEROS: gl.constexpr, ZERO_POINT: gl.constexpr
):
    """Returns three bfloat16 tensors: the scales times UNIT_OF_CODES, the errors of rounding these
    products to bfloat16, and the addend that subtracts the zeros."""
    if scale.dtype == gl.uint8:  # the scales of E2M1 codes, whose unit is 1
        high = bfloat16_powers(scale)
        low = high
    else:
        high, low = bfloat16_parts(scale.to(gl.float32) * UNIT_OF_CODES)
    zeros = high
    if HAS_ZEROS:
        zeros = ((zero + ZERO_POINT).to(gl.float32) / -UNIT_OF_CODES).to(gl.bfloat16)
    return high, low, zeros


@gluon.jit
def spread(blocks, like, GROUPS: gl.constexpr, TILE: gl.constexpr):
    """Repeats the numbers of blocks [rows, GROUPS] for a tile of the shape of `like`, so that each
    column of the tile has the number of its group."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    LAYOUT: gl.constexpr = blocks_layout(ROWS, GROUPS, COLUMNS // GROUPS)
    shape = gl.zeros([ROWS, GROUPS, COLUMNS // GROUPS], gl.int32, LAYOUT)
    wide = gl.broadcast(blocks.expand_dims(2), shape)[0]
    return gl.convert_layout(wide.reshape([ROWS, COLUMNS]), TILE, assert_trivial=True)


@gluon.jit
def decoded(
    words, high, low, zeros, CODES: gl.constexpr, LOOKUP: gl.constexpr, PER: gl.constexpr,
    ORDER: gl.constexpr,
    SIGNED: gl.constexpr, HAS_ZEROS: gl.constexpr, ZERO_POINT: gl.constexpr,
    SCALED: gl.constexpr, EXACT: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Decodes words [ROWS, BLOCK_K / PER] to the left operand of a product, bfloat16 [ROWS,
    BLOCK_K].

    The difference code - zero is exact, and its product with the scale is rounded once. The decoder
    moves the bits of a code to their places in a bfloat16. The value of this bfloat16 is the code
    times a power of two.
    """
    WORDS: gl.constexpr = words_layout(ROWS, BLOCK_K, PER)
    TILE: gl.constexpr = tile_layout(ROWS, BLOCK_K)
    wide = gl.broadcast(
        words.expand_dims(2), gl.zeros([ROWS, BLOCK_K // PER, PER], gl.int32, WORDS)
    )
    codes = gl.convert_layout(wide[0].reshape([ROWS, BLOCK_K]), TILE, assert_trivial=True)
    place = gl.arange(0, BLOCK_K, gl.SliceLayout(0, TILE)) % PER
    # Find the bytes, and the nibbles in them, that hold the two codes of a pair.
    even = place & PER - 2
    odd = place | 1
    if PER == 8:
        even = (place * 0 + ORDER) >> (even * 4) & 7
        odd = (place * 0 + ORDER) >> (odd * 4) & 7
    even_byte = even // (PER // 4)
    odd_byte = odd // (PER // 4)
    if CODES == "e2m1":
        # Bytes 4 to 7 are the bytes of the word after a shift by one nibble.
        select = (even_byte + 4 - even % 2 * 4) << 4 | (odd_byte + 4 - odd % 2 * 4) << 12
    elif CODES == "table":
        # One byte holds both codes of a pair. Bytes 4 to 7 belong to the word eight rows below.
        select = even_byte | even_byte + 4 << 4
    elif CODES == "e4m3":
        # Each byte goes to the top of its half.
        select = 0x0004 | even_byte << 4 | 0x0400 | odd_byte << 12
    else:
        select = even_byte | 0x0040 | odd_byte << 8 | 0x4000
    chosen = gl.broadcast(select.expand_dims(0), codes)[0]
    if CODES == "table":
        numbers = gl.inline_asm_elementwise(
            LOOKUP, "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [codes, chosen, spread(high, codes, GROUPS, TILE), spread(low, codes, GROUPS, TILE)],
            dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    elif CODES == "e2m1":
        # Move the sign and the other three bits of a nibble to the sign and the low exponent bits
        # of a bfloat16.
        numbers = gl.inline_asm_elementwise(
            """{
            .reg .b32 p, q;
            shl.b32 q, $1, 4;
            prmt.b32 p, $1, q, $3;
            shr.b32 q, p, 6;
            and.b32 q, q, 0x01C001C0;
            and.b32 p, p, 0x80008000;
            or.b32 q, q, p;
            mov.b32 p, 0x7E807E80;
            mul.rn.bf16x2 $0, q, p;
            }""",
            "=r,r,r,r,r", [codes, chosen], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif CODES == "e4m3":
        # All bits of s are set where a code is NaN; elsewhere s is zero.
        numbers = gl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, s;
            mov.b32 p, 0;
            prmt.b32 p, $1, p, $3;
            and.b32 q, p, 0x7F007F00;
            shr.b32 q, q, 4;
            mov.b32 s, 0x07F007F0;
            set.ge.u32.bf16x2 s, q, s;
            and.b32 p, p, 0x80008000;
            or.b32 q, q, p;
            mov.b32 p, 0x7B807B80;
            fma.rn.bf16x2 $0, q, p, s;
            }""",
            "=r,r,r,r,r", [codes, chosen], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        if HAS_ZEROS:
            addend = spread(zeros, codes, GROUPS, TILE)
        else:
            addend = gl.full([ROWS, BLOCK_K], -0.015625 * ZERO_POINT, gl.bfloat16, TILE)
        if CODES == "bytes":
            if SIGNED:
                codes = codes ^ -2139062144  # 0x80808080
            numbers = gl.inline_asm_elementwise(
                """{
                .reg .b32 p, m;
                mov.b32 p, 0;
            prmt.b32 p, $1, p, $3;
                mov.b32 m, 0x7F007F00;
                fma.rn.bf16x2 $0, p, m, $5;
                }""",
                "=r,r,r,r,r,r", [codes, chosen, addend], dtype=gl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        elif ORDER == 0x76543210:
            numbers = gl.inline_asm_elementwise(
                """{
                .reg .b32 p, m;
                mov.b32 p, 0;
            prmt.b32 p, $1, p, $3;
                and.b32 p, p, 0x00F0000F;
                mov.b32 m, 0x7D007F00;
                fma.rn.bf16x2 $0, p, m, $5;
                }""",
                "=r,r,r,r,r,r", [codes, chosen, addend], dtype=gl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            mask = gl.where(even % 2 == 0, 0x0F, 0xF0) | gl.where(odd % 2 == 0, 0x0F, 0xF0) << 16
            unit = gl.where(even % 2 == 0, 0x7F00, 0x7D00)
            unit = unit | gl.where(odd % 2 == 0, 0x7F00, 0x7D00) << 16
            masks = gl.broadcast(mask.expand_dims(0), codes)[0]
            units = gl.broadcast(unit.expand_dims(0), codes)[0]
            numbers = gl.inline_asm_elementwise(
                """{
                .reg .b32 p;
                mov.b32 p, 0;
            prmt.b32 p, $1, p, $3;
                and.b32 p, p, $5;
                fma.rn.bf16x2 $0, p, $7, $9;
                }""",
                "=r,r,r,r,r,r,r,r,r,r", [codes, chosen, masks, units, addend],
                dtype=gl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    if SCALED and CODES != "table":
        scale = spread(high, codes, GROUPS, TILE)
        if EXACT:
            numbers = gl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, scale],
                dtype=gl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            rest = spread(low, codes, GROUPS, TILE)
            numbers = gl.inline_asm_elementwise(
                """{
                .reg .b32 p;
                mul.rn.bf16x2 p, $1, $3;
                fma.rn.bf16x2 $0, $1, $2, p;
                }""",
                "=r,r,r,r", [numbers, scale, rest], dtype=gl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    return gl.convert_layout(numbers, OPERAND, assert_trivial=True)


@gluon.jit
def finished(
    total, rows, bias_ptr, factor_ptr, scale_ptr, N: gl.constexpr, SCALE: gl.constexpr,
    SCALED: gl.constexpr, UNIT_OF_CODES: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_ROW_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr,
):  # fmt: skip
    """Returns SCALE * (total + bias). If each row has one scale, total is first multiplied by
    it."""
    if not SCALED:
        scale = gl.load(scale_ptr + rows // SCALE_ROWS * SCALE_ROW_STRIDE, mask=rows < N, other=0.0)
        scale = scale.to(gl.float32)
        total *= (scale * UNIT_OF_CODES).expand_dims(1)
    if factor_ptr is not None:
        total *= gl.load(factor_ptr)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + rows * BIAS_STRIDE, mask=rows < N, other=0.0)
        total += bias.to(gl.float32).expand_dims(1)
    if SCALE != 1.0:
        total *= SCALE
    return total


@gluon.jit
def halves(numbers):
    """Splits sums of products into the first and the second half of their columns."""
    ROWS: gl.constexpr = numbers.shape[0]
    COLUMNS: gl.constexpr = numbers.shape[1] // 2
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    first, second = gl.split(numbers.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
    first = gl.convert_layout(first, HALF, assert_trivial=True)
    return first, gl.convert_layout(second, HALF, assert_trivial=True)


@gluon.jit
def store_activated(
    total, out, first_row, bias_ptr, factor_ptr, scale_ptr, N: gl.constexpr, SCALE: gl.constexpr,
    SCALED: gl.constexpr, UNIT_OF_CODES: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_ROW_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Stores the activation of the finished sums [rows, tokens] to out [tokens, rows].

    The function computes 64 tokens at a time, because an activation needs more registers than its
    result.
    """
    ROWS: gl.constexpr = total.shape[0]
    TOKENS: gl.constexpr = total.shape[1]
    if TOKENS > 64:
        first, second = halves(total)
        store_activated(
            first, out.slice(0, TOKENS // 2), first_row, bias_ptr, factor_ptr, scale_ptr, N, SCALE,
            SCALED, UNIT_OF_CODES, SCALE_ROWS, SCALE_ROW_STRIDE, BIAS_STRIDE, ACTIVATION,
        )  # fmt: skip
        store_activated(
            second, out.slice(TOKENS // 2, TOKENS // 2), first_row, bias_ptr, factor_ptr, scale_ptr,
            N, SCALE, SCALED, UNIT_OF_CODES, SCALE_ROWS, SCALE_ROW_STRIDE, BIAS_STRIDE, ACTIVATION,
        )  # fmt: skip
    else:
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, total.type.layout))
        total = finished(
            total, rows, bias_ptr, factor_ptr, scale_ptr, N, SCALE, SCALED, UNIT_OF_CODES,
            SCALE_ROWS, SCALE_ROW_STRIDE, BIAS_STRIDE,
        )  # fmt: skip
        total = activate(total, total, ACTIVATION, 1.0, 0.0, False)
        out.permute((1, 0)).store(total.to(gl.bfloat16))


@gluon.jit
def places_of_sums(
    start, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_T: gl.constexpr, LAYOUT: gl.constexpr
):
    """Returns the offsets at which the sums [ROWS, start : start + COLUMNS] of a tile of BLOCK_T
    tokens are stored. The threads of a warp store their pairs of numbers next to each other."""
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    t = start + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    return (r % 16 // 8 * (BLOCK_T // 8) + t // 8) * 256 + ((r // 16 * 32 + r % 8 * 4) * 2 + t % 8)


@gluon.jit
def multiply_tiles(
    CONSUMER: gl.constexpr, x_tiles, word_tiles, full, empty, handed, scale_ptr, zero_ptr, bias_ptr,
    factor_ptr, residual_ptr, residual_desc, out_desc, out_tiles, workspace_ptr, counters_ptr,
    whole, num_tiles, tiles_t, N: gl.constexpr, K: gl.constexpr, UNITS: gl.constexpr,
    UNIT: gl.constexpr, SPAN: gl.constexpr, GROUPS: gl.constexpr, CODES: gl.constexpr,
    LOOKUP: gl.constexpr, PER: gl.constexpr,
    ORDER: gl.constexpr, SIGNED: gl.constexpr, ZERO_POINT: gl.constexpr,
    PACKED_ZEROS: gl.constexpr, SCALED: gl.constexpr, EXACT: gl.constexpr,
    UNIT_OF_CODES: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    SCALE_ROW_STRIDE: gl.constexpr, SCALE_COLUMN_STRIDE: gl.constexpr,
    ZERO_ROW_STRIDE: gl.constexpr, ZERO_COLUMN_STRIDE: gl.constexpr, SCALE: gl.constexpr,
    BIAS_STRIDE: gl.constexpr, ACTIVATION: gl.constexpr, ACTIVATED: gl.constexpr,
    PAIRED: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Computes ROWS rows of each tile.

    CONSUMER: which half of the tile's rows this consumer computes or, if PAIRED, which of the two
    weights it multiplies. ACTIVATED: how many consumers apply the activation.
    """
    CHUNK: gl.constexpr = 64
    STEPS: gl.constexpr = UNIT // BLOCK_K
    SPANS: gl.constexpr = UNIT // SPAN
    HAS_ZEROS: gl.constexpr = zero_ptr is not None
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    WORDS: gl.constexpr = gl.SliceLayout(2, words_layout(ROWS, BLOCK_K, PER))
    BLOCKS: gl.constexpr = gl.SliceLayout(2, blocks_layout(ROWS, GROUPS, BLOCK_K // GROUPS))
    SIZE: gl.constexpr = ROWS * BLOCK_T
    ACTIVATES: gl.constexpr = ACTIVATION != "" and CONSUMER < ACTIVATED
    out = out_tiles.index(CONSUMER)
    step = 0
    sums = 0
    count, segments, begin, end, span = share_of(whole, num_tiles, UNITS, PROGRAMS)
    for number in range(segments):
        tile, first, last = segment_of(number, count, whole, begin, end, UNITS, PROGRAMS)
        row_tile, token_tile = place_of(tile, (N + BLOCK_N - 1) // BLOCK_N, tiles_t, GROUP)
        first_row = row_tile * BLOCK_N + CONSUMER * (BLOCK_N - ROWS)
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, BLOCKS))
        scale, zero = load_blocks(
            scale_ptr, zero_ptr, rows, first * SPANS, N, K, SPAN, GROUPS, SCALE_ROWS, SCALE_COLUMNS,
            SCALE_ROW_STRIDE, SCALE_COLUMN_STRIDE, ZERO_ROW_STRIDE, ZERO_COLUMN_STRIDE,
            PACKED_ZEROS, ORDER, BLOCKS,
        )  # fmt: skip
        high, low, zeros = factors_of(scale, zero, UNIT_OF_CODES, HAS_ZEROS, ZERO_POINT)
        total = gl.zeros([ROWS, BLOCK_T], gl.float32, PRODUCT)
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        words = word_tiles.index(step % STAGES * 2 + CONSUMER).load(WORDS)
        weight = decoded(
            words, high, low, zeros, CODES, LOOKUP, PER, ORDER, SIGNED, HAS_ZEROS, ZERO_POINT,
            SCALED,
            EXACT, GROUPS, ROWS, BLOCK_K, OPERAND,
        )  # fmt: skip
        for unit in range(first, last):
            for part in gl.static_range(STEPS):
                # Load the next scales. After the last unit, the loaded scales are not used.
                if part % (STEPS // SPANS) == 0:
                    scale, zero = load_blocks(
                        scale_ptr, zero_ptr, rows, unit * SPANS + part // (STEPS // SPANS) + 1, N,
                        K, SPAN, GROUPS, SCALE_ROWS, SCALE_COLUMNS, SCALE_ROW_STRIDE,
                        SCALE_COLUMN_STRIDE, ZERO_ROW_STRIDE, ZERO_COLUMN_STRIDE, PACKED_ZEROS,
                        ORDER, BLOCKS,
                    )  # fmt: skip
                stage = step % STAGES
                flying = warpgroup_mma(
                    weight, x_tiles.index(stage).permute((1, 0)), total, is_async=True
                )
                more = part < STEPS - 1
                if part == STEPS - 1:
                    more = unit < last - 1
                if (part + 1) % (STEPS // SPANS) == 0:
                    high, low, zeros = factors_of(scale, zero, UNIT_OF_CODES, HAS_ZEROS, ZERO_POINT)
                step += 1
                mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=more)
                words = word_tiles.index(step % STAGES * 2 + CONSUMER).load(WORDS)
                weight = decoded(
                    words, high, low, zeros, CODES, LOOKUP, PER, ORDER, SIGNED, HAS_ZEROS,
                    ZERO_POINT, SCALED, EXACT, GROUPS, ROWS, BLOCK_K, OPERAND,
                )  # fmt: skip
                total = warpgroup_mma_wait(0, [flying])
                mbarrier.arrive(empty.index(stage))
            if residual_ptr is not None:  # noqa: SIM102
                # Wait until the results of the previous tile have been copied out of this memory.
                if unit == first and last - first == UNITS:
                    tma.store_wait(0)
                    barrier()
                    mbarrier.expect(handed.index(CONSUMER), SIZE * 2)
                    load_tile(
                        residual_desc,
                        [token_tile * BLOCK_T, first_row],
                        handed.index(CONSUMER),
                        out,
                    )
        whole_k = True
        if workspace_ptr is not None:
            whole_k = last - first == UNITS
        if whole_k:
            if not ACTIVATES:
                own = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, PRODUCT))
                total = finished(
                    total, own, bias_ptr, factor_ptr, scale_ptr, N, SCALE, SCALED, UNIT_OF_CODES,
                    SCALE_ROWS, SCALE_ROW_STRIDE, BIAS_STRIDE,
                )  # fmt: skip
            if PAIRED:
                # The first consumer hands the activated gate to the second one.
                sums += 1
                if CONSUMER == 0:
                    mbarrier.wait(handed.index(1), sums & 1)
                else:
                    mbarrier.wait(handed.index(0), (sums & 1) ^ 1)
                    total *= out_tiles.index(0).permute((1, 0)).load(PRODUCT).to(gl.float32)
                    barrier()
                    mbarrier.arrive(handed.index(1))
                    tma.store_wait(0)
            elif residual_ptr is not None:
                mbarrier.wait(handed.index(CONSUMER), sums & 1)
                sums += 1
                total += out.permute((1, 0)).load(PRODUCT).to(gl.float32)
            else:
                tma.store_wait(0)
            barrier()
            if ACTIVATES:
                store_activated(
                    total, out, first_row, bias_ptr, factor_ptr, scale_ptr, N, SCALE, SCALED,
                    UNIT_OF_CODES, SCALE_ROWS, SCALE_ROW_STRIDE, BIAS_STRIDE, ACTIVATION,
                )  # fmt: skip
            else:
                out.permute((1, 0)).store(total.to(gl.bfloat16))
            if PAIRED and CONSUMER == 0:
                barrier()
                mbarrier.arrive(handed.index(0))
            else:
                fence_async_shared()
                store_tile(out_desc, [token_tile * BLOCK_T, first_row], out)
        elif workspace_ptr is not None:
            # Store the sums of a part of K. A program has two places for such sums: one for the
            # tile in which its range of units begins, and one for the next tile.
            split = tile - whole
            mine = (gl.program_id(0) * 2 + number - count) * 2 + CONSUMER
            places = places_of_sums(0, ROWS, BLOCK_T, BLOCK_T, PRODUCT)
            gl.store(workspace_ptr + mine * SIZE + places, total)
            begun = split * UNITS // span
            ended = ((split + 1) * UNITS - 1) // span
            barrier()
            arrived = gl.atomic_add(counters_ptr + split * 2 + CONSUMER, 1, sem="acq_rel")
            if arrived == ended - begun:
                gl.store(counters_ptr + split * 2 + CONSUMER, 0)
                tma.store_wait(0)
                barrier()
                if residual_ptr is not None:
                    mbarrier.expect(handed.index(CONSUMER), SIZE * 2)
                    load_tile(
                        residual_desc,
                        [token_tile * BLOCK_T, first_row],
                        handed.index(CONSUMER),
                        out,
                    )
                    mbarrier.wait(handed.index(CONSUMER), sums & 1)
                    sums += 1
                for chunk in gl.static_range(BLOCK_T // CHUNK):
                    some_places = places_of_sums(chunk * CHUNK, ROWS, CHUNK, BLOCK_T, PART)
                    some = gl.zeros([ROWS, CHUNK], gl.float32, PART)
                    for program in range(begun, ended + 1):
                        other = (program * 2 + split - program * span // UNITS) * 2 + CONSUMER
                        some += gl.load(
                            workspace_ptr + other * SIZE + some_places, cache_modifier=".cg"
                        )  # fmt: skip
                    some = finished(
                        some, first_row + gl.arange(0, ROWS, gl.SliceLayout(1, PART)), bias_ptr,
                        factor_ptr, scale_ptr, N, SCALE, SCALED, UNIT_OF_CODES, SCALE_ROWS,
                        SCALE_ROW_STRIDE, BIAS_STRIDE,
                    )  # fmt: skip
                    some_out = out.slice(chunk * CHUNK, CHUNK).permute((1, 0))
                    if ACTIVATES:
                        some = activate(some, some, ACTIVATION, 1.0, 0.0, False)
                    if residual_ptr is not None:
                        some += some_out.load(PART).to(gl.float32)
                    some_out.store(some.to(gl.bfloat16))
                fence_async_shared()
                store_tile(out_desc, [token_tile * BLOCK_T, first_row], out)
    tma.store_wait(0)


@gluon.jit
def mixed_linear(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, up_weight_ptr, up_scale_ptr,
    up_zero_ptr, up_factor_ptr, up_bias_ptr, residual_ptr, out_ptr, workspace_ptr, counters_ptr,
    num_tokens,
    N: gl.constexpr, K: gl.constexpr, X_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr,
    BIAS_STRIDE: gl.constexpr, RESIDUAL_STRIDE: gl.constexpr, CODES: gl.constexpr,
    LOOKUP: gl.constexpr, UNIT_OF_CODES: gl.constexpr, PER: gl.constexpr, ORDER: gl.constexpr,
    SIGNED: gl.constexpr, ZERO_POINT: gl.constexpr,
    PACKED_ZEROS: gl.constexpr, SCALED: gl.constexpr, EXACT: gl.constexpr,
    SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, SCALE_ROW_STRIDE: gl.constexpr,
    SCALE_COLUMN_STRIDE: gl.constexpr, ZERO_ROW_STRIDE: gl.constexpr,
    ZERO_COLUMN_STRIDE: gl.constexpr, SCALE: gl.constexpr, UNIT: gl.constexpr,
    SPAN: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Computes out [T, N] = residual + activation(SCALE * (x @ weight^T * factor + bias)) for x in
    bfloat16. If there is an up weight, the activated product is multiplied by SCALE * (x @
    up_weight^T * up_factor + up_bias).

    Grid (PROGRAMS,), with one program for each multiprocessor. A program computes whole tiles of
    128 rows or, if there is an up weight, of 64 rows of both weights. The last tiles may be too few
    to give each program one. If SPLIT, all programs share these last tiles, and the parts of such a
    tile are added in a fixed order.

    weight [N, K / PER] has 32-bit words of PER codes. (code - zero) * scale is rounded to bfloat16,
    and the products are summed in fp32.

    Args:
        CODES: The kind of codes: "nibbles", "bytes", "e4m3", "e2m1" or "table".
        LOOKUP: For "table", the assembly that looks up the numbers of two pairs of codes and
            multiplies them by their scales.
        UNIT_OF_CODES: The number that a decoded 1.0 stands for: the decoder's results are the codes
            divided by UNIT_OF_CODES.
        ORDER: Which nibble of a word holds each code; one hexadecimal digit for each code.
        ZERO_POINT: The constant part of the zero, plus 128 if bytes are SIGNED.
        SCALED: Whether each code is multiplied by its scale. If not, each row has one scale, which
            multiplies the sums of the row.
        EXACT: Whether bfloat16 represents the scales exactly.
        UNIT: The number of columns of an iteration of the loop over K.
        SPAN: The number of columns whose scales are loaded together.
    """
    ROWS: gl.constexpr = 64
    PAIRED: gl.constexpr = up_weight_ptr is not None
    BLOCK_N: gl.constexpr = ROWS if PAIRED else 2 * ROWS
    ACTIVATED: gl.constexpr = 1 if PAIRED else 2
    UNITS: gl.constexpr = (K + UNIT - 1) // UNIT
    GROUPS: gl.constexpr = BLOCK_K // SCALE_COLUMNS if SCALE_COLUMNS < BLOCK_K else 1
    X_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_T, BLOCK_K], gl.bfloat16)
    WORD_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K // PER], gl.int32)
    OUT_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_T, ROWS], gl.bfloat16)
    x_desc = tma.make_tensor_descriptor(
        x_ptr, [num_tokens, K], [X_STRIDE, 1], [BLOCK_T, BLOCK_K], X_TILE
    )
    words_desc = tma.make_tensor_descriptor(
        weight_ptr, [N, K // PER], [WEIGHT_STRIDE, 1], [ROWS, BLOCK_K // PER], WORD_TILE
    )
    # The second consumer multiplies the other half of the weight's rows, or the up weight.
    more_words_desc = words_desc
    if PAIRED:
        more_words_desc = tma.make_tensor_descriptor(
            up_weight_ptr, [N, K // PER], [WEIGHT_STRIDE, 1], [ROWS, BLOCK_K // PER], WORD_TILE
        )
    out_desc = tma.make_tensor_descriptor(
        out_ptr, [num_tokens, N], [N, 1], [BLOCK_T, ROWS], OUT_TILE
    )
    residual_desc = out_desc
    if residual_ptr is not None:
        residual_desc = tma.make_tensor_descriptor(
            residual_ptr, [num_tokens, N], [RESIDUAL_STRIDE, 1], [BLOCK_T, ROWS], OUT_TILE
        )
    tiles_t = (num_tokens + BLOCK_T - 1) // BLOCK_T
    num_tiles = (N + BLOCK_N - 1) // BLOCK_N * tiles_t
    whole = num_tiles
    if SPLIT:
        whole = num_tiles // PROGRAMS * PROGRAMS
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, BLOCK_K], X_TILE)
    word_tiles = gl.allocate_shared_memory(gl.int32, [2 * STAGES, ROWS, BLOCK_K // PER], WORD_TILE)
    out_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_T, ROWS], OUT_TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(handed.index(0), count=1)
    mbarrier.init(handed.index(1), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_tiles, (
                0, x_tiles, word_tiles, full, empty, handed, scale_ptr, zero_ptr, bias_ptr,
                factor_ptr, residual_ptr, residual_desc, out_desc, out_tiles, workspace_ptr,
                counters_ptr, whole, num_tiles, tiles_t, N, K, UNITS, UNIT, SPAN, GROUPS, CODES,
                LOOKUP, PER, ORDER, SIGNED, ZERO_POINT, PACKED_ZEROS, SCALED, EXACT, UNIT_OF_CODES,
                SCALE_ROWS, SCALE_COLUMNS, SCALE_ROW_STRIDE, SCALE_COLUMN_STRIDE, ZERO_ROW_STRIDE,
                ZERO_COLUMN_STRIDE, SCALE, BIAS_STRIDE, ACTIVATION, ACTIVATED, PAIRED, ROWS,
                BLOCK_N, BLOCK_T, BLOCK_K, STAGES, GROUP, PROGRAMS,
            )),
            (multiply_tiles, (
                1, x_tiles, word_tiles, full, empty, handed, up_scale_ptr if PAIRED else scale_ptr,
                up_zero_ptr if PAIRED else zero_ptr, up_bias_ptr if PAIRED else bias_ptr,
                up_factor_ptr if PAIRED else factor_ptr, residual_ptr, residual_desc, out_desc,
                out_tiles, workspace_ptr, counters_ptr, whole, num_tiles, tiles_t, N, K, UNITS,
                UNIT, SPAN, GROUPS, CODES, LOOKUP, PER, ORDER, SIGNED, ZERO_POINT, PACKED_ZEROS,
                SCALED, EXACT, UNIT_OF_CODES, SCALE_ROWS, SCALE_COLUMNS, SCALE_ROW_STRIDE,
                SCALE_COLUMN_STRIDE, ZERO_ROW_STRIDE, ZERO_COLUMN_STRIDE, SCALE, BIAS_STRIDE,
                ACTIVATION, ACTIVATED, PAIRED, ROWS, BLOCK_N, BLOCK_T, BLOCK_K, STAGES, GROUP,
                PROGRAMS,
            )),
            (load_tiles, (
                x_desc, words_desc, more_words_desc, x_tiles, word_tiles, full, empty, whole,
                num_tiles, tiles_t, N, UNITS, UNIT, PER, ROWS, BLOCK_N, BLOCK_T, BLOCK_K, STAGES,
                GROUP, PROGRAMS,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
