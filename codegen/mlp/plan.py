"""Plans of linears for few tokens: tile sizes, and the largest number of tokens for each kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.mlp.kernels import DotConfig, LinearConfig, RoundConfig
from tilewright.codegen.mlp.problem import LinearProblem, code_step
from tilewright.codegen.row_norm import takes_columns
from tilewright.codegen.targets import Target

# The largest number of tokens for which a kernel streams one weight. With more tokens, a library's
# GEMM uses the tensor cores better.
MOST_TOKENS = 64
# The largest number of tokens for which one kernel streams two weights. Gate and up projection on
# an H200 take 66 us for 16 tokens (68 us with Inductor's kernels), and 113 us for 64 tokens (74 us
# with Inductor's kernels).
MOST_GATED_TOKENS = 16
# The largest number of tokens for which the op multiplies two weights that are not quantised in one
# kernel. Patterns use the op only for up to MOST_GATED_TOKENS tokens, but a model may call the op
# for more. On an H100, gate and up of Llama-3-8B take 101 us for 32 tokens, and 105 us with two
# products of the library. This kernel was not compared with Inductor's kernels.
MOST_STREAMED_PAIR = 32
# The largest number of tokens for which a kernel streams a quantised weight. This number is larger
# than MOST_TOKENS, because the library needs a decoded weight in every call. On an H100, the down
# projection in int4 takes 66 us for 128 tokens, while the library takes 56 us to decode the weight
# and 50 us for the product. The same limit holds for two quantised weights. (For more than
# MOST_GATED_TOKENS tokens, each of the two weights has its own kernel if x cannot be permuted
# first.) If x is quantised too, the library multiplies the codes, and the limit is MOST_TOKENS.
# Gate and up in float8 take 92 us for 128 tokens and 52 us for 64 tokens, while the library's two
# products and the conversions of scales take 66 us for 128 tokens.
MOST_CODED_TOKENS = 128
# The largest number of tokens for which the kernel of unquantised weights computes an RMS norm of x
# itself. For 64 tokens on an H100, the first linear of OPT-6.7B's MLP takes 140 us if its kernel
# computes a norm, and 55 us if a separate kernel has computed a layer norm. Nothing was measured
# for 17 to 63 tokens.
MOST_NORMED_TOKENS = 16
# The largest number of tokens for which the kernel computes a layer norm of x itself. The limit is
# modelled, not measured. Every program reads whole rows before its first product, which takes about
# 1 us per token for 4096 columns. A separate norm takes about 2 us.
MOST_LAYER_NORMED_TOKENS = 1
# The largest number of tokens in a tile that decodes two quantised weights. With more tokens, the
# sums would not leave enough registers.
MOST_CODED_TILE = 32
# For 4-bit floats, a tile with more than MOST_CODED_TILE tokens spills registers on sm90 if fewer
# columns than this share a scale. (An audit of 64 tokens with groups of 16 columns found three
# spills in the loop.)
LEAST_GROUP = 32
# The largest number of tokens in a tile that decodes two weights of 4-bit floats.
MOST_GATED_FLOATS = 16
# The largest number of tokens in a tile of any quantised weight, if the tensor cores read both
# operands from registers.
MOST_CODED_IN_REGISTERS = 16
# How many bytes of its share of shared memory a program keeps free for barriers and for sums over
# tokens.
RESERVED_BYTES = 8 * 1024
# The fewest steps over K that a program performs. A step has up to 128 columns.
LEAST_STEPS = 4
# The largest number of parts that K is split into.
MOST_PARTS = 16


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and pipeline options for one kind of weight.

    Attributes:
        block_n: The number of weight rows in a tile.
        block_k: The number of columns in a step, unless the problem requires a different number.
        num_warps: The number of warps of a program.
        stages: The largest number of pipeline stages. With more stages, the next kernel's programs
            could not start early.
        programs: The number of programs that run on a multiprocessor at the same time.
        parts: The number of parts of K if there are more tiles than programs.
    """

    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    stages: int = 8
    programs: int = 2
    parts: int = 1


