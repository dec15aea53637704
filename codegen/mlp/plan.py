"""The tiles of a linear for few tokens, and up to how many tokens it is one."""

from __future__ import annotations

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.mlp.kernels import LinearConfig
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
# All programs are there at once, so that they end together: two on each multiprocessor.
PROGRAMS_PER_SM = 2
# What a program leaves of its half of the shared memory: its barriers, and sums over tokens.
RESERVED_BYTES = 8 * 1024
BLOCK_N = 64
# Steps over K that are worth a program of their own.
LEAST_STEPS = 4
MOST_PARTS = 16
MOST_STAGES = 8
# Columns of a row that are asked for early. With one weight, whose programs end soon, that and
# letting the next kernel in saves up to a tenth (H200, 4096 x 4096: 10.4 us and 11.3).
PREFETCHED = 256


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
    block_k = 64 if problem.num_weights == 2 or block_t > 32 else 128
    if problem.quantization is not None:
        block_k = code_step(problem.quantization, problem.k)
    tiles = cdiv(problem.n, BLOCK_N)
    steps = cdiv(problem.k, block_k)
    parts = max(min(PROGRAMS_PER_SM * target.num_sms // tiles, steps // LEAST_STEPS, MOST_PARTS), 1)
    split = cdiv(steps, cdiv(steps, parts))
    room = target.max_shared_bytes // PROGRAMS_PER_SM - RESERVED_BYTES
    room -= made_bytes(problem, block_t, block_k)
    stages = max(min(room // stage_bytes(problem, block_t, block_k), MOST_STAGES), 2)
    early = problem.num_weights == 1
    prefetch = PREFETCHED if early else 0
    return LinearConfig(BLOCK_N, block_t, block_k, split, 4, stages, prefetch, lets_in=early)


def stage_bytes(problem: LinearProblem, block_t: int, block_k: int) -> int:
    """Of the weights' tiles, and of those of x and the norm, 16 bits a number."""
    weights = problem.num_weights * BLOCK_N * problem.weight_bytes
    tiles = 1 + (0 if problem.norm is None else problem.norm.tiles)
    return int(weights + 2 * block_t * tiles) * block_k


def made_bytes(problem: LinearProblem, block_t: int, block_k: int) -> int:
    """Of the tiles that codes are decoded to, and that x is put into their order in; codes packed
    along K stay in registers."""
    q = problem.quantization
    if q is None:
        return 0
    return 2 * block_k * (block_t + (BLOCK_N if q.packed_rows else 0))
