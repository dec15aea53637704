"""The static part of QKV problems, and the conditions under which the fused kernels can compute
them.

A problem has the static facts about one call: sizes, dtypes, the geometry of the cache, and strides
in elements. This module needs neither torch nor a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand
from tilewright.codegen.row_norm import RowNorm, squares_a_row
from tilewright.codegen.targets import Target


@dataclass(frozen=True)
class HeadEpilogue:
    """The epilogue of projected heads: bias, delta, clip, norm and RoPE, which rotates the columns
    of a head in pairs. After these steps, q is stored to the result, and k and v are stored to the
    slots of a cache. Kernels use the fields and properties as constants.

    Attributes:
        dtype: The dtype of q. If there is no q (num_heads is 0), the dtype of k.
        num_heads, num_kv_heads: The number of heads of q, and of k, in the projection.
        head_dim: The width of a head.
        page_size: The number of slots in a page.
        cache_dtype: The dtype of the cache.
        k_strides, v_strides: The strides of the cache's views [page, slot, head, dim] for k and for
            v.
        writes_v: Whether there is a v. If not, v_strides are the strides of k.
        addressing, wrap_negative, search_steps: The parameters of `cache_places` with these names.
        rope_style: "none", "half", "interleaved" or "interleaved_to_half".
        rotary_dim: The number of columns of a head that are rotated.
        rope_full_width: Whether the tables of cosines and sines have `rotary_dim` columns. If not,
            they have half as many.
        wide_tables: Whether the tables of cosines and sines are fp32.
        bias_strides: The strides of (q's groups, q's heads, k's heads, v's heads) in the biases.
        has_delta: Whether a delta (LoRA) is added.
        normed: (whether q has a norm, whether k has a norm).
        v_normed: Whether v has a norm, which has no weight.
        norm_kind: "rms" or "layer".
        norm_width: "head", or "row" for a norm over all heads of a projection.
        norm_after_rope: Whether the norm comes after the rotation.
        norm_eps: The epsilon of the norm.
        norm_offset: A number that is added to the norm's weights.
        norm_strides, norm_bias_strides: The strides between the heads' vectors of norm weights, and
            of norm biases, for (q, k); 0 if all heads share a vector. norm_bias_strides is None if
            there is no bias.
        kv_repeat: The number of heads of the cache to which each head of k and v is stored.
        group: The number of q heads in a group, if q's weight, its bias and the product have an
            axis for groups; else 0.
        gate_run: If this number is not 0, q's heads alternate between this many queries and this
            many gates. Gates have neither a norm nor a rotation.
        clip: The largest absolute value that q, k and v may have; 0 for no limit.
        scale_strides: The strides between heads of the fp32 scales of k and v in the cache; 0 if
            all heads share a scale.
        scale_multiplies: Whether values are multiplied by the scale. If not, they are divided by
            it.
        saturates: Whether 8-bit floats of the cache saturate. If not, they overflow.
        num_tokens: The number of tokens, if it is a constant of the graph; None if it is known only
            at the launch.
    """

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    cache_dtype: str
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    writes_v: bool = True
    addressing: str = "flat"
    wrap_negative: bool = False
    search_steps: int = 0
    rope_style: str = "none"
    rotary_dim: int = 0
    rope_full_width: bool = False
    wide_tables: bool = False
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    has_delta: bool = False
    normed: tuple[bool, bool] = (False, False)
    v_normed: bool = False
    norm_kind: str = "rms"
    norm_width: str = "head"
    norm_after_rope: bool = False
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_strides: tuple[int, int] = (0, 0)
    norm_bias_strides: tuple[int, int] | None = None
    kv_repeat: int = 1
    group: int = 0
    gate_run: int = 0
    clip: float = 0.0
    scale_strides: tuple[int, int] = (0, 0)
    scale_multiplies: bool = False
    saturates: bool = True
    num_tokens: int | None = None

    @property
    def interleaved(self) -> bool:
        """Whether the two members of a pair are adjacent before the rotation."""
        return self.rope_style.startswith("interleaved")

    @property
    def halves(self) -> int:
        """The distance between the members of a pair after the rotation, if the rotation changes
        it; else 0."""
        return self.rotary_dim // 2 if self.rope_style == "interleaved_to_half" else 0

    @property
    def pair_half(self) -> int:
        """The distance between the members of a pair, if they are not adjacent."""
        return self.rotary_dim // 2 if self.rope_style == "half" else (self.head_dim + 1) // 2

    @property
    def pairs_per_head(self) -> int:
        """The number of pairs that cover a head. The last pairs may extend past the head."""
        return -(-self.head_dim // (2 * self.pair_half)) * self.pair_half

    @property
    def row_unit(self) -> int:
        """A number that divides the offset of every row, in elements; 1 if all strides are 0."""
        # If q has another dtype than the cache, another operand describes where q is written, so
        # the length of q's rows does not matter here.
        q_row = self.num_heads * self.head_dim if self.dtype == self.cache_dtype else 0
        return math.gcd(q_row, *self.k_strides[:2], *self.v_strides[:2]) or 1

    @property
    def has_norm(self) -> bool:
        return self.v_normed or any(self.normed)

    @property
    def row_norm(self) -> bool:
        """Whether a norm covers all heads of a projection."""
        return self.has_norm and self.norm_width == "row"

    @property
    def norm_before(self) -> str:
        """The kind of the norm before the rotation, or "none"."""
        return self.norm_kind if self.has_norm and self.norm_after == "none" else "none"

    @property
    def norm_after(self) -> str:
        """The kind of the norm after the rotation, or "none"."""
        follows = self.has_norm and self.norm_after_rope and self.rotary_dim > 0
        return self.norm_kind if follows else "none"

    @property
    def norm_halves(self) -> int:
        """The value of `halves` for the norm's weights. It equals `halves` if the norm comes after
        the rotation, else it is 0."""
        return 0 if self.norm_after == "none" else self.halves

    @property
    def kinds(self) -> int:
        """The number of projections among q, k and v."""
        return 1 + (self.num_heads > 0) + self.writes_v

    @property
    def heads_in_all(self) -> int:
        return self.num_heads + self.num_kv_heads * (1 + self.writes_v)


@dataclass(frozen=True)
class QkvProblem:
    """One call of `fused_qkv_paged`.

    Attributes:
        hidden: The number of columns of x.
        x: The operand x [T, hidden], with strides (token,).
        weights: The operands of q, k and v (None if there is no v), with strides (group, head, row,
            column). The stride of groups is 0 if heads are not grouped. If the stride of columns is
            1, K is the contiguous dimension (k-major). If not, the stride of rows is 1 (n-major).
        epilogue: The epilogue.
        one_descriptor: Whether one TMA descriptor can cover the three weights, because they are
            near enough (strides below 2**40 bytes).
        quantization: How the weights are quantised; None if they are not. If they are, their
            strides count stored words.
        input_norm: The norm of x before the projection, or None.
        scaled_by: The units that have one scale each: "tensors", "rows" or "blocks". It is "" if no
            library can multiply the codes of x with the codes of the weights.
    """

    hidden: int
    x: Operand
    weights: tuple[Operand, Operand, Operand | None]
    epilogue: HeadEpilogue
    one_descriptor: bool = True
    quantization: Quantization | None = None
    input_norm: RowNorm | None = None
    scaled_by: str = ""

    @property
    def k_major(self) -> bool:
        """Whether K is the contiguous dimension of q's weight."""
        return self.weights[0].strides[-1] == 1

    @property
    def codes(self) -> Quantization:
        """The quantisation of a problem whose weights are quantised."""
        assert self.quantization is not None
        return self.quantization

    @property
    def number_dtype(self) -> str:
        """The dtype to which the library lowering decodes codes. If x has codes too, this is fp32,
        because rounding the numbers would lose accuracy. If not, this is q's dtype."""
        return "fp32" if self.coded_x else self.epilogue.dtype

    @property
    def coded_x(self) -> bool:
        """Whether x has fp8 codes."""
        return self.x.dtype == "fp8e4nv"

    def multiplies_codes(self, target: Target) -> bool:
        """Whether a library multiplies the codes of x with the codes of the weights on this
        chip."""
        return bool(self.scaled_by) and (self.scaled_by != "blocks" or target.scales_blocks)

    @property
    def num_rows(self) -> int:
        """The number of weight rows of q, k and v together."""
        return self.epilogue.heads_in_all * self.epilogue.head_dim

    def bytes_moved(self, num_tokens: int) -> int:
        """Returns a lower bound of the global memory traffic in bytes: weights and x are read once,
        and q and the slots are written once."""
        size = ELEMENT_BYTES[self.epilogue.dtype]
        per_token = self.hidden + self.num_rows
        return size * (self.hidden * self.num_rows + num_tokens * per_token)

    @property
    def after_norm(self) -> QkvProblem:
        """The problem that remains after a separate kernel has normalised x. If there is no norm of
        x, this is the problem itself."""
        if self.input_norm is None:
            return self
        x = Operand(self.x.dtype, (self.hidden,))
        return replace(self, x=x, input_norm=None)


