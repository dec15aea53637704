"""The kernels of `cache_attention`, the tiles of those of few queries, and their grids."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS
from tilewright.codegen.attention.problem import CacheProblem
from tilewright.codegen.kernel import Kernel

# Of a cache whose values have a tensor of their own.
V_STRIDES = ("v_page_stride", "v_head_stride")
# Of the keys' second part.
ROPE_STRIDES = ("q_rope_token_stride", "q_rope_head_stride", "rope_page_stride")
# fp32 numbers that a warp of the merging program holds: 64 a thread.
MERGED_NUMBERS = 64 * 32
MERGE_WARPS = 4
STRIDES = (
    "q_token_stride", "q_head_stride", "k_page_stride", "k_head_stride", "v_page_stride",
    "v_head_stride", "positions_sequence_stride", "positions_stride", "table_stride",
    "mask_sequence_stride", "mask_head_stride", "mask_row_stride", "mask_column_stride",
    "blocks_sequence_stride", "blocks_head_stride", "blocks_tile_stride", "k_scale_stride",
    "v_scale_stride",
)  # fmt: skip
_SCALARS = {"factor": "fp32", "softcap": "fp32"}
_DECODE_STRIDES = (*(name for name in STRIDES if name != "blocks_head_stride"), *ROPE_STRIDES)

DECODE = Kernel(
    "attention.decode",
    "attention_decode",
    {"K_STRIDE": ("k", 1), "V_STRIDE": ("v", 1), "ROPE_STRIDE": ("k_rope", 1)},
    types=_SCALARS | dict.fromkeys(_DECODE_STRIDES, "i64"),
    ranges=("num_queries", "num_keys", "row_tiles"),
    divisible=_DECODE_STRIDES,
)
# After DECODE, where keys are split.
MERGE = Kernel(
    "attention.decode",
    "attention_merge",
    types={"v_scale_stride": "i64"},
    ranges=("num_queries", "row_tiles"),
    num_warps=MERGE_WARPS,
)
PREFILL = Kernel(
    "attention.prefill",
    "attention_prefill",
    {"K_STRIDE": ("k", 1), "V_STRIDE": ("v", 1)},
    types=_SCALARS | dict.fromkeys(STRIDES, "i64"),
    ranges=("num_queries", "num_keys", "row_tiles", "head_group"),
    divisible=STRIDES,
)


@dataclass(frozen=True)
class DecodeConfig:
    """Tiles of `tokens` queries, and `heads` of those that share keys, in `rows` rows; `splits`
    programs share the keys of a tile."""

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
        """The first rows, a power of two, that hold all queries."""
        return next_power_of_2(self.tokens * self.heads)


def decode_tiles(problem: CacheProblem, config: DecodeConfig, sizes: tuple[int, int]) -> int:
    """Tiles of a call with (sequences, queries of each)."""
    sequences, queries = sizes
    head_tiles = problem.num_kv_heads * cdiv(problem.group, config.heads)
    return sequences * cdiv(queries, config.tokens) * head_tiles


def workspace_elements(problem: CacheProblem, config: DecodeConfig) -> int:
    """fp32 numbers of a tile whose keys are split: values, largest logits, sums of weights."""
    return config.splits * config.real_rows * (problem.v_block + 2)


def merge_grid(problem: CacheProblem, config: DecodeConfig, tiles: int) -> tuple[int, int]:
    return tiles * config.real_rows, cdiv(problem.v_dim, merged_columns(problem, config))


def merged_columns(problem: CacheProblem, config: DecodeConfig) -> int:
    """Columns of a row that a program of `attention_merge` merges at once."""
    fitting = MERGED_NUMBERS * MERGE_WARPS // next_power_of_2(config.splits)
    return max(min(fitting, problem.v_block), 16)
