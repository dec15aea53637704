"""Plans of a linear for few tokens: its tiles, and the most tokens for which it is used."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.mlp.kernels import DotConfig, LinearConfig, RoundConfig
from tilewright.codegen.mlp.problem import LinearProblem, code_step
from tilewright.codegen.row_norm import takes_columns
from tilewright.codegen.targets import Target

# Most tokens. With more, a library's GEMM uses the tensor core better than a kernel that streams
# weights. Gate and up on an H200: 66 us for 16 tokens, where Inductor's kernels take 68, but 113 us
# for 64 tokens, where they take 74.
MOST_TOKENS = 64
MOST_GATED_TOKENS = 16
# Most tokens of weights of codes. A library's GEMM needs the codes decoded to numbers in every
# call: on an H100, the down projection in int4 takes 66 us for 128 tokens, where the library takes
# 56 to decode and 50 for the product. So this bound also holds for two weights of codes, which have
# a kernel each above MOST_GATED_TOKENS if x cannot be permuted before. If x is decoded from codes,
# the library multiplies codes: gate and up in float8 take 92 us for 128 tokens, where its two
# products take 66 with their conversions of scales, but 52 for 64 tokens. MOST_TOKENS is their
# bound.
MOST_CODED_TOKENS = 128
# Most tokens for which the kernel layer-norms x itself. This is modelled, not measured: every
# program reads whole rows before its first product, about 1 us per token for 4096 columns, where a
# separate norm takes about 2 us.
MOST_LAYER_NORMED_TOKENS = 1
# Most tokens of a tile that decodes two weights of codes beside its sums: more would spill.
MOST_CODED_TILE = 32
# Fewest columns of a scale of floats of four bits for which a tile of more tokens does not spill on
# sm90 (audit of 64 tokens, groups of 16: three spills in the loop).
LEAST_GROUP = 32
# Most tokens of such a tile if the codes are floats of four bits.
MOST_GATED_FLOATS = 16
# Most tokens of a tile of any weight of codes, if the tensor core takes both operands from
# registers.
MOST_CODED_IN_REGISTERS = 16
# Bytes that a program leaves free in its share of shared memory, for barriers and sums over tokens.
RESERVED_BYTES = 8 * 1024
# Fewest steps over K, of up to 128 columns, of a program.
LEAST_STEPS = 4
MOST_PARTS = 16


@dataclass(frozen=True)
class Tiling:
    """Tiles of block_n rows, in steps of block_k columns unless the problem needs others.

    programs: programs on a multiprocessor, which all run at once, so that they end together.
    stages: most pipeline stages; more would keep the next kernel's programs from starting early.
    """

    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    stages: int = 8
    programs: int = 2


PLAIN = Tiling()
# Tiles for codes of four bits, measured for 1 and 16 tokens on an H100, in steps that read 128
# bytes of a row. The down projection of Llama-3-8B takes 17.2 us, and took 29.1 with 64 rows of 128
# columns and eight stages; gate and up take 35.0 us, and took 38.8.
NIBBLES = Tiling(block_n=128, block_k=256, num_warps=8, stages=3)
GATED_NIBBLES = Tiling(block_n=128, block_k=256, num_warps=8, stages=2)
# Tiles for E2M1 that is multiplied by its scales in registers: 22.4 us, where NIBBLES take 32.3. On
# chips with tensor memory it has tiles whose sums need not be read and written between two products
# of a step.
SCALED_NUMBERS = Tiling(block_k=256, stages=3)
SUMS_IN_TENSOR_MEMORY = Tiling(block_n=128, num_warps=8, stages=6)
# Tiles for codes of four bits that are floats or of a table, which take longer to decode: nf4 takes
# 26.6 us instead of 33.0.
NUMBERS = Tiling(stages=3, programs=3)
GATED_NUMBERS = Tiling(stages=3)
# Tiles for words that hold the codes of several rows: 27.3 us instead of 30.7.
NIBBLES_OF_ROWS = Tiling(stages=3, programs=4)
# Tiles of codes if an earlier kernel permutes x. Times on an H100, in us, include that kernel. Down
# projection of Llama-3-8B, for 32, 64 and 128 tokens: int4 21.8, 30.8 and 46.4 (23.4, 33.4 and 57.9
# if each program permutes x); float8 29.2, 34.2 and 45.6; NVFP4 24.9, 32.5 and 47.4; nf4 30.3, 37.1
# and 57.3. Gate and up, for 16, 32, 64 and 128 tokens: int4 33.4, 32.1, 42.7 and 79.2 (72 for 64
# tokens by a kernel for each weight); float8 48.0, 49.2, 51.7 and 92.4; NVFP4 41.4, 44.1, 51.4 and
# 95.1; MXFP4 60.5, 68.6, 85.0 and 159; nf4 52.5, 60.8, 66.3 and 126.
ORDERED = Tiling(block_k=256, stages=4)
ORDERED_FOR_MORE = Tiling(stages=4)
ORDERED_BYTES_FOR_MORE = Tiling(block_n=128, num_warps=8, stages=4, programs=1)
ORDERED_FOR_MOST = Tiling(block_n=128, num_warps=8, stages=4, programs=1)
ORDERED_NIBBLES_FOR_MOST = Tiling(block_k=256, stages=3, programs=1)
GATED_ORDERED = Tiling(stages=3)
GATED_ORDERED_NIBBLES = Tiling(block_k=256, stages=3)
# Most tokens for which the kernel of one weight permutes x itself, in each of its programs.
MOST_TOKENS_IN_MEMORY_ORDER = 16
# Columns of a row that are prefetched. With one weight, whose programs end soon, this and letting
# the next kernel start early save up to a tenth (H200, 4096 x 4096: 10.4 us instead of 11.3).
PREFETCHED = 256


# Most tokens for which codes are multiplied without tensor cores.
MOST_DOTTED_TOKENS = 1


@dataclass(frozen=True)
class DotTiling:
    """rows: rows of each weight that a program takes. words: words of a step over K."""

    rows: int
    words: int
    num_warps: int = 4


# Tiles of dot products. Measured on an H100 for one token and the projections of Llama-3-8B (down,
# gate and up, out), in us, with the times of the tensor core's kernels in parentheses: int4 13.8,
# 24.8 and 5.6 (16.7, 34.7, 7.9); float8 21.8, 44.5 and 8.4 (24.4, 47.6, 9.0); NVFP4 17.5, 40.5 and
# 7.0 (29.0, 62.5, 10.8); nf4 19.8, 47.6 and 6.9 (26.6, 56.0, 10.2).
DOTS = DotTiling(8, 256)
DOTS_OF_NIBBLES = DotTiling(16, 256)
GATED_DOTS = DotTiling(8, 512)
GATED_DOTS_OF_BYTES = DotTiling(8, 256)
GATED_DOTS_OF_TABLES = DotTiling(4, 256)


def dot_obstacle(
    problem: LinearProblem, num_tokens: int, bytes_fill_words: bool = True
) -> str | None:
    """Returns why `dotted_linear` does not take a call; None if it can and is faster.

    bytes_fill_words: whether codes can be read four bytes at a time.
    """
    q = problem.quantization
    if q is None:
        return "weights are no codes"
    if num_tokens > MOST_DOTTED_TOKENS:
        return f"more than {MOST_DOTTED_TOKENS} tokens"
    if problem.norm is not None and problem.norm.kind != "rms":
        return f"{problem.norm.kind} norm"
    if not problem.k_major:
        return "rows lie next to each other"
    if q.per_int32 == 4 and not bytes_fill_words:
        return "bytes that are no words"
    return q.dot_obstacle(problem.k)


def dot_config(problem: LinearProblem) -> DotConfig:
    """Returns the tiles of `dotted_linear`."""
    q = problem.quantization
    assert q is not None
    tiling = _dot_tiling(problem.gated, q)
    block_k = tiling.words * q.per_int32
    return DotConfig(tiling.rows, block_k, tiling.num_warps)


def _dot_tiling(gated: bool, q: Quantization) -> DotTiling:
    nibbles = q.format.bits == 4
    if not gated:
        return DOTS_OF_NIBBLES if nibbles and q.format.number != "e2m1" else DOTS
    if q.has_table:
        return GATED_DOTS_OF_TABLES
    return GATED_DOTS if nibbles else GATED_DOTS_OF_BYTES


def most_tokens(num_weights: int, coded: bool = False, rounded: bool = False) -> int:
    """Returns the most tokens for which the kernels are faster. coded: weights are codes. rounded:
    x is decoded from codes too, so that a library's GEMM can multiply codes."""
    if coded:
        return MOST_TOKENS if rounded else MOST_CODED_TOKENS
    return MOST_TOKENS if num_weights == 1 else MOST_GATED_TOKENS


