"""Recognises the routing of a mixture of experts, however it is written. The routing consists of
four parts: the order that sorts the routes by expert, the rows that are gathered in this order, the
end of the rows of each expert, and the inverse of the order.

Each function examines the tensors from which its argument is computed. A match therefore knows that
all parts belong to one choice of experts. There are T tokens with S slots (top-k) each. A *route*
is one slot of one token, and its number is t * S + s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_while
from tilewright.patterns.arithmetic.steps import (
    floor_quotient,
    is_filled,
    reduced_dims,
    start_and_step,
)
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Effect, Size

_ORDER_OUTPUTS = {"aten.sort": 1, "aten.argsort": None}
_INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Order:
    """A permutation that sorts the routes by expert.

    Attributes:
        permutation: The route at each place of the order, [T * S]. None means the original order of
            the routes.
        ids: The expert of each route, [T * S].
        cells: A map [T, E] that is true where a token is routed to an expert, or None. If there is
            a map, `permutation` has the numbers e * T + t of the true cells instead of routes.
    """

    permutation: View | None
    ids: View
    cells: View | None = None


def flat(view: View) -> View:
    """Returns the view with all its dimensions merged."""
    return view.reshape(effects.product(view.shape))


def per_row(view: View) -> View | None:
    """Returns a view [M, 1], or such a view broadcast to [M, N], as [M]. Returns None if the view
    differs between columns, or if the view is a single number."""
    if not view.effect.dims:
        return None
    *rows, last = view.effect.dims
    return view.with_dims(*rows) if effects.repeats(last) else None


def strip_integer_casts(view: View, below: Size | None = None) -> View:
    """Returns the view before casts that do not change integers.

    A cast to bool changes integers, so it is kept. Casts from types with fewer than 32 bits are
    kept too, because no op supports such indices. below: the reader of the view treats all numbers
    from `below` on in the same way, and treats all numbers under `-below` in the same way. A cast
    that changes only such numbers is removed too.
    """
    if view.value.op != "cast":
        return view  # the usual case
    return strip_while(view, lambda value: value.op == "cast" and _keeps_integers(value, below))[0]


def _keeps_integers(cast: Value, below: Size | None) -> bool:
    source: View = cast.args[0]
    given, dtype = source.value.dtype, cast.dtype
    if given.is_floating_point and dtype.is_floating_point:
        return _exact_to(dtype) >= _exact_to(given)
    if given.is_floating_point:
        counted = source.value.op in (*_COUNTS, "aten.cumsum") and _counts(given)
        whole = counted or (source.value.op == "cast" and _keeps_integers(source.value, below))
        return whole and dtype in _INDICES
    if given not in (torch.bool, *_INDICES) or not dtype.is_floating_point:
        return given in (torch.bool, *_INDICES) and dtype in _INDICES
    # Rounding is monotonic: it never moves a number into a range in which the type represents all
    # integers exactly.
    ends = [end for end in (below, _end_of(source.value)) if isinstance(end, int)]
    return bool(ends) and min(ends) <= _exact_to(dtype)


def _exact_to(dtype: torch.dtype) -> int:
    """Returns the number up to which a floating-point type represents every integer exactly."""
    return int(2 / torch.finfo(dtype).eps)


def _counts(dtype: torch.dtype) -> bool:
    """Whether a type can represent every possible number of routes of a call. float32 can represent
    numbers up to 2**24."""
    return dtype in (*_INDICES, torch.float32, torch.float64)


def holds_counts(value: Value) -> bool:
    """Whether the type of a value represents every number of routes exactly."""
    return _counts(value.dtype)


def _end_of(value: Value) -> Size | None:
    """Returns an exclusive upper bound of a value that has no negative numbers. Returns None if no
    bound is known."""
    if value.dtype == torch.bool or value.op == "aten.one_hot":
        return 2
    if _counts_up(value):
        return value.shape[0]
    if is_top_indices(value):
        compared: View = value.args[0]
        return compared.shape[-1]
    return None


def is_top_indices(value: Value) -> bool:
    """Whether a value is the indices that a topk along the last dimension returns. Such indices are
    distinct."""
    return _is_of_topk(value, 1)


def are_largest(value: Value) -> bool:
    """Whether a value is the largest numbers along the last dimension, as a topk returns them."""
    return _is_of_topk(value, 0) and takes_largest(value)


def takes_largest(topk: Value) -> bool:
    """Whether a topk selects the largest numbers, and not the smallest."""
    return bool(topk.argument(3, "largest", True))


def _is_of_topk(value: Value, output: int) -> bool:
    if value.op != "aten.topk" or value.kwargs.get("output") != output:
        return False
    return value.argument(2, "dim", -1) in (-1, len(value.shape) - 1)


def is_distinct(ids: View) -> bool:
    """Whether ids [T, S] give each token S different experts, as the indices of a topk do."""
    return ids.shape[-1] == 1 or (ids.is_whole and is_top_indices(ids.value))


def match_order(view: View) -> Order | None:
    """Returns the order if `view` is the indices of a sort of the routes' experts; else None."""
    view = strip_integer_casts(view)
    value = view.value
    if value.op not in _ORDER_OUTPUTS or len(value.shape) != 1:
        return None
    if value.kwargs.get("output") != _ORDER_OUTPUTS[value.op]:
        return None
    if _descending(value):
        return _order_of_cells(view)
    return Order(view, strip_integer_casts(value.args[0])) if view.is_whole else None


