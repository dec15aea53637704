"""MLA attention as plain data: problems, configs and kernel specs of `mla_attention`, and of the
kernels beside it: `mla_merge` and, before a library's attention, `mla_join`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, cdiv, next_power_of_2
from tilewright.codegen.attention.blocks import KEYS, QUERIES
from tilewright.codegen.attention.prefill_tiles import (
    PrefillConfig,
    mask_kind,
    num_tiles,
    tile_grid,
)
from tilewright.codegen.mla.query_specs import NO_ROTATION, TMA_BYTES, Rotation
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.spec import KernelSpec, constants_of

MASKS = ("none", "causal", "sliding_window", "chunked")
# Sequences whose order by length a program works out itself: it compares each with each.
MAX_SORTED = 64
# Weights of fp8 values are this many powers of two too large: the largest is 256, of at most 448,
# and one part in 2 ** 17 is still a normal number.
FP8_SHIFT = 8.0
# Rows of one program of `mla_merge`, and of `mla_join`.
MERGE_ROWS = 16
JOIN_ROWS = 32
# Tensors of `mla_attention` beside the tables of a rotation, in the kernel's order: parameter ->
# field of AttentionProblem.
TENSORS = {
    **{f"{x}_ptr": x for x in ("q", "q_rope", "k", "v")},
    "rope_ptr": "k_rope",
    **{f"{x}_ptr": x for x in ("out", "lse", "query_offsets", "key_offsets", "query_starts")},
    **{f"{x}_ptr": x for x in ("key_starts", "key_lengths")},
    "positions_ptr": "query_positions",
    "block_table_ptr": "block_table",
    "mask_ptr": "attn_mask",
    **{f"{x}_ptr": x for x in ("mask_blocks", "q_scale", "k_scale", "v_scale")},
}
COUNTS = (
    "num_sequences", "num_queries", "num_keys", "row_tiles", "head_group", "num_pages",
    "table_rows",
)  # fmt: skip
STRIDES = (
    "q_sequence_stride", "q_head_stride", "q_token_stride", "q_rope_sequence_stride",
    "q_rope_head_stride", "q_rope_token_stride", "k_sequence_stride", "k_head_stride",
    "v_sequence_stride", "v_head_stride", "v_stride", "rope_sequence_stride", "rope_head_stride",
    "positions_sequence_stride", "positions_stride", "table_stride", "mask_sequence_stride",
    "mask_head_stride", "mask_row_stride", "mask_column_stride",
)  # fmt: skip
# Strides of a list of blocks, where there is a mask tensor.
LIST_STRIDES = ("blocks_sequence_stride", "blocks_head_stride", "blocks_tile_stride")


@dataclass(frozen=True)
class AttentionProblem:
    """The static part of an MLA attention call.

    nope, v_dim: columns of a head's unrotated part and of its values. q, v, out: 16-bit or 8-bit
    floats; k: strides (row,). q_rope, k_rope: the rotated part, None where keys have one part only;
    k_rope: strides (row, page), of which the second counts where its rows are looked up in pages of
    page_size (0: they are not). lse: the log-sum-exp, if it is asked for. v_by_key: a dim's keys
    are contiguous, not a key's dims.
    sequences: a power of two not below their number, 1 where not ragged. attn_mask: u8 of a mask of
    booleans, else a float that is added, strides (column,) where that is 1; mask_blocks: its list
    of blocks. divisible: names of run-time strides that 16 divides. tma: descriptors can reach q, k
    and v; rope_tma: the rope keys too. joint: a key's values follow it, and both fill their tiles.
    rotation: of q's rope part, if it is not done.
    """

    num_heads: int
    nope: int
    rope: int
    v_dim: int
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    q_rope: Operand | None = None
    k_rope: Operand | None = None
    lse: Operand | None = None
    query_offsets: Operand | None = None
    key_offsets: Operand | None = None
    query_starts: Operand | None = None
    key_starts: Operand | None = None
    key_lengths: Operand | None = None
    query_positions: Operand | None = None
    block_table: Operand | None = None
    attn_mask: Operand | None = None
    mask_blocks: Operand | None = None
    q_scale: Operand | None = None
    k_scale: Operand | None = None
    v_scale: Operand | None = None
    v_by_key: bool = False
    page_size: int = 0
    sequences: int = 1
    mask: str = "causal"
    window: int = 0
    divisible: tuple[str, ...] = ()
    tma: bool = False
    rope_tma: bool = False
    joint: bool = False
    rotation: Rotation = NO_ROTATION

    @property
    def dtype(self) -> str:
        """Of keys, values and queries."""
        return self.k.dtype

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("fp8")

    @property
    def ragged(self) -> bool:
        return self.query_offsets is not None

    @property
    def mask_contiguous(self) -> bool:
        """Whether the keys of a row of the mask tensor lie side by side."""
        return self.attn_mask is not None and self.attn_mask.strides == (1,)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Tile widths of nope, rope and v: powers of two a tensor core takes."""
        least = 32 if self.is_fp8 else 16
        dims = (self.nope, self.rope, self.v_dim)
        nope, rope, v = (max(next_power_of_2(n), least) for n in dims)
        return nope, rope, v

    @property
    def key_bytes(self) -> int:
        """Bytes of one head's key and value."""
        return (self.nope + self.v_dim) * ELEMENT_BYTES[self.dtype]