@dataclass(frozen=True)
class TiledWeights:
    """How one TMA descriptor loads the heads of all three weights.

    Attributes:
        weight_strides: The strides of the descriptor: (unit, row), where all heads begin at
            multiples of `unit`, or (column,) for n-major weights, whose heads may begin at any
            element.
        head_steps: The steps between (q's groups, q's heads, k's heads, v's heads). They count
            units, or elements if the weights are n-major.
        weight_extent: The extent of all heads, in the same units as head_steps.
        adjacent: Whether several heads can be loaded together.
    """

    weight_strides: tuple[int, ...]
    head_steps: tuple[int, int, int, int]
    weight_extent: int
    adjacent: bool


def tiled_weights(problem: QkvProblem) -> TiledWeights:
    """Returns how to load the weights of a problem. The weights have equal row and column
    strides."""
    heads = problem.epilogue
    q, k, v = problem.weights
    q_group, q_head, q_row, q_column = q.strides
    k_head, v_head = k.strides[1], (v or k).strides[1]
    n_major, in_group = not problem.k_major, heads.group or heads.num_heads
    groups, kv_heads = heads.num_heads // in_group, heads.num_kv_heads
    # The step along an axis that has one element has no meaning, so any step may replace it.
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
    """Returns why `qkv_projection` cannot compute the problem; None if it can."""
    heads = problem.epilogue
    size = ELEMENT_BYTES[problem.x.dtype]
    if (obstacle := fused_obstacle(heads)) is not None:
        return obstacle
    if problem.quantization is not None:
        return "the kernel cannot convert codes, because TMA does not load through registers"
    if problem.input_norm is not None:
        return "the kernel cannot normalise x, because TMA does not load through registers"
    weights = [weight for weight in problem.weights if weight is not None]
    if len({weight.strides[2:] for weight in weights}) != 1:
        return "the three weights have different strides"
    strides = (*problem.x.strides, *tiled_weights(problem).weight_strides)
    aligned = all(operand.aligned for operand in (problem.x, *weights))
    if not aligned or any(stride * size % 16 for stride in strides):
        return "TMA requires addresses and strides that are multiples of 16 bytes"
    if not problem.one_descriptor:
        return "the weights are too far apart for one TMA descriptor"
    if heads.head_dim != next_power_of_2(heads.head_dim):
        return f"head_dim {heads.head_dim} is not a power of two"
    pair_half = heads.pair_half
    if not heads.interleaved and pair_half != next_power_of_2(pair_half):
        return f"half of rotary_dim, {pair_half}, is not a power of two"
    return None


