"""QKV problems as plain data, and which of the fused kernels can take one.

Nothing here touches torch or a GPU: a problem is what is static about one call site (dims, strides,
dtypes, cache geometry).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES, next_power_of_2
from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand
from tilewright.codegen.qkv.heads import HeadEpilogue


@dataclass(frozen=True)
class QkvProblem:
    """One `fused_qkv_paged` call site.

    x: [T, hidden], strides (token,). weights: of q, k and v (None where there is no v), strides
    (group, head, row, column), group 0 where heads do not lie in groups. Column 1: K is the
    contiguous dim (k-major); else row is 1 (n-major).
    one_descriptor: the three weights are near enough for one TMA descriptor (strides below 2**40
    bytes). quantization: of weights that are codes; their strides then count stored words.
    """

    hidden: int
    x: Operand
    weights: tuple[Operand, Operand, Operand | None]
    epilogue: HeadEpilogue
    one_descriptor: bool = True
    quantization: Quantization | None = None

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
    if heads.num_heads % heads_per_tile or heads.num_kv_heads % heads_per_tile:
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
    return None


def fused_obstacle(heads: HeadEpilogue) -> str | None:
    """Why no kernel that multiplies tiles can have this epilogue; None when they can."""
    if heads.dtype not in ("bf16", "fp16"):
        return f"tensor cores take bf16 and fp16 here, not {heads.dtype}"
    if heads.row_norm:
        return "a norm over all heads of a projection needs more than a tile"
    return None