# The tiles that are used if no rule below applies.
PLAIN = Tiling()
# Tiles for weights that are not quantised and many tokens, and, on chips that were not measured,
# for two weights and any number of tokens. A step reads 8 KiB of each weight.
SHORT_STEPS = Tiling(block_k=64)
# The largest number of tokens for which the tiles of a single unquantised weight are PLAIN.
MOST_PLAIN_TILE = 32
# Tiles for two weights that are not quantised and few tokens, and for one weight and more than
# MOST_PAIRED_TOKENS tokens. A step reads 16 KiB of each weight, and one program has all of the
# shared memory. On an H100, gate and up of Llama-3-8B take 89.6 us for 1 token and 91.6 us for 16
# tokens (with SHORT_STEPS and two programs on a multiprocessor: 95.7 and 97.7 us). For 64 tokens,
# the down projection of Llama-3-8B takes 50.1 us (with SHORT_STEPS: 52.9 us).
LONG_STEPS = Tiling(stages=5, programs=1)
# Wider tiles for two weights that are not quantised and few tokens. For 16 tokens on an H100, gate
# and up of Qwen3-4B take 45.0 us with WIDE_TILES, and 48.0 us with SHORT_STEPS. WIDE_TILES or
# LONG_STEPS are the fastest for 4 and 32 tokens, too, and for Qwen3-8B and Llama-3-70B.
WIDE_TILES = Tiling(block_n=128, block_k=64, stages=5, programs=1)
# LONG_STEPS with K in two parts, so that the last programs, which are few, end sooner. For one
# token on an H200, gate and up of Qwen3-14B take 102.1 us with HALVES, and 107.9 us with
# LONG_STEPS.
HALVES = Tiling(stages=5, programs=1, parts=2)
# The time that each further part of K adds, as a fraction of the time with one part. Parts take
# more time because their sums are added in a fixed order.
PARTS_TIME = 0.02
# The highest rate at which one program reads if it is alone on a multiprocessor, as measured on an
# H100.
PROGRAM_BYTES_PER_S = 85e9
# For one weight: the largest number of tokens for which two programs share a multiprocessor. For 32
# tokens on an H200, the down projection of Gemma2-9B takes 32.6 us with LONG_STEPS (112 programs),
# and 34.4 us with two programs on a multiprocessor.
MOST_PAIRED_TOKENS = 16
# For one weight and more than MOST_PAIRED_TOKENS tokens: the smallest fraction of the
# multiprocessors that LONG_STEPS has to occupy.
LEAST_OCCUPIED = 0.8
# Tiles for one weight and many tokens, if LONG_STEPS would occupy too few multiprocessors. The down
# projections of Qwen3-14B and 32B have 80 tiles of 64 rows. For 64 tokens on an H200, they take
# 61.8 and 85.4 us with LONG_STEPS (80 programs), and 56.5 and 76.4 us with WIDE_WARPS (120
# programs).
WIDE_WARPS = Tiling(block_n=128, block_k=64, num_warps=8, stages=5, programs=1)
# Tiles for one weight of 4-bit codes, which read 128 bytes of a row in each step. For 1 and for 16
# tokens on an H100, the down projection of Llama-3-8B in int4 takes 17.2 us. With tiles of 64 rows
# and 128 columns and with eight stages, it takes 29.1 us.
NIBBLES = Tiling(block_n=128, block_k=256, num_warps=8, stages=3)
# Tiles for two weights of 4-bit codes, which read 128 bytes of a row in each step. Gate and up of
# Llama-3-8B take 35.0 us with these tiles, and 38.8 us with tiles of 64 rows and 128 columns.
GATED_NIBBLES = Tiling(block_n=128, block_k=256, num_warps=8, stages=2)
# Tiles for E2M1 codes that are multiplied by their scales in registers. The down projection takes
# 22.4 us with these tiles, and 32.3 us with NIBBLES.
SCALED_NUMBERS = Tiling(block_k=256, stages=3)
# Tiles for the same codes on chips with tensor memory. With these tiles, the sums need not be read
# from tensor memory and written back between the two products of a step.
SUMS_IN_TENSOR_MEMORY = Tiling(block_n=128, num_warps=8, stages=6)
# Tiles for one weight of 4-bit codes that are floats or indices into a table. These codes take
# longer to decode. The down projection in nf4 takes 26.6 us with these tiles, and 33.0 us with
# NIBBLES.
NUMBERS = Tiling(stages=3, programs=3)
# Tiles for two weights of these codes.
GATED_NUMBERS = Tiling(stages=3)
# Tiles for words that hold the codes of several rows. The down projection takes 27.3 us with these
# tiles, and 30.7 us with NIBBLES.
NIBBLES_OF_ROWS = Tiling(stages=3, programs=4)
# The constants from here to GATED_ORDERED_NIBBLES are tiles for quantised weights if an earlier
# kernel permutes x. The following times on an H100, in us, include the earlier kernel. Down
# projection of Llama-3-8B, for 32, 64 and 128 tokens: int4 21.8, 30.8 and 46.4 (23.4, 33.4 and 57.9
# if each program permutes x itself); float8 29.2, 34.2 and 45.6; NVFP4 24.9, 32.5 and 47.4; nf4
# 30.3, 37.1 and 57.3. Gate and up, for 16, 32, 64 and 128 tokens: int4 33.4, 32.1, 42.7 and 79.2
# (72 for 64 tokens with a separate kernel for each weight); float8 48.0, 49.2, 51.7 and 92.4; NVFP4
# 41.4, 44.1, 51.4 and 95.1; MXFP4 60.5, 68.6, 85.0 and 159; nf4 52.5, 60.8, 66.3 and 126.
#
# Tiles of up to 32 tokens for one weight.
ORDERED = Tiling(block_k=256, stages=4)
# Tiles of more tokens for one weight of 4-bit codes.
ORDERED_FOR_MORE = Tiling(stages=4)
# Tiles of more tokens for one weight of 8-bit codes.
ORDERED_BYTES_FOR_MORE = Tiling(block_n=128, num_warps=8, stages=4, programs=1)
# Tiles of more than MOST_TOKENS tokens for one weight.
ORDERED_FOR_MOST = Tiling(block_n=128, num_warps=8, stages=4, programs=1)
# Tiles for one weight of 4-bit integers, in a call of more than MOST_TOKENS tokens.
ORDERED_NIBBLES_FOR_MOST = Tiling(block_k=256, stages=3, programs=1)
# Tiles for two weights.
GATED_ORDERED = Tiling(stages=3)
# Tiles of up to 32 tokens for two weights of 4-bit integers.
GATED_ORDERED_NIBBLES = Tiling(block_k=256, stages=3)
# The largest number of tokens for which each program of a kernel for one weight permutes x itself.
MOST_TOKENS_IN_MEMORY_ORDER = 16
# The number of columns of a row that are prefetched. If there is only one weight, the programs of a
# kernel end soon. Prefetching, together with an early start of the next kernel, then saves up to a
# tenth of the time (for a weight of 4096 x 4096 on an H200: 10.4 us instead of 11.3 us).
PREFETCHED = 256