def _order_of_cells(view: View) -> Order | None:
    """Returns the order of a map [T, E] of routes that is sorted by expert. Returns None for every
    other view.

    A stable sort places the true cells of the map first. The view selects the first T * S cells,
    because each token has S different experts.
    """
    value = view.value
    source = by_cell(value.args[0], of_ones=True)
    ids = None if source is None else scattered_ones(source.value)
    if source is None or ids is None or not is_distinct(ids) or not value.kwargs.get("stable"):
        return None
    routes = flat(ids)
    if view != value.whole.narrow(0, 0, routes.shape[0]):
        return None
    return Order(view, routes, source)


def by_cell(view: View, of_ones: bool = False) -> View | None:
    """Returns the map [T, E] if a view [E * T] lists the cells of this map expert by expert.
    Returns None for every other view.

    Ignores copies, and casts between floating-point types. of_ones: whether to ignore all casts,
    for maps of zeros and ones, which are equal in every type.
    """
    view, _ = strip_while(
        view, lambda v: v.op == "aten.clone" or (v.op == "cast" and _floats(v, of_ones))
    )
    cells = view.value.whole
    known = len(cells.shape) == 2 and view == flat(cells.permute(1, 0))
    return cells if known else None


def _floats(cast: Value, of_ones: bool) -> bool:
    given: torch.dtype = cast.args[0].value.dtype
    return of_ones or (given.is_floating_point and cast.dtype.is_floating_point)


def _descending(value: Value) -> bool:
    given = [a for a in value.args[1:] if isinstance(a, bool)]
    return bool(value.kwargs.get("descending")) or any(given[-1:])


def experts_of(view: View, num_experts: Size | None = None) -> View:
    """Returns the expert of each route, for a view of the experts in the original order of the
    routes, or in sorted order.

    num_experts: the number from which on the reader of the view treats all experts in the same way.
    A cast that changes only such numbers is ignored.
    """
    view = strip_integer_casts(view, num_experts)
    value = view.value
    if value.op == "aten.sort" and value.kwargs.get("output") == 0 and view.is_whole:
        return strip_integer_casts(value.args[0], num_experts)
    taken = gathered(view)
    if taken is not None:
        order = match_order(taken[1])
        if (
            order is not None
            and order.cells is None
            and order.ids == strip_integer_casts(taken[0], num_experts)
        ):
            return order.ids
    return view


