"""QKV problems as plain data, and which of the fused kernels can take one.

Nothing here touches torch or a GPU: a problem is what is static about one call site (dims, strides,
dtypes, cache geometry).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.qkv.heads import HeadFinish


@dataclass(frozen=True)
class WeightStrides:
    """Strides of a weight [H, D, K], or [H / G, G, D, K] where heads lie in groups; in elements.

    column 1: K is the contiguous dim (k-major); else row is 1 (n-major).
    """

    head: int
    row: int
    column: int = 1
    group: int = 0

    @property
    def all(self) -> tuple[int, int, int, int]:
        return self.group, self.head, self.row, self.column


@dataclass(frozen=True)
class QkvProblem:
    """One `fused_qkv_paged` call site.

    num_tokens: T where it is a constant of the graph, with rope_tokens (rows of the tables) and
    sequence_tokens (tokens per page for per-sequence slots); else None, and the counts come at
    run time. weight_strides: of q, k and v, None where there is no v.
    unaligned: names of pointer parameters that are not aligned to 16 bytes.
    one_descriptor: the three weights are near enough for one TMA descriptor (strides below 2**40
    bytes). quantization: of weights that are codes; their strides then count stored words.
    """

    hidden: int
    x_stride: int
    weight_strides: tuple[WeightStrides, WeightStrides, WeightStrides | None]
    finish: HeadFinish
    num_tokens: int | None = None
    rope_tokens: int | None = None
    sequence_tokens: int | None = None
    unaligned: tuple[str, ...] = ()
    one_descriptor: bool = True
    quantization: Quantization | None = None

    @property
    def num_rows(self) -> int:
        """Weight rows of q, k and v together."""
        return self.finish.heads_in_all * self.finish.head_dim

    def bytes_moved(self, num_tokens: int) -> int:
        """Least bytes of global memory: weights and x read once, q and the slots written once."""
        size = ELEMENT_BYTES[self.finish.dtype]
        per_token = self.hidden + self.num_rows
        return size * (self.hidden * self.num_rows + num_tokens * per_token)


@dataclass(frozen=True)
class InputStrides:
    """Strides (token, head, dim) of a [T, H, D] input, in elements; group where heads have one."""

    token: int
    head: int
    dim: int
    group: int = 0

    @property
    def all(self) -> tuple[int, int, int, int]:
        return self.token, self.group, self.head, self.dim


@dataclass(frozen=True)
class EpilogueProblem:
    """Finishing q, k, v that already exist; q None where finish has no q, v likewise."""

    q: InputStrides | None
    k: InputStrides
    v: InputStrides | None
    finish: HeadFinish
    input_dtype: str
    num_tokens: int | None = None
    rope_tokens: int | None = None
    sequence_tokens: int | None = None
    unaligned: tuple[str, ...] = ()


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
    finish = problem.finish
    q, k, v = problem.weight_strides
    v = v or k
    n_major, in_group = q.column != 1, finish.group or finish.num_heads
    groups, kv_heads = finish.num_heads // in_group, finish.num_kv_heads
    # The step along an axis of one element has no meaning: any other will do.
    whole = 1 if n_major else q.row * finish.head_dim
    q_head = q.head if in_group > 1 else k.head if kv_heads > 1 else whole
    k_head, v_head = (w.head if kv_heads > 1 else q_head for w in (k, v))
    group = q.group if groups > 1 and finish.group else in_group * q_head
    unit = 1 if n_major else math.gcd(group, q_head, k_head, v_head)
    steps = (group // unit, q_head // unit, k_head // unit, v_head // unit)
    one = finish.head_dim if n_major else 1
    q_last = (groups - 1) * steps[0] + (in_group - 1) * steps[1]
    return TiledWeights(
        (q.column,) if n_major else (unit, q.row),
        steps,
        max(q_last, (kv_heads - 1) * max(steps[2:])) + one,
        set(steps[1:]) == {one},
    )


def tiled_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection` cannot take the problem; None when it can."""
    finish = problem.finish
    size = ELEMENT_BYTES[finish.dtype]
    if (obstacle := fused_obstacle(finish)) is not None:
        return obstacle
    weights = [strides for strides in problem.weight_strides if strides is not None]
    if len({(strides.row, strides.column) for strides in weights}) != 1:
        return "the three weights differ in strides"
    strides = (problem.x_stride, *tiled_weights(problem).strides)
    odd = {"x_ptr", "q_weight_ptr", "k_weight_ptr", "v_weight_ptr"} & set(problem.unaligned)
    if odd or any(stride * size % 16 for stride in strides):
        return "TMA wants addresses and strides in multiples of 16 bytes"
    if not problem.one_descriptor:
        return "the weights lie too far apart for one TMA descriptor"
    if finish.head_dim != next_power_of_2(finish.head_dim):
        return f"head_dim {finish.head_dim} is no power of two"
    pair_half = finish.pair_half
    if not finish.interleaved and pair_half != next_power_of_2(pair_half):
        return f"half of rotary_dim, {pair_half}, is no power of two"
    return None


def heads_fit(problem: QkvProblem, heads_per_tile: int) -> bool:
    """Whether tiles of so many heads lie wholly in q, k or v, and can be loaded at once."""
    finish = problem.finish
    if finish.num_heads % heads_per_tile or finish.num_kv_heads % heads_per_tile:
        return False
    if heads_per_tile == 1:
        return True
    weights = tiled_weights(problem)
    in_row = not finish.group or weights.steps[0] == finish.group * weights.steps[1]
    return weights.adjacent and (in_row or finish.group % heads_per_tile == 0)


def swapped_obstacle(problem: QkvProblem) -> str | None:
    """Why `qkv_projection_swapped` cannot take the problem; None when it can."""
    if (obstacle := fused_obstacle(problem.finish)) is not None:
        return obstacle
    if len({strides.column == 1 for strides in problem.weight_strides if strides}) != 1:
        return "k-major and n-major weights together"
    return None


def fused_obstacle(finish: HeadFinish) -> str | None:
    """Why no kernel that multiplies tiles can finish the heads; None when they can."""
    if finish.dtype not in ("bf16", "fp16"):
        return f"tensor cores take bf16 and fp16 here, not {finish.dtype}"
    if finish.row_norm:
        return "a norm over all heads of a projection needs more than a tile"
    return None
