"""Recognises GEMMs that have one weight for each expert. They are grouped over rows that are sorted
by expert, or batched over routes.

    grouped_mm(x [M, K], weight [E, K, N], ends [E])
    bmm(weight[experts] [M, N, K], x [M, K, 1])                   in either order, or as
    einsum("tk, tsnk -> tsn", x, weight[experts [T, S]])          with M = T * S routes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts, strip_widening
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import Atom, Dim, Effect
from tilewright.patterns.recognise.gemm import Side, named_product
from tilewright.patterns.recognise.linear import Columns, columns_along
from tilewright.patterns.recognise.outside import LOOKUPS, REFUSED, Outside, outside_of_ends
from tilewright.patterns.recognise.routing import (
    flat,
    gathered,
    holds_counts,
    strip_integer_casts,
)

_GROUPED = "aten._grouped_mm"
_BATCHED = ("aten.bmm", "aten.einsum", "aten.matmul")


@dataclass(frozen=True)
class ExpertGemm:
    """The product `x @ weight[expert]^T + bias[expert]`.

    Attributes:
        x: The rows [M, K]. If every expert multiplies T rows, x is [E, T, K].
        weight: The weights, [E, N, K], stored or computed.
        end: The value that has the result.
        absorbed: The values that the op replaces.
        column_axis: The axis of `end` that is N.
        bias: The biases, [E, N], or None.
        bias_index: The experts by which the bias was gathered, or None.
        ends: The end of the sorted rows of each expert, [E]. It is None if `experts` is given.
        experts: The expert of each row, [M], or None.
        outside: How the lookup of the weight treats numbers that are not the number of an expert.
        bias_outside: How the lookup of the bias treats such numbers.
    """

    x: View
    weight: View
    end: Value
    absorbed: tuple[Value, ...]
    column_axis: int = 1
    bias: View | None = None
    bias_index: View | None = None
    ends: View | None = None
    experts: View | None = None
    outside: Outside = REFUSED
    bias_outside: Outside = REFUSED

    def columns_of(self, part: View) -> Columns | None:
        """Returns the columns that a view [M, n] (or [T, S, n]) of the result selects from every
        row. Returns None for every other view."""
        last = part.effect.dims[-1] if len(part.effect.dims) > 1 else ()
        if part.value is not self.end or not any(a.axis == self.column_axis for a in last):
            return None
        return columns_along(part, self.column_axis)


def is_expert_gemm(value: Value) -> bool:
    """Whether a value is a GEMM that has one weight for each expert."""
    return (value.op == _GROUPED or value.op in _BATCHED) and rows_of(value) is not None


def rows_of(value: Value) -> View | None:
    """Returns the rows that a GEMM with expert weights multiplies. Returns None for every other
    value."""
    if value.op == _GROUPED:
        rows: View = value.args[0]
        return rows
    found = match_batched(value)
    return None if found is None else found.x


def routes_of(value: Value) -> View | None:
    """Returns what determines the expert of each row: the ends of the experts' rows, or the expert
    ids."""
    found = match_grouped(value) or match_batched(value)
    return None if found is None else found.ends or found.experts


def match_expert_gemm(value: Value, flow: Dataflow) -> ExpertGemm | None:
    """Returns the GEMM that computes `value`. If the graph adds a bias after the GEMM, the result
    includes the bias."""
    found = match_grouped(value) or match_batched(value)
    if found is None:
        return None
    for user in flow.users.get(value, ()):
        biased = _with_bias(found, user, value) if user.op == "aten.add" else None
        if biased is not None:
            return biased
    return found


def before_widening_rows(gemm: ExpertGemm) -> ExpertGemm:
    """Returns the GEMM with its rows before casts to wider floating-point types."""
    x, casts = strip_widening(gemm.x)
    return replace(gemm, x=x, absorbed=(*gemm.absorbed, *casts))


def match_grouped(value: Value) -> ExpertGemm | None:
    """Returns a GEMM of rows that are sorted by group, without its bias. Returns None for every
    other value."""
    if value.op != _GROUPED:
        return None
    weight = value.args[1]
    ends = value.kwargs.get("offs")
    ends = value.args[2] if ends is None and len(value.args) > 2 else ends
    if len(weight.shape) != 3 or not isinstance(ends, View):
        return None
    by_row = weight.permute(0, 2, 1)
    outside = outside_of_ends(ends)
    return ExpertGemm(value.args[0], by_row, value, (value,), ends=ends, outside=outside)


def match_batched(value: Value) -> ExpertGemm | None:
    """Returns a product that has the operand weight[experts], without its bias. Returns None for
    every other value."""
    product = named_product(value) if value.op in _BATCHED else None
    if product is None:
        return None
    for weight, x in product.either_way:
        try:
            found = _by_route(value, x, weight, product.result)
        except effects.InexpressibleError:  # for example, if there are no routes
            continue
        if found is not None:
            return found
    return None


def _by_route(value: Value, x: Side, weight: Side, result: str) -> ExpertGemm | None:
    """Returns the product if its operand weight[experts] has one weight for each row of the other
    operand; else None."""
    taken = gathered(weight.view.value.whole)
    lead = 0 if taken is None else len(taken[1].shape)
    axes = _axes(weight.view, lead)
    if taken is None or axes is None or len(taken[0].shape) < 2 or len(axes) != lead + 2:
        return None
    stored, experts = taken
    routes = [weight.names[axes.index(axis)] for axis in range(lead)]
    xs, ws = x.dims, weight.dims
    own = [name for name in weight.names if name not in routes]
    k = [name for name in own if name in xs and name not in result]
    n = [name for name in own if name in result and name not in xs]
    if len(k) != 1 or len(n) != 1 or len(xs) != len(x.names) or weight.view.value is x.view.value:
        return None
    # The bmm has a dimension of length one for the row.
    single = [a for a in xs if a not in routes and a != k[0]]
    if any(xs[a] for a in single) or [a for a in result if a not in single] != [*routes, n[0]]:
        return None
    by_row = on_stack(stored, lead, [ws[n[0]], ws[k[0]]], weight.view.effect.start)
    if by_row is None:
        return None
    sizes = [weight.view.value.shape[axis] for axis in range(lead)]
    rows = [
        xs[name] if xs.get(name) else (Atom(None, 0, size),)
        for name, size in zip(routes, sizes, strict=True)
    ]
    merged = effects.coalesce(atom for dim in rows for atom in dim)
    rows_view = x.view.with_dims(merged, xs[k[0]])
    column_axis = result.index(n[0])
    ids = flat(strip_integer_casts(experts))
    absorbed = (value, weight.view.value)
    outside = LOOKUPS.get(weight.view.value.op, REFUSED)
    return ExpertGemm(rows_view, by_row, value, absorbed, column_axis, experts=ids, outside=outside)


def _axes(view: View, lead: int) -> list[int] | None:
    """Returns, for each dimension of a view, the axis of the view's value along which it selects.

    Returns None unless the view has each of the first `lead` axes once and completely. The view may
    have only parts of the later axes.
    """
    ones = [a for a, n in enumerate(view.value.shape) if n == 1]
    axes: list[int] = []
    for dim in view.effect.dims:
        if dim == ():
            if not ones:
                return None
            axes.append(ones.pop(0))
            continue
        axis = dim[0].axis
        if axis is None:
            return None
        if axis < lead and dim != (Atom(axis, 1, view.value.shape[axis]),):
            return None
        axes.append(axis)
    return axes if sorted(a for a in axes if a < lead) == list(range(lead)) else None


def on_stack(stored: View, lead: int, dims: Sequence[Dim], start: Sequence[int]) -> View | None:
    """Rewrites the dimensions `dims` of stored[index] as a view [G, dims...] of the stack `stored`.
    Returns None if they are not dimensions of each matrix. In stored[index], `lead` axes replace
    the first axis."""
    if any(start[:lead]) or any(a.axis is None or a.axis < lead for d in dims for a in d):
        return None
    first = effects.identity(stored.shape).dims[0]
    rest = [tuple(Atom(a.axis - lead + 1, a.step, a.length) for a in d if a.axis is not None)
            for d in dims]  # fmt: skip
    return stored.through(Effect((first, *rest), (0, *start[lead:])))


def _with_bias(gemm: ExpertGemm, add: Value, value: Value) -> ExpertGemm | None:
    """Returns gemm + bias[experts], in either order; else None."""
    if len(add.operands) != 2 or add.kwargs.get("alpha", 1) != 1:
        return None
    others = [v for v in add.operands if v.value is not value]
    own = [v for v in add.operands if v.value is value]
    if len(others) != 1 or gemm.columns_of(own[0]) != (0, value.shape[gemm.column_axis], 1):
        return None
    other, casts = strip_casts(others[0])
    taken = gathered(other)
    repeated = _repeated_bias(other, gemm)
    if repeated is not None and add.shape == own[0].shape == other.shape:
        absorbed = (*gemm.absorbed, add, other.value, *casts)
        return replace(gemm, bias=repeated, end=add, column_axis=1, absorbed=absorbed)
    if taken is None or len(taken[0].shape) != 2 or not add.shape == own[0].shape == other.shape:
        return None
    absorbed = (*gemm.absorbed, add, other.value, *casts)
    index = flat(strip_integer_casts(taken[1]))
    return replace(
        gemm, bias=taken[0], bias_index=index, end=add, column_axis=len(add.shape) - 1,
        absorbed=absorbed, bias_outside=LOOKUPS.get(other.value.op, REFUSED),
    )  # fmt: skip


def _repeated_bias(view: View, gemm: ExpertGemm) -> View | None:
    """Returns the bias [E, N] if the bias of each expert is repeated for all rows of the expert;
    else None. The graph may write this in two ways:

            repeat_interleave(bias, counts), or
            repeat_interleave(cat(bias, zeros), cat(counts, rows that are left))

    The rows after the last expert's rows get zeros in the second form.
    """
    value, ends = view.value, None if gemm.ends is None else gemm.ends.value
    if value.op != "aten.repeat_interleave" or not view.is_whole or value.argument(2, "dim") != 0:
        return None
    bias, repeats = value.args[0], strip_integer_casts(value.args[1])
    if repeats.value.op == "cast" and holds_counts(repeats.value.args[0].value):
        repeats = repeats.value.args[0].through(repeats.effect)
    if ends is None or ends.op != "aten.cumsum" or not gemm.ends or not gemm.ends.is_whole:
        return None
    counts = strip_integer_casts(ends.args[0])
    if strip_integer_casts(repeats) != counts:
        pair = _joined(bias), _joined(repeats)
        if pair[0] is None or pair[1] is None or strip_integer_casts(pair[1]) != counts:
            return None
        bias = pair[0]
    stored = isinstance(bias, View) and bias.shape == gemm.weight.shape[:2]
    return strip_casts(bias)[0] if stored else None


def _joined(view: View) -> View | None:
    """Returns the first of two tensors that the graph joins along their first dimension. Returns
    None unless the second tensor has length one in this dimension."""
    value = view.value
    if value.op != "aten.cat" or not view.is_whole or value.argument(1, "dim", 0) != 0:
        return None
    parts = value.args[0]
    return parts[0] if len(parts) == 2 and parts[1].shape[:1] == (1,) else None
