"""The delta of a low-rank adapter: scale * (x @ A[adapter]^T) @ B[adapter]^T, as it is written.

One adapter for all rows (two linears), or one of G for each row: tables taken by an index in front
of a bmm, matmul or einsum. Factors may stand before, between and behind the products.

Dimension letters: T rows, K hidden, R rank, W columns, G adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Effect, InexpressibleError
from tilewright.patterns.equality import equal_values
from tilewright.patterns.expert_gemm import match_batched
from tilewright.patterns.gemm import is_weight, match_gemm
from tilewright.patterns.norm import is_float_cast
from tilewright.patterns.routing import gathered

#: Above this inner dimension two products in a row are a bottleneck MLP, not an adapter.
MAX_RANK = 512


@dataclass(frozen=True)
class LoraDelta:
    """What is added to a projection.

    x [T, K]; shrink (A) [G, R, K]; expand (B) [G, W, R]. index [T]: each row's adapter; None: there
    is one. scales [G]: each adapter's factor, or None. end: the last value; absorbed: with it.
    """

    x: View
    shrink: View
    expand: View
    index: View | None
    scale: float
    scales: View | None
    end: Value
    absorbed: tuple[Value, ...]

    @property
    def rank(self) -> Any:
        return self.shrink.shape[1]


@dataclass(frozen=True)
class _Product:
    """x [T, K] times weight [G, N, K], by row of index [T]; None: G is 1."""

    x: View
    weight: View
    index: View | None
    absorbed: tuple[Value, ...]


@dataclass(frozen=True)
class _Peeled:
    """A value with the factors around it taken off."""

    view: View
    scale: float = 1.0
    table: View | None = None
    index: View | None = None
    absorbed: tuple[Value, ...] = ()


def match_delta(view: View) -> LoraDelta | None:
    """The delta that `view` [..., W] is, or None where it is another thing."""
    outer = _peel(view)
    second = _product(outer.view)
    if second is None:
        return None
    inner = _peel(second.x)
    first = _product(inner.view)
    if first is None:
        return None
    factors = [p for p in (outer, inner) if p.table is not None]
    if len(factors) > 1 or not _is_adapter(first, second):
        return None
    if not _same_rows(first.index, second.index):
        return None
    if factors and not _same_rows(factors[0].index, first.index):
        return None
    absorbed = (*outer.absorbed, *second.absorbed, *inner.absorbed, *first.absorbed)
    return LoraDelta(
        first.x,
        first.weight,
        second.weight,
        first.index,
        outer.scale * inner.scale,
        factors[0].table if factors else None,
        view.value,
        tuple(dict.fromkeys(absorbed)),
    )


def _is_adapter(first: _Product, second: _Product) -> bool:
    rank, hidden, width = first.weight.shape[1], first.weight.shape[2], second.weight.shape[1]
    sizes = (rank, hidden, width)
    if not all(isinstance(size, int) for size in sizes):
        return False
    return rank <= MAX_RANK and rank < hidden and rank < width


def _same_rows(one: View | None, other: View | None) -> bool:
    if one is None or other is None:
        return one is other
    return equal_values(one, other)


def _product(view: View) -> _Product | None:
    """The product whose rows, all of them and in order, `view` [..., N] is."""
    found = _by_row(view)
    return found if found is not None else _of_one(view)


def _of_one(view: View) -> _Product | None:
    gemm = match_gemm(view.value)
    if gemm is None or gemm.bias is not None or gemm.x_scale is not None:
        return None
    if not is_weight(gemm.weight) or gemm.layout != effects.identity(gemm.shape):
        return None
    if _rows(view) != _rows(gemm.value.whole):
        return None
    weight = View(gemm.weight.value, effects.unsqueeze(gemm.weight.effect, 0))
    return _Product(gemm.flat_x, weight, None, (gemm.value,))


def _by_row(view: View) -> _Product | None:
    found = match_batched(view.value)
    if found is None or found.experts is None:
        return None
    width = view.value.shape[found.column_axis]
    if found.columns_of(view) != (0, width, 1):
        return None
    return _Product(found.x, found.weight, found.experts, found.absorbed)


def _rows(view: View) -> Effect | None:
    """[T, N] of a view [..., N]; None where its leading dimensions do not merge."""
    *lead, width = view.shape
    try:
        return effects.reshape(view.effect, (effects.product(lead), width))
    except InexpressibleError:
        return None


def _peel(view: View) -> _Peeled:
    """The factors around a value: numbers, a number per adapter; casts between floats go too."""
    found = _Peeled(view)
    while True:
        value = found.view.value
        factor = (value.args[0], 1.0, None, None) if is_float_cast(value) else _factor(value)
        through = None if factor is None else _through(found.view, factor[0])
        if factor is None or through is None:
            return found
        _, number, table, index = factor
        if table is not None:
            if found.table is not None:
                return found
            found = replace(found, table=table, index=index)
        absorbed = (*found.absorbed, value)
        found = replace(found, view=through, scale=found.scale * number, absorbed=absorbed)


def _through(view: View, inner: View) -> View | None:
    """`view` of an elementwise result, as a view of the operand."""
    if inner.shape != view.value.shape:
        return None
    try:
        return inner.through(view.effect)
    except InexpressibleError:
        return None


def _factor(value: Value) -> tuple[View, float, View | None, View | None] | None:
    """(operand, number, table [G], index [T]) of a product with a factor; None for another."""
    if value.op not in ("aten.mul", "aten.div") or value.kwargs or len(value.args) < 2:
        return None
    one, other = value.args[:2]
    if isinstance(one, View) and isinstance(other, (int, float)):
        return one, 1 / other if value.op == "aten.div" else float(other), None, None
    if value.op != "aten.mul":
        return None
    if isinstance(other, View) and isinstance(one, (int, float)):
        return other, float(one), None, None
    for operand, factor in ((one, other), (other, one)):
        taken = _per_row(factor, value)
        if taken is not None:
            return operand, 1.0, *taken
    return None


def _per_row(factor: Any, value: Value) -> tuple[View, View] | None:
    """(table [G], index [T]) of a factor table[index], one number for each row of `value`."""
    if not isinstance(factor, View) or len(factor.shape) != len(value.shape):
        return None
    taken = gathered(factor.value.whole)
    if taken is None or len(taken[0].shape) != 1 or len(taken[1].shape) != 1:
        return None
    rows, *rest = factor.effect.dims
    if rows != effects.identity(factor.value.shape).dims[0]:
        return None
    if any(atom.axis is not None for dim in rest for atom in dim):
        return None
    return taken[0], taken[1]
