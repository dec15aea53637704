"""From a tensor of heads back to its projection: casts, rotation, norm, bias, linear.

Dimension letters: B batch, S sequence, T = B*S tokens, H heads, D head_dim, N output features of
the linear, K hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Effect, Size
from tilewright.patterns.gemm import piece_of
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.norm import match_rms_norm, strip_casts
from tilewright.patterns.rope import Rope, match_rope
from tilewright.patterns.rows import Rows, heads_of
from tilewright.patterns.trunk import Trunk, match_trunk


@dataclass(frozen=True)
class Heads:
    """One of Q, K, V as found: `rope(norm(trunk))`, every step but the product optional.

    trunk: product, bias, clamp. rows: which of the product's features are these heads.
    layout: the heads' dimensions on the product's axes [tokens..., N].
    end: the last absorbed value, whose elements are the heads.
    """

    trunk: Trunk
    rows: Rows
    layout: Effect
    norm_weight: View | None
    norm_eps: float | None
    rope: Rope | None
    rope_layout: Effect | None
    end: Value
    absorbed: tuple[Value, ...]

    @property
    def linear(self) -> Value:
        """The product's value."""
        return self.trunk.gemm.value

    @property
    def feature(self) -> int:
        """The axis of the product's features in `layout`."""
        return self.trunk.gemm.feature

    @property
    def tokens(self) -> tuple[Size, ...]:
        """The sizes of the product's token axes."""
        return self.trunk.gemm.shape[:-1]

    @property
    def num_heads(self) -> int:
        return self.rows.num_heads

    @property
    def head_dim(self) -> int:
        return self.rows.head_dim

    @property
    def x(self) -> View:
        """The activation, flattened to [T, K]."""
        return self.trunk.gemm.flat_x

    @property
    def num_tokens(self) -> Size:
        return effects.product(self.tokens)

    @property
    def weight(self) -> View:
        """This projection's rows of the weight, [H, D, K], or [groups, G, D, K]."""
        return piece_of(self.rows.of(self.trunk.gemm.weight))

    @property
    def bias_rows(self) -> View | None:
        """This projection's part of the bias, shaped as the weight without K."""
        bias = self.trunk.bias
        return None if bias is None else piece_of(self.rows.of(bias, self.trunk.bias_first))


def match_heads(view: View, stage: Stage, head_dim: int | None = None) -> Heads:
    """The projection whose heads `view` [..., H, ..., D] holds.

    head_dim: D, where the view does not separate heads (its feature dimension is split by it).
    Raises Reject at `stage`.
    """
    head, absorbed = strip_casts(view)
    end = view.value
    whole, effect = one_head_axis(head)
    rope = match_rope(whole)
    norm_weight, norm_eps, rope_layout = None, None, None
    if rope is not None:
        absorbed += rope.absorbed
        rope_layout_view = rope.x
        head_dim = rope.x.shape[-1]
        head, casts = strip_casts(rope.x.through(effect))
        absorbed += casts
    norm = match_rms_norm(head.value.whole)
    if norm is not None:
        _check_norm(norm.x, rope, stage)
        norm_weight, norm_eps = norm.weight, norm.eps
        if norm_weight is None:
            reject("UNSUPPORTED", stage, "an RMS norm without a weight", head)
        absorbed += norm.absorbed
        head, casts = strip_casts(norm.x.through(head.effect))
        absorbed += casts
    trunk = match_trunk(head.value, stage)
    absorbed += trunk.absorbed
    layout = effects.compose(head.effect, trunk.layout)
    rows = heads_of(layout, trunk.gemm.feature, head_dim)
    if rows is None:
        reject(
            "LAYOUT",
            stage,
            f"{head.shape} does not separate heads, each a run of consecutive features",
            head,
        )
    if norm is not None and norm.width != rows.head_dim:
        reject(
            "NORM_WIDTH",
            stage,
            f"the norm runs over {norm.width} elements, head_dim is {rows.head_dim}",
            head,
        )
    if norm is not None:
        _check_axis(_layout_of(norm.x, stage), rows, trunk, stage)
    if rope is not None:
        rope_layout = _layout_of(rope_layout_view, stage)
        _check_axis(rope_layout, rows, trunk, stage)
    return Heads(
        trunk=trunk,
        rows=rows,
        layout=layout,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        rope=rope,
        rope_layout=rope_layout,
        end=end,
        absorbed=tuple(dict.fromkeys(absorbed)),
    )


