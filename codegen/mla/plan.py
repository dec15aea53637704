"""Which tiles the kernels around MLA's attention take, by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.mla.key_kernels import LatentConfig, LatentProblem, UpConfig, UpProblem
from tilewright.codegen.targets import Target

# Rows up to which a program has one: there are fewer than warps that hide latency.
FEW_ROWS = 1024
# Rows up to which a fused launch has a program for every fourth of its tokens.
SOME_ROWS = 16384


def latent_config(problem: LatentProblem, rows: int) -> LatentConfig:
    """Tiles for `rows` rows of keys and tokens together.

    One warp each: the norm's sums are then added in one order whatever the number of rows. Least
    or nearly so on an H200 for 16 to 32768 rows, values and codes; fused rows in pairs take 117
    registers, not 63, which leaves half the programs on a multiprocessor.
    """
    few = rows <= FEW_ROWS
    if problem.fused:
        return LatentConfig(1, 1, checked=1 if few else 4 if rows <= SOME_ROWS else 16)
    return LatentConfig(1 if few else 2, 1)


def up_config(problem: UpProblem, rows: int, target: Target) -> UpConfig:
    """Tiles of the up-projection for `rows` keys."""
    block_m = 64 if rows <= 64 else 128
    block_n = _head_block(problem) if problem.joint else _part_block(problem, 128)
    block_k = 64 if problem.scale_block is None else min(problem.scale_block[1], 128)
    warps = 4 if block_m * block_n <= 64 * 128 else 8
    # Triton 3.6 cannot flatten the loop where keys and values are stored apart.
    wide = block_m == 128 and problem.joint and not problem.limited
    specialised = bool(target.tmem_columns) and wide
    return UpConfig(
        block_m, block_n, block_k, warps, 4, flatten=specialised, warp_specialize=specialised
    )


def uses_library(problem: UpProblem, rows: int, target: Target) -> bool:
    """Whether the library's GEMM makes the keys: of values, side by side, every row of them."""
    return problem.joint and problem.scale_block is None and not problem.limited


def _head_block(problem: UpProblem) -> int:
    """Rows of the weight in a tile of keys and values: of one head where they are apart by head."""
    block = 128
    while problem.by_head and (problem.nope + problem.v_dim) % block and block > 16:
        block //= 2
    return block


def _part_block(problem: UpProblem, most: int) -> int:
    """Rows of the weight in a tile: a power of two that keeps to one part and one scale."""
    block = min(most, next_power_of_2(max(problem.nope, problem.v_dim)))
    return max(block, 16)


@dataclass(frozen=True)
class DecodeSizes:
    """Queries of a sequence and the keys that it has room for; heads, N, R, V and the rank L; rows
    of a tile of absorbed attention."""

    queries: int
    keys: int
    heads: int
    nope: int
    rope: int
    v_dim: int
    rank: int
    rows: int


# Keys from which fewer bytes and products are worth two more launches.
FEWEST_KEYS = 256
# Multiply-adds of an H200 in the time that memory takes for a 16-bit number.
NUMBER_MACS = 170
# Of absorbed attention, whose tiles are narrow, over those of a GEMM in the same time.
NARROW_MACS = 3


def absorbs(sizes: DecodeSizes) -> bool:
    """Whether attention to the latents themselves takes less time than to keys made of them.

    For each key: the up-projection multiplies it into all heads' columns, H * L * (N + V), which
    are written and read again; attention then costs little. Absorbed, each tile of rows reads
    L + R numbers and multiplies each twice, but for R. (What a query costs by itself is left out:
    both read the weight once.)
    """
    if sizes.keys < FEWEST_KEYS:
        return False
    columns = sizes.heads * (sizes.nope + sizes.v_dim)
    expanded = columns * (sizes.rank + 2 * NUMBER_MACS)
    expanded += sizes.queries * (columns + sizes.heads * sizes.rope)
    tiles = cdiv(sizes.queries * sizes.heads, sizes.rows)
    tile = NARROW_MACS * sizes.rows * (2 * sizes.rank + sizes.rope)
    tile += NUMBER_MACS * (sizes.rank + sizes.rope)
    return tiles * tile < expanded