def in_order(view: View, order: Order) -> bool:
    """Whether `view` has the experts of the routes in the given order."""
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
    """Returns (source, index) if a view is source[index] along the first dimension; else None."""
    value = view.value
    if not view.is_whole:
        return None
    if value.op == "aten.index":
        items = value.args[1]
        # If a Python list is used as an index, the index is not a tensor.
        if len(items) == 1 and items[0][0] == 0 and isinstance(items[0][1], View):
            return value.args[0], items[0][1]
    if value.op == "aten.index_select" and value.args[1] == 0:
        return value.args[0], value.args[2]
    if value.op == "aten.embedding":
        return value.args[0], value.args[1]
    if value.op == "aten.gather" and value.argument(1, "dim") == 0:
        return _gathered_rows(value.args[0], value.argument(2, "index"))
    return None


#: The operations that :func:`gathered` reads.
GATHERS = frozenset({"aten.index", "aten.index_select", "aten.embedding", "aten.gather"})
#: A lookup that writes its table, as `F.embedding(..., max_norm=)` does.
RESCALED = "opaque:embedding"
#: GATHERS, and the lookups that no pattern reads. Such lookups write their table, or treat indices
#: out of range in another way.
TAKEN = GATHERS | {"aten.take_along_dim", RESCALED}


def _gathered_rows(source: View, index: View) -> tuple[View, View] | None:
    """Returns (source, index) of a gather whose index repeats along whole rows; else None."""
    if not source.shape or index.shape[1:] != source.shape[1:]:
        return None
    if index.value.dtype != torch.int64:
        return None  # an index of 32 bits: torch 2.13 on a CPU takes the first row for all
    first, *rest = index.effect.dims
    return (source, index.with_dims(first)) if all(map(effects.repeats, rest)) else None


def without_counting(view: View) -> View:
    """Rewrites a view of rows[0, 1, .., T - 1, 0, 1, ..] as a view of the rows. Returns every other
    view unchanged."""
    taken = gathered(view.value.whole)
    if taken is None or not _counts_up(taken[1].value):
        return view
    source, rows = taken
    dims = (*rows.effect.dims, *effects.identity(source.shape).dims[1:])
    again = source.through(Effect(dims, (*rows.effect.start, *(0 for _ in source.shape[1:]))))
    return again.through(view.effect)


def counts_again(view: View) -> Size | None:
    """Returns T if a view has the numbers 0, 1, ..., T - 1, repeated several times; else None."""
    if not _counts_up(view.value) or len(view.effect.dims) != 1 or view.effect.start != (0,):
        return None
    length = view.value.shape[0]
    atoms = [atom for atom in view.effect.dims[0] if atom.axis is not None]
    whole = atoms in ([Atom(0, 1, length)], [Atom(0, 1, length)][: length != 1])
    again = length == 1 or view.effect.dims[0][-1:] == tuple(atoms)
    return length if whole and again else None


def match_rows(view: View, order: Order) -> Size | None:
    """Returns S if `view` has the token of each route in the given order; else None. These tokens
    are permutation // S, or they are gathered by the permutation."""
    view = strip_integer_casts(view)
    value = view.value
    if order.permutation is None:
        return _tokens_of_routes(view)
    if order.cells is not None:
        tokens = order.cells.shape[0]
        within = value.op == "aten.remainder" and view.is_whole
        found = within and value.args[0] == order.permutation and value.args[1] == tokens
        return effects.divides(tokens, order.ids.shape[0]) if found else None
    if view == strip_integer_casts(order.permutation):
        return 1  # one token for each route
    quotient = floor_quotient(value) if view.is_whole else None
    if quotient is not None and quotient[0] == order.permutation:
        return quotient[1]
    taken = gathered(view)
    if taken is None or taken[1] != order.permutation:
        return None
    return _tokens_of_routes(taken[0])


def _tokens_of_routes(view: View) -> Size | None:
    """Returns S if the view counts 0 0 .. 1 1 .., that is, if it has every token S times; else
    None."""
    value = view.value
    if value.op != "aten.arange" or not is_arange(value.whole) or len(view.effect.dims) != 1:
        return None
    atoms = view.effect.dims[0]
    if len(atoms) == 2 and atoms[0].axis == 0 and atoms[1].axis is None:
        return atoms[1].length
    return 1 if view.is_whole else None


