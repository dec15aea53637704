"""Plans of `cache_attention`: the tiles, and the number of parts that the keys are split into."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.kernels import DecodeConfig, decode_tiles
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.targets import Target

# Most rows of a tile, and most numbers of its output.
MOST_ROWS = 64
MOST_NUMBERS = MOST_ROWS * 128
# For latents, whose keys are also the values: fp32 numbers of the output in a thread's registers,
# the most of them with the most warps, the most warps, and the keys of a block, whose rows are
# wide.
HELD_NUMBERS = 64
MOST_HELD_NUMBERS = 128
MOST_WARPS = 8
LATENT_KEYS = 32
# Keys of a block of latents that are rounded: they are in registers, in fp32. A program takes about
# three times as long for them as for reading them (measured on an H100).
ROUNDED_KEYS = 16
ROUNDED_TIME = 3
# Without latents: fp32 numbers of scores and output in a thread of 4 warps; for more, there are 8.
HELD_SUMS = 96
# Shared memory for the weights, barriers and reductions.
SPARE_BYTES = 8192
MOST_SPLITS = 128
# The cost of splitting, in bytes of keys that a multiprocessor reads in the same time (measured on
# an H200): of another launch, and of each part to merge.
LAUNCH_BYTES = 56 * 1024
MERGED_BYTES = 2 * 1024
# For latents, the cost of each part: several programs merge the parts of a row (measured on an
# H100).
MERGED_LATENT_BYTES = 512
# Programs that fit a multiprocessor at once. More would start late, in a nearly empty second wave.
RESIDENT_PROGRAMS = 2
# Pipeline stages; a paged cache takes more, because the page of a block is loaded before the block.
STAGES = 3
PAGED_STAGES = 5
# Tiles for many queries; the first that fits is taken.
BY_POINTERS = (
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 32, 8, 2),
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 4, 1),
)
# Tiles for chips that keep scores, output and q all in registers: a thread has fewer scores.
IN_REGISTERS = (
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 8, 2),
    PrefillConfig(64, 32, 8, 1),
    PrefillConfig(32, 32, 4, 1),
)
# Tiles with a mask tensor, whose tile takes registers too.
MASKED = (PrefillConfig(64, 64, 4, 2), *BY_POINTERS[2:])


def decode_rows(
    problem: CacheProblem, num_queries: int, held: int = MOST_HELD_NUMBERS
) -> tuple[int, int, int]:
    """Returns (queries of a tile, heads of a tile, rows of a tile). held: for latents, the fp32
    numbers of the output that a thread may hold."""
    most, group = _most_rows(problem, held), problem.group
    heads = cdiv(group, cdiv(group, most))
    room = max(most // next_power_of_2(heads), 1)
    tokens = min(next_power_of_2(max(num_queries, 1)), room)
    return tokens, heads, max(next_power_of_2(tokens * heads), 16)


def _most_rows(problem: CacheProblem, held: int) -> int:
    """Returns the most rows of a tile whose output fits the registers of its warps."""
    if not problem.latent:
        return min(MOST_ROWS, max(MOST_NUMBERS // problem.v_block, 16))
    return max(min(held * 32 * MOST_WARPS // problem.v_block, MOST_ROWS), 16)


def decodes(problem: CacheProblem, sizes: AttentionSizes) -> bool:
    """Whether the queries of a sequence fit the rows of one tile; for ragged sequences, the average
    number of queries."""
    queries = sizes.num_queries
    if problem.ragged:
        queries = cdiv(queries, max(sizes.num_sequences, 1))
    return queries <= decode_rows(problem, queries)[0]


def prefill_config(problem: CacheProblem, target: Target) -> PrefillConfig:
    """Returns the tiles of a call with many queries."""
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
    """Returns the tiles of a call with few queries. sizes: rounded to the sizes that plans are made
    for."""
    # Numbers on their way to tensor memory take registers, in addition to those of a mask.
    crowded = bool(target.tmem_columns) and problem.attn_mask != ""
    held = HELD_NUMBERS if crowded else MOST_HELD_NUMBERS
    tokens, heads, rows = decode_rows(problem, sizes.num_queries, held)
    # Sums and scores on their way to tensor memory are in registers twice.
    held = HELD_SUMS // (2 if target.tmem_columns else 1)
    warps = 4 if rows * (problem.v_block + KEYS) <= held * 4 * 32 else MOST_WARPS
    if problem.latent:
        warps = min(max(rows * problem.v_block // (HELD_NUMBERS * 32), 4), MOST_WARPS)
    keys = KEYS if not problem.latent else LATENT_KEYS
    if problem.rounding is not None:
        keys = ROUNDED_KEYS
    stages = _stages(problem, rows, keys, target)
    config = DecodeConfig(tokens, heads, rows, 1, warps, stages, keys)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    splits = _splits(problem, config, tiles, sizes.num_keys, target.num_sms)
    return replace(config, splits=splits)


def _stages(problem: CacheProblem, rows: int, keys: int, target: Target) -> int:
    """Returns the number of pipeline stages: as many as are useful and fit shared memory."""
    paged = problem.paged
    wanted = PAGED_STAGES if paged else STAGES
    fixed = 2 * rows * (problem.head_block + problem.rope_block + keys) + SPARE_BYTES
    if problem.attn_mask:
        fixed += wanted * rows * keys * ELEMENT_BYTES[problem.attn_mask]
        if target.tmem_columns:
            fixed += 4 * rows * keys  # the logits in fp32, between tensor memory and registers
    fitting = (target.max_shared_bytes - fixed) // (keys * problem.key_bytes)
    if problem.latent and paged:
        # One stage holds only the pages, which are loaded first, and no keys.
        fitting += 1
    return max(min(wanted, fitting), 1)


def _splits(problem: CacheProblem, config: DecodeConfig, tiles: int, keys: int, sms: int) -> int:
    """Returns the number of parts of each tile's keys with the least time.

    One program saturates a multiprocessor's share of the memory rate, so the
    time follows from the number of key blocks on the busiest multiprocessor.
    """
    blocks, block_bytes = cdiv(keys, config.block_n), config.block_n * problem.key_bytes
    if problem.rounding is not None:
        block_bytes *= ROUNDED_TIME
    part_bytes = 4 * config.real_rows * problem.v_block
    merged_bytes = MERGED_LATENT_BYTES if problem.latent else MERGED_BYTES
    most = min(MOST_SPLITS, blocks, RESIDENT_PROGRAMS * sms // tiles)

    def time(splits: int) -> float:
        programs = tiles * splits
        reading = cdiv(programs, sms) * cdiv(blocks, splits) * block_bytes
        # Parts are written, and read again by the merging programs.
        merging = LAUNCH_BYTES + merged_bytes * splits + 2 * programs * part_bytes / sms
        return reading + (merging if splits > 1 else 0)

    return min(range(1, max(most, 1) + 1), key=time)
