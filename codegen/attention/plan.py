"""How a call of `cache_attention` is computed: tiles, and into how many parts the keys fall."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.kernels import DecodeConfig, decode_tiles
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.targets import Target

# Rows of a tile at most.
MOST_ROWS = 64
# Where values are the keys: fp32 numbers of the output that a thread holds, and of one of the most
# warps at most; keys of a block, whose rows are wide.
HELD_NUMBERS = 64
MOST_HELD_NUMBERS = 128
MOST_WARPS = 8
LATENT_KEYS = 32
# Shared memory for the weights, barriers and reductions.
SPARE_BYTES = 8192
MOST_SPLITS = 128
# What splitting costs, in bytes of keys that a multiprocessor reads in that time (measured on an
# H200): another launch, and each part that it merges.
LAUNCH_BYTES = 56 * 1024
MERGED_BYTES = 2 * 1024
# Of latents: a lone program of a multiprocessor takes so much longer than two do beside each other.
LONE_LATENTS = 1.2
# More programs than fit at once would start late where most of the capacity is empty.
RESIDENT_PROGRAMS = 2
# Stages of the pipeline: more where a block's page is loaded before it.
STAGES = 3
PAGED_STAGES = 5
# Of many queries; the first that fits.
BY_POINTERS = (
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 32, 8, 2),
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 4, 1),
)
# With scores, output and q all in registers: fewer scores of a thread.
IN_REGISTERS = (
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 8, 2),
    PrefillConfig(64, 32, 8, 1),
    PrefillConfig(32, 32, 4, 1),
)
# With a mask tensor, whose tile takes registers too.
MASKED = (PrefillConfig(64, 64, 4, 2), *BY_POINTERS[2:])


def decode_rows(
    problem: CacheProblem, num_queries: int, held: int = MOST_HELD_NUMBERS
) -> tuple[int, int, int]:
    """(queries of a tile, heads of it that share keys, its rows). held: of latents, numbers of the
    output that a thread may hold."""
    most, group = _most_rows(problem, held), problem.group
    heads = cdiv(group, cdiv(group, most))
    room = max(most // next_power_of_2(heads), 1)
    tokens = min(next_power_of_2(max(num_queries, 1)), room)
    return tokens, heads, max(next_power_of_2(tokens * heads), 16)


def _most_rows(problem: CacheProblem, held: int) -> int:
    """Rows of a tile whose output fits the registers of its warps."""
    if not problem.latent:
        return MOST_ROWS
    return max(min(held * 32 * MOST_WARPS // problem.v_block, MOST_ROWS), 16)


def decodes(problem: CacheProblem, sizes: AttentionSizes) -> bool:
    """Whether the queries of a sequence, of ragged ones on average, fit the rows of one tile."""
    queries = sizes.num_queries
    if problem.ragged:
        queries = cdiv(queries, max(sizes.num_sequences, 1))
    return queries <= decode_rows(problem, queries)[0]


def prefill_config(problem: CacheProblem, target: Target) -> PrefillConfig:
    """The tiles of a call of many queries."""
    tried: tuple[PrefillConfig, ...] = BY_POINTERS
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
    """The tiles of a call; sizes: rounded to what plans are made for."""
    # Numbers on their way to tensor memory take registers of their own, beside a mask's.
    crowded = bool(target.tmem_columns) and problem.attn_mask != ""
    held = HELD_NUMBERS if crowded else MOST_HELD_NUMBERS
    tokens, heads, rows = decode_rows(problem, sizes.num_queries, held)
    warps = 4
    if problem.latent:
        warps = min(max(rows * problem.v_block // (HELD_NUMBERS * 32), 4), MOST_WARPS)
    keys = KEYS if not problem.latent else LATENT_KEYS
    stages = _stages(problem, rows, keys, target)
    config = DecodeConfig(tokens, heads, rows, 1, warps, stages, keys)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    splits = _splits(problem, config, tiles, sizes.num_keys, target.num_sms)
    return replace(config, splits=splits)


def _stages(problem: CacheProblem, rows: int, keys: int, target: Target) -> int:
    """As many stages as are useful and fit shared memory."""
    paged = problem.paged
    wanted = PAGED_STAGES if paged else STAGES
    fixed = 2 * rows * (problem.head_block + problem.rope_block + keys) + SPARE_BYTES
    if problem.attn_mask:
        fixed += wanted * rows * keys * ELEMENT_BYTES[problem.attn_mask]
        if target.tmem_columns:
            fixed += 4 * rows * keys  # the logits in fp32, between tensor memory and registers
    fitting = (target.max_shared_bytes - fixed) // (keys * problem.key_bytes)
    if problem.latent and paged:
        # A stage of the loads that come first holds no keys.
        fitting += 1
    return max(min(wanted, fitting), 1)


def _splits(problem: CacheProblem, config: DecodeConfig, tiles: int, keys: int, sms: int) -> int:
    """Into how many parts the keys of each tile fall, for the least time.

    One program keeps a multiprocessor's share of the memory busy (of latents, nearly), so what
    counts is how many blocks of keys the busiest one takes.
    """
    blocks, block_bytes = cdiv(keys, config.block_n), config.block_n * problem.key_bytes
    part_bytes = 4 * config.real_rows * problem.v_block
    most = min(MOST_SPLITS, blocks, RESIDENT_PROGRAMS * sms // tiles)

    def time(splits: int) -> float:
        programs = tiles * splits
        longer = LONE_LATENTS if problem.latent and programs <= sms else 1.0
        reading = longer * cdiv(programs, sms) * cdiv(blocks, splits) * block_bytes
        # Parts are written, and read by those who merge them.
        merging = LAUNCH_BYTES + MERGED_BYTES * splits + 2 * programs * part_bytes / sms
        return reading + (merging if splits > 1 else 0)

    return min(range(1, max(most, 1) + 1), key=time)