def multiplies_apart(problem: LinearProblem, num_tokens: int, target: Target) -> bool:
    """Whether two weights of codes are multiplied by separate kernels: beside the sums of one
    weight, more tokens fit the registers."""
    if not problem.gated or problem.quantization is None:
        return False
    return num_tokens > MOST_GATED_TOKENS and not orders_x(problem, num_tokens, target)


def orders_x(problem: LinearProblem, num_tokens: int, target: Target) -> bool:
    """Whether an earlier kernel permutes x to the order of the codes, and norms it if it is
    normed."""
    q = problem.quantization
    if q is None or q.packed_rows or not problem.k_major or target.multiplies_registers:
        return False
    return num_tokens > (1 if problem.gated else MOST_TOKENS_IN_MEMORY_ORDER)


def takes_norm(kind: str, num_tokens: int, columns: int) -> bool:
    """Whether the kernel itself norms x. kind: as in `RowNorm`."""
    few = kind == "rms" or num_tokens <= MOST_LAYER_NORMED_TOKENS
    return few and takes_columns(kind, columns)


def linear_config(problem: LinearProblem, num_tokens: int, target: Target) -> LinearConfig:
    """Returns the tiles for this many tokens, with as many bytes in flight as fit."""
    ordered = orders_x(problem, num_tokens, target)
    most = MOST_CODED_TILE if problem.quantization and problem.num_weights == 2 else MOST_TOKENS
    if problem.quantization and problem.quantization.format.number and problem.num_weights == 2:
        most = MOST_GATED_FLOATS
    if ordered:
        most = _most_ordered(problem, target)
    if problem.quantization and target.multiplies_registers:
        most = MOST_CODED_IN_REGISTERS
    block_t = min(max(next_power_of_2(num_tokens), 16), most)
    tiling = _tiling(problem, num_tokens, block_t, target)
    block_k = 64 if problem.num_weights == 2 or block_t > 32 else tiling.block_k
    if problem.quantization is not None:
        block_k = code_step(problem.quantization, problem.k, tiling.block_k)
    tiles = cdiv(problem.n, tiling.block_n)
    steps = cdiv(problem.k, block_k)
    worth = cdiv(problem.k, min(block_k, 128)) // LEAST_STEPS
    parts = min(tiling.programs * target.num_sms // tiles, worth, MOST_PARTS)
    split = cdiv(steps, cdiv(steps, max(parts, 1)))
    room = target.max_shared_bytes // tiling.programs - RESERVED_BYTES
    if not ordered:
        room -= made_bytes(problem, tiling.block_n, block_t, block_k)
    most = room // stage_bytes(problem, tiling.block_n, block_t, block_k)
    early = problem.num_weights == 1
    return LinearConfig(
        tiling.block_n,
        block_t,
        block_k,
        split,
        tiling.num_warps,
        num_stages=max(min(most, tiling.stages), 2),
        prefetch=PREFETCHED if early else 0,
        lets_in=early,
        x_in_order=ordered,
    )


def _tiling(problem: LinearProblem, num_tokens: int, block_t: int, target: Target) -> Tiling:
    q = problem.quantization
    if q is None or target.multiplies_registers:
        return PLAIN
    if orders_x(problem, num_tokens, target):
        if target.tmem_columns > 0:
            return PLAIN
        return _ordered_tiling(problem, q, num_tokens, block_t)
    if block_t > 16:
        return PLAIN
    if q.format.bits != 4:
        return PLAIN
    # Zeros of two weights leave no registers for a second program.
    if problem.gated and (q.packed_rows or q.has_zero_tensors):
        return PLAIN
    if q.packed_rows:
        return NIBBLES_OF_ROWS
    if q.scales_numbers and target.tmem_columns > 0:
        return SUMS_IN_TENSOR_MEMORY
    if q.scales_numbers:
        return SCALED_NUMBERS
    if q.format.number:
        return GATED_NUMBERS if problem.gated else NUMBERS
    return GATED_NIBBLES if problem.gated else NIBBLES


def _most_ordered(problem: LinearProblem, target: Target) -> int:
    """Returns the most tokens of a tile if x is permuted by an earlier kernel. Sums of a second
    weight, zeros, or the scales of integers of four bits take the registers that more tokens would
    need. Tensor memory has no room for the numbers and the sums of more tokens."""
    q = problem.quantization
    assert q is not None
    if problem.gated and q.format.number and not q.scales_numbers and q.block[1] < LEAST_GROUP:
        return MOST_CODED_TILE
    heavy = problem.gated or q.has_zero_tensors or _is_of_nibbles(q) or target.tmem_columns > 0
    return MOST_TOKENS if heavy else MOST_CODED_TOKENS


def _is_of_nibbles(q: Quantization) -> bool:
    """Whether codes are integers of four bits."""
    return q.format.bits == 4 and not q.format.number


def _ordered_tiling(
    problem: LinearProblem, q: Quantization, num_tokens: int, block_t: int
) -> Tiling:
    if problem.gated:
        return GATED_ORDERED_NIBBLES if _is_of_nibbles(q) and block_t <= 32 else GATED_ORDERED
    if block_t <= 32:
        return ORDERED
    if num_tokens > MOST_TOKENS and _is_of_nibbles(q):
        return ORDERED_NIBBLES_FOR_MOST
    if block_t > MOST_TOKENS:
        return ORDERED_FOR_MOST
    return ORDERED_FOR_MORE if q.format.bits == 4 else ORDERED_BYTES_FOR_MORE


def stage_bytes(problem: LinearProblem, block_n: int, block_t: int, block_k: int) -> int:
    """Returns the bytes of a pipeline stage: the tiles of weights, and those of x and the norm with
    16 bits per number."""
    weights = problem.num_weights * block_n * problem.weight_bytes
    tiles = 1 + (0 if problem.norm is None else problem.norm.tiles)
    return int(weights + 2 * block_t * tiles) * block_k


def made_bytes(problem: LinearProblem, block_n: int, block_t: int, block_k: int) -> int:
    """Returns the bytes of the tiles of decoded codes and of x in the order of codes. Codes packed
    along K stay in registers."""
    q = problem.quantization
    if q is None:
        return 0
    return 2 * block_k * (block_t + (block_n if q.packed_rows else 0))


# Most columns of a row that `round_rows` takes: 32 numbers for each thread of 32 warps. With 64, a
# gate and its up projection spill on sm100.
MOST_ROUNDED_COLUMNS = 32768
# Most rows for which one kernel that rounds them, between kernels that start early, is expected to
# be faster than the graph's.
MOST_ROUNDED_TOKENS = 128
# Fewest columns of a program that rounds rows, and most programs that each read a whole row. Chosen
# by the audit of registers, not measured against other numbers.
LEAST_ROUNDED_WIDTH = 512
MOST_READERS_OF_ROW = 8
# Numbers of a thread, unless that takes more than 16 warps.
NUMBERS_OF_THREAD = 16


def round_config(
    columns: int, group: int, whole: bool, num_tokens: int, target: Target
) -> RoundConfig:
    """Returns the tiles of `round_rows`: few rows are shared by several programs.

    group: columns that share a scale; 0 for all. whole: whether each program reads a whole row.
    """
    row = next_power_of_2(columns)
    parts = max(target.num_sms // max(num_tokens, 1), 1)
    parts = min(parts, MOST_READERS_OF_ROW) if whole else parts
    width = min(max(next_power_of_2(cdiv(columns, parts)), LEAST_ROUNDED_WIDTH, group), row)
    numbers = row if whole else width
    warps = min(max(numbers // (32 * NUMBERS_OF_THREAD), 4), 16 if numbers <= 16384 else 32)
    return RoundConfig(max(width, group), max(row, group), warps)
