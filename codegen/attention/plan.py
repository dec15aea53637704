"""How a call of `cache_attention` is computed: tiles, and into how many parts the keys fall."""

from __future__ import annotations

from dataclasses import replace

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.problem import CacheProblem, CacheSizes
from tilewright.codegen.attention.specs import DecodeConfig, decode_tiles
from tilewright.codegen.targets import Target

# Rows of a tile at most, and heads that may share a head of keys.
MOST_ROWS = 64
MOST_GROUP = 128
# Shared memory for the weights, barriers and reductions.
SPARE_BYTES = 8192
MOST_SPLITS = 64
# What a split costs, in the time that a multiprocessor takes for a block of keys: handing over a
# part, and merging it.
HANDOVER_BLOCKS = 1.5
MERGE_BLOCKS = 0.05
# Stages of the pipeline: one more each where a block's number, or its page, is loaded first, and
# one because the loads that depend on it start later.
STAGES = 3
INDIRECT_STAGES = 5


def decode_rows(group: int, num_queries: int) -> tuple[int, int]:
    """(queries of a tile, its rows)."""
    room = max(MOST_ROWS // next_power_of_2(group), 1)
    tokens = min(next_power_of_2(max(num_queries, 1)), room)
    return tokens, max(next_power_of_2(tokens * group), 16)


def decodes(group: int, num_queries: int) -> bool:
    """Whether all queries of a sequence fit the rows of one tile."""
    return num_queries <= decode_rows(group, num_queries)[0]


def decode_config(problem: CacheProblem, sizes: CacheSizes, target: Target) -> DecodeConfig:
    """The tiles of a call; sizes: rounded to what plans are made for."""
    tokens, rows = decode_rows(problem.group, sizes.num_queries)
    stages = _stages(problem, rows, target)
    config = DecodeConfig(tokens, rows, 1, num_stages=stages)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    splits = _splits(tiles, cdiv(sizes.num_keys, KEYS), target.num_sms)
    return replace(config, splits=splits)


def _stages(problem: CacheProblem, rows: int, target: Target) -> int:
    """As many stages as are useful and fit shared memory."""
    indirect = problem.mask_blocks is not None or problem.block_table is not None
    wanted = INDIRECT_STAGES if indirect else STAGES
    fixed = 2 * rows * (problem.blocks[0] + KEYS) + SPARE_BYTES
    fitting = (target.max_shared_bytes - fixed) // (KEYS * problem.key_bytes)
    return max(min(wanted, fitting), 1)


def _splits(tiles: int, blocks: int, num_sms: int) -> int:
    """Into how many parts the keys of each tile fall, for the least time.

    One program keeps a multiprocessor's share of the memory busy, so what counts is how many blocks
    of keys the busiest one takes.
    """

    def time(splits: int) -> float:
        shared = HANDOVER_BLOCKS + MERGE_BLOCKS * splits if splits > 1 else 0.0
        return cdiv(tiles * splits, num_sms) * cdiv(blocks, splits) + shared

    return min(range(1, max(min(blocks, MOST_SPLITS), 1) + 1), key=time)
