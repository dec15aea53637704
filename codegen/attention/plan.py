"""How a call of `cache_attention` is computed: tiles, and into how many parts the keys fall."""

from __future__ import annotations

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.problem import LISTED_KEYS, CacheProblem, CacheSizes
from tilewright.codegen.attention.specs import DecodeConfig, decode_tiles
from tilewright.codegen.targets import Target

# Rows of a tile at most, and heads that may share a head of keys.
MOST_ROWS = 64
MOST_GROUP = 128
# Shared memory for the weights, barriers and reductions.
SPARE_BYTES = 8192
MOST_SPLITS = 64
# What a program costs besides its blocks of keys, in blocks: its start, and handing over a part.
START_BLOCKS = 2.0
HANDOVER_BLOCKS = 1.0
# What merging costs, in blocks, for each part.
MERGE_BLOCKS = 0.15


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
    stages, resident = _stages(problem, rows, target)
    config = DecodeConfig(tokens, rows, 1, num_stages=stages)
    tiles = decode_tiles(problem, config, (sizes.num_sequences, sizes.num_queries))
    splits = _splits(tiles, cdiv(sizes.num_keys, LISTED_KEYS), resident * target.num_sms)
    return DecodeConfig(tokens, rows, splits, num_stages=stages)


def _stages(problem: CacheProblem, rows: int, target: Target) -> tuple[int, int]:
    """(pipeline stages, programs of a multiprocessor at once)."""
    stage = LISTED_KEYS * problem.key_bytes
    fixed = 2 * rows * (problem.blocks[0] + LISTED_KEYS) + SPARE_BYTES
    for stages, resident in ((4, 2), (3, 2), (2, 2), (3, 1), (2, 1)):
        if resident * (stages * stage + fixed) <= target.max_shared_bytes:
            return stages, resident
    return 1, 1


def _splits(tiles: int, blocks: int, slots: int) -> int:
    """Into how many parts the keys of each tile fall, for the least time."""

    def time(splits: int) -> float:
        waves = cdiv(tiles * splits, slots)
        shared = HANDOVER_BLOCKS + MERGE_BLOCKS * splits if splits > 1 else 0.0
        return waves * (cdiv(blocks, splits) + START_BLOCKS) + shared

    return min(range(1, max(min(blocks, MOST_SPLITS), 1) + 1), key=time)