# The largest number of tokens for which quantised weights are multiplied without tensor cores.
MOST_DOTTED_TOKENS = 1


@dataclass(frozen=True)
class DotTiling:
    """The tile sizes of a kernel that computes dot products without tensor cores.

    Attributes:
        rows: The number of rows of each weight that a program computes.
        words: The number of 32-bit words of a row that are read in one step over K.
        num_warps: The number of warps of a program.
    """

    rows: int
    words: int
    num_warps: int = 4


# The constants from here to GATED_DOTS_OF_TABLES are tiles of dot products. The projections of
# Llama-3-8B (down, gate and up, out) took the following times on an H100, in us, for one token. In
# parentheses are the times of the kernels that use tensor cores. int4 13.8, 24.8 and 5.6 (16.7,
# 34.7, 7.9); float8 21.8, 44.5 and 8.4 (24.4, 47.6, 9.0); NVFP4 17.5, 40.5 and 7.0 (29.0, 62.5,
# 10.8); nf4 19.8, 47.6 and 6.9 (26.6, 56.0, 10.2).
#
# Tiles for one weight of 8-bit codes or of E2M1 codes.
DOTS = DotTiling(8, 256)
# Tiles for one weight of other 4-bit codes.
DOTS_OF_NIBBLES = DotTiling(16, 256)
# Tiles for two weights of 4-bit codes without a table.
GATED_DOTS = DotTiling(8, 512)
# Tiles for two weights of 8-bit codes.
GATED_DOTS_OF_BYTES = DotTiling(8, 256)
# Tiles for two weights of codes with a table.
GATED_DOTS_OF_TABLES = DotTiling(4, 256)


