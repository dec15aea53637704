"""Converts ids that are not the number of an expert or adapter to the form that the op expects. For
the op, -1 means that there is no expert, and every other number out of range is an error.

A lookup in the graph may treat such numbers in another way. :func:`experts_argument` changes such
numbers so that the op computes the same result as the lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tilewright.patterns.arithmetic.steps import chosen_by_mask, clamp_bounds, start_and_step
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.recognise.routing import is_top_indices, strip_integer_casts

# The largest number of values that are searched for a range.
_REACH = 8


@dataclass(frozen=True)
class Outside:
    """How a lookup treats numbers outside of the range from 0 to N - 1.

    Attributes:
        below: How the lookup treats negative numbers. "error": they are an error. "none": they mean
            no expert. "first": they mean expert 0. "last": they count backwards from the last
            expert, and are an error if they would go past the first expert. "shifted": the rows of
            such numbers are sorted before all other rows, but they are not counted. This shifts the
            counted ends, so that later rows may get the weight of another expert.
        above: How the lookup treats N and larger numbers, "error" or "none".
    """

    below: Literal["error", "none", "first", "last", "shifted"]
    above: Literal["error", "none"]


#: How a lookup weight[ids] treats numbers out of range.
WRAPPED = Outside("last", "error")
#: The treatment in which every number out of range is an error.
REFUSED = Outside("error", "error")
LOOKUPS = {"aten.index": WRAPPED}

_COUNTED = {
    "aten.searchsorted": Outside("first", "none"),
    "aten.bincount": Outside("error", "none"),
    "aten.histc": Outside("shifted", "none"),
    "aten.eq": Outside("shifted", "none"),
    "setitem": Outside("shifted", "error"),
    "index_put_": Outside("shifted", "error"),
    "_index_put_impl_": Outside("shifted", "error"),
}


def outside_of_ends(ends: View) -> Outside:
    """Returns how the ends of experts' rows, found by `match_ends`, treat numbers out of range."""
    value = strip_integer_casts(ends).value
    while value.op in ("aten.cumsum", "aten.sum", "cast"):
        value = value.args[0].value
    kind = value.op if value.store is None else value.store.kind
    return _COUNTED.get(kind, REFUSED)


def both(one: Outside, other: Outside) -> Outside | None:
    """Returns how two lookups by the same ids treat numbers out of range. Returns None if no op can
    express this, because the two lookups combine the weight of one expert with the bias of another
    expert."""
    ways = {one.below, other.below}
    if "error" in ways:
        below: Any = "error"
    elif len(ways) == 1 or ways == {"none", "last"}:
        below = "none" if "none" in ways else one.below
    else:
        return None
    return Outside(below, "error" if "error" in (one.above, other.above) else "none")


def experts_argument(
    ids: View, count: Size, outside: Outside, sorted_by: tuple[View, View] | None = None
) -> Any:
    """Returns the op's argument `expert_ids` for a lookup by `ids` in the graph.

    count: the number of experts. sorted_by: for a lookup that counts rows, the end of the rows of
    each expert, and the permutation that sorts the rows.
    """
    if outside.below != "shifted" or sorted_by is None or is_natural(ids):
        return _placed(ids, count, outside)
    by_place = _shifted_back(*sorted_by, ids)
    return Computed("where", (Computed("ge", (by_place, count)), -1, by_place))


def _placed(ids: View, count: Size, outside: Outside) -> Any:
    """Returns ids in which numbers out of range are replaced as `outside` says: by -1, by a valid
    expert, or by a number that is an error for the op."""
    least, end = _range_of(ids)
    given: Any = ids
    found: Any = ids
    if least is None:
        below: Any = {"error": count, "none": -1, "first": 0}.get(outside.below)
        if below is None:
            counted = Computed("add", (given, count))
            below = Computed("where", (Computed("ge", (given, -count)), counted, count))
        found = Computed("where", (Computed("lt", (given, 0)), below, found))
    known = isinstance(end, int) and isinstance(count, int) and end <= count
    if outside.above == "none" and not known:
        found = Computed("where", (Computed("ge", (given, count)), -1, found))
    return found


