"""Routing of a mixture of experts: the routes sorted by expert, the rows gathered in that order,
the end of each expert's rows, and the inverse order.

Each is recognised by what it depends on, in whichever of its spellings, so that a match knows that
all of them speak of one choice. T tokens, S slots (top-k) per token; a *route* is one slot of one
token, number t * S + s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.recognise.steps import is_filled, reduced_dims

_ORDER_OUTPUTS = {"aten.sort": 1, "aten.argsort": None}
_INTEGER_STEPS = {"aten.floor_divide", "aten.div"}


@dataclass(frozen=True)
class Order:
    """A permutation that sorts the routes by expert.

    permutation: [T * S], the route at each place of the order; None: the routes' own order.
    ids: the experts, [T * S] by route.
    """

    permutation: View | None
    ids: View


def flat(view: View) -> View:
    """The view with all its dimensions in one."""
    return view.reshape(effects.product(view.shape))


def per_row(view: View) -> View | None:
    """A number per row [M, 1], or broadcast to [M, N], as [M]; None where it varies by column."""
    *rows, last = view.effect.dims
    if any(a.axis is not None for a in last):
        return None
    return view.with_dims(*rows)


def strip_integer_casts(view: View) -> View:
    """The view before casts that keep integers what they are; to bool is none, and no op takes
    indices of fewer than 32 bits."""
    while view.value.op == "cast" and not _is_narrow(view.value):
        view = view.value.args[0].through(view.effect)
    return view


def _is_narrow(cast: Value) -> bool:
    types = (cast.args[0].value.dtype, cast.dtype)
    small = any(t.itemsize < 4 and t != torch.bool for t in types)
    return cast.dtype == torch.bool or (small and not any(t.is_floating_point for t in types))


def match_order(view: View) -> Order | None:
    """The order whose permutation `view` is: the indices of a sort of the routes' experts."""
    view = strip_integer_casts(view)
    value = view.value
    if value.op not in _ORDER_OUTPUTS or not view.is_whole or len(value.shape) != 1:
        return None
    if value.kwargs.get("output") != _ORDER_OUTPUTS[value.op] or _descending(value):
        return None
    return Order(view, strip_integer_casts(value.args[0]))


def _descending(value: Value) -> bool:
    given = [a for a in value.args[1:] if isinstance(a, bool)]
    return bool(value.kwargs.get("descending")) or any(given[-1:])


def experts_of(view: View) -> View:
    """The experts by route that a view of experts, in sorted order or not, comes from."""
    view = strip_integer_casts(view)
    value = view.value
    if value.op == "aten.sort" and value.kwargs.get("output") == 0 and view.is_whole:
        return strip_integer_casts(value.args[0])
    taken = gathered(view)
    if taken is not None:
        order = match_order(taken[1])
        if order is not None and order.ids == strip_integer_casts(taken[0]):
            return order.ids
    return view


def in_order(view: View, order: Order) -> bool:
    """Whether `view` holds the routes' experts in the given order."""
    view = strip_integer_casts(view)
    if order.permutation is None:
        return view == order.ids
    if experts_of(view) != order.ids:
        return False
    if view.value.op == "aten.sort":
        return view.value.node is strip_integer_casts(order.permutation).value.node
    taken = gathered(view)
    return taken is not None and taken[1] == order.permutation


def gathered(view: View) -> tuple[View, View] | None:
    """(source, index) of source[index] along the first dimension."""
    value = view.value
    if not view.is_whole:
        return None
    if value.op == "aten.index":
        items = value.args[1]
        # A Python list as the index is no tensor.
        if len(items) == 1 and items[0][0] == 0 and isinstance(items[0][1], View):
            return value.args[0], items[0][1]
    if value.op == "aten.index_select" and value.args[1] == 0:
        return value.args[0], value.args[2]
    return None


def match_rows(view: View, order: Order) -> Size | None:
    """S where `view` is the token of each route in order: permutation // S, or its gather."""
    view = strip_integer_casts(view)
    value = view.value
    if value.op in _INTEGER_STEPS and view.is_whole and _floors(value):
        divisor = value.args[1]
        if isinstance(divisor, int) and value.args[0] == order.permutation:
            return divisor
    taken = gathered(view)
    if taken is None or taken[1] != order.permutation:
        return None
    return _tokens_of_routes(taken[0])


def _floors(value: Value) -> bool:
    return value.op == "aten.floor_divide" or value.kwargs.get("rounding_mode") == "floor"


def _tokens_of_routes(view: View) -> Size | None:
    """S where the view counts 0 0 .. 1 1 .., every token S times."""
    value = view.value
    if value.op == "aten.repeat_interleave" and view.is_whole:
        inner, times = value.args[0], value.args[1]
        return times if is_arange(inner) and isinstance(times, int) else None
    if value.op != "aten.arange" or not is_arange(value.whole) or len(view.effect.dims) != 1:
        return None
    atoms = view.effect.dims[0]
    if len(atoms) == 2 and atoms[0].axis == 0 and atoms[1].axis is None:
        return atoms[1].length
    return None


