"""Plans of `cache_attention`: the tile sizes, and the number of parts that the keys are split
into."""

from __future__ import annotations

import math
from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.kernels import DecodeConfig, decode_tiles
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.targets import Target, sm_rate

# The most rows of a tile.
MOST_ROWS = 64
# Without latents: the most numbers in the output of a tile.
MOST_NUMBERS = MOST_ROWS * 128
# For latents, which are both keys and values: how many fp32 numbers of the output a thread holds,
# unless the program would then have more than MOST_WARPS warps.
HELD_NUMBERS = 64
# For latents: the most fp32 numbers of the output that a thread holds.
MOST_HELD_NUMBERS = 128
# The largest number of warps of a program.
MOST_WARPS = 8
# The number of keys in a block of latents. It is small, because rows of latents are wide.
LATENT_KEYS = 32
# The number of keys in a block of latents if the kernel rounds the latents to float8 codes and back
# before it uses them. The program holds these keys in registers, in fp32.
ROUNDED_KEYS = 16
# Without latents: how many fp32 numbers of scores and output a thread of a program with 4 warps may
# hold. If there are more numbers, the program has 8 warps.
HELD_SUMS = 96
# The shared memory that is kept free for the weights, barriers and reductions, in bytes.
SPARE_BYTES = 8192
# The largest number of parts that the keys of a tile are split into.
MOST_SPLITS = 128
# The constants from here to RESIDENT_PROGRAMS belong to the cost model in `_splits`. They follow
# from sweeps on an H100 and an H200 with 1 to 128 sequences of 1000 to 16384 keys
# (benchmarks/results/plans.json and plans_h200.json). All times are in seconds.
#
# The time of the second launch, which merges the parts.
LAUNCH_S = 1.8e-6
# Without latents: the time in which the second launch merges one part.
MERGED_S = 0.12e-6
# With latents: the time in which the second launch merges one row of one part. Several programs
# share the work.
MERGED_LATENT_ROW_S = 1.2e-9
# Without latents: the fixed part of the least time that a program takes for a block of keys. The
# program takes this time because its products and its softmax wait for each other. The other part
# of the least time is the time in which the program reads the block.
STEP_S = 0.65e-6
# Without latents: the rate at which one program reads a block.
STEP_BYTES_PER_S = 100e9
# The least time that a program takes for a block of latents.
LATENT_STEP_S = 1.75e-6
# The time of the products of one row of a tile with a block of latents.
LATENT_ROW_S = 45e-9
# The fraction of the memory rate that programs reach without latents.
MEMORY_SHARE = 0.9
# The fraction of the memory rate that programs reach with latents.
LATENT_MEMORY_SHARE = 0.8
# The time in which a program that is alone on a multiprocessor rounds and processes a block of
# latents.
ROUNDED_STEP_S = 2.8e-6
# The time that a block of rounded latents takes if two programs share a multiprocessor, divided by
# the time that it takes if a program is alone. The quotient is less than 2, because one program can
# work while the other one waits for its reads.
ROUNDED_PAIR = 1.8
# The number of programs that fit a multiprocessor at the same time. Plans do not split keys so far
# that there are more programs, because these would start late, in a second wave that is nearly
# empty.
RESIDENT_PROGRAMS = 2
# The number of pipeline stages if the cache has no pages.
STAGES = 3
# The number of pipeline stages if the cache has pages. It is larger, because a program loads the
# page number of a block before the block.
PAGED_STAGES = 5
# Without latents: how many bytes of keys and values a program loads ahead if it is alone on a
# multiprocessor. Blocks of narrow keys are small, so such a program has more stages. Measured on an
# H100 for 8 heads of 64 columns: 8 sequences of 8192 keys take 61.6 us with four stages, and 64.9
# us with three. With two programs on a multiprocessor, three stages are faster.
LONE_BYTES = 48 * 1024
# Tile sizes for many queries. The plan uses the first entry that fits.
BY_POINTERS = (
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 32, 8, 2),
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 4, 1),
)
# Tile sizes for chips that keep scores, output and q in registers. On these chips, a thread holds
# fewer scores.
IN_REGISTERS = (
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 8, 2),
    PrefillConfig(64, 32, 8, 1),
    PrefillConfig(32, 32, 4, 1),
)
# Tile sizes for calls with a mask tensor, whose own tile takes registers, too.
MASKED = (PrefillConfig(64, 64, 4, 2), *BY_POINTERS[2:])


