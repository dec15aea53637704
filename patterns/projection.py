"""From a tensor of heads back to its projection: casts, rotation, norm, bias, linear.

Dimension letters: B batch, S sequence, T = B*S tokens, H heads, D head_dim, N output features of
the linear, K hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Effect, Size
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.norm import match_rms_norm, strip_casts
from tilewright.patterns.rope import Rope, match_rope


@dataclass(frozen=True)
class Heads:
    """One of Q, K, V as found: `rope(norm(x @ weight^T + bias))`, every step but the GEMM optional.

    linear: the GEMM's value, [tokens..., N]. layout: the heads' dimensions on the linear's axes.
    head_step, first_row: rows h * head_step + first_row + d of the weight belong to head h.
    end: the last absorbed value, whose elements are the heads.
    """

    linear: Value
    layout: Effect
    num_heads: int
    head_dim: int
    head_step: int
    first_row: int
    bias: View | None
    norm_weight: View | None
    norm_eps: float | None
    rope: Rope | None
    rope_layout: Effect | None
    end: Value
    absorbed: tuple[Value, ...]

    @property
    def x(self) -> View:
        """The activation, flattened to [T, K]."""
        activation: View = self.linear.args[0]
        *tokens, hidden = activation.shape
        flat = effects.reshape(activation.effect, (effects.product(tokens), hidden))
        return View(activation.value, flat)

    @property
    def num_tokens(self) -> Size:
        return effects.product(self.linear.shape[:-1])

    @property
    def weight(self) -> View:
        """This projection's rows of the weight, [H, D, K]."""
        return self._rows(self.linear.args[1])

    @property
    def bias_rows(self) -> View | None:
        """This projection's part of the bias, [H, D]."""
        return None if self.bias is None else self._rows(self.bias)

    @property
    def rows(self) -> frozenset[int]:
        """The first row of every head: enough to tell two projections of one weight apart."""
        return frozenset(self.first_row + h * self.head_step for h in range(self.num_heads))

    def _rows(self, view: View) -> View:
        """Rows of [N, ...], regrouped as [H, D, ...]; a per-head interleave leaves gaps."""
        skip = self.first_row % self.head_step if self.head_step > self.head_dim else 0
        effect = effects.narrow(
            view.effect, 0, self.first_row - skip, self.num_heads * self.head_step
        )
        shape = (self.num_heads, self.head_step, *view.shape[1:])
        effect = effects.reshape(effect, shape)
        return View(view.value, effects.narrow(effect, 1, skip, self.head_dim))


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
    linear, bias, head, more = _match_linear(head, stage)
    absorbed += more
    num_heads, head_step, first_row, dim = _split_heads(head, linear, head_dim, stage)
    if norm is not None and norm.width != dim:
        reject(
            "NORM_WIDTH",
            stage,
            f"the norm runs over {norm.width} elements, head_dim is {dim}",
            head,
        )
    if rope is not None:
        rope_layout = _layout_of(rope_layout_view, linear)
    return Heads(
        linear=linear,
        layout=head.effect,
        num_heads=num_heads,
        head_dim=dim,
        head_step=head_step,
        first_row=first_row,
        bias=bias,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        rope=rope,
        rope_layout=rope_layout,
        end=end,
        absorbed=tuple(dict.fromkeys((*absorbed, linear))),
    )


def _check_norm(x: View, rope: Rope | None, stage: Stage) -> None:
    if rope is None and match_rope(strip_casts(x)[0].value.whole) is not None:
        reject("NORM_AFTER_ROPE", stage, "the heads are rotated, then normalised", x)


def _match_linear(head: View, stage: Stage) -> tuple[Value, View | None, View, tuple[Value, ...]]:
    """(linear, bias, the head on the linear's axes, further absorbed values)."""
    value = head.value
    if value.op == "aten.linear":
        return value, value.args[2], head, ()
    if value.op == "aten.add" and value.kwargs.get("alpha", 1) == 1 and len(value.operands) == 2:
        left, right = value.operands
        for product, bias in ((left, right), (right, left)):
            inner, casts = strip_casts(product)
            if inner.value.op != "aten.linear" or inner.value.args[2] is not None:
                continue
            if len(bias.shape) == 1 and not bias.value.projected and inner.is_whole:
                return inner.value, bias, inner.through(head.effect), (value, *casts)
    code = {Stage.K_PATH: "K_PATH", Stage.V_PATH: "V_PATH", Stage.Q_PATH: "Q_PATH"}[stage]
    reject(*_explain(value, code, stage), head, hint=_HINTS.get(value.op, ""))