def is_natural(ids: View) -> bool:
    """Whether the graph shows that no id is negative."""
    return _range_of(ids)[0] is not None


def _shifted_back(ends: View, permutation: View, ids: View) -> Computed:
    """Returns, for each route, the expert whose weight multiplies the row of the route in the
    graph. The ends determine this expert from the place of the route in the sorted order."""
    options = (("dtype", ends.value.dtype), ("device", ids.value.device))
    (routes,) = permutation.shape
    places = Computed("arange", (routes,), options)
    by_place = Computed("searchsorted", (ends, places), (("right", True),))
    inverse = Computed("argsort", (permutation,))
    by_route = Computed("index_select", (by_place, 0, inverse))
    return Computed("reshape", (by_route, *ids.shape))


def _range_of(ids: Any, reach: int = _REACH) -> tuple[int | None, Size | None]:
    """Returns the bounds (least, end) of all ids. `least` is 0, or None if some ids may be
    negative. `end` is exclusive, or None if it is not known."""
    if isinstance(ids, (int, float)):
        return (0, int(ids) + 1) if ids >= 0 and int(ids) == ids else (None, None)
    if not isinstance(ids, View) or reach == 0:
        return None, None
    value = ids.value
    rule = _RANGES.get(value.op)
    if clamp_bounds(value) is not None:
        return _clamped(value, reach)
    if is_top_indices(value) or value.op in ("aten.argmax", "aten.argmin"):
        return 0, value.args[0].shape[-1] if is_top_indices(value) else None
    return rule(value, reach) if rule is not None else (None, None)


def _clamped(value: Value, reach: int) -> tuple[int | None, Size | None]:
    low, high = clamp_bounds(value) or (None, None)
    least, end = _range_of(value.args[0], reach - 1)
    if high is not None and not (isinstance(high, int) and high >= 0):
        return None, None
    if isinstance(low, int) and low >= 0:
        least = 0
    if isinstance(high, int):
        end = min(end, high + 1) if isinstance(end, int) else high + 1
    return least, end


def _counted(value: Value, reach: int) -> tuple[int | None, Size | None]:
    return (0, value.shape[0]) if start_and_step(value) == (0, 1) else (None, None)


def _either(value: Value, reach: int) -> tuple[int | None, Size | None]:
    chosen = chosen_by_mask(value)
    if chosen is None:
        return None, None
    (least, end), (other, last) = (_range_of(side, reach - 1) for side in chosen[1:])
    known = isinstance(end, int) and isinstance(last, int)
    least = None if least is None or other is None else 0
    return least, max(end, last) if known else None  # type: ignore[type-var]


def _remainder(value: Value, reach: int) -> tuple[int | None, Size | None]:
    divisor = value.args[1]
    return (0, divisor) if isinstance(divisor, int) and divisor > 0 else (None, None)


def _cast(value: Value, reach: int) -> tuple[int | None, Size | None]:
    """Returns the range after a cast to an integer type. The range does not change if every number
    fits the type. Otherwise it is unknown."""
    least, end = _range_of(value.args[0], reach - 1)
    fits = not value.dtype.is_floating_point and isinstance(end, int) and end <= 1 << 31
    wide = value.dtype.itemsize >= 4 and not value.dtype.is_floating_point
    return (least, end) if fits and wide else (None, None)


def _same(value: Value, reach: int) -> tuple[int | None, Size | None]:
    return _range_of(value.args[0], reach - 1)


_RANGES: dict[str, Any] = {
    "aten.arange": _counted,
    "aten.where": _either,
    "aten.masked_fill": _either,
    "aten.remainder": _remainder,
    "cast": _cast,
    "aten.clone": _same,
}
