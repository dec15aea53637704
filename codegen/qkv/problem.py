"""QKV problems as plain data, and which of the fused kernels can take one.

Nothing here touches torch or a GPU: a problem is what is static about one call site (dims, dtypes,
cache geometry, strides in elements).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.codegen.addressing import Addressing
from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand, first_strides
from tilewright.codegen.row_norm import RowNorm, squares_a_row
from tilewright.codegen.spec import Constant, constants_of, operands_of


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: style "half", "interleaved" or "interleaved_to_half".

    full_width: the tables have `rotary_dim` columns, else half as many. cos, sin: strides (row,).
    """

    style: str
    rotary_dim: int
    full_width: bool
    cos: Operand
    sin: Operand


@dataclass(frozen=True)
class Norm:
    """The norms of q and k; kind "rms" or "layer".

    weights: of q and k, [head_dim] or [H, head_dim], None where there is none; strides (head,),
    0 where the heads share one. row: over all heads of a projection together. offset is added to
    the weights. weightless: q and k are normed also without a weight. biases: what q and k add
    then, shaped as weights. values: v is normed too, without a weight.
    """

    weights: tuple[Operand | None, Operand | None] = (None, None)
    kind: str = "rms"
    row: bool = False
    after_rope: bool = False
    offset: float = 0.0
    weightless: bool = False
    biases: tuple[Operand | None, Operand | None] = (None, None)
    values: bool = False
    eps: float = 1e-6


@dataclass(frozen=True)
class HeadEpilogue:
    """What is done to projected heads: bias, delta, clip, norm, RoPE; then q is stored to the
    result, k and v to the slots of a cache.

    q_out: None where there is no q (num_heads is 0 then). num_kv_heads: of the projection; each is
    stored to kv_repeat heads of the cache. group: q heads in a group where q's weight, its bias and
    the product of a GEMM have an axis for groups, else 0. gate_run: q's heads are so many queries,
    then as many gates, which are neither normed nor rotated, and so on; 0: all are queries.
    k_cache, v_cache: windows [page, slot, head, dim] with those strides; v_cache None: there is no
    v. page_size: slots in a page.
    biases: of q, k, v, strides (head,), of a grouped q (group, head). delta: strides (row,).
    clip 0: none. cache_scales: fp32, of k and v, strides (head,), 0 where the heads share one.
    saturates: 8-bit floats of the cache do; else they overflow.
    num_tokens: T where it is a constant of the graph, with rope_tokens (rows of the tables) and
    sequence_tokens (tokens per page for per-sequence slots); None: known at the launch.
    """

    q_out: Operand | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    k_cache: Operand
    v_cache: Operand | None
    addressing: Addressing
    rope: Rope | None = None
    biases: tuple[Operand | None, ...] = (None, None, None)
    delta: Operand | None = None
    norm: Norm = Norm()
    kv_repeat: int = 1
    group: int = 0
    gate_run: int = 0
    clip: float = 0.0
    cache_scales: tuple[Operand | None, Operand | None] = (None, None)
    scale_multiplies: bool = False
    saturates: bool = True
    num_tokens: int | None = None
    rope_tokens: int | None = None
    sequence_tokens: int | None = None

    @property
    def dtype(self) -> str:
        """Of q."""
        assert self.q_out is not None
        return self.q_out.dtype

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
        return self.norm.weightless or self.norm.values or any(self.norm.weights)

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

    def constants(self) -> dict[str, Constant]:
        """The constexpr parameters that every kernel of the family takes."""
        rope, q_bias = self.rope, self.biases[0]
        v_cache = self.v_cache or self.k_cache
        return {
            **constants_of(self, "num_heads", "num_kv_heads", "head_dim", "group", "kv_repeat"),
            **constants_of(self, "pair_half", "interleaved", "halves", "clip", "page_size"),
            **constants_of(self, "row_unit", "scale_multiplies"),
            **(constants_of(self, "gate_run") if self.gate_run else {}),
            **({} if self.saturates else constants_of(self, "saturates")),
            "ROTARY_DIM": rope.rotary_dim if rope else 0,
            "ROPE_FULL_WIDTH": rope.full_width if rope else False,
            "COS_STRIDE": rope.cos.strides[0] if rope else 0,
            "SIN_STRIDE": rope.sin.strides[0] if rope else 0,
            "BIAS_STRIDES": (
                q_bias.strides[0] if q_bias and len(q_bias.strides) == 2 else 0,
                *(bias.strides[-1] if bias else 0 for bias in self.biases),
            ),
            "DELTA_STRIDE": first_strides(self.delta)[0],
            **self._norm_constants(),
            **self.addressing.constants(),
            "K_STRIDES": self.k_cache.strides,
            "V_STRIDES": v_cache.strides,
            "SCALE_STRIDES": first_strides(*self.cache_scales),
        }

    def _norm_constants(self) -> dict[str, Constant]:
        norm = self.norm
        kind = norm.kind if self.has_norm else "none"
        return {
            "NORM_BEFORE": "none" if self.norm_after_rope else kind,
            "NORM_AFTER": kind if self.norm_after_rope else "none",
            "NORMED": tuple(w is not None or norm.weightless for w in norm.weights),
            "NORM_EPS": norm.eps,
            "NORM_OFFSET": norm.offset,
            "NORM_HALVES": self.halves if self.norm_after_rope else 0,
            "NORM_STRIDES": first_strides(*norm.weights),
            **({"V_NORMED": True} if norm.values else {}),
            **({"NORM_BIAS_STRIDES": first_strides(*norm.biases)} if any(norm.biases) else {}),
        }

    @property
    def row_unit(self) -> int:
        """Elements that divide every row's offset; 1 where a cache of one slot has no strides."""
        caches = (self.k_cache, self.v_cache or self.k_cache)
        strides = [stride for cache in caches for stride in cache.strides[:2]]
        # A q of another dtype has a target of its own.
        shared = self.q_out is not None and self.q_out.dtype == self.k_cache.dtype
        return math.gcd(self.num_heads * self.head_dim if shared else 0, *strides) or 1

    def pointers(self) -> dict[str, Operand | None]:
        """The tensors that every kernel of the family takes, in their order."""
        rope = self.rope
        return {
            **operands_of(self, "q_out", "k_cache", "v_cache"),
            **self.addressing.pointers(),
            **dict(zip(("k_cache_scale_ptr", "v_cache_scale_ptr"), self.cache_scales, strict=True)),
            **dict(zip(("q_bias_ptr", "k_bias_ptr", "v_bias_ptr"), self.biases, strict=True)),
            "delta_ptr": self.delta,
            **dict(zip(("q_norm_ptr", "k_norm_ptr"), self.norm.weights, strict=True)),
            "cos_ptr": rope.cos if rope else None,
            "sin_ptr": rope.sin if rope else None,
        }

    def last_pointers(self) -> dict[str, Operand]:
        """The tensors that kernels take behind their counts, where there are any."""
        biases = zip(("q_norm_bias_ptr", "k_norm_bias_ptr"), self.norm.biases, strict=True)
        return {name: bias for name, bias in biases if bias is not None}

    def counts(self) -> dict[str, str | int | None]:
        """The counts that every kernel takes: the number where it is static, else a type."""
        static = {
            "num_tokens": self.num_tokens,
            "sequence_tokens": self.sequence_tokens,
            "rope_tokens": self.rope_tokens,
            "num_pages": None,
        }
        counts = {name: "i32" if known is None else known for name, known in static.items()}
        return {**counts, **self.addressing.counts()}


