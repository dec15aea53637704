"""Plans of the kernels around MLA's attention, by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.mla.key_kernels import LatentConfig, LatentProblem, UpConfig, UpProblem
from tilewright.codegen.targets import Target

# The largest number of rows for which each program computes one row. A chip has room for more than
# this many warps.
FEW_ROWS = 1024
# The largest number of rows for which a program checks four new tokens, if cached keys and new
# tokens share a launch.
SOME_ROWS = 16384


def latent_config(problem: LatentProblem, rows: int) -> LatentConfig:
    """Returns the tile sizes for `rows` rows of keys and tokens together.

    A program has one warp, so that the sums of the norm are added in the same order for any number
    of rows. On an H200, these tile sizes are the fastest, or nearly the fastest, for 16 to 32768
    rows, quantised or not. A fused launch with two rows in a program takes 117 registers instead of
    63, and then only half as many programs fit a multiprocessor.
    """
    few = rows <= FEW_ROWS
    if problem.fused:
        return LatentConfig(1, 1, checked=1 if few else 4 if rows <= SOME_ROWS else 16)
    return LatentConfig(1 if few else 2, 1)


def up_config(problem: UpProblem, rows: int, target: Target) -> UpConfig:
    """Returns the tile sizes of the up-projection for `rows` keys."""
    block_m = 64 if rows <= 64 else 128
    block_n = _head_block(problem) if problem.joint else _part_block(problem, 128)
    block_k = 64 if problem.scale_block is None else min(problem.scale_block[1], 128)
    warps = 4 if block_m * block_n <= 64 * 128 else 8
    # Triton 3.6 cannot flatten the loop if keys and values are separate tensors.
    wide = block_m == 128 and problem.joint and not problem.limited
    specialised = bool(target.tmem_columns) and wide
    return UpConfig(
        block_m, block_n, block_k, warps, 4, flatten=specialised, warp_specialize=specialised
    )


def uses_library(problem: UpProblem, rows: int, target: Target) -> bool:
    """Whether the library's GEMM computes the keys. It does so if weights are not quantised, keys
    and values are in one tensor, and all rows are needed."""
    return problem.joint and problem.scale_block is None and not problem.limited


def _head_block(problem: UpProblem) -> int:
    """Returns how many rows of the weight there are in a tile that has keys and values. If a tile
    has rows of only one head, the result divides the number of rows of a head."""
    block = 128
    while problem.by_head and (problem.nope + problem.v_dim) % block and block > 16:
        block //= 2
    return block


def _part_block(problem: UpProblem, most: int) -> int:
    """Returns how many rows of the weight there are in a tile that has only keys or only values: a
    power of two that is at most `most`."""
    block = min(most, next_power_of_2(max(problem.nope, problem.v_dim)))
    return max(block, 16)


@dataclass(frozen=True)
class DecodeSizes:
    """The sizes of a call of MLA attention that decodes.

    Attributes:
        queries: The number of queries of a sequence.
        keys: The number of keys that a sequence has room for.
        heads: The number of heads, H.
        nope, rope, v_dim: The number of columns of the parts of a head, N, R and V.
        rank: The number of columns of a latent, L.
        rows: The number of rows of a tile of absorbed attention.
        tiles: The number of tiles that have the queries and heads of a sequence.
        sequences: The number of sequences; 0 if it is unknown.
    """

    queries: int
    keys: int
    heads: int
    nope: int
    rope: int
    v_dim: int
    rank: int
    rows: int
    tiles: int
    sequences: int = 0


# The fewest keys for which absorbed attention is used. Absorbed attention needs two more launches,
# but it reads fewer bytes and computes fewer products.
FEWEST_KEYS = 256
# How many multiply-adds an H200 computes while its memory transfers one 16-bit number.
NUMBER_MACS = 170
# The cost of a multiply-add in absorbed attention, divided by the cost of a multiply-add in a GEMM.
# The cost is higher because the tiles of absorbed attention are narrow.
NARROW_MACS = 3
# The fixed cost of attention to expanded keys, as a number of multiply-adds. For any number of
# keys, attention to expanded keys takes 15 us longer than absorbed attention, because it has more
# launches, and its GEMM has few tiles. An H200 computes EXPANDING_MACS multiply-adds in this time.
# With 64 queries of DeepSeek-V2-Lite behind 1900 tokens, absorbed attention takes 50.0, 71.2 and
# 198 us for 1, 2 and 8 sequences, and attention to expanded keys takes 58.9, 75.4 and 168 us.
EXPANDING_MACS = 5.9e9
# The fixed cost counts only if there are at least this many keys for each query. The cost was not
# measured for fewer keys.
KEYS_PER_QUERY = 16


def absorbs(sizes: DecodeSizes) -> bool:
    """Whether attention to the latents themselves is faster than attention to expanded keys.

    The estimate compares the costs per key. With expanded keys, the up-projection multiplies a
    latent by the columns of all heads, which takes H * L * (N + V) multiply-adds. The resulting
    columns are written and read again. For each query, attention then adds one multiply-add for
    each column, including the R rope columns. With absorbed weights, each tile of rows reads L + R
    numbers and multiplies each of them twice, except for the R rope columns. Both ways read the
    weight once. The fixed costs of expanded keys count if the number of sequences is known and
    there are few queries.
    """
    if sizes.keys < FEWEST_KEYS:
        return False
    columns = sizes.heads * (sizes.nope + sizes.v_dim)
    expanded: float = columns * (sizes.rank + 2 * NUMBER_MACS)
    expanded += sizes.queries * (columns + sizes.heads * sizes.rope)
    tile = NARROW_MACS * sizes.rows * (2 * sizes.rank + sizes.rope)
    tile += NUMBER_MACS * (sizes.rank + sizes.rope)
    if sizes.sequences and sizes.keys >= KEYS_PER_QUERY * sizes.queries:
        expanded += EXPANDING_MACS / (sizes.sequences * sizes.keys)
    return sizes.tiles * tile < expanded
