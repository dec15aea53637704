"""Plans of `cache_attention`: the tile sizes, and the number of parts that the keys are split
into."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.kernels import DecodeConfig, decode_tiles
from tilewright.codegen.attention.prefill_tiles import PrefillConfig
from tilewright.codegen.attention.problem import AttentionSizes, CacheProblem
from tilewright.codegen.targets import Target

# The most rows of a tile, and the most numbers in the output of a tile.
MOST_ROWS = 64
MOST_NUMBERS = MOST_ROWS * 128
# Limits for latents, where the keys are also the values: how many fp32 numbers of the output a
# thread holds, how many it holds if the program has MOST_WARPS warps, the largest number of warps,
# and the number of keys in a block. Blocks are small, because rows of latents are wide.
HELD_NUMBERS = 64
MOST_HELD_NUMBERS = 128
MOST_WARPS = 8
LATENT_KEYS = 32
# ROUNDED_KEYS is the number of keys in a block of latents if the kernel rounds the latents to
# float8 codes and back before it uses them. These keys are in registers, in fp32. ROUNDED_TIME says
# that a program takes about four times as long to read and round keys as it takes only to read
# them. This number follows from sweeps on an H100 with 1 to 64 sequences of 1024 and 2048 latents.
ROUNDED_KEYS = 16
ROUNDED_TIME = 4
# Without latents: how many fp32 numbers of scores and output a thread of a program with 4 warps may
# hold. If there are more numbers, the program has 8 warps.
HELD_SUMS = 96
# The shared memory that is kept free for the weights, barriers and reductions, in bytes.
SPARE_BYTES = 8192
MOST_SPLITS = 128
# The cost of another launch, and the cost of each part that is merged, if keys are split into
# parts. The costs were measured on an H200. They are given as the bytes of keys that a
# multiprocessor reads in the same time.
LAUNCH_BYTES = 56 * 1024
MERGED_BYTES = 2 * 1024
# The cost of each part that is merged, for latents (measured on an H100). It is lower because
# several programs merge the parts of a row.
MERGED_LATENT_BYTES = 512
# For latents that are rounded: the time that a multiprocessor takes for a block if it runs one
# program, divided by the time that it takes for a block if it runs two. A program waits for its
# reads and then rounds, so a second program can work while the first one waits. On an H100, a call
# with 64 sequences of 1024 latents takes 69.7 us with 4 parts, and 115.5 us with 2 parts.
LONE_ROUNDED = 1.1
# Without latents: the least time that a program takes for a block of keys, given as the bytes that
# a multiprocessor reads in the same time. If there are fewer programs than multiprocessors, each
# program reads faster, but its products and its softmax wait for each other. The number follows
# from sweeps on an H100. With one sequence of 2048 keys, 8 parts (9.3 us) are faster than 16 (9.9
# us) if there are 8 heads of keys, and 16 parts are the fastest if there are 4. With 16384 keys, 16
# and 32 parts are the fastest.
STEP_BYTES = 19 * 1024
# The number of programs that fit a multiprocessor at the same time. Any more programs would start
# late, in a second wave that is nearly empty.
RESIDENT_PROGRAMS = 2
# The number of pipeline stages. A paged cache needs more stages, because a program loads the page
# number of a block before the block.
STAGES = 3
PAGED_STAGES = 5
# Without latents: the bytes of keys that are on their way to a multiprocessor that has only one
# program. Blocks of narrow keys are small, so the program has more stages. Measured on an H100 for
# 8 heads of 64 columns: 8 sequences of 8192 keys take 61.6 us with four stages, and 64.9 us with
# three. With two programs on a multiprocessor, three stages are faster.
LONE_BYTES = 48 * 1024
# Tile sizes for many queries. The plan uses the first ones that fit.
BY_POINTERS = (
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 32, 8, 2),
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 4, 1),
)
# Tile sizes for chips that keep scores, output and q in registers. There, a thread holds fewer
# scores.
IN_REGISTERS = (
    PrefillConfig(64, 32, 4, 2),
    PrefillConfig(64, 32, 8, 2),
    PrefillConfig(64, 32, 8, 1),
    PrefillConfig(32, 32, 4, 1),
)
# Tile sizes for calls with a mask tensor. The tile of the mask takes registers, too.
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
    """Whether the queries of a sequence fit the rows of one tile. If sequences are ragged, this
    compares their average number of queries."""
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
    # Data on its way to tensor memory takes registers, in addition to those that hold a mask.
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
    splits = _splits(problem, config, tiles, sizes.num_keys, target.num_sms)
    stages = _stages(problem, rows, keys, target, alone=tiles * splits <= target.num_sms)
    return replace(config, splits=splits, num_stages=stages)


def _stages(problem: CacheProblem, rows: int, keys: int, target: Target, alone: bool) -> int:
    """Returns the number of pipeline stages: as many as are useful and fit shared memory. alone:
    whether no two programs share a multiprocessor."""
    paged = problem.paged
    wanted = PAGED_STAGES if paged else STAGES
    if alone and not problem.latent:
        wanted = max(wanted, 1 + cdiv(LONE_BYTES, keys * problem.key_bytes))
    fixed = 2 * rows * (problem.head_block + problem.rope_block + keys) + SPARE_BYTES
    if problem.attn_mask:
        fixed += wanted * rows * keys * ELEMENT_BYTES[problem.attn_mask]
        if target.tmem_columns:
            fixed += 4 * rows * keys  # the logits in fp32, between tensor memory and registers
    fitting = (target.max_shared_bytes - fixed) // (keys * problem.key_bytes)
    if problem.latent and paged:
        # One of the stages holds only page numbers, which are loaded before the keys.
        fitting += 1
    return max(min(wanted, fitting), 1)


def _splits(problem: CacheProblem, config: DecodeConfig, tiles: int, keys: int, sms: int) -> int:
    """Returns the number of parts of each tile's keys that gives the shortest modelled time.

    One program saturates a multiprocessor's share of the memory bandwidth, unless it rounds the
    keys. Therefore the time depends only on the number of key blocks that the busiest
    multiprocessor reads, and on its share, which is larger if other multiprocessors have no
    program.
    """
    blocks, block_bytes = cdiv(keys, config.block_n), config.block_n * problem.key_bytes
    rounds = problem.rounding is not None
    part_bytes = 4 * config.real_rows * problem.v_block
    merged_bytes = MERGED_LATENT_BYTES if problem.latent else MERGED_BYTES
    most = min(MOST_SPLITS, blocks, RESIDENT_PROGRAMS * sms // tiles)

    def time(splits: int) -> float:
        programs = tiles * splits
        step_bytes: float = block_bytes
        if not problem.latent:
            step_bytes = max(block_bytes * min(programs / sms, 1), STEP_BYTES)
        if rounds:
            step_bytes *= ROUNDED_TIME * (LONE_ROUNDED if programs <= sms else 1)
        reading = cdiv(programs, sms) * cdiv(blocks, splits) * step_bytes
        # Programs write the parts, and the merging programs read them again, in a tile that is
        # padded to a power of two.
        parts = merged_bytes * next_power_of_2(splits) + 2 * programs * part_bytes / sms
        return reading + (LAUNCH_BYTES + parts if splits > 1 else 0)

    return min(range(1, max(most, 1) + 1), key=time)