@dataclass(frozen=True)
class QkvProblem:
    """One `fused_qkv_paged` call site.

    x: [T, hidden], strides (token,). weights: of q, k and v (None where there is no v), strides
    (group, head, row, column), group 0 where heads do not lie in groups. Column 1: K is the
    contiguous dim (k-major); else row is 1 (n-major).
    one_descriptor: the three weights are near enough for one TMA descriptor (strides below 2**40
    bytes). quantization: of weights that are codes; their strides then count stored words.
    input_norm: of x, before the projection.
    """

    hidden: int
    x: Operand
    weights: tuple[Operand, Operand, Operand | None]
    epilogue: HeadEpilogue
    one_descriptor: bool = True
    quantization: Quantization | None = None
    input_norm: RowNorm | None = None

    @property
    def k_major(self) -> bool:
        """Whether the weight of q has K contiguous."""
        return self.weights[0].strides[-1] == 1

    @property
    def coded_x(self) -> bool:
        """Whether x has fp8 codes."""
        return self.x.dtype == "fp8e4nv"

    @property
    def num_rows(self) -> int:
        """Weight rows of q, k and v together."""
        return self.epilogue.heads_in_all * self.epilogue.head_dim

    def bytes_moved(self, num_tokens: int) -> int:
        """Least bytes of global memory: weights and x read once, q and the slots written once."""
        size = ELEMENT_BYTES[self.epilogue.dtype]
        per_token = self.hidden + self.num_rows
        return size * (self.hidden * self.num_rows + num_tokens * per_token)

    @property
    def after_norm(self) -> QkvProblem:
        """What is left once x is normed, in a tensor of its own; where it is not normed, itself."""
        if self.input_norm is None:
            return self
        x = Operand(self.x.dtype, (self.hidden,))
        return replace(self, x=x, input_norm=None)