def attention_spec(problem: AttentionProblem, config: PrefillConfig, target: str) -> KernelSpec:
    """The `mla_attention` kernel of a problem."""
    p = problem
    nope_block, rope_block, v_block = p.blocks
    rope_row, page = p.k_rope.strides if p.k_rope else (0, 0)
    return KernelSpec.of(
        "mla.attention",
        "mla_attention",
        {
            **constants_of(p, "num_heads", "sequences", "ragged", "nope", "rope", "v_dim"),
            **constants_of(p, "v_by_key", "mask", "window"),
            "SORTED": p.ragged and p.sequences <= MAX_SORTED,
            "NOPE_BLOCK": nope_block,
            "ROPE_BLOCK": rope_block,
            "V_BLOCK": v_block,
            "K_STRIDE": p.k.strides[0],
            "V_ALIGNMENT": TMA_BYTES // ELEMENT_BYTES[p.dtype],
            "ROPE_STRIDE": rope_row,
            "PAGE_SIZE": max(p.page_size, 1),
            "PAGE_STRIDE": page,
            "MASK_KIND": mask_kind(p.attn_mask.dtype if p.attn_mask else ""),
            "QUERIES": QUERIES,
            "KEYS": KEYS,
            **p.rotation.constants,
            "SHIFT": FP8_SHIFT if p.is_fp8 else 0.0,
            **constants_of(config, "promote", "chained"),
            **config.constants,
            "ROPE_TMA": config.tma and p.rope_tma,
            "JOINT": config.tma and p.joint,
        },
        {
            **{name: getattr(p, field) for name, field in TENSORS.items()},
            **p.rotation.tensors,
            **dict.fromkeys(COUNTS, "i32"),
            "factor": "fp32",
            **dict.fromkeys(STRIDES, "i64"),
            **({"mask_column_stride": 1} if p.mask_contiguous else {}),
            **dict.fromkeys(LIST_STRIDES, 0 if p.mask_blocks is None else "i64"),
        },
        divisible=p.divisible,
        ranges=("row_tiles", "head_group", "table_rows"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
        target=target,
    )


def merge_spec(
    parts: int, v_dim: int, part_dtype: str, out_dtype: str, lse: bool, target: str
) -> KernelSpec:
    """The `mla_merge` kernel for `parts` partial results; lse: it gives their log-sum-exp too."""
    numbers = Operand("fp32", aligned=False)
    return KernelSpec.of(
        "mla.merge",
        "mla_merge",
        {
            "PARTS": parts,
            "V_DIM": v_dim,
            "V_BLOCK": next_power_of_2(v_dim),
            "BLOCK_R": MERGE_ROWS,
        },
        {
            "parts_ptr": Operand(part_dtype),
            "lses_ptr": numbers,
            "out_ptr": Operand(out_dtype),
            "lse_ptr": numbers if lse else None,
            **dict.fromkeys(("num_rows", "part_stride", "lse_stride"), "i64"),
        },
        target=target,
    )


def join_spec(problem: AttentionProblem, target: str) -> KernelSpec:
    """The `mla_join` kernel, which puts both parts of a problem's keys side by side."""
    p = problem
    nope_block, rope_block, _ = p.blocks
    return KernelSpec.of(
        "mla.join",
        "mla_join",
        {
            **constants_of(p, "num_heads", "nope", "rope"),
            "NOPE_BLOCK": nope_block,
            "ROPE_BLOCK": rope_block,
            "K_STRIDE": p.k.strides[0],
            "ROPE_STRIDE": first_strides(p.k_rope)[0],
            "BLOCK_R": JOIN_ROWS,
        },
        {
            "k_ptr": p.k,
            "rope_ptr": p.k_rope,
            "out_ptr": Operand(p.dtype),
            "num_rows": "i32",
            "run": "i32",
            **dict.fromkeys(("k_sequence_stride", "k_head_stride", "rope_sequence_stride"), "i64"),
        },
        divisible=p.divisible,
        ranges=("run",),
        target=target,
    )


def join_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, JOIN_ROWS),)


def merge_grid(num_rows: int) -> tuple[int]:
    return (cdiv(num_rows, MERGE_ROWS),)


@dataclass(frozen=True)
class AttentionSizes:
    """What a launch knows of the extents without reading the device.

    num_queries, num_keys: of each sequence where dense, of all together where ragged. longest: a
    bound on the queries of one sequence.
    """

    num_sequences: int
    num_queries: int
    num_keys: int
    longest: int


def row_tiles(problem: AttentionProblem, config: PrefillConfig, sizes: AttentionSizes) -> int:
    """Row tiles of one dense sequence, or at most of all ragged ones; at least 1."""
    counts = (sizes.num_sequences, sizes.num_queries, sizes.longest)
    return num_tiles(config.block_m, *counts, ragged=problem.ragged)


def attention_grid(
    problem: AttentionProblem, sizes: AttentionSizes, tiles: int, head_group: int
) -> tuple[int]:
    return tile_grid(head_pairs(problem, sizes), tiles, head_group)


def head_pairs(problem: AttentionProblem, sizes: AttentionSizes) -> int:
    """Heads, of a dense batch pairs of sequence and head."""
    return problem.num_heads * (1 if problem.ragged else sizes.num_sequences)