def dot_obstacle(
    problem: LinearProblem, num_tokens: int, bytes_fill_words: bool = True
) -> str | None:
    """Returns why `dotted_linear` does not compute a call; None if it can compute the call and is
    faster.

    bytes_fill_words: whether the codes can be read four bytes at a time.
    """
    q = problem.quantization
    if q is None:
        return "the weights are not quantised"
    if num_tokens > MOST_DOTTED_TOKENS:
        return f"more than {MOST_DOTTED_TOKENS} tokens"
    if problem.norm is not None and problem.norm.kind != "rms":
        return f"{problem.norm.kind} norm"
    if not problem.k_major:
        return "the weight is contiguous along N, not along K"
    if q.per_int32 == 4 and not bytes_fill_words:
        return "the codes do not form whole 32-bit words"
    return q.dot_obstacle(problem.k)


def dot_config(problem: LinearProblem) -> DotConfig:
    """Returns the tile sizes of `dotted_linear`."""
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
    """Returns the largest number of tokens for which these kernels are faster than a library.

    coded: whether the weights are quantised. rounded: whether x is quantised too, so that a
    library's GEMM can multiply the codes directly.
    """
    if coded:
        return MOST_TOKENS if rounded else MOST_CODED_TOKENS
    return MOST_TOKENS if num_weights == 1 else MOST_GATED_TOKENS


def takes_library(problem: LinearProblem, num_tokens: int, target: Target) -> bool:
    """Whether the library's GEMM is faster, for weights that are not quantised."""
    if not problem.gated:
        return num_tokens > MOST_TOKENS
    return num_tokens > (MOST_STREAMED_PAIR if target.measured else MOST_GATED_TOKENS)


def multiplies_apart(problem: LinearProblem, num_tokens: int, target: Target) -> bool:
    """Whether two quantised weights are multiplied by two separate kernels. A kernel for one weight
    holds the sums of one weight only, so more tokens fit its registers."""
    if not problem.gated or problem.quantization is None:
        return False
    return num_tokens > MOST_GATED_TOKENS and not orders_x(problem, num_tokens, target)


def orders_x(problem: LinearProblem, num_tokens: int, target: Target) -> bool:
    """Whether an earlier kernel permutes x to the order of the codes. That kernel also normalises
    x, if x is normalised at all."""
    q = problem.quantization
    if q is None or q.packed_rows or not problem.k_major or target.multiplies_registers:
        return False
    return num_tokens > (1 if problem.gated else MOST_TOKENS_IN_MEMORY_ORDER)


