"""The kernel `mixed_linear` for quantised weights and many tokens: its plan, constants and
limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tilewright.codegen.arithmetic import INT32_MAX, cdiv
from tilewright.codegen.formats import TABLES, Quantization, bfloat16_table
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.operand import ALIGNMENT, Operand
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target

MIXED = Kernel("mlp.mixed_gemm", "mixed_linear", unaligned=("factor", "up_factor", "counters"))
# The number of weight rows of a tile. Each of the two warp groups that multiply computes one half
# of them.
BLOCK_N = 128
# The number of columns of a step.
BLOCK_K = 64
# The number of weight rows that one warp group computes.
ROWS = BLOCK_N // 2
# The number of columns of an iteration of the loop over K. With two steps, the weights of the
# current and of the next product have registers of their own, and are not copied. The scales of
# these columns are loaded together if all of the columns share a scale.
UNIT = 128
# The number of consecutive row tiles that are computed for the same tokens before the next tokens.
GROUP = 8
# The fewest columns that may share a scale.
LEAST_SCALED = 16
#: The dtypes of zeros that are integers.
WHOLE = ("u8", "i8", "i32", "i64")
#: The dtypes of scales that bfloat16 represents exactly.
EXACT = ("bf16", "u8", "fp8e4nv")
# The results of `nibble_order` if the low or the high nibble of each byte holds the first code.
LOW_FIRST = 0x76543210
HIGH_FIRST = 0x67452301
# Maps `WeightFormat.number` to the kernel's name for 4-bit codes.
_CODES = {"": "nibbles", "e2m1": "e2m1"} | dict.fromkeys(TABLES, "table")
# Maps the kernel's name for a kind of codes to the number that a decoded 1.0 stands for: the
# decoder's results are the codes divided by this number. For a table, `bfloat16_table` returns the
# number. For all other codes, it is 1.
_UNITS = {"nibbles": 64.0, "bytes": 64.0}


@dataclass(frozen=True)
class Gain:
    """The largest number of tokens for which `mixed_linear` is faster than decoding the weight and
    calling the library's GEMM, for one kind of codes.

    Attributes:
        bits: The number of bits of a code.
        is_float: Whether the codes are floats. If not, they are integers.
        columns: The largest number of columns that share a scale.
        tokens: The largest number of tokens for which the kernel is faster.
    """

    bits: int
    is_float: bool
    columns: int
    tokens: int


# The gains for all kinds of codes that have one. On an H100, with a weight of 4096 x 14336 and 1024
# tokens, the time of `mixed_linear` divided by the time of the library's bfloat16 product was 1.28
# for NVFP4, 1.16 for MXFP4, 1.07 for float8 in blocks, and 1.00 to 1.03 for integers. Decoding the
# weight first takes as long as the library's product of 590 tokens.
GAINS = (
    Gain(4, is_float=True, columns=16, tokens=1024),
    Gain(4, is_float=True, columns=INT32_MAX, tokens=2048),
    Gain(8, is_float=True, columns=INT32_MAX, tokens=4096),
    Gain(8, is_float=False, columns=64, tokens=2048),
    Gain(4, is_float=False, columns=64, tokens=2048),
)


@dataclass(frozen=True)
class MixedTiles:
    """Tiles of 128 rows, with their times measured on an H100.

    Attributes:
        block_t: The number of tokens in a tile.
        stages: The number of pipeline stages.
        tile_us: The fixed part of the time that a program needs for a tile, in microseconds.
        columns_us: The time that a program needs for 1024 columns of the weight, in microseconds.
        split_us: The time in which programs exchange their sums if K is split, in microseconds.
    """

    block_t: int
    stages: int
    tile_us: float
    columns_us: float
    split_us: float

    def seconds(
        self, n: int, k: int, num_tokens: int, target: Target, split: bool = False
    ) -> float:
        """Returns the modelled time of a product with a weight of n rows and k columns, in
        seconds."""
        tiles = cdiv(n, BLOCK_N) * cdiv(num_tokens, self.block_t)
        waves = tiles / target.num_sms if split else cdiv(tiles, target.num_sms)
        us = waves * (self.tile_us + self.columns_us * k / 1024)
        return 1e-6 * ((us + self.split_us) / (1 - MARGIN) if split else us)


# The tiles from which a plan chooses.
TILES = (MixedTiles(256, 4, 1.0, 10.6, 17.0), MixedTiles(128, 6, 4.2, 5.9, 12.0))
# A plan splits K only if the split saves at least this fraction of the modelled time, because
# splits were slower than modelled with many waves of tiles.
MARGIN = 0.04


@dataclass(frozen=True)
class MixedConfig:
    """The constants of a launch that the plan chooses.

    Attributes:
        block_t: The number of tokens in a tile.
        stages: The number of pipeline stages.
        split: Whether all programs share the last tiles, which are too few to give each program a
            tile.
        programs: The number of programs.
    """

    block_t: int
    stages: int
    split: bool
    programs: int

    def __str__(self) -> str:
        return f"{BLOCK_N}x{self.block_t}x{BLOCK_K} s{self.stages}{' split' * self.split}"


def mixed_obstacle(problem: LinearProblem, dtype: str, target: Target) -> str | None:
    """Returns why `mixed_linear` cannot compute a problem; None if it can. dtype: the dtype of
    x."""
    q = problem.quantization
    if q is None:
        return "the weights are not quantised"
    if not decodes_codes(target):
        return f"{target.name} has no tensor core that reads a decoded weight from registers"
    if dtype != "bf16":
        return f"x is {dtype}"
    if problem.norm is not None or problem.post_norm is not None:
        return "x or the result has a norm"
    if q.differs:
        return q.differs
    if q.x_scale is not None:
        return "x is quantised too"
    return _storage_obstacle(problem, q) or _blocks_obstacle(problem, q)


def decodes_codes(target: Target) -> bool:
    """Whether a chip has a kernel that decodes a weight while it multiplies many tokens by the
    weight."""
    return target.has("wgmma")


def most_decoded(q: Quantization, k: int) -> int | None:
    """Returns the largest number of tokens for which the kernel is faster than decoding a weight of
    k columns and calling the library's GEMM; None if the kernel is always faster."""
    is_float, columns = bool(q.format.number) or q.weight_format == "fp8", q.block[1]
    if columns >= k:  # the kernel scales the sums instead of each number of the weight
        return None
    of_kind = [one for one in GAINS if (one.bits, one.is_float) == (q.format.bits, is_float)]
    return next((one.tokens for one in of_kind if columns <= one.columns), None)


