"""What becomes of projected heads, as plain data: the part that all kernels of the family share.

Nothing here touches torch or a GPU. Strides and the like that come once per q, k and v are tuples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.spec import Constant

POINTER_NAMES = (
    "q_out_ptr", "k_cache_ptr", "v_cache_ptr", "slots_ptr", "sequences_ptr", "positions_ptr",
    "k_cache_scale_ptr", "v_cache_scale_ptr", "q_bias_ptr", "k_bias_ptr", "v_bias_ptr", "delta_ptr",
    "q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr",
)  # fmt: skip
COUNT_NAMES = ("num_tokens", "sequence_tokens", "rope_tokens", "num_pages")
TABLE_COUNT_NAMES = ("num_sequences", "lookup_columns", "lookup_stride")


@dataclass(frozen=True)
class CacheStrides:
    """Geometry of a cache window that is static for a kernel; strides in elements."""

    page_size: int
    page_stride: int
    slot_stride: int
    head_stride: int
    dim_stride: int

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return self.page_stride, self.slot_stride, self.head_stride, self.dim_stride


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: style "half", "interleaved" or "interleaved_to_half"; strides of the table
    rows in elements.

    full_width: the tables have `rotary_dim` columns, else half as many.
    """

    style: str
    rotary_dim: int
    full_width: bool
    table_dtype: str
    cos_stride: int
    sin_stride: int


@dataclass(frozen=True)
class Norm:
    """What the norms of q and k share; kind "rms" or "layer".

    row: over all heads of a projection together. offset is added to the weights. weightless: q and
    k are normed also without a weight. strides: from head to head of q's and k's weight, 0 where
    the heads share one.
    """

    kind: str = "rms"
    row: bool = False
    after_rope: bool = False
    offset: float = 0.0
    weightless: bool = False
    strides: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PageTable:
    """Tokens whose slots follow from a lookup table of pages.

    ragged: sequences and positions are row offsets and cache lengths, else one of each per token.
    search_steps: 2 ** search_steps is more than the number of sequences (ragged).
    """

    ragged: bool
    sequence_dtype: str
    position_dtype: str
    sequence_stride: int
    position_stride: int
    search_steps: int = 0