def decode_rows(
    problem: CacheProblem, num_queries: int, held: int = MOST_HELD_NUMBERS
) -> tuple[int, int, int]:
    """Returns the size of a tile: (queries, heads, rows). held: for latents, how many fp32 numbers
    of the output a thread may hold."""
    most, group = _most_rows(problem, held), problem.group
    heads = cdiv(group, cdiv(group, most))
    room = max(most // next_power_of_2(heads), 1)
    tokens = min(next_power_of_2(max(num_queries, 1)), room)
    return tokens, heads, max(next_power_of_2(tokens * heads), 16)


def _most_rows(problem: CacheProblem, held: int) -> int:
    """Returns the largest number of rows whose output fits the registers of a program's warps."""
    if not problem.latent:
        return min(MOST_ROWS, max(MOST_NUMBERS // problem.v_block, 16))
    return max(min(held * 32 * MOST_WARPS // problem.v_block, MOST_ROWS), 16)


def decodes(problem: CacheProblem, sizes: AttentionSizes) -> bool:
    """Whether the queries of a sequence fit the rows of one tile. If sequences are ragged, their
    average number of queries counts."""
    queries = sizes.num_queries
    if problem.ragged:
        queries = cdiv(queries, max(sizes.num_sequences, 1))
    return queries <= decode_rows(problem, queries)[0]


def prefill_config(problem: CacheProblem, target: Target) -> PrefillConfig:
    """Returns the tile sizes of a call with many queries."""
    tried: tuple[PrefillConfig, ...] = BY_POINTERS
    if problem.paged and max(problem.head_block, problem.v_block) > 128:
        tried = BY_POINTERS[3:]  # the addresses of 64 keys would spill
    if problem.attn_mask:
        tried = MASKED if max(problem.head_block, problem.v_block) <= 128 else BY_POINTERS[1:]
    if target.tmem_columns:
        wide = max(problem.head_block, problem.v_block) > 128
        tried = (PrefillConfig(128, 32 if wide else 64, 8, 2, tma=problem.tma),)
    if target.multiplies_registers:
        tried = (
            IN_REGISTERS if max(problem.head_block, problem.v_block) <= 128 else IN_REGISTERS[1:]
        )
    return next((config for config in tried if _fits(problem, config, target)), tried[-1])


def _fits(problem: CacheProblem, config: PrefillConfig, target: Target) -> bool:
    q_bytes = problem.head_block * ELEMENT_BYTES[problem.dtype]
    key_bytes = (problem.head_block + problem.v_block) * ELEMENT_BYTES[problem.key_dtype]
    return config.fits(q_bytes, key_bytes, problem.attn_mask, target)


def decode_config(problem: CacheProblem, sizes: AttentionSizes, target: Target) -> DecodeConfig:
    """Returns the tile sizes of a call with few queries. sizes: the sizes of the call, rounded up
    to the sizes of the plan's bucket."""
    # Data on its way to tensor memory takes registers, in addition to the registers that hold a
    # mask.
    crowded = bool(target.tmem_columns) and problem.attn_mask != ""
    held = HELD_NUMBERS if crowded else MOST_HELD_NUMBERS
    tokens, heads, rows = decode_rows(problem, sizes.num_queries, held)
    # On chips with tensor memory, sums and scores pass through registers on their way to tensor
    # memory, and take twice as many registers there.
    held = HELD_SUMS // (2 if target.tmem_columns else 1)
    warps = 4 if rows * (problem.v_block + KEYS) <= held * 4 * 32 else MOST_WARPS
    if problem.latent:
        warps = min(max(rows * problem.v_block // (HELD_NUMBERS * 32), 4), MOST_WARPS)
    keys = KEYS if not problem.latent else LATENT_KEYS
    if problem.rounding is not None:
        keys = ROUNDED_KEYS
    config = DecodeConfig(tokens, heads, rows, 1, warps, STAGES, keys)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    config = replace(config, splits=_splits(problem, config, tiles, sizes.num_keys, target))
    stages = _stages(problem, config, tiles, sizes.num_keys, target)
    return replace(config, num_stages=stages)


def _stages(
    problem: CacheProblem, config: DecodeConfig, tiles: int, num_keys: int, target: Target
) -> int:
    """Returns the number of pipeline stages: as many as are useful and fit shared memory."""
    paged, keys = problem.paged, config.block_n
    wanted = PAGED_STAGES if paged else STAGES
    if tiles * config.splits <= target.num_sms and not problem.latent:
        wanted = max(wanted, 1 + cdiv(LONE_BYTES, keys * problem.key_bytes))
    fixed = 2 * config.rows * (problem.head_block + problem.rope_block + keys) + SPARE_BYTES
    if problem.attn_mask:
        fixed += wanted * config.rows * keys * ELEMENT_BYTES[problem.attn_mask]
        if target.tmem_columns:
            # Shared memory also holds the logits, in fp32, on their way from tensor memory to
            # registers.
            fixed += 4 * config.rows * keys
    fitting = (target.max_shared_bytes - fixed) // (keys * problem.key_bytes)
    if problem.latent and paged:
        # One of the stages holds only page numbers, which are loaded before the keys.
        fitting += 1
    # A program needs at most one stage more than it has blocks. The additional stage lets the reads
    # of the first block start before the loop.
    steps = cdiv(cdiv(num_keys, keys), config.splits)
    return max(min(wanted, fitting, steps + (2 if paged else 1)), 1)


def _splits(
    problem: CacheProblem, config: DecodeConfig, tiles: int, keys: int, target: Target
) -> int:
    """Returns the number of parts of each tile's keys that gives the shortest modelled time.

    The modelled time of a part is the number of its blocks, times the time of a block. If there are
    several parts, programs also write the sums of the parts, and a second launch reads and merges
    them.
    """
    sms, blocks = target.num_sms, cdiv(keys, config.block_n)
    sm_bytes_per_s = sm_rate(target)
    part_bytes = 4 * config.real_rows * problem.v_block
    merged = config.real_rows * MERGED_LATENT_ROW_S if problem.latent else MERGED_S
    most = min(MOST_SPLITS, blocks, RESIDENT_PROGRAMS * sms // tiles)

    def time(splits: int) -> float:
        programs = tiles * splits
        reading = cdiv(blocks, splits) * _step_s(problem, config, programs / sms, sm_bytes_per_s)
        if splits == 1:
            return reading
        # The sums of all parts are written and read again. The second launch pads the number of
        # parts to a power of two.
        parts = 2 * programs * part_bytes / sms / sm_bytes_per_s
        return reading + LAUNCH_S + merged * next_power_of_2(splits) + parts

    return min(range(1, max(most, 1) + 1), key=time)


def _step_s(
    problem: CacheProblem, config: DecodeConfig, load: float, sm_bytes_per_s: float
) -> float:
    """Returns the seconds in which the programs of the busiest multiprocessor compute a block each.

    load: the average number of programs of a multiprocessor. If the load is below one, the programs
    also use the memory rate of the multiprocessors that have no program.
    """
    waves = math.ceil(load)
    if problem.rounding is not None:
        return ROUNDED_STEP_S * (1 if waves == 1 else waves / 2 * ROUNDED_PAIR)
    block_bytes = config.block_n * problem.key_bytes
    reading = (load if waves == 1 else waves) * block_bytes / sm_bytes_per_s
    if not problem.latent:
        return max(reading / MEMORY_SHARE, STEP_S + block_bytes / STEP_BYTES_PER_S)
    products = waves * config.rows * LATENT_ROW_S
    return max(reading / LATENT_MEMORY_SHARE, products, LATENT_STEP_S)