@dataclass(frozen=True)
class EpilogueProblem:
    """Bias, norm, RoPE and store of q, k and v that exist already; q or v None where the epilogue
    has none. Strides (token, group, head, dim), group 0 where heads do not lie in groups."""

    q: Operand | None
    k: Operand
    v: Operand | None
    epilogue: HeadEpilogue


@dataclass(frozen=True)
class TiledWeights:
    """How one TMA descriptor reaches the heads of all three weights.

    strides: (unit, row) with heads at multiples of unit, or (column,) of n-major weights, where
    heads begin at any element. steps: (q's group, q's head, k's head, v's head), and extent, how
    far they reach, count those. adjacent: several heads may be loaded together.
    """

    strides: tuple[int, ...]
    steps: tuple[int, int, int, int]
    extent: int
    adjacent: bool


def tiled_weights(problem: QkvProblem) -> TiledWeights:
    """The placement of a problem whose weights agree in row and column strides."""
    heads = problem.epilogue
    q, k, v = problem.weights
    q_group, q_head, q_row, q_column = q.strides
    k_head, v_head = k.strides[1], (v or k).strides[1]
    n_major, in_group = not problem.k_major, heads.group or heads.num_heads
    groups, kv_heads = heads.num_heads // in_group, heads.num_kv_heads
    # The step along an axis of one element has no meaning: any other will do.
    whole = 1 if n_major else q_row * heads.head_dim
    q_head = q_head if in_group > 1 else k_head if kv_heads > 1 else whole
    if kv_heads == 1:
        k_head = v_head = q_head
    group = q_group if groups > 1 and heads.group else in_group * q_head
    unit = 1 if n_major else math.gcd(group, q_head, k_head, v_head)
    steps = (group // unit, q_head // unit, k_head // unit, v_head // unit)
    one = heads.head_dim if n_major else 1
    q_last = (groups - 1) * steps[0] + (in_group - 1) * steps[1]
    return TiledWeights(
        (q_column,) if n_major else (unit, q_row),
        steps,
        max(q_last, (kv_heads - 1) * max(steps[2:])) + one,
        set(steps[1:]) == {one},
    )


def tiled_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection` cannot take the problem; None when it can."""
    heads = problem.epilogue
    size = ELEMENT_BYTES[problem.x.dtype]
    if (obstacle := fused_obstacle(heads)) is not None:
        return obstacle
    if problem.input_norm is not None:
        return "what TMA loads goes to the tensor cores as it is"
    weights = [weight for weight in problem.weights if weight is not None]
    if len({weight.strides[2:] for weight in weights}) != 1:
        return "the three weights differ in strides"
    strides = (*problem.x.strides, *tiled_weights(problem).strides)
    aligned = all(operand.aligned for operand in (problem.x, *weights))
    if not aligned or any(stride * size % 16 for stride in strides):
        return "TMA wants addresses and strides in multiples of 16 bytes"
    if not problem.one_descriptor:
        return "the weights lie too far apart for one TMA descriptor"
    if heads.head_dim != next_power_of_2(heads.head_dim):
        return f"head_dim {heads.head_dim} is no power of two"
    pair_half = heads.pair_half
    if not heads.interleaved and pair_half != next_power_of_2(pair_half):
        return f"half of rotary_dim, {pair_half}, is no power of two"
    return None


def heads_fit(problem: QkvProblem, heads_per_tile: int) -> bool:
    """Whether tiles of so many heads lie wholly in q, k or v, and can be loaded at once."""
    heads = problem.epilogue
    counts = (heads.num_heads, heads.num_kv_heads, heads.gate_run)
    if any(count % heads_per_tile for count in counts):
        return False
    if heads_per_tile == 1:
        return True
    weights = tiled_weights(problem)
    in_row = not heads.group or weights.steps[0] == heads.group * weights.steps[1]
    return weights.adjacent and (in_row or heads.group % heads_per_tile == 0)


def swapped_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection_swapped` cannot take the problem; None when it can."""
    if (obstacle := fused_obstacle(problem.epilogue)) is not None:
        return obstacle
    if len({weight.strides[-1] == 1 for weight in problem.weights if weight}) != 1:
        return "k-major and n-major weights together"
    if squares_a_row(problem.input_norm) and problem.x.dtype != "bf16":
        return f"{problem.x.dtype} has no range for sums that are normed afterwards"
    return None


def fused_obstacle(heads: HeadEpilogue) -> str | None:
    """Why no kernel that multiplies tiles can have this epilogue; None when they can."""
    if heads.dtype not in ("bf16", "fp16"):
        return f"tensor cores take bf16 and fp16 here, not {heads.dtype}"
    if heads.row_norm:
        return "a norm over all heads of a projection needs more than a tile"
    return None