@dataclass(frozen=True)
class HeadFinish:
    """What becomes of projected heads: bias, norm, rotation, and where they are stored.

    dtype: of q. num_heads 0: there is no q. v_cache None: there is no v. Biases are (head stride,
    dtype) or None for q, k, v; delta (row stride, dtype) or None; norms are the weight's dtype or
    None for q, k.
    num_kv_heads: of the projection; each goes to kv_repeat heads of the cache.
    group: heads to a group where q's heads lie in groups (weight, bias and what a GEMM makes of
    them), else 0. clip 0: none. cache_scales: head strides of k's and v's fp32 scales, or None.
    table: None where slot_dtype and slots_stride describe a slot for each token, else the table is
    of slot_dtype.
    """

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    k_cache: CacheStrides
    v_cache: CacheStrides | None
    cache_dtype: str
    slot_dtype: str = "i64"
    slots_stride: int = 1
    per_sequence: bool = False
    wrap_negative: bool = False
    rope: Rope | None = None
    biases: tuple[tuple[int, str] | None, ...] = (None, None, None)
    delta: tuple[int, str] | None = None
    norms: tuple[str | None, ...] = (None, None)
    norm_eps: float = 1e-6
    norm: Norm = Norm()
    kv_repeat: int = 1
    group: int = 0
    q_bias_group_stride: int = 0
    clip: float = 0.0
    cache_scales: tuple[int | None, int | None] = (None, None)
    scale_multiplies: bool = False
    table: PageTable | None = None

    @property
    def interleaved(self) -> bool:
        """Whether the partners of a pair are neighbours before the rotation."""
        return self.rope is not None and self.rope.style != "half"

    @property
    def halves(self) -> int:
        """Distance between partners after the rotation where it differs from before, else 0."""
        if self.rope is not None and self.rope.style == "interleaved_to_half":
            return self.rope.rotary_dim // 2
        return 0

    @property
    def pair_half(self) -> int:
        """Distance between the partners of a pair that are not neighbours."""
        if self.rope is not None and self.rope.style == "half":
            return self.rope.rotary_dim // 2
        return (self.head_dim + 1) // 2

    @property
    def pairs_per_head(self) -> int:
        """Pairs that cover a head; the last ones may reach past it."""
        if self.interleaved:
            return (self.head_dim + 1) // 2
        return -(-self.head_dim // (2 * self.pair_half)) * self.pair_half

    @property
    def has_norm(self) -> bool:
        return self.norm.weightless or any(norm is not None for norm in self.norms)

    @property
    def row_norm(self) -> bool:
        """Whether a norm spans all heads of a projection."""
        return self.has_norm and self.norm.row

    @property
    def norm_after_rope(self) -> bool:
        return self.has_norm and self.norm.after_rope and self.rope is not None

    @property
    def kinds(self) -> int:
        """How many of q, k and v there are."""
        return 1 + (self.num_heads > 0) + (self.v_cache is not None)

    @property
    def heads_in_all(self) -> int:
        return self.num_heads + self.num_kv_heads * (1 if self.v_cache is None else 2)

    @property
    def addressing(self) -> str:
        if self.table is not None:
            return "ragged" if self.table.ragged else "block_table"
        return "per_sequence" if self.per_sequence else "flat"

    def constants(self) -> dict[str, Constant]:
        """The constexpr parameters that every kernel of the family takes."""
        rope, table = self.rope, self.table
        return {
            "NUM_HEADS": self.num_heads,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "GROUP": self.group,
            "KV_REPEAT": self.kv_repeat,
            "PAIR_HALF": self.pair_half,
            "INTERLEAVED": self.interleaved,
            "HALVES": self.halves,
            "ROTARY_DIM": rope.rotary_dim if rope else 0,
            "ROPE_FULL_WIDTH": rope.full_width if rope else False,
            "COS_STRIDE": rope.cos_stride if rope else 0,
            "SIN_STRIDE": rope.sin_stride if rope else 0,
            "BIAS_STRIDES": (
                self.q_bias_group_stride,
                *(bias[0] if bias else 0 for bias in self.biases),
            ),
            "DELTA_STRIDE": self.delta[0] if self.delta else 0,
            "CLIP": self.clip,
            **self._norm_constants(),
            "PAGE_SIZE": self.k_cache.page_size,
            "ADDRESSING": self.addressing,
            "WRAP_NEGATIVE": self.wrap_negative,
            "ADDRESS_STRIDES": (
                self.slots_stride,
                table.sequence_stride if table else 0,
                table.position_stride if table else 0,
            ),
            "SEARCH_STEPS": table.search_steps if table else 0,
            "K_STRIDES": self.k_cache.strides,
            "V_STRIDES": (self.v_cache or self.k_cache).strides,
            "ROW_UNIT": self.row_unit,
            "SCALE_STRIDES": tuple(stride or 0 for stride in self.cache_scales),
            "SCALE_MULTIPLIES": self.scale_multiplies,
        }

    def _norm_constants(self) -> dict[str, Constant]:
        kind = self.norm.kind if self.has_norm else "none"
        return {
            "NORM_BEFORE": "none" if self.norm_after_rope else kind,
            "NORM_AFTER": kind if self.norm_after_rope else "none",
            "NORMED": tuple(norm is not None or self.norm.weightless for norm in self.norms),
            "NORM_EPS": self.norm_eps,
            "NORM_OFFSET": self.norm.offset,
            "NORM_HALVES": self.halves if self.norm_after_rope else 0,
            "NORM_STRIDES": self.norm.strides,
        }

    @property
    def row_unit(self) -> int:
        """Elements that divide every row's offset; 1 where a cache of one slot has no strides."""
        caches = (self.k_cache, self.v_cache or self.k_cache)
        strides = [stride for c in caches for stride in (c.page_stride, c.slot_stride)]
        # A q of another dtype has a target of its own.
        q_row = self.num_heads * self.head_dim if self.dtype == self.cache_dtype else 0
        return math.gcd(q_row, *strides) or 1

    def pointer_types(self) -> dict[str, str | None]:
        """Triton types of the pointers in POINTER_NAMES; None where there is no such tensor."""
        table = f"*{self.rope.table_dtype}" if self.rope else None
        cache = f"*{self.cache_dtype}"
        types: dict[str, str | None] = {
            "q_out_ptr": f"*{self.dtype}" if self.num_heads else None,
            "k_cache_ptr": cache,
            "v_cache_ptr": cache if self.v_cache else None,
            "slots_ptr": f"*{self.slot_dtype}",
            "sequences_ptr": f"*{self.table.sequence_dtype}" if self.table else None,
            "positions_ptr": f"*{self.table.position_dtype}" if self.table else None,
            "delta_ptr": f"*{self.delta[1]}" if self.delta else None,
            "cos_ptr": table,
            "sin_ptr": table,
        }
        for letter, stride in zip("kv", self.cache_scales, strict=True):
            types[f"{letter}_cache_scale_ptr"] = "*fp32" if stride is not None else None
        for letter, bias in zip("qkv", self.biases, strict=True):
            types[f"{letter}_bias_ptr"] = f"*{bias[1]}" if bias else None
        for letter, norm in zip("qk", self.norms, strict=True):
            types[f"{letter}_norm_ptr"] = f"*{norm}" if norm else None
        return {name: types[name] for name in POINTER_NAMES}

    def count_types(self) -> dict[str, str | None]:
        """Triton types of the counts that every kernel takes; None where a count has no use."""
        table = "i32" if self.table else None
        return {**dict.fromkeys(COUNT_NAMES, "i32"), **dict.fromkeys(TABLE_COUNT_NAMES, table)}