def is_arange(view: View) -> bool:
    """Whether a view is 0, 1, 2, ... over all its length."""
    value = strip_integer_casts(view).value
    if value.op != "aten.arange" or not view.is_whole:
        return False
    numbers = [a for a in value.args if not isinstance(a, View)]
    return len(numbers) == 1 or (len(numbers) == 2 and numbers[0] == 0)


def match_inverse(view: View, order: Order) -> bool:
    """Whether `view` is the inverse of the order's permutation."""
    view = strip_integer_casts(view)
    value = view.value
    if not view.is_whole:
        return False
    if value.op in _ORDER_OUTPUTS and value.kwargs.get("output") == _ORDER_OUTPUTS[value.op]:
        return not _descending(value) and value.args[0] == order.permutation
    store = value.store
    if store is None or store.source is None or store.accumulate:
        return False
    by_index = list(store.index.items()) == [(0, order.permutation)]
    return by_index and is_arange(store.source) and not store.memory.is_input


# --- the end of every expert's rows ---------------------------------------------------------------


def match_ends(view: View) -> tuple[View, Size] | None:
    """(experts by route, number of experts) of which `view` [E] holds the running counts."""
    view = strip_integer_casts(view)
    value = view.value
    if value.op == "aten.searchsorted" and view.is_whole:
        return _searched(value)
    if value.op != "aten.cumsum" or not view.is_whole:
        return None
    return _counted(strip_integer_casts(value.args[0]))


def _searched(value: Value) -> tuple[View, Size] | None:
    """searchsorted(sorted experts, 0..E-1, right) counts the routes of experts up to each."""
    ordered, experts = value.args[0], value.args[1]
    right = value.kwargs.get("right") or value.kwargs.get("side") == "right"
    if not right or not isinstance(experts, View) or not is_arange(experts):
        return None
    ids = experts_of(ordered)
    return None if ids == strip_integer_casts(ordered) else (ids, experts.shape[0])


def _counted(view: View) -> tuple[View, Size] | None:
    """(experts by route, E) of a histogram [E]."""
    value = view.value
    if value.op == "aten.bincount":
        return _binned(view)
    rule = _COUNTS.get(value.op)
    return rule(value) if rule is not None and view.is_whole else None


def _binned(view: View) -> tuple[View, Size] | None:
    """The first E of bincount(experts, minlength=E), whose own length the data decides."""
    value, names = view.value, ("weights", "minlength")
    given = {name: value.kwargs.get(name) for name in names} | dict(
        zip(names, value.args[1:], strict=False)
    )
    bins = given["minlength"]
    if given["weights"] is not None or not isinstance(bins, int):
        return None
    if view.effect != effects.identity((bins,)):
        return None
    return experts_of(value.args[0]), bins


def _histogram(value: Value) -> tuple[View, Size] | None:
    given = [a for a in value.args[1:] if isinstance(a, (int, float))]
    named = [value.kwargs.get(name) for name in ("bins", "min", "max")]
    bins, low, high = ([*given, *named[len(given) :]])[:3]
    if low != 0 or not isinstance(bins, int) or high not in (bins - 1, bins):
        return None
    # Bins are one wide with max = bins; with bins - 1 the last, closed bin holds E - 1 alone.
    return experts_of(value.args[0]), bins


def _summed(value: Value) -> tuple[View, Size] | None:
    """sum over routes of one_hot(experts), or of experts == arange(E)."""
    inner = strip_integer_casts(value.args[0])
    if len(inner.shape) != 2 or reduced_dims(value) != (0,):
        return None
    if inner.value.op == "aten.one_hot" and inner.is_whole:
        return experts_of(flat(inner.value.args[0])), inner.shape[1]
    if inner.value.op != "aten.eq" or not inner.is_whole:
        return None
    for ids, experts in inner.value.either_way:
        by_route, by_expert = _along(ids, 0), _along(experts, 1)
        if by_route is not None and by_expert is not None and is_arange(by_expert):
            return experts_of(by_route), inner.shape[1]
    return None


def _along(view: View, dim: int) -> View | None:
    """The one dimension of a view [a, b] that walks its value, where the other only repeats."""
    if len(view.effect.dims) != 2 or any(a.axis is not None for a in view.effect.dims[1 - dim]):
        return None
    return view.with_dims(view.effect.dims[dim])


def _added(value: Value) -> tuple[View, Size] | None:
    """zeros(E) to which one is added at every route's expert."""
    base, dim, index, source = value.args[:4]
    if value.args[4:] or value.kwargs.get("alpha", 1) != 1:
        return None
    if dim != 0 or not is_filled(base, 0) or not is_filled(source, 1):
        return None
    return experts_of(index), value.shape[0]


def _stored_ones(value: Value) -> tuple[View, Size] | None:
    """The same, in place into fresh zeros."""
    store = value.store
    if store is None or not store.accumulate or store.source is None or store.memory.is_input:
        return None
    items = list(store.index.items())
    before = value.args[0]
    if len(items) != 1 or items[0][0] != 0:
        return None
    if not is_filled(before, 0) or not is_filled(store.source, 1):
        return None
    return experts_of(items[0][1]), value.shape[0]


_COUNTS = {
    "aten.histc": _histogram,
    "aten.sum": _summed,
    "aten.scatter_add": _added,
    "aten.index_add": _added,
    "store": _stored_ones,
}
