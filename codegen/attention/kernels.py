"""The kernels of `cache_attention`, and the tiles and grids of calls with few queries."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS, LIST_STRIDES, MASK_STRIDES
from tilewright.codegen.attention.problem import CacheProblem
from tilewright.codegen.kernel import Kernel, strides_of

# How many fp32 numbers a warp of a merging program holds in registers: 64 in each thread.
MERGED_NUMBERS = 64 * 32
# The number of warps of a merging program.
MERGE_WARPS = 4
# The strides of the values, if keys and values are separate tensors.
V_STRIDES = strides_of("v", page=0, head=2)
# The strides of the rope columns of queries and keys.
ROPE_STRIDES = strides_of("q_rope", token=0, head=1) | strides_of("k_rope", "rope", page=0)
_STRIDES = {
    **strides_of("q", token=0, head=1),
    **strides_of("k", page=0, head=2),
    **V_STRIDES,
    **strides_of("positions", sequence=-2),
    "positions_stride": ("positions", -1),
    "table_stride": ("block_table", 0),
    "k_scale_stride": ("k_scale", 0),
    "v_scale_stride": ("v_scale", 0),
    **MASK_STRIDES,
    **LIST_STRIDES,
}
_BROADCAST = ("mask", "mask_blocks", "k_scale", "v_scale")
_SCALARS = {"factor": "fp32", "softcap": "fp32"}

DECODE = Kernel(
    "attention.decode",
    "attention_decode",
    {"K_STRIDE": ("k", 1), "V_STRIDE": ("v", 1), "ROPE_STRIDE": ("k_rope", 1)},
    {name: s for name, s in _STRIDES.items() if name != "blocks_head_stride"} | ROPE_STRIDES,
    _BROADCAST,
    types=_SCALARS,
    ranges=("num_queries", "num_keys", "row_tiles"),
    omitted=("ROUND_GROUP", "ZERO_SCALE", "LEAST", "LEAST_DIVISOR"),
)
# If the keys are split, this kernel runs after DECODE.
MERGE = Kernel(
    "attention.decode",
    "attention_merge",
    launch_strides={"v_scale_stride": ("v_scale", 0)},
    broadcast=_BROADCAST[-1:],
    ranges=("num_queries", "row_tiles"),
    unaligned=("v_scale_stride",),
    num_warps=MERGE_WARPS,
)
PREFILL = Kernel(
    "attention.prefill",
    "attention_prefill",
    {"K_STRIDE": ("k", 1), "V_STRIDE": ("v", 1)},
    _STRIDES,
    _BROADCAST,
    types=_SCALARS,
    ranges=("num_queries", "num_keys", "row_tiles", "head_group"),
)


@dataclass(frozen=True)
class DecodeConfig:
    """The tile sizes of `attention_decode`.

    Attributes:
        tokens: The number of queries in a tile.
        heads: The number of query heads in a tile. They share a head of keys.
        rows: The number of rows of a tile: one for each pair of query and head, and rows that pad
            the tile.
        splits: The number of programs among which the keys of a tile are divided.
        num_warps: The number of warps of a program.
        num_stages: The number of pipeline stages.
        block_n: The number of keys that a program reads in one step.
    """

    tokens: int
    heads: int
    rows: int
    splits: int
    num_warps: int = 4
    num_stages: int = 3
    block_n: int = KEYS

    def __str__(self) -> str:
        held = f"{self.tokens} queries of {self.heads} heads"
        tile = f"{self.rows} rows ({held}) x {self.block_n} keys"
        return f"{tile} /{self.splits} w{self.num_warps} s{self.num_stages}"

    @property
    def real_rows(self) -> int:
        """The number of rows that hold all queries of a tile, rounded up to a power of two."""
        return next_power_of_2(self.tokens * self.heads)


def decode_tiles(problem: CacheProblem, config: DecodeConfig, sizes: tuple[int, int]) -> int:
    """Returns the number of tiles of a call. If the sequences are ragged, returns an upper bound.

    sizes: (number of sequences, number of queries). The queries are counted for each sequence, or
    for all sequences together if they are ragged.
    """
    sequences, queries = sizes
    row_tiles = sequences * cdiv(queries, config.tokens)
    if problem.ragged:
        # Each sequence has at most one tile that is not full.
        row_tiles = min(row_tiles, cdiv(queries, config.tokens) + sequences - 1)
    return row_tiles * problem.num_kv_heads * cdiv(problem.group, config.heads)


def workspace_elements(problem: CacheProblem, config: DecodeConfig) -> int:
    """Returns how many fp32 numbers the workspace of one tile holds, if the tile's keys are split.
    For each part of the keys, the workspace holds the sums of values, the largest logits, and the
    sums of softmax weights."""
    return config.splits * config.real_rows * (problem.v_block + 2)


def merge_grid(problem: CacheProblem, config: DecodeConfig, tiles: int) -> tuple[int, int]:
    return tiles * config.real_rows, cdiv(problem.v_dim, merged_columns(problem, config))


def merged_columns(problem: CacheProblem, config: DecodeConfig) -> int:
    """Returns how many columns of a row a program of `attention_merge` merges."""
    fitting = MERGED_NUMBERS * MERGE_WARPS // next_power_of_2(config.splits)
    return max(min(fitting, problem.v_block), 16)