def _storage_obstacle(problem: LinearProblem, q: Quantization) -> str | None:
    if not problem.k_major or q.packed_rows:
        return "the weight is contiguous along N, not along K"
    if problem.k % (ALIGNMENT * 8 // q.format.bits) or problem.n % 8:
        return (
            f"the number of rows, {problem.n}, is not a multiple of 8, or the codes of "
            f"{problem.k} columns are not a multiple of {ALIGNMENT} bytes"
        )
    return None


def _blocks_obstacle(problem: LinearProblem, q: Quantization) -> str | None:
    columns = q.block[1]
    if q.has_table and (columns >= problem.k or columns < BLOCK_K):
        return f"{columns} columns of codes of a table share a scale"
    if q.has_table and nibble_order(q) not in (LOW_FIRST, HIGH_FIRST):
        return "two consecutive codes of a table are in different bytes"
    if q.has_table and any(one is not None and one.dtype == "u8" for one in q.scales):
        return "the scales of codes of a table are exponents"
    if columns >= problem.k and any(one is not None and one.dtype == "u8" for one in q.scales):
        return "the scales of whole rows are exponents"
    if columns < problem.k and columns % BLOCK_K and (BLOCK_K % columns or columns < LEAST_SCALED):
        return f"the number of columns that share a scale is {columns}"
    if q.format.added_zeros:
        return "zeros are added instead of subtracted"
    zero = q.zeros[0]
    if zero is not None and (zero.dtype not in WHOLE or q.format.bits != 4):
        return "the zeros are not integers of four bits"
    if not 0 <= q.zero_point <= 128:
        return f"the zero point is {q.zero_point}"
    if any(_reach(one, problem) > INT32_MAX for one in (*q.scales, *q.zeros)):
        return "the offsets of scales exceed 32 bits"
    return None


def _reach(blocks: Operand | None, problem: LinearProblem) -> int:
    """Returns an upper bound of the offsets of a weight's scales or zeros, in elements."""
    return 0 if blocks is None else blocks.strides[0] * problem.n + blocks.strides[1] * problem.k


@cache
def mixed_config(n: int, k: int, num_tokens: int, target: Target) -> MixedConfig:
    """Returns the tile sizes with the shortest modelled time."""
    options = [(tiles, split) for split in (False, True) for tiles in TILES]
    tiles, split = min(options, key=lambda one: one[0].seconds(n, k, num_tokens, target, one[1]))
    return MixedConfig(tiles.block_t, tiles.stages, split, target.num_sms)


@cache
def pair_config(n: int, k: int, num_tokens: int, target: Target) -> MixedConfig | None:
    """Returns the tile sizes of one kernel that computes a gate and its up projection, each of n
    rows. Returns None if two separate products and an activation are modelled to be faster."""
    tiles = min(TILES, key=lambda one: one.seconds(2 * n, k, num_tokens, target))
    apart = min(
        one.seconds(n, k, num_tokens, target, split) for one in TILES for split in (False, True)
    )
    activation = 3 * 2 * n * num_tokens / target.hbm_bytes_per_s
    if tiles.seconds(2 * n, k, num_tokens, target) > 2 * apart + activation:
        return None
    return MixedConfig(tiles.block_t, tiles.stages, False, target.num_sms)


@cache
def mixed_statics(
    problem: LinearProblem,
    config: MixedConfig,
    index: int,
    stored: str,
    activation: str,
    has_residual: bool,
) -> Statics:
    """Returns the constants of the product with the weight of this index, or with both weights.

    The numbers of a table are rounded to bfloat16 before they are multiplied by their scales, if
    the kernel adds a residual to the product or activates the product. PyTorch rounds the product
    itself before these operations, and the error of that rounding is about twice as large.

    Args:
        stored: The dtype of the codes before they are read as 32-bit words.
        activation: The name of the activation that the kernel applies to its product, or to the
            first product if it computes both.
        has_residual: Whether the kernel adds a residual.
    """
    exact = not (activation or has_residual)
    constants = mixed_constants(problem, index, stored, exact)
    return Statics(config, **constants, ACTIVATION=activation)


def mixed_constants(
    problem: LinearProblem, index: int, stored: str, exact: bool
) -> dict[str, Constant]:
    """Returns the constants of `mixed_linear`, except the constants that the plan chooses, the
    strides of its tensors, and the constants of the activation. exact: whether a product of a
    table's number and its scale is rounded only once."""
    q = problem.quantization
    assert q is not None
    scale = q.scales[index]
    assert scale is not None
    rows, columns = q.block
    strides = dict(zip(_STRIDES, q.block_strides(index), strict=True))
    signed = stored == "i8"
    codes = _CODES[q.format.number] if q.format.bits == 4 else "bytes"
    codes = "e4m3" if q.weight_format == "fp8" else codes
    lookup, unit = _table_constants(q, exact) if q.has_table else ("", 1.0)
    return {
        "N": problem.n,
        "K": problem.k,
        "CODES": codes,
        "LOOKUP": lookup,
        "UNIT_OF_CODES": _UNITS.get(codes, unit),
        "PER": q.per_int32,
        "ORDER": nibble_order(q),
        "SIGNED": signed,
        "ZERO_POINT": q.zero_point + 128 * signed,
        "PACKED_ZEROS": q.packed_zeros,
        "SCALED": columns < problem.k,
        "EXACT": scale.dtype in EXACT,
        "SCALE_ROWS": rows,
        "SCALE_COLUMNS": min(columns, problem.k),
        "SCALE": problem.scale,
        "UNIT": UNIT,
        "SPAN": UNIT if columns >= problem.k or columns % UNIT == 0 else BLOCK_K,
        "BLOCK_K": BLOCK_K,
        "GROUP": GROUP,
        **strides,
    }


_STRIDES = (
    "SCALE_ROW_STRIDE", "SCALE_COLUMN_STRIDE", "ZERO_ROW_STRIDE", "ZERO_COLUMN_STRIDE",
)  # fmt: skip


def _table_constants(q: Quantization, exact: bool) -> tuple[str, float]:
    """Returns the assembly for the codes of a table, and the number that a decoded 1.0 stands
    for."""
    rounded, rests, unit = bfloat16_table(q.format.number)
    is_high_first = nibble_order(q) == HIGH_FIRST
    return lookup_assembly(rounded, rests if exact else (), is_high_first), unit


def lookup_assembly(rounded: Sequence[int], rests: Sequence[int], is_high_first: bool) -> str:
    """Returns PTX that looks up the numbers of two pairs of codes, and multiplies each number by
    its scale.

    The operands $2 and $4 are the words with the first and the second pair, and $6 selects one byte
    of each word. The operands $10 and $11 are the scales of the two pairs in bfloat16, and $12 and
    $13 are the rounding errors of these scales. The results $0 and $1 have two bfloat16 numbers
    each.

    Args:
        rounded: The words of the rounded numbers, as
            :func:`tilewright.codegen.formats.bfloat16_table` returns them.
        rests: The words of the rounding errors, as the same function returns them. With them, a
            product is rounded once. If `rests` is empty or zero, the numbers stay rounded, and the
            product is rounded again.
        is_high_first: Whether the high nibble of a byte holds the first code of a pair.
    """
    lines = [
        ".reg .b32 s, m, a, b, c, h0, h1, l0, l1;",
        # The nibbles of s are the four codes. `prmt` uses a nibble to select a byte.
        "prmt.b32 s, $2, $4, $6;",
        # All bits of a byte of m are set where the code is at least 8.
        "shl.b32 c, s, 4;",
        "prmt.b32 m, s, c, 0x9D8C;",
        "and.b32 s, s, 0x7777;",
        *_looked_up("h", rounded, is_high_first),
    ]
    if any(rests):
        lines += _looked_up("l", rests, is_high_first)
    for pair in range(2):
        number, rest, scale, error = f"h{pair}", f"l{pair}", f"${10 + pair}", f"${12 + pair}"
        if any(rests):
            lines += [f"mul.rn.bf16x2 {rest}, {rest}, {scale};"]
            lines += [f"fma.rn.bf16x2 {rest}, {number}, {error}, {rest};"]
        else:
            lines += [f"mul.rn.bf16x2 {rest}, {number}, {error};"]
        lines += [f"fma.rn.bf16x2 ${pair}, {number}, {scale}, {rest};"]
    return "\n".join(("{", *lines, "}"))


def _looked_up(out: str, words: Sequence[int], is_high_first: bool) -> list[str]:
    """Returns the instructions that put the 16-bit numbers of two pairs of codes into the registers
    `out`0 and `out`1. The nibbles of register s are the low three bits of the codes, and register m
    tells which codes are at least 8."""
    selects = ("0x4051", "0x6273") if is_high_first else ("0x5140", "0x7362")
    return [
        *_bytes_of("a", words[:4]),
        *_bytes_of("b", words[4:]),
        *(f"prmt.b32 {out}{pair}, a, b, {select};" for pair, select in enumerate(selects)),
    ]


def _bytes_of(out: str, words: Sequence[int]) -> list[str]:
    """Returns the instructions that put one byte of the numbers of four codes into a register.
    words: this byte of all 16 numbers."""
    first, second, third, fourth = (f"{word & 0xFFFFFFFF:#x}" for word in words)
    return [
        f"prmt.b32 {out}, {first}, {second}, s;",
        f"prmt.b32 c, {third}, {fourth}, s;",
        f"lop3.b32 {out}, m, c, {out}, 0xCA;",
    ]


def nibble_order(q: Quantization) -> int:
    """Returns a number with one hexadecimal digit for each code of a 32-bit word: the number of the
    nibble that holds the code. The lowest digit belongs to the first code. If codes are stored in
    bytes, the order of the nibbles in a byte is repeated."""
    order = q.order or (0, 1)
    per = len(order)
    places = (number // per * per + order[number % per] for number in range(8))
    return sum(place << 4 * number for number, place in enumerate(places))


def workspace(config: MixedConfig) -> tuple[int, int]:
    """Returns the workspace that a launch with `split` needs: (number of counters, number of fp32
    values for each counter). Each program stores parts of at most two tiles."""
    return 2 * config.programs, 2 * ROWS * config.block_t