def heads_fit(problem: QkvProblem, heads_per_tile: int) -> bool:
    """Whether each tile of this many heads belongs to only one of q, k and v, and can be loaded at
    once."""
    heads = problem.epilogue
    counts = (heads.num_heads, heads.num_kv_heads, heads.gate_run)
    if any(count % heads_per_tile for count in counts):
        return False
    if heads_per_tile == 1:
        return True
    weights = tiled_weights(problem)
    in_row = not heads.group or weights.head_steps[0] == heads.group * weights.head_steps[1]
    return weights.adjacent and (in_row or heads.group % heads_per_tile == 0)


def swapped_obstacle(problem: QkvProblem) -> str | None:
    """Returns why `qkv_projection_swapped` cannot compute the problem; None if it can."""
    if (obstacle := fused_obstacle(problem.epilogue)) is not None:
        return obstacle
    if problem.quantization is not None:
        return _codes_obstacle(problem)
    if len({weight.strides[-1] == 1 for weight in problem.weights if weight}) != 1:
        return "some weights are k-major, and others are n-major"
    return _range_obstacle(problem)


def _range_obstacle(problem: QkvProblem) -> str | None:
    if squares_a_row(problem.input_norm) and problem.x.dtype != "bf16":
        return (
            f"the range of {problem.x.dtype} is too small for sums that are normalised afterwards"
        )
    return None