def takes_norm(kind: str, num_tokens: int, columns: int, coded: bool) -> bool:
    """Whether the kernel itself normalises x. kind: the kind of norm, as in `RowNorm`. coded:
    whether the weights are quantised."""
    most = MOST_LAYER_NORMED_TOKENS
    if kind == "rms":
        most = MOST_CODED_TOKENS if coded else MOST_NORMED_TOKENS
    return num_tokens <= most and takes_columns(kind, columns)


def linear_config(
    problem: LinearProblem, num_tokens: int, target: Target, tiling: Tiling | None = None
) -> LinearConfig:
    """Returns the tile sizes for this many tokens, with as many bytes in flight as shared memory
    holds. tiling: a tiling to use instead of the one that the plan would choose."""
    ordered = orders_x(problem, num_tokens, target)
    most = MOST_CODED_TILE if problem.quantization and problem.num_weights == 2 else MOST_TOKENS
    if problem.quantization and problem.quantization.format.number and problem.num_weights == 2:
        most = MOST_GATED_FLOATS
    if ordered:
        most = _most_ordered(problem, target)
    if problem.quantization and target.multiplies_registers:
        most = MOST_CODED_IN_REGISTERS
    block_t = min(max(next_power_of_2(num_tokens), 16), most)
    tiling = tiling or _tiling(problem, num_tokens, block_t, target)
    block_k = tiling.block_k
    if problem.quantization is not None:
        block_k = code_step(problem.quantization, problem.k, tiling.block_k)
    tiles = cdiv(problem.n, tiling.block_n)
    steps = cdiv(problem.k, block_k)
    worth = cdiv(problem.k, min(block_k, 128)) // LEAST_STEPS
    split = cdiv(steps, cdiv(steps, _parts(tiling, tiles, worth, target)))
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


