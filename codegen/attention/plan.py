"""How a call of `cache_attention` is computed: tiles, and into how many parts the keys fall."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.problem import LISTED_KEYS, CacheProblem, CacheSizes
from tilewright.codegen.attention.specs import DecodeConfig, decode_tiles, workspace_elements
from tilewright.codegen.targets import Target

# Rows of a tile at most.
MOST_ROWS = 64
# fp32 numbers of the output that a thread holds where values are the keys, and its warps at most.
HELD_NUMBERS = 64
MOST_WARPS = 8
# Shared memory for the weights, barriers and reductions.
SPARE_BYTES = 8192
MOST_SPLITS = 64
# What a split costs, in the time that a multiprocessor takes for a block of keys: handing over a
# part, and merging it.
HANDOVER_BLOCKS = 1.5
MERGE_BLOCKS = 0.05
# The same where parts are wide (values are keys), over their share of a block's bytes: one program
# reads faster while the others are done.
MERGE_SHARE = 0.6
# Stages of the pipeline: one more each where a block's number, or its page, is loaded first, and
# one because the loads that depend on it start later.
STAGES = 3
INDIRECT_STAGES = 5


def decode_rows(problem: CacheProblem, num_queries: int) -> tuple[int, int, int]:
    """(queries of a tile, heads of it that share keys, its rows)."""
    most, group = _most_rows(problem), problem.group
    heads = cdiv(group, cdiv(group, most))
    room = max(most // next_power_of_2(heads), 1)
    tokens = min(next_power_of_2(max(num_queries, 1)), room)
    return tokens, heads, max(next_power_of_2(tokens * heads), 16)


def _most_rows(problem: CacheProblem) -> int:
    """Rows of a tile whose output fits the registers of its warps."""
    if problem.v is not None:
        return MOST_ROWS
    return max(min(HELD_NUMBERS * 32 * MOST_WARPS // problem.blocks[1], MOST_ROWS), 16)


def decode_config(problem: CacheProblem, sizes: CacheSizes, target: Target) -> DecodeConfig:
    """The tiles of a call; sizes: rounded to what plans are made for."""
    tokens, heads, rows = decode_rows(problem, sizes.num_queries)
    warps = 4
    if problem.v is None:
        warps = min(max(rows * problem.blocks[1] // (HELD_NUMBERS * 32), 4), MOST_WARPS)
    stages = _stages(problem, rows, target)
    config = DecodeConfig(tokens, heads, rows, 1, num_warps=warps, num_stages=stages)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    merge = MERGE_BLOCKS if problem.v is not None else MERGE_SHARE * _part_share(problem, config)
    splits = _splits(tiles, cdiv(sizes.num_keys, LISTED_KEYS), target.num_sms, merge)
    return replace(config, splits=splits)


def _part_share(problem: CacheProblem, config: DecodeConfig) -> float:
    """Bytes of a part that is merged, over those of a block of keys."""
    return 4 * workspace_elements(problem, config) / (LISTED_KEYS * problem.key_bytes)


def _stages(problem: CacheProblem, rows: int, target: Target) -> int:
    """As many stages as are useful and fit shared memory."""
    indirect = problem.mask_blocks is not None or problem.block_table is not None
    wanted = INDIRECT_STAGES if indirect else STAGES
    fixed = 2 * rows * (problem.blocks[0] + problem.rope_block + LISTED_KEYS) + SPARE_BYTES
    fitting = (target.max_shared_bytes - fixed) // (LISTED_KEYS * problem.key_bytes)
    if problem.v is None and indirect:
        # A stage of the loads that come first holds no keys.
        fitting += 1
    return max(min(wanted, fitting), 1)


def _splits(tiles: int, blocks: int, num_sms: int, merge: float) -> int:
    """Into how many parts the keys of each tile fall, for the least time. merge: what one costs
    that is merged, in blocks of keys.

    One program keeps a multiprocessor's share of the memory busy, so what counts is how many blocks
    of keys the busiest one takes.
    """

    def time(splits: int) -> float:
        shared = HANDOVER_BLOCKS + merge * splits if splits > 1 else 0.0
        return cdiv(tiles * splits, num_sms) * cdiv(blocks, splits) + shared

    return min(range(1, max(min(blocks, MOST_SPLITS), 1) + 1), key=time)
