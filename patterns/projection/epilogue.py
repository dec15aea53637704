"""The norm of the heads (QK norm) and RoPE, in either order, between a projection and its
reader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.arithmetic.steps import constant_factor
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Atom, Effect
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.lora.delta import match_delta
from tilewright.patterns.projection.rows import Rows
from tilewright.patterns.recognise.norm import Norm, by_runs, match_joined_norms, match_norm
from tilewright.patterns.recognise.rope import Rope, match_rope
from tilewright.patterns.recognise.rope_terms import joined_axes, summed_axis


@dataclass(frozen=True)
class HeadEpilogue:
    """The norm and the rotation of heads.

    Attributes:
        head: The input of the norm and the rotation. It has the dimensions of the matched view.
        norm: The norm, or None.
        rope: The rotation, or None.
        norm_after_rope: Whether the norm comes after the rotation.
        absorbed: The values that the op replaces.
        head_weights: The weights [D] of the norm, one for each head, if each head has its own
            weight.
        factor: The number that multiplies the heads before the rotation.
    """

    head: View
    norm: Norm | None
    rope: Rope | None
    norm_after_rope: bool
    absorbed: tuple[Value, ...]
    head_weights: tuple[View, ...] = ()
    factor: float = 1.0


@dataclass(frozen=True)
class HeadNorm:
    """A norm in the form that `fused_qkv_paged` expects.

    Attributes:
        kind: The kind of norm.
        width: The features that one norm runs over: `head` or `row`.
        after_rope: Whether the norm comes after the rotation.
        weight, bias: Tensors of shape [D] or [H, D], or None.
        offset: The number that is added to `weight`.
        factor: `offset + weight` as the graph computes it.
        eps: The epsilon of the norm.
    """

    kind: str
    width: str
    after_rope: bool
    weight: View | Computed | None
    offset: float
    factor: View | Computed | None
    eps: float
    bias: View | Computed | None = None

    @property
    def with_factor(self) -> HeadNorm:
        """This norm with a weight that includes the offset."""
        return replace(self, weight=self.factor, offset=0.0)


def match_epilogue(view: View, stage: Stage, factors: bool = False) -> HeadEpilogue:
    """Returns the norm and the rotation whose result is `view` [..., H, ..., D]. Each of them may
    be absent.

    factors: whether numbers may multiply the heads before the rotation and after the norm. Raises
    Reject for a kind of norm or rotation that the op does not support.
    """
    head, absorbed = strip_casts(view)
    factor = 1.0
    norm: Norm | None = None
    rope: Rope | None = None
    norm_after_rope = False
    own: tuple[View, ...] = ()
    while True:
        whole, effect = one_head_axis(head)
        turned = match_rope(whole, stage, _is_delta) if rope is None else None
        if turned is not None:
            rope, norm_after_rope = turned, norm is not None
            below, found = turned.x.through(effect), turned.absorbed
        elif norm is None and (joined := match_joined_norms(head.value, stage)) is not None:
            norm, own = joined.norm, joined.weights
            below, found = norm.x.through(head.effect), norm.absorbed
        elif (scaled := match_norm(head.value.whole, stage, True)) is not None:
            if norm is not None:
                message = (
                    "the heads are normalised twice; one norm, before or after the rotation, "
                    "can be fused"
                )
                reject("NORM_AFTER_ROPE", stage, message, head)
            norm = by_runs(scaled)
            below, found = scaled.x.through(head.effect), scaled.absorbed
        else:
            inner, more, found = unscaled(head)
            if not found or not factors or rope is None or norm is not None:
                return HeadEpilogue(head, norm, rope, norm_after_rope, absorbed, own, factor)
            below, factor = inner, factor * more
        head, casts = strip_casts(below)
        absorbed = (*absorbed, *found, *casts)


def unscaled(view: View) -> tuple[View, float, tuple[Value, ...]]:
    """Returns (x, factor, values) for a view that is x multiplied by numbers, with casts in
    between. `values` are the products and casts."""
    factor, absorbed = 1.0, []
    inner, casts = strip_casts(view)
    while (found := constant_factor(inner.value)) is not None:
        x, number = found
        absorbed += [*casts, inner.value]
        view, factor = x.through(inner.effect), factor * number
        inner, casts = strip_casts(view)
    return view, factor, tuple(absorbed)


def _is_delta(view: View) -> bool:
    """Whether a view is the delta of an adapter. Such a delta is a part of the projection, and not
    a part of its rotation."""
    return match_delta(view) is not None


def head_norm(
    epilogue: HeadEpilogue, layout: Effect, feature: int, rows: Rows, stage: Stage
) -> HeadNorm:
    """Returns the norm of an epilogue in the form that the op expects.

    layout: the dimensions of the epilogue's input, expressed on the axes of the product. feature:
    the axis of the product's features. Raises Reject (NORM_WIDTH, UNSUPPORTED) for a norm that the
    op does not support.
    """
    norm = epilogue.norm
    assert norm is not None
    run = (Atom(feature, 1, norm.width),)
    one_run = all(step == rows.head_dim for _, step in rows.heads) and len(rows.heads) < 2
    whole_row = one_run and norm.width == rows.num_heads * rows.head_dim
    starts = layout.start[feature] == rows.first
    if layout.dims[-1] != run or not (norm.width == rows.head_dim or (whole_row and starts)):
        message = (
            f"the norm runs over {norm.width} features, but the projection has {rows.num_heads} "
            f"heads of {rows.head_dim}"
        )
        reject("NORM_WIDTH", stage, message, norm.x)
    by_head = norm.width == rows.head_dim
    heads = (rows.num_heads, rows.head_dim)
    made: list[View | Computed | None] = [
        None if view is None else _weight(view, layout, feature, heads, by_head, stage)
        for view in (norm.weight, norm.factor, norm.bias)
    ]
    weight, factor, bias = made
    width = "head" if by_head else "row"
    if epilogue.head_weights:
        weight = factor = _each_head(epilogue, layout, feature, heads, stage)
    after = epilogue.norm_after_rope
    return HeadNorm(norm.kind, width, after, weight, norm.offset, factor, norm.eps, bias)


def _each_head(
    epilogue: HeadEpilogue, layout: Effect, feature: int, heads: tuple[int, int], stage: Stage
) -> Computed:
    """Returns the weights of heads that are normalised one by one, as one tensor [H, D]. Raises
    Reject (UNSUPPORTED) if the normalised heads are not exactly the heads of the projection."""
    apart = [dim for dim in layout.dims[:-1] if any(a.axis == feature for a in dim)]
    if len(epilogue.head_weights) != heads[0] or [len(dim) for dim in apart] != [1]:
        reject(
            "UNSUPPORTED",
            stage,
            "the norms do not belong to exactly the heads of this projection",
            *epilogue.head_weights,
        )
    return Computed("reshape", (Computed("cat", (epilogue.head_weights, 0)), list(heads)))


def _weight(
    view: View,
    layout: Effect,
    feature: int,
    heads: tuple[int, int],
    by_head: bool,
    stage: Stage,
) -> View:
    """Returns the weight or bias of a norm in the form that the op expects: [D] for all heads, or
    [H, D]. Raises Reject (UNSUPPORTED) if the weight or bias differs between tokens, or has the
    heads in another order."""
    *lead, last = view.effect.dims
    along = [i for i, dim in enumerate(lead) if dim]
    axes = {a.axis for i in along for a in layout.dims[i]}
    if not axes <= {feature} or (along and not by_head):
        reject("UNSUPPORTED", stage, "the norm's weight or bias differs between tokens", view)
    # The op numbers the heads by their rows in the projection. The outermost dimension of the heads
    # has the largest step.
    split = [i for i, dim in enumerate(layout.dims[:-1]) if any(a.axis == feature for a in dim)]
    steps = [a.step for i in split for a in layout.dims[i] if a.axis == feature]
    if along and (along != split or steps != sorted(steps, reverse=True)):
        reject(
            "UNSUPPORTED", stage, "the norm's weight or bias has the heads in another order", view
        )
    if by_head and not along:
        return view.with_dims(last)
    flat = (*(a for i in along for a in lead[i]), *last)
    return View(view.value, effects.reshape(Effect((flat,), view.effect.start), heads))


def norm_arguments(
    q: HeadNorm | None, k: HeadNorm | None, v: HeadNorm | None, culprit: Value
) -> dict[str, Any]:
    """Returns the op's arguments for the norms of q, k and v. Raises Reject (UNSUPPORTED) if these
    norms differ in a way that the op does not support."""
    norms = [n for n in (q, k) if n is not None]
    if v is not None and norms:
        v = replace(v, after_rope=norms[0].after_rope)  # v has no rotation
    if v is not None and len({(n.kind, n.width, n.after_rope, n.eps) for n in (*norms, v)}) > 1:
        message = f"k and v are normalised differently: {_describe(k)}, and {_describe(v)}"
        reject("UNSUPPORTED", Stage.GUARDS, message, culprit)
    if not norms:
        return {} if v is None else {"v_norm": True, **_shared_arguments(v)}
    weightless = any(n.weight is None for n in norms)
    kinds = {(n.kind, n.width, n.after_rope, n.eps) for n in norms}
    if len(kinds) > 1 or (weightless and len(norms) == 1):
        message = f"q and k are normalised differently: {_describe(q)}, and {_describe(k)}"
        reject("UNSUPPORTED", Stage.GUARDS, message, culprit)
    if len({n.offset for n in norms if n.weight is not None}) > 1:
        q, k = (None if n is None else n.with_factor for n in (q, k))
    weighted = [n for n in (q, k) if n is not None and n.weight is not None]
    return {
        **_shared_arguments(norms[0]),
        **{
            f"{letter}_norm_{what}": None if norm is None else getattr(norm, what)
            for letter, norm in (("q", q), ("k", k))
            for what in ("weight", "bias")
        },
        "weightless_norm": weightless,
        "norm_offset": weighted[0].offset if weighted else 0.0,
        "v_norm": v is not None,
    }


def _shared_arguments(norm: HeadNorm) -> dict[str, Any]:
    return {
        "norm_eps": norm.eps,
        "norm_kind": norm.kind,
        "norm_width": norm.width,
        "norm_after_rope": norm.after_rope,
    }


def _describe(norm: HeadNorm | None) -> str:
    if norm is None:
        return "no norm"
    place = "after" if norm.after_rope else "before"
    weight = "without a weight, " if norm.weight is None else ""
    return f"a {norm.kind} norm per {norm.width}, {weight}eps {norm.eps:g}, {place} the rotation"


def norm_fact(norm: HeadNorm | None) -> str:
    """Returns the description of a norm that reports show."""
    if norm is None:
        return "none"
    words = [norm.kind]
    words += ["row"] if norm.width == "row" else []
    words += ["after rope"] if norm.after_rope else []
    words += ["weightless"] if norm.weight is None else []
    words += ["bias"] if norm.bias is not None else []
    return ", ".join(words)


def one_head_axis(view: View) -> tuple[View, Effect]:
    """Returns (heads, effect). `heads` is a view of the value in which each head is the last
    dimension. `effect` expresses the given view as an effect on `heads`. A stack of pairs [...,
    D/2, 2] or of halves [..., 2, D/2] becomes [..., D]."""
    value, effect = view.value, view.effect
    if not _is_pairs(view):
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


def _is_pairs(view: View) -> bool:
    """Whether the last two axes of a value are one head in this view. The value is joined from
    pieces, or summed pair by pair."""
    value = view.value
    last = len(value.shape) - 1
    if value.op == "aten.sum" and last > 0:
        return summed_axis(value) is not None and value.shape[last] == 2
    if value.op not in ("aten.view_as_real", "aten.cat") or joined_axes(value) != 2:
        return False
    if value.op == "aten.view_as_real" or value.args[1] == last or value.shape[last] == 1:
        return True
    # Heads that were joined are in separate dimensions. The halves of one head are in one
    # dimension.
    return any({last - 1, last} <= {atom.axis for atom in dim} for dim in view.effect.dims)