def _check_axis(layout: Effect, rows: Rows, trunk: Trunk, stage: Stage) -> None:
    """What is normalised or rotated is head_dim, not the heads."""
    if layout.dims[-1] != (Atom(trunk.gemm.feature, 1, rows.head_dim),):
        reject(
            "LAYOUT", stage, "a norm or rotation runs over another axis than head_dim", trunk.value
        )


def _check_norm(x: View, rope: Rope | None, stage: Stage) -> None:
    if rope is None and match_rope(strip_casts(x)[0].value.whole) is not None:
        reject("NORM_AFTER_ROPE", stage, "the heads are rotated, then normalised", x)


def _layout_of(view: View, stage: Stage) -> Effect:
    """A view of something between the product and the cache, put on the product's axes."""
    head, _ = strip_casts(view)
    norm = match_rms_norm(head.value.whole)
    if norm is not None:
        head, _ = strip_casts(norm.x.through(head.effect))
    return effects.compose(head.effect, match_trunk(head.value, stage).layout)


def one_head_axis(view: View) -> tuple[View, Effect]:
    """A stack of pairs [..., D/2, 2] read as [..., D], and the view's effect on that."""
    value, effect = view.value, view.effect
    if value.op != "aten.cat" or value.args[1] != len(value.shape) - 1:
        return value.whole, effect
    if any(piece.effect.dims[-1] != () for piece in value.args[0]):
        return value.whole, effect
    *lead, pairs, two = value.shape
    if not isinstance(pairs, int) or not isinstance(two, int):
        return value.whole, effect
    axis = len(lead)
    merged = effects.reshape(effects.identity(value.shape), (*lead, pairs * two))
    dims = tuple(
        effects.coalesce(
            Atom(axis, a.step * two, a.length)
            if a.axis == axis
            else Atom(axis, a.step, a.length)
            if a.axis == axis + 1
            else a
            for a in dim
        )
        for dim in effect.dims
    )
    start = (*effect.start[:axis], effect.start[axis] * two + effect.start[axis + 1])
    return View(value, merged), Effect(dims, start)


def on_heads(heads: Heads, effect: Effect) -> Effect:
    """An effect on the product's axes, restated on the op's output [T, H, D].

    Raises InexpressibleError where it takes features of another projection.
    """
    return heads.rows.restate(effect, heads.tokens)


def rope_table(heads: Heads, table: View) -> View:
    """cos or sin as the op takes it: [T or S or 1, width], rows repeating over leading axes.

    Raises Reject (ROPE_TABLE) where it varies from head to head.
    """
    layout = heads.rope_layout
    assert layout is not None
    feature = heads.feature
    by_axis: dict[int, tuple[Atom, ...]] = {}
    for place, dim in zip(layout.dims[:-1], table.effect.dims[:-1], strict=True):
        axes = [a.axis for a in place]
        if feature in axes and dim != ():
            reject("ROPE_TABLE", Stage.K_PATH, "cos and sin vary from head to head", table)
        if feature in axes:
            continue
        if len(axes) > 1 and dim != ():
            by_axis.update(_split_tokens(place, dim))
        elif axes and axes[0] is not None:
            by_axis[axes[0]] = dim
        elif dim != ():
            reject("ROPE_TABLE", Stage.K_PATH, "cos and sin vary along no token axis", table)
    rows: list[Atom] = []
    for axis, size in enumerate(heads.tokens):
        dim = by_axis.get(axis, ())
        if dim == () and size != 1 and rows:
            dim = (Atom(None, 0, size),)
        rows += dim
    width = table.effect.dims[-1]
    return View(table.value, Effect((effects.coalesce(rows), width), table.effect.start))


def _split_tokens(place: tuple[Atom, ...], dim: tuple[Atom, ...]) -> dict[int, tuple[Atom, ...]]:
    """A table whose token dimension is merged like the heads': its atoms per token axis."""
    flat = Effect((dim,), (0,) * (1 + max(a.axis or 0 for a in dim)))
    apart = effects.reshape(flat, [a.length for a in place])
    return {a.axis: d for a, d in zip(place, apart.dims, strict=True) if a.axis is not None}