def _codes_obstacle(problem: QkvProblem) -> str | None:
    q, heads = problem.codes, problem.epilogue
    if problem.input_norm is not None:
        return "x is read in the order of the codes, so the kernel cannot normalise x"
    if q.differs:
        return q.differs
    if not problem.coded_x and problem.x.dtype != heads.dtype:
        return f"x is {problem.x.dtype}, but q is {heads.dtype}"
    if problem.coded_x and q.weight_format != "fp8":
        return f"x has fp8 codes, but the weights are {q.weight_format}"
    if not q.known_order:
        return f"the nibbles are in the order {list(q.order)}"
    if q.packed_rows and not heads.interleaved and heads.pair_half % q.per_word:
        return "a word has codes of both members of a pair"
    if q.packed_rows and heads.head_dim % q.per_word:
        return "a word has codes of two heads"
    if not any(steps_fit(problem, block_k) for block_k in (32, 64, 128)):
        return f"the number of columns that share a scale is {q.block[1]}"
    return None


def dots_obstacle(problem: QkvProblem) -> str | None:
    """Returns why `qkv_projection_swapped` cannot compute the problem without tensor cores; None if
    it can."""
    if (obstacle := fused_obstacle(problem.epilogue)) is not None:
        return obstacle
    q, norm = problem.quantization, problem.input_norm
    if q is None:
        return "the weights are not quantised"
    if q.differs:
        return q.differs
    if norm is not None and not norm.follows:
        return f"x has a {norm.kind} norm"
    if (obstacle := q.dot_obstacle(problem.hidden) or _range_obstacle(problem)) is not None:
        return obstacle
    if not problem.coded_x and problem.x.dtype != problem.epilogue.dtype:
        return f"x is {problem.x.dtype}, but q is {problem.epilogue.dtype}"
    weights = [weight for weight in problem.weights if weight is not None]
    if any(weight.strides[-1] != 1 for weight in weights):
        return "the columns are not contiguous"
    whole = all(one.aligned and not any(s % 4 for s in one.strides[:-1]) for one in weights)
    return None if q.per_int32 != 4 or whole else "the codes do not form whole 32-bit words"


def steps_fit(problem: QkvProblem, block_k: int) -> bool:
    """Whether steps of block_k columns cover whole scales."""
    q = problem.codes
    if not problem.coded_x:
        return q.step_fits(problem.hidden, block_k)
    # For accuracy, the tensor core itself sums at most 128 products.
    most = 256 if q.scales_whole_rows(problem.hidden) else 128
    return q.groups_in(problem.hidden, block_k) == 1 and 32 <= block_k <= most


def fused_obstacle(heads: HeadEpilogue) -> str | None:
    """Returns why no kernel that multiplies tiles can have this epilogue; None if such kernels
    can."""
    if heads.dtype not in ("bf16", "fp16"):
        return f"the kernels multiply bf16 and fp16 on tensor cores, not {heads.dtype}"
    if heads.row_norm:
        return "a norm over all heads of a projection needs more than one tile"
    return None