def is_arange(view: View) -> bool:
    """Whether a view is 0, 1, 2, ... over its whole length."""
    value = strip_integer_casts(view).value
    return view.is_whole and _counts_up(value)


def _counts_up(value: Value) -> bool:
    return value.op == "aten.arange" and start_and_step(value) == (0, 1)


def match_inverse(view: View, order: Order) -> bool:
    """Whether `view` is the inverse of the permutation of the order."""
    view = strip_integer_casts(view)
    value = view.value
    if not view.is_whole or order.cells is not None:
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
    """Returns (expert of each route, number of experts) if `view` [E] holds the end of each
    expert's rows; else None. The ends are the running sums of the numbers of rows of the
    experts."""
    view = strip_integer_casts(view)
    value = view.value
    if value.op == "aten.searchsorted" and view.is_whole:
        return _searched(value)
    if value.op != "aten.cumsum" or not view.is_whole or not _counts(value.dtype):
        return None
    return _counted(strip_integer_casts(value.args[0]))


def _searched(value: Value) -> tuple[View, Size] | None:
    """Reads searchsorted(sorted experts, 0..E-1, right). Entry e counts the routes of the experts 0
    to e."""
    ordered, experts = value.args[0], value.args[1]
    right = value.kwargs.get("right") or value.kwargs.get("side") == "right"
    if not right or not isinstance(experts, View) or not is_arange(experts):
        return None
    num_experts = experts.shape[0]
    ids = experts_of(ordered, num_experts)
    unsorted = ids == strip_integer_casts(ordered, num_experts)
    return None if unsorted else (ids, num_experts)


def _counted(view: View) -> tuple[View, Size] | None:
    """Returns (expert of each route, E) for a histogram [E]; else None."""
    value = view.value
    if not _counts(value.dtype):
        return None
    if value.op == "aten.bincount":
        return _binned(view)
    rule = _COUNTS.get(value.op)
    return rule(value) if rule is not None and view.is_whole else None


def _binned(view: View) -> tuple[View, Size] | None:
    """Reads the first E elements of bincount(experts, minlength=E), whose length depends on
    data."""
    value, names = view.value, ("weights", "minlength")
    given = {name: value.kwargs.get(name) for name in names} | dict(
        zip(names, value.args[1:], strict=False)
    )
    bins = given["minlength"]
    if given["weights"] is not None or not isinstance(bins, int):
        return None
    if view.effect != effects.identity((bins,)):
        return None
    return experts_of(value.args[0], bins), bins


def _histogram(value: Value) -> tuple[View, Size] | None:
    given = [a for a in value.args[1:] if isinstance(a, (int, float))]
    named = [value.kwargs.get(name) for name in ("bins", "min", "max")]
    bins, low, high = ([*given, *named[len(given) :]])[:3]
    if low != 0 or not isinstance(bins, int) or high not in (bins - 1, bins):
        return None
    # If max is bins, each bin has width one. If max is bins - 1, the last bin is closed and
    # contains only E - 1.
    return experts_of(value.args[0], bins), bins


def _summed(value: Value) -> tuple[View, Size] | None:
    """Reads a sum over routes of one_hot(experts), or of experts == arange(E)."""
    inner = strip_integer_casts(value.args[0])
    if len(inner.shape) != 2 or reduced_dims(value) != (0,):
        return None
    if inner.value.op == "aten.one_hot" and inner.is_whole:
        return experts_of(flat(inner.value.args[0]), inner.shape[1]), inner.shape[1]
    if inner.value.op != "aten.eq" or not inner.is_whole:
        return _marked(inner)
    for ids, experts in inner.value.either_way:
        by_route, by_expert = _along(inner.of_operand(ids), 0), _along(inner.of_operand(experts), 1)
        if by_route is not None and by_expert is not None and is_arange(by_expert):
            return experts_of(by_route, inner.shape[1]), inner.shape[1]
    return None