_HINTS = {
    "aten.clamp": "clamped projections are not fused",
    "aten.layer_norm": "LayerNorm on the heads is not fused, RMSNorm is",
}


def _explain(value: Value, code: str, stage: Stage) -> tuple[str, Stage, str]:
    if "_c10d_functional" in value.op or "c10d" in value.op:
        return "COLLECTIVE", stage, f"{value.op} lies between the projection and the cache"
    if value.op == "cast":
        steps = (value.operands[0].value.dtype, value.dtype)
        names = " to ".join(str(d).removeprefix("torch.") for d in steps)
        return "CAST", stage, f"cast from {names} between the projection and the cache"
    if value.op == "aten.index" and any(v.value.dtype == torch.bool for v in value.operands):
        return "MASKED_WRITE", stage, "a boolean mask selects the tokens that are written"
    return code, stage, f"expected a linear, a norm or a rotation, found {value}"


def _layout_of(view: View, linear: Value) -> Effect:
    """A view of something between the linear and the cache, put on the linear's axes."""
    head, _ = strip_casts(view)
    norm = match_rms_norm(head.value.whole)
    if norm is not None:
        head, _ = strip_casts(norm.x.through(head.effect))
    if head.value.op == "aten.add":
        inner = next(v for v in head.value.operands if strip_casts(v)[0].value is linear)
        head = strip_casts(inner)[0].through(head.effect)
    return head.effect


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


def _split_heads(
    head: View, linear: Value, head_dim: int | None, stage: Stage
) -> tuple[int, int, int, int]:
    """(num_heads, head_step, first_row, head_dim) of heads on the linear's features."""
    feature = len(linear.shape) - 1
    first = head.effect.start[feature]
    by_dim = [[a for a in d if a.axis == feature] for d in head.effect.dims]
    atoms = sorted((a for d in by_dim for a in d), key=lambda a: a.step)
    sizes = [first, *(a.length for a in atoms)]
    if not atoms or atoms[0].step != 1 or not all(isinstance(n, int) for n in sizes):
        reject("LAYOUT", stage, "a head is not a run of consecutive features", head)
    if head_dim is None:
        inner = next(d for d in by_dim if atoms[0] in d)
        head_dim = int(effects.product(a.length for a in inner))
    run, outer = 1, []
    for atom in atoms:
        length = int(atom.length)
        if run == head_dim:
            outer.append(atom)
        elif atom.step == run and run * length <= head_dim:
            run *= length
        elif atom.step == run and run * length % head_dim == 0:
            outer.append(Atom(feature, head_dim, run * length // head_dim))
            run = head_dim
        else:
            break
    if run != head_dim or len(outer) > 1:
        reject("LAYOUT", stage, f"{head.shape} does not separate heads and head_dim", head)
    if not outer:
        return 1, head_dim, int(first), head_dim
    return int(outer[0].length), outer[0].step, int(first), head_dim


def on_heads(heads: Heads, effect: Effect) -> Effect:
    """An effect on the linear's axes, restated on the op's output [T, H, D]."""
    feature = len(heads.linear.shape) - 1
    sizes = heads.linear.shape[:-1]
    dims = []
    for dim in effect.dims:
        atoms: list[Atom] = []
        for atom in dim:
            if atom.axis is None:
                atoms.append(atom)
            elif atom.axis == feature:
                atoms += _feature_atoms(atom, heads)
            else:
                inner = effects.product(sizes[atom.axis + 1 :])
                atoms.append(Atom(0, atom.step * inner, atom.length))
        dims.append(effects.coalesce(atoms))
    return Effect(tuple(dims), (0, 0, 0))


def _feature_atoms(atom: Atom, heads: Heads) -> list[Atom]:
    if atom.length == heads.num_heads and atom.step == heads.head_step:
        return [Atom(1, 1, atom.length)]
    if atom.step * atom.length <= heads.head_dim:
        return [Atom(2, atom.step, atom.length)]
    whole = atom.length == heads.num_heads * heads.head_dim
    if atom.step == 1 and whole and heads.head_step == heads.head_dim:
        return [Atom(1, 1, heads.num_heads), Atom(2, 1, heads.head_dim)]
    raise effects.InexpressibleError("the heads' features are regrouped")


def rope_table(heads: Heads, table: View) -> View:
    """cos or sin as the op takes it: [T or S or 1, width], rows repeating over leading axes.

    Raises Reject (ROPE_TABLE) where it varies from head to head.
    """
    layout = heads.rope_layout
    assert layout is not None
    feature = len(heads.linear.shape) - 1
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
    for axis, size in enumerate(heads.linear.shape[:-1]):
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