def _parts(tiling: Tiling, tiles: int, worth: int, target: Target) -> int:
    """Returns the number of parts of K: as many as the multiprocessors have room for, and at most
    `worth`, the number of parts that are worthwhile for the length of K."""
    parts = max(tiling.programs * target.num_sms // tiles, tiling.parts)
    return max(min(parts, worth, MOST_PARTS), 1)


def _tiling(problem: LinearProblem, num_tokens: int, block_t: int, target: Target) -> Tiling:
    q = problem.quantization
    if q is None:
        return _plain_tiling(problem, num_tokens, block_t, target)
    if target.multiplies_registers:
        return PLAIN
    if orders_x(problem, num_tokens, target):
        if target.tmem_columns > 0:
            return PLAIN
        return _ordered_tiling(problem, q, num_tokens, block_t)
    if block_t > 16:
        return PLAIN
    if q.format.bits != 4:
        return PLAIN
    # The zeros of two weights take the registers that a second program would need.
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


def _plain_tiling(problem: LinearProblem, num_tokens: int, block_t: int, target: Target) -> Tiling:
    """Returns the tiling for weights that are not quantised."""
    if not target.measured:
        return SHORT_STEPS if problem.gated or block_t > MOST_PLAIN_TILE else PLAIN
    if problem.gated and block_t > MOST_STREAMED_PAIR:
        return SHORT_STEPS
    if problem.gated:
        tried = (LONG_STEPS, WIDE_TILES, HALVES)
        return min(tried, key=lambda one: _reading_time(problem.n, one, target))
    return _single_tiling(problem.n, num_tokens, target)


def _single_tiling(rows: int, num_tokens: int, target: Target) -> Tiling:
    """Returns the tiling for one weight with this many rows."""
    if num_tokens > MOST_TOKENS:
        return SHORT_STEPS
    tiles = cdiv(rows, LONG_STEPS.block_n)
    occupied = max(target.num_sms // tiles, 1) * tiles / target.num_sms
    if num_tokens > MOST_PAIRED_TOKENS and occupied >= LEAST_OCCUPIED:
        return LONG_STEPS
    return PLAIN if num_tokens <= MOST_PLAIN_TILE else WIDE_WARPS


def _reading_time(rows: int, tiling: Tiling, target: Target) -> float:
    """Returns the time in which programs read all rows, one program on a multiprocessor at a time.
    The unit of the result is the time in which the whole chip reads one row at the full memory
    rate."""
    reading = math.ceil(target.hbm_bytes_per_s / PROGRAM_BYTES_PER_S)
    waves, last = divmod(tiling.parts * cdiv(rows, tiling.block_n), target.num_sms)
    programs = waves * target.num_sms + (max(last, reading) if last else 0)
    return tiling.block_n * programs / tiling.parts * (1 + PARTS_TIME * (tiling.parts - 1))


def _most_ordered(problem: LinearProblem, target: Target) -> int:
    """Returns the largest number of tokens in a tile if an earlier kernel permutes x.

    The sums of a second weight, zeros, and the scales of 4-bit integers take registers that more
    tokens would need. Tensor memory has no room for the decoded weight and the sums of more tokens.
    """
    q = problem.quantization
    assert q is not None
    if problem.gated and q.format.number and not q.scales_numbers and q.block[1] < LEAST_GROUP:
        return MOST_CODED_TILE
    heavy = problem.gated or q.has_zero_tensors or _is_of_nibbles(q) or target.tmem_columns > 0
    return MOST_TOKENS if heavy else MOST_CODED_TOKENS


def _is_of_nibbles(q: Quantization) -> bool:
    """Whether the codes are 4-bit integers."""
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
    """Returns the number of bytes of one pipeline stage. It holds tiles of the weights, of x and of
    the norm's weight. A number of x or of the norm's weight has 16 bits."""
    weights = problem.num_weights * block_n * problem.weight_bytes
    tiles = 1 + (0 if problem.norm is None else problem.norm.tiles)
    return int(weights + 2 * block_t * tiles) * block_k


def made_bytes(problem: LinearProblem, block_n: int, block_t: int, block_k: int) -> int:
    """Returns the number of bytes of the tiles that the kernel computes in shared memory: the
    decoded weight, and x in the order of the codes. Codes that are packed along K stay in
    registers."""
    q = problem.quantization
    if q is None:
        return 0
    return 2 * block_k * (block_t + (block_n if q.packed_rows else 0))


# The largest number of columns of a row that `round_rows` can round. Each thread of 32 warps then
# holds 32 numbers. With 64 numbers in each thread, the kernel for a gate and its up projection
# spills registers on sm100.
MOST_ROUNDED_COLUMNS = 32768
# The largest number of rows for which `round_rows` is expected to be faster than the kernels that
# Inductor would make of the graph. `round_rows` is one kernel, and it lets the next kernel start
# early.
MOST_ROUNDED_TOKENS = 128
# The fewest columns that a program rounds. LEAST_ROUNDED_WIDTH and MOST_READERS_OF_ROW follow from
# an audit of registers. Other numbers were not measured.
LEAST_ROUNDED_WIDTH = 512
# The largest number of programs that share a row if each of them has to read the whole row.
MOST_READERS_OF_ROW = 8
# The number of elements that each thread holds, unless that would require more than 16 warps.
NUMBERS_OF_THREAD = 16


def round_config(
    columns: int, group: int, whole: bool, num_tokens: int, target: Target
) -> RoundConfig:
    """Returns the tile sizes of `round_rows`. If there are few rows, several programs share a row.

    group: the number of columns that share a scale; 0 if a whole row shares one. whole: whether
    each program reads a whole row.
    """
    row = next_power_of_2(columns)
    parts = max(target.num_sms // max(num_tokens, 1), 1)
    parts = min(parts, MOST_READERS_OF_ROW) if whole else parts
    width = min(max(next_power_of_2(cdiv(columns, parts)), LEAST_ROUNDED_WIDTH, group), row)
    numbers = row if whole else width
    warps = min(max(numbers // (32 * NUMBERS_OF_THREAD), 4), 16 if numbers <= 16384 else 32)
    return RoundConfig(max(width, group), max(row, group), warps)
