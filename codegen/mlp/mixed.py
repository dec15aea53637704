"""The kernel of linears of many tokens with weights of codes, its plan, constants and limits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tilewright.codegen.arithmetic import INT32_MAX, cdiv
from tilewright.codegen.formats import Quantization
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.operand import ALIGNMENT, Operand
from tilewright.codegen.spec import Constant
from tilewright.codegen.targets import Target

MIXED = Kernel("mlp.mixed_gemm", "mixed_linear", unaligned=("factor", "up_factor", "counters"))
# Rows of a tile, half of them of each consumer, and columns of a step.
BLOCK_N = 128
BLOCK_K = 64
ROWS = BLOCK_N // 2
# Columns whose scales are loaded at a time, if a scale covers as many.
UNIT = 128
# Tiles of rows that follow each other, for the same tokens.
GROUP = 8
# Fewest columns that share a scale.
LEAST_SCALED = 16
#: The dtypes of zeros that are whole numbers, and of scales that bfloat16 holds exactly.
WHOLE = ("u8", "i8", "i32", "i64")
EXACT = ("bf16", "u8", "fp8e4nv")
_CODES = {"": "nibbles", "e2m1": "e2m1"}


@dataclass(frozen=True)
class Gain:
    """The most tokens for which the kernel is faster than the library's product of a weight that is
    decoded before: of numbers of some bits, floats or integers, with a scale for at most some
    columns."""

    bits: int
    is_float: bool
    columns: int
    tokens: int


# Beside the library's product of bfloat16, `mixed_linear` took on an H100 (4096 x 14336, 1024
# tokens): for NVFP4 1.28 times as long, MXFP4 1.16, float8 in blocks 1.07, integers 1.00 to 1.03.
# Decoding before takes as long as the library's product of 590 tokens.
GAINS = (
    Gain(4, is_float=True, columns=16, tokens=1024),
    Gain(4, is_float=True, columns=INT32_MAX, tokens=2048),
    Gain(8, is_float=True, columns=INT32_MAX, tokens=4096),
    Gain(8, is_float=False, columns=64, tokens=2048),
    Gain(4, is_float=False, columns=64, tokens=2048),
)


@dataclass(frozen=True)
class MixedTiles:
    """Tiles of 128 rows by block_t tokens, with their times, measured on an H100: microseconds of
    a program for a tile (in all and for 1024 columns of the weight), and of the sums that programs
    exchange if K is split."""

    block_t: int
    stages: int
    tile_us: float
    columns_us: float
    split_us: float

    def seconds(
        self, n: int, k: int, num_tokens: int, target: Target, split: bool = False
    ) -> float:
        """Returns the modelled time of a product by a weight of n rows and k columns."""
        tiles = cdiv(n, BLOCK_N) * cdiv(num_tokens, self.block_t)
        waves = tiles / target.num_sms if split else cdiv(tiles, target.num_sms)
        us = waves * (self.tile_us + self.columns_us * k / 1024)
        return 1e-6 * ((us + self.split_us) / (1 - MARGIN) if split else us)


TILES = (MixedTiles(256, 4, 1.0, 10.6, 17.0), MixedTiles(128, 6, 4.2, 5.9, 12.0))
# The share of the time that a split of K must save. It was slower than modelled behind many waves.
MARGIN = 0.04


@dataclass(frozen=True)
class MixedConfig:
    """The constants of a launch that the plan chooses. split: whether all programs share the tiles
    that would leave some of them idle."""

    block_t: int
    stages: int
    split: bool
    programs: int

    def __str__(self) -> str:
        return f"{BLOCK_N}x{self.block_t}x{BLOCK_K} s{self.stages}{' split' * self.split}"


def mixed_obstacle(problem: LinearProblem, dtype: str, target: Target) -> str | None:
    """Returns why `mixed_linear` does not take a problem; None if it does. dtype: x's."""
    q = problem.quantization
    if q is None:
        return "weights are no codes"
    if not decodes_codes(target):
        return f"{target.name} has no tensor core that reads a decoded weight from registers"
    if dtype != "bf16":
        return f"x is {dtype}"
    if problem.norm is not None or problem.post_norm is not None:
        return "a norm of x or of the result"
    if q.differs:
        return q.differs
    if q.x_scale is not None:
        return "x has codes too"
    return _storage_obstacle(problem, q) or _blocks_obstacle(problem, q)


def decodes_codes(target: Target) -> bool:
    """Whether a chip has a kernel that decodes weights on the way to a product of many tokens."""
    return target.has("wgmma")