def _along(view: View, dim: int) -> View | None:
    """Returns dimension `dim` of a view [a, b] without the other dimension, if the view only
    repeats along the other dimension; else None."""
    if len(view.effect.dims) != 2 or not effects.repeats(view.effect.dims[1 - dim]):
        return None
    return view.with_dims(view.effect.dims[dim])


def _marked(inner: View) -> tuple[View, Size] | None:
    """Returns (expert of each route, E) for a sum over tokens of a mask [T, E] that has ones at the
    experts of each token; else None.

    The experts must be the indices of a topk. If a token had the same expert twice, the mask would
    count this expert only once.
    """
    inner, _ = strip_while(inner, lambda value: value.op == "cast")  # ones are ones in any type
    ids = scattered_ones(inner.value)
    if ids is None or not inner.is_whole or not ids.is_whole or not is_top_indices(ids.value):
        return None
    return experts_of(flat(ids)), inner.shape[1]


def scattered_ones(value: Value, mark: int = 1) -> View | None:
    """Returns the ids [T, S] of zeros(T, E).scatter(1, ids, 1), which may be in place. Returns None
    for every other value.

    mark: 0 for ones(T, E).scatter(1, ids, 0).
    """
    node = value.node
    given = node.kwargs.get("value", node.args[3] if len(node.args) > 3 else None)
    replaces = node.kwargs.get("reduce") is None and is_filled(given, mark)
    return scattered_into(value, 1.0 - mark) if replaces else None


def scattered_into(value: Value, number: float) -> View | None:
    """Returns the ids [T, S] of a scatter along the experts into a tensor [T, E] that is filled
    with `number`. The scatter may be in place, in memory that the graph allocated. Returns None for
    every other value."""
    if value.op == "aten.scatter":
        base, dim, ids = value.args[:3]
        return _into(value, base, dim, ids, number)
    store = value.store
    if store is None or store.kind not in ("scatter_", "scatter_add_") or store.memory.is_input:
        return None
    if list(store.index) != [1] or not effects.is_identity(store.target, store.memory.shape):
        return None
    if store.dtype != store.memory.dtype or value.node.args[:1] != (store.memory.root,):
        return None
    ids = store.index[1]
    one = value.shape[0] == 1 and len(ids.shape) == 1  # the index of a single row may be 1-d
    return _into(value, value.args[0], 1, ids.unsqueeze(0) if one else ids, number)


def _into(value: Value, base: Any, dim: Any, ids: Any, number: float) -> View | None:
    if not isinstance(base, View) or not isinstance(ids, View) or dim not in (1, -1):
        return None
    if len(ids.shape) != 2 or ids.shape[0] != value.shape[0] or not is_filled(base, number):
        return None
    return strip_integer_casts(ids)


def _added(value: Value) -> tuple[View, Size] | None:
    """Reads zeros(E) to which one is added at the expert of every route."""
    base, index, source = rows_added_to(value) or (None, None, None)
    if index is None or not is_filled(base, 0) or not is_filled(source, 1):
        return None
    return experts_of(index), value.shape[0]


def rows_added_to(value: Value) -> tuple[View, View, View] | None:
    """Returns (base, index, source) of an `index_add` or `scatter_add` that adds rows to a base.
    Returns None for every other value. If the operation is in place, the base must be zeros in
    memory that the graph allocated."""
    store = value.store
    if store is not None:
        own = store.accumulate and not store.memory.is_input and is_filled(value.args[0], 0)
        if not own or list(store.index) != [0] or store.source is None:
            return None
        return value.args[0], store.index[0], store.source
    if value.op not in ("aten.index_add", "aten.scatter_add"):
        return None
    name = "source" if value.op == "aten.index_add" else "src"
    dim, index = value.argument(1, "dim"), value.argument(2, "index")
    source, times = value.argument(3, name), value.argument(4, "alpha", 1)
    if dim != 0 or times != 1 or not isinstance(source, View):
        return None
    return value.args[0], index, source


_COUNTS = {
    "aten.histc": _histogram,
    "aten.sum": _summed,
    "aten.scatter_add": _added,
    "aten.index_add": _added,
    "store": _added,
}
