"""The kernel specs of `attention_decode` and `attention_prefill`."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS, QUERIES
from tilewright.codegen.attention.prefill_tiles import PrefillConfig, mask_kind
from tilewright.codegen.attention.problem import CacheProblem
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import Constant, KernelSpec, constants_of, operands_of
from tilewright.codegen.targets import get_target

# Tensors of a launch: parameter -> field of CacheProblem.
TENSORS = {
    **{f"{x}_ptr": x for x in ("row_offsets", "block_table", "key_lengths", "positions")},
    "cache_lengths_ptr": "cache_lengths",
    "mask_ptr": "attn_mask",
    **{f"{x}_ptr": x for x in ("mask_blocks", "sinks", "k_scale", "v_scale")},
}
# Of a cache whose values have a tensor of their own.
V_STRIDES = ("v_page_stride", "v_head_stride")
# Of the keys' second part.
ROPE_STRIDES = ("q_rope_token_stride", "q_rope_head_stride", "rope_page_stride")
# fp32 numbers that a warp of the merging program holds: 64 a thread.
MERGED_NUMBERS = 64 * 32
MERGE_WARPS = 4
COUNTS = ("num_queries", "num_keys", "num_pages", "row_tiles")
STRIDES = (
    "q_token_stride", "q_head_stride", "k_page_stride", "k_head_stride", "v_page_stride",
    "v_head_stride", "positions_sequence_stride", "positions_stride", "table_stride",
    "mask_sequence_stride", "mask_head_stride", "mask_row_stride", "mask_column_stride",
    "blocks_sequence_stride", "blocks_head_stride", "blocks_tile_stride", "k_scale_stride",
    "v_scale_stride",
)  # fmt: skip


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


def decode_spec(problem: CacheProblem, config: DecodeConfig, target: str) -> KernelSpec:
    """The `attention_decode` kernel of a problem."""
    p = problem
    split, real, rope = config.splits > 1, config.real_rows, p.k_rope is not None
    return KernelSpec.of(
        "attention.decode",
        "attention_decode",
        {
            **_constants(p),
            **constants_of(p, "num_kv_heads", "rope_dim", "rope_block"),
            "TILE_HEADS": config.heads,
            "ROPE_STRIDE": p.k_rope.strides[0] if p.k_rope else 0,
            "LISTED": p.mask_blocks is not None,
            **constants_of(config, "tokens", "rows", "block_n", "splits"),
            "REAL": real,
            # In tensor memory an accumulator that two products share is wrong before Triton 3.9.
            "CHAINED": not get_target(target).tmem_columns,
            "KEYS": KEYS,
            "STAGES": config.num_stages,
        },
        {
            **operands_of(p, "q", "q_rope", "k", "v", "k_rope", "out"),
            "workspace_ptr": Operand("fp32") if split else None,
            **{name: getattr(p, field) for name, field in TENSORS.items()},
            **dict.fromkeys(COUNTS, "i32"),
            "factor": "fp32",
            "softcap": "fp32",
            **{n: t for n, t in _strides(p).items() if n != "blocks_head_stride"},
            **({} if p.v else dict.fromkeys(V_STRIDES, 0)),
            **dict.fromkeys(ROPE_STRIDES, "i64" if rope else 0),
        },
        divisible=p.divisible,
        ranges=("num_queries", "num_keys", "row_tiles"),
        dependent=True,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        target=target,
    )


def _strides(p: CacheProblem) -> dict[str, str | int]:
    """The strides of a launch; a mask's keys mostly follow each other."""
    strides: dict[str, str | int] = dict.fromkeys(STRIDES, "i64")
    if p.attn_mask is not None and p.attn_mask.strides:
        strides["mask_column_stride"] = p.attn_mask.strides[0]
    return strides


def _constants(p: CacheProblem) -> dict[str, Constant]:
    """What both kernels are told of a problem."""
    head_block, v_block = p.blocks
    return {
        **constants_of(p, "group", "head_dim", "v_dim", "mask", "window"),
        "HEAD_BLOCK": head_block,
        "V_BLOCK": v_block,
        "K_STRIDE": p.k.strides[0],
        "V_STRIDE": p.v.strides[0] if p.v else 0,
        "PAGE_SIZE": max(p.page_size, 1),
        "RAGGED": p.row_offsets is not None,
        "MASK_KIND": mask_kind(p.attn_mask),
        "CAPPED": p.softcap,
        "QUERIES": QUERIES,
    }


def prefill_spec(problem: CacheProblem, config: PrefillConfig, target: str) -> KernelSpec:
    """The `attention_prefill` kernel of a problem."""
    p = problem
    return KernelSpec.of(
        "attention.prefill",
        "attention_prefill",
        {
            **_constants(p),
            "NUM_HEADS": p.num_kv_heads * p.group,
            "SEQUENCES": p.sequences,
            "KEYS": KEYS,
            **config.constants,
        },
        {
            **operands_of(p, "q", "k", "v", "out"),
            **{name: getattr(p, field) for name, field in TENSORS.items()},
            "num_sequences": "i32",
            **dict.fromkeys(COUNTS, "i32"),
            "head_group": "i32",
            "factor": "fp32",
            "softcap": "fp32",
            **_strides(p),
        },
        divisible=p.divisible,
        ranges=("num_queries", "num_keys", "row_tiles", "head_group"),
        dependent=True,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
        target=target,
    )


def decode_tiles(problem: CacheProblem, config: DecodeConfig, sizes: tuple[int, int]) -> int:
    """Tiles of a call with (sequences, queries of each)."""
    sequences, queries = sizes
    head_tiles = problem.num_kv_heads * cdiv(problem.group, config.heads)
    return sequences * cdiv(queries, config.tokens) * head_tiles


def workspace_elements(problem: CacheProblem, config: DecodeConfig) -> int:
    """fp32 numbers of a tile whose keys are split: values, largest logits, sums of weights."""
    return config.splits * config.real_rows * (problem.blocks[1] + 2)


def merge_spec(problem: CacheProblem, config: DecodeConfig, target: str) -> KernelSpec:
    """The `attention_merge` kernel after that of `decode_spec`, where keys are split."""
    p = problem
    return KernelSpec.of(
        "attention.decode",
        "attention_merge",
        {
            **constants_of(p, "num_kv_heads", "group", "v_dim"),
            "TILE_HEADS": config.heads,
            "V_BLOCK": p.blocks[1],
            **constants_of(config, "tokens", "splits"),
            "REAL": config.real_rows,
            "RAGGED": p.row_offsets is not None,
            "SPLIT_BLOCK": next_power_of_2(config.splits),
            "COLUMNS": _merged_columns(p, config),
        },
        {
            "workspace_ptr": Operand("fp32"),
            **operands_of(p, "out", "row_offsets", "sinks", "v_scale"),
            "num_queries": "i32",
            "row_tiles": "i32",
            "v_scale_stride": "i64",
        },
        ranges=("num_queries", "row_tiles"),
        dependent=True,
        num_warps=MERGE_WARPS,
        target=target,
    )


def merge_grid(problem: CacheProblem, config: DecodeConfig, tiles: int) -> tuple[int, int]:
    return tiles * config.real_rows, cdiv(problem.v_dim, _merged_columns(problem, config))


def _merged_columns(problem: CacheProblem, config: DecodeConfig) -> int:
    """Columns of a row that a program of `attention_merge` merges at once."""
    fitting = MERGED_NUMBERS * MERGE_WARPS // next_power_of_2(config.splits)
    return max(min(fitting, problem.blocks[1]), 16)