def most_decoded(q: Quantization, k: int) -> int | None:
    """Returns the most tokens for which the kernel is faster than the library's product of a weight
    of k columns that is decoded before; None if it is for any number."""
    is_float, columns = bool(q.format.number) or q.weight_format == "fp8", q.block[1]
    if columns >= k:  # sums are scaled, not numbers
        return None
    of_kind = [one for one in GAINS if (one.bits, one.is_float) == (q.format.bits, is_float)]
    return next((one.tokens for one in of_kind if columns <= one.columns), None)


def _storage_obstacle(problem: LinearProblem, q: Quantization) -> str | None:
    if not problem.k_major or q.packed_rows:
        return "rows lie next to each other"
    if q.has_table:
        return f"numbers of the table {q.format.number}"
    if problem.k % (ALIGNMENT * 8 // q.format.bits) or problem.n % 8:
        return f"{problem.n} rows of {problem.k} columns are not whole {ALIGNMENT} bytes"
    return None


def _blocks_obstacle(problem: LinearProblem, q: Quantization) -> str | None:
    columns = q.block[1]
    if columns >= problem.k and any(one is not None and one.dtype == "u8" for one in q.scales):
        return "scales of whole rows that are exponents"
    if columns < problem.k and columns % BLOCK_K and (BLOCK_K % columns or columns < LEAST_SCALED):
        return f"scales of {columns} columns"
    if q.format.added_zeros:
        return "zeros that are added"
    zero = q.zeros[0]
    if zero is not None and (zero.dtype not in WHOLE or q.format.bits != 4):
        return "zeros that are no whole numbers of four bits"
    if not 0 <= q.zero_point <= 128:
        return f"zeros of {q.zero_point}"
    if any(_reach(one, problem) > INT32_MAX for one in (*q.scales, *q.zeros)):
        return "offsets of scales exceed 32 bits"
    return None


def _reach(blocks: Operand | None, problem: LinearProblem) -> int:
    """Returns a bound of the offsets of the scales or zeros of a weight."""
    return 0 if blocks is None else blocks.strides[0] * problem.n + blocks.strides[1] * problem.k


@cache
def mixed_config(n: int, k: int, num_tokens: int, target: Target) -> MixedConfig:
    """Returns the tiles with the least modelled time."""
    options = [(tiles, split) for split in (False, True) for tiles in TILES]
    tiles, split = min(options, key=lambda one: one[0].seconds(n, k, num_tokens, target, one[1]))
    return MixedConfig(tiles.block_t, tiles.stages, split, target.num_sms)


@cache
def pair_config(n: int, k: int, num_tokens: int, target: Target) -> MixedConfig | None:
    """Returns the tiles of one kernel for a gate and its up projection, each of n rows; None if two
    products and an activation have less modelled time."""
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
    problem: LinearProblem, config: MixedConfig, index: int, stored: str, activation: str
) -> Statics:
    """Returns the constants of the product by the index-th weight, or by both. stored: dtype of its
    codes before they are read as words. activation: of the product, or of the first one."""
    constants = mixed_constants(problem, index, stored)
    return Statics(config, **constants, ACTIVATION=activation)


def mixed_constants(problem: LinearProblem, index: int, stored: str) -> dict[str, Constant]:
    """Returns the constants of `mixed_linear` that are neither the plan's nor strides of its
    tensors, without its activation."""
    q = problem.quantization
    assert q is not None
    scale = q.scales[index]
    assert scale is not None
    rows, columns = q.block
    strides = dict(zip(_STRIDES, q.block_strides(index), strict=True))
    signed = stored == "i8"
    codes = _CODES[q.format.number] if q.format.bits == 4 else "bytes"
    return {
        "N": problem.n,
        "K": problem.k,
        "CODES": "e4m3" if q.weight_format == "fp8" else codes,
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
        "UNIT": UNIT if columns >= problem.k or columns % UNIT == 0 else BLOCK_K,
        "BLOCK_K": BLOCK_K,
        "GROUP": GROUP,
        **strides,
    }


_STRIDES = (
    "SCALE_ROW_STRIDE", "SCALE_COLUMN_STRIDE", "ZERO_ROW_STRIDE", "ZERO_COLUMN_STRIDE",
)  # fmt: skip


def nibble_order(q: Quantization) -> int:
    """Returns the nibbles of a 32-bit word that hold its codes, each as a hexadecimal digit, the
    first one last. Stored bytes may have an order, too."""
    order = q.order or (0, 1)
    per = len(order)
    places = (number // per * per + order[number % per] for number in range(8))
    return sum(place << 4 * number for number, place in enumerate(places))


def workspace(config: MixedConfig) -> tuple[int, int]:
    """Returns (counters, fp32 numbers for each of them) that a launch with `split` needs: each
    program has parts of up to two tiles."""
    return 2 * config.programs, 2 * ROWS * config.block_t
