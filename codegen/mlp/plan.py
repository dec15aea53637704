"""The tiles of a linear for few tokens, and up to how many tokens it is one."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.mlp.kernels import DotConfig, LinearConfig
from tilewright.codegen.mlp.problem import LinearProblem, code_step
from tilewright.codegen.row_norm import takes_columns
from tilewright.codegen.targets import Target

# Above, a library's GEMM takes more of the tensor core than a kernel that streams weights; of gate
# and up on an H200: 66 us of 16 tokens where Inductor's take 68, but 113 and 74 of 64.
MOST_TOKENS = 64
MOST_GATED_TOKENS = 16
# Up to so many tokens the kernel layer-norms x itself. Modelled, not measured: every program reads
# whole rows before its first product, of 4096 columns in about 1 us a token, where a norm by itself
# takes about 2.
MOST_LAYER_NORMED_TOKENS = 1
# Tokens of a tile where two weights of codes are decoded beside its sums: more spill.
MOST_CODED_TILE = 32
# The same of codes that are floats of four bits.
MOST_GATED_FLOATS = 16
# The same of any weight of codes where the tensor core takes both operands out of registers.
MOST_CODED_IN_REGISTERS = 16
# What a program leaves of its half of the shared memory: its barriers, and sums over tokens.
RESERVED_BYTES = 8 * 1024
# Steps over K, of up to 128 columns, that are worth a program of their own.
LEAST_STEPS = 4
MOST_PARTS = 16


@dataclass(frozen=True)
class Tiling:
    """Tiles of block_n rows, of steps of block_k columns unless the problem wants others.

    programs: of a multiprocessor, all there at once, so that they end together. stages: at most;
    more keep the next kernel's programs from taking their places early.
    """

    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    stages: int = 8
    programs: int = 2


PLAIN = Tiling()
# Codes of four bits, measured for 1 and 16 tokens on an H100 in steps that read 128 bytes of a row:
# the down projection of Llama-3-8B took 29.1 us with 64 rows of 128 columns and eight stages, and
# takes 17.2; gate and up 38.8 and 35.0.
NIBBLES = Tiling(block_n=128, block_k=256, num_warps=8, stages=3)
GATED_NIBBLES = Tiling(block_n=128, block_k=256, num_warps=8, stages=2)
# E2M1 multiplied by its scales in registers has the same tiles: 55.7 us and 28.6, gate and up 98.9
# and 61.5. Sums in tensor memory would be read and written between two products of a step.
SUMS_IN_TENSOR_MEMORY = Tiling(block_n=128, num_warps=8, stages=6)
# The same where codes are floats or of a table, which take longer to decode: nf4 33.0 us and 26.6.
NUMBERS = Tiling(stages=3, programs=3)
GATED_NUMBERS = Tiling(stages=3)
# The same where a word holds the codes of several rows: 30.7 us and 27.3.
NIBBLES_OF_ROWS = Tiling(stages=3, programs=4)
# Columns of a row that are asked for early. With one weight, whose programs end soon, that and
# letting the next kernel in saves up to a tenth (H200, 4096 x 4096: 10.4 us and 11.3).
PREFETCHED = 256


# Up to so many tokens codes are multiplied without tensor cores.
MOST_DOTTED_TOKENS = 1
# Words of a step, the longest first, and rows of a program, of one weight and of two. Measured on
# an H100 with int4, one token: the projections of Llama-3-8B take 13.0 us (down), 22.3 (gate, up)
# and 4.8 (out) where the tensor core's kernels take 16.6, 34.0 and 7.8.
DOT_WORDS = (512, 256, 128)
DOT_ROWS = (16, 8)


def dot_obstacle(problem: LinearProblem, num_tokens: int) -> str | None:
    """Says why `dotted_linear` does not take a call; None where it does, and is the faster one."""
    q = problem.quantization
    if q is None:
        return "weights are no codes"
    if num_tokens > MOST_DOTTED_TOKENS:
        return f"more than {MOST_DOTTED_TOKENS} tokens"
    if problem.norm is not None and problem.norm.kind != "rms":
        return f"{problem.norm.kind} norm"
    if not problem.k_major:
        return "rows lie next to each other"
    return q.dot_obstacle(problem.k)


def dot_config(problem: LinearProblem) -> DotConfig:
    """The tiles of `dotted_linear`."""
    q = problem.quantization
    assert q is not None
    words = q.dot_words(problem.k, DOT_WORDS)
    return DotConfig(DOT_ROWS[problem.gated], words * q.dot_per, num_warps=4)


def most_tokens(num_weights: int) -> int:
    """Up to how many tokens the kernel is the faster one."""
    return MOST_TOKENS if num_weights == 1 else MOST_GATED_TOKENS


def takes_norm(kind: str, num_tokens: int, columns: int) -> bool:
    """Whether the kernel norms so many rows itself. kind: as in `RowNorm`."""
    few = kind == "rms" or num_tokens <= MOST_LAYER_NORMED_TOKENS
    return few and takes_columns(kind, columns)


def linear_config(problem: LinearProblem, num_tokens: int, target: Target) -> LinearConfig:
    """The tiles for so many tokens: as many bytes in flight as fit two programs."""
    most = MOST_CODED_TILE if problem.quantization and problem.num_weights == 2 else MOST_TOKENS
    if problem.quantization and problem.quantization.format.number and problem.num_weights == 2:
        most = MOST_GATED_FLOATS
    if problem.quantization and target.multiplies_registers:
        most = MOST_CODED_IN_REGISTERS
    block_t = min(max(next_power_of_2(num_tokens), 16), most)
    tiling = _tiling(problem, block_t, target)
    block_k = 64 if problem.num_weights == 2 or block_t > 32 else tiling.block_k
    if problem.quantization is not None:
        block_k = code_step(problem.quantization, problem.k, tiling.block_k)
    tiles = cdiv(problem.n, tiling.block_n)
    steps = cdiv(problem.k, block_k)
    worth = cdiv(problem.k, min(block_k, 128)) // LEAST_STEPS
    parts = min(tiling.programs * target.num_sms // tiles, worth, MOST_PARTS)
    split = cdiv(steps, cdiv(steps, max(parts, 1)))
    room = target.max_shared_bytes // tiling.programs - RESERVED_BYTES
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
    )


def _tiling(problem: LinearProblem, block_t: int, target: Target) -> Tiling:
    q = problem.quantization
    if q is None or q.format.bits != 4 or block_t > 16 or target.multiplies_registers:
        return PLAIN
    # Zeros of two weights take the registers of a second program.
    if problem.gated and (q.packed_rows or q.has_zero_tensors):
        return PLAIN
    if q.packed_rows:
        return NIBBLES_OF_ROWS
    if q.scales_numbers and target.tmem_columns > 0:
        return SUMS_IN_TENSOR_MEMORY
    if q.format.number and not q.scales_numbers:
        return GATED_NUMBERS if problem.gated else NUMBERS
    return GATED_NIBBLES if problem.gated else NIBBLES


def stage_bytes(problem: LinearProblem, block_n: int, block_t: int, block_k: int) -> int:
    """Of the weights' tiles, and of those of x and the norm, 16 bits a number."""
    weights = problem.num_weights * block_n * problem.weight_bytes
    tiles = 1 + (0 if problem.norm is None else problem.norm.tiles)
    return int(weights + 2 * block_t * tiles) * block_k


def made_bytes(problem: LinearProblem, block_n: int, block_t: int, block_k: int) -> int:
    """Of the tiles that codes are decoded to, and that x is put into their order in; codes packed
    along K stay in registers."""
    q = problem.quantization
    if q is None:
        return 0
    return 2 * block_k * (block_t + (block_n if q.packed_rows else 0))
