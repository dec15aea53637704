"""Follows a tensor of heads back to its projection, through the rotation, the norm, the bias and
the linear.

Dimension letters: B batch, S sequence, T = B*S tokens, H heads, D head_dim, N output features of
the linear, K hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Atom, Effect, Size
from tilewright.patterns.language import reject
from tilewright.patterns.lora.delta import LoraDelta, match_delta
from tilewright.patterns.projection.epilogue import (
    HeadNorm,
    head_norm,
    match_epilogue,
    unscaled,
)
from tilewright.patterns.projection.rows import Rows, heads_of
from tilewright.patterns.quantised.weights import (
    DequantizedWeight,
    match_scaled_weight,
    repeated,
)
from tilewright.patterns.recognise.gemm import piece_of
from tilewright.patterns.recognise.linear import Linear, Path, match_linear
from tilewright.patterns.recognise.rope import Rope, Table, table_argument


@dataclass(frozen=True)
class Heads:
    """The heads of Q, K or V: `rope(norm(linear))` or `norm(rope(linear))`. The norm and the
    rotation are optional.

    Attributes:
        path: The codes of the pattern's misses, and the words of their messages.
        linear: The product, the bias and the clamp.
        rows: Which of the product's features are these heads.
        layout: The dimensions of the heads, expressed on the axes [tokens..., N] of the product.
        norm: The norm, or None.
        rope: The rotation, or None.
        rope_layout: The layout of the heads at the rotation, or None.
        end: The last absorbed value, which has the heads.
        absorbed: The values that the op replaces.
        factor: The number that multiplies the normalised and rotated heads.
    """

    path: Path
    linear: Linear
    rows: Rows
    layout: Effect
    norm: HeadNorm | None
    rope: Rope | None
    rope_layout: Effect | None
    end: Value
    absorbed: tuple[Value, ...]
    factor: float = 1.0

    @property
    def product(self) -> Value:
        """The value of the product."""
        return self.linear.gemm.value

    @property
    def feature(self) -> int:
        """The axis in `layout` that has the features of the product."""
        return self.linear.gemm.feature

    @property
    def tokens(self) -> tuple[Size, ...]:
        """The sizes of the token axes of the product."""
        return self.linear.gemm.shape[:-1]

    @property
    def num_heads(self) -> int:
        return self.rows.num_heads

    @property
    def head_dim(self) -> int:
        return self.rows.head_dim

    @property
    def x(self) -> View:
        """The activation, flattened to [T, K]."""
        return self.linear.gemm.flat_x

    @property
    def x_scale(self) -> View | None:
        """The scale of a quantised activation, [T or 1, K / block or 1]."""
        return self.linear.gemm.x_scale

    @property
    def float_operands(self) -> tuple[Value, ...]:
        """The activation if it is not codes, and the weight if it is not codes."""
        coded = self.quantized is not None
        kept = () if coded else (self.weight.value,)
        return kept if self.x_scale is not None else (self.x.value, *kept)

    @property
    def num_tokens(self) -> Size:
        return effects.product(self.tokens)

    @cached_property
    def weight(self) -> View:
        """The rows of the weight that belong to this projection, [H, D, K], or [groups, G, D,
        K]."""
        return piece_of(self.rows.of(self.linear.gemm.weight))

    @cached_property
    def quantized(self) -> DequantizedWeight | None:
        """The codes from which this projection's rows of the weight are computed, or None.

        Raises Reject (WEIGHT_FORMAT) for codes that the op does not support.
        """
        gemm, linear = self.linear.gemm, self.linear
        sums = weights = None
        if linear.scale is not None:
            rows = self.rows.of(linear.scale, linear.scale_first)
            sums = repeated(rows, self.weight.shape[-1])
        if gemm.weight_scale is not None:
            weights = self.rows.of(gemm.weight_scale).matrix
        return match_scaled_weight(self.weight, sums, weights)

    def expand_rows(self, delta: LoraDelta) -> View:
        """Returns the rows of an adapter's B that belong to this projection, [G, W, R].

        Raises InexpressibleError if these rows are not contiguous and there are several adapters.
        """
        run = self._run_of_rows()
        if run is not None:
            return delta.expand.narrow(1, *run)
        if delta.expand.shape[0] != 1:
            raise effects.InexpressibleError("several adapters of rows that are not contiguous")
        return self.rows.of(delta.expand.select(0, 0)).matrix.unsqueeze(0)

    def delta_columns(self, delta: LoraDelta) -> View:
        """Returns the columns of an adapter's delta that belong to this projection, [T, W].

        Raises InexpressibleError if these columns are not contiguous.
        """
        run = self._run_of_rows()
        if run is None:
            raise effects.InexpressibleError("the columns of the delta are not contiguous")
        return delta.view.matrix.narrow(1, *run)

    def _run_of_rows(self) -> tuple[int, int] | None:
        """Returns (first, number) of the output features of this projection if they are contiguous;
        else None."""
        indices = self.rows.indices()
        low, count = min(indices), len(indices)
        in_order = indices == frozenset(range(low, low + count)) and len(self.rows.heads) < 2
        return (low, count) if in_order else None

    @property
    def bias_rows(self) -> View | Computed | None:
        """The part of the bias that belongs to this projection. It has the shape of the weight
        without K."""
        bias = self.linear.bias
        if bias is None:
            return None
        rows = piece_of(self.rows.of(bias, self.linear.bias_first))
        dense = rows.effect.dims[-1] == (Atom(len(rows.value.shape) - 1, 1, self.head_dim),)
        return rows if dense else Computed("contiguous", (rows,))


def match_heads(
    view: View, path: Path, head_dim: int | None = None, factors: bool = False
) -> Heads:
    """Returns the projection that computes the heads in `view` [..., H, ..., D].

    head_dim: D, for a view that does not separate the heads; the feature dimension is then split.
    factors: whether numbers may multiply the heads. Raises Reject with the codes of `path` if there
    is no such projection.
    """
    stage, end = path.stage, view.value
    view, factor, scaled = unscaled(view) if factors else (view, 1.0, ())
    epilogue = match_epilogue(view, stage, factors)
    head, absorbed = epilogue.head, (*scaled, *epilogue.absorbed)
    factor *= epilogue.factor
    if epilogue.rope is not None:
        head_dim = epilogue.rope.x.shape[-1]
    linear = match_linear(head.value, path, match_delta)
    absorbed += linear.absorbed
    layout = effects.compose(head.effect, linear.layout)
    rows = heads_of(layout, linear.gemm.feature, head_dim)
    if rows is None:
        message = f"{head.shape} does not separate heads that are runs of consecutive features"
        reject("LAYOUT", stage, message, head)
    norm = rope_layout = None
    if epilogue.norm is not None:
        norm = head_norm(
            epilogue, _layout_of(epilogue.norm.x, path), linear.gemm.feature, rows, stage
        )
    if epilogue.rope is not None:
        before = unscaled(epilogue.rope.x)[0] if factors else epilogue.rope.x
        rope_layout = _layout_of(before, path)
        if rope_layout.dims[-1] != (Atom(linear.gemm.feature, 1, rows.head_dim),):
            reject("LAYOUT", stage, "a rotation runs over another axis than head_dim", linear.value)
    return Heads(
        path=path,
        linear=linear,
        rows=rows,
        layout=layout,
        norm=norm,
        rope=epilogue.rope,
        rope_layout=rope_layout,
        end=end,
        absorbed=tuple(dict.fromkeys(absorbed)),
        factor=factor,
    )


def _layout_of(view: View, path: Path) -> Effect:
    """Returns a view between the product and its reader, as an effect on the axes of the
    product."""
    head = match_epilogue(view, path.stage).head
    return effects.compose(head.effect, match_linear(head.value, path, match_delta).layout)


def same_activation(one: Heads, other: Heads) -> bool:
    """Whether two products have the same activation. The graph may compute a quantised activation
    twice."""
    scale, wanted = one.x_scale, other.x_scale
    if scale is None or wanted is None:
        return scale is wanted and equal_values(one.x, other.x)
    return equal_values(scale, wanted) and equal_values(one.x, other.x)


def on_heads(heads: Heads, effect: Effect) -> Effect:
    """Converts an effect on the axes of the product to an effect on the op's output [T, H, D].

    Raises InexpressibleError if the effect selects features of another projection.
    """
    return heads.rows.restate(effect, heads.tokens)


def rope_table(heads: Heads, table: Table) -> View | Computed:
    """Returns cos or sin in the form that the op expects, [T or S or 1, width]. The rows repeat
    over the leading token axes.

    Raises Reject (ROPE_TABLE) if the table differs between heads.
    """
    assert heads.rope_layout is not None
    return table_argument(table, heads.rope_layout, heads.feature, heads.tokens, heads.path.stage)
