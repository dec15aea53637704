"""What an attention mask says: which keys a query sees, read off the expressions that compute it.

`arange(K) <= positions[:, None]` is causal by position; with `arange(K) > positions[:, None] - n`
it is a sliding window, and `padding[:, None, None]` hides keys besides. Masks are built from
counted indices (`arange`, differences, running sums, gathers of these), each a linear function of
its own indices: comparisons of those decide most of a mask before any number is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Effect, InexpressibleError, Size
from tilewright.patterns.recognise.equality import equal_values

_INTEGERS = (torch.int32, torch.int64)
_FILLED = {f"aten.{kind}": number for kind, number in (("ones", 1), ("new_ones", 1), ("zeros", 0))}


@dataclass(frozen=True)
class Visible:
    """Which keys j a query at position p sees.

    mask: "none": all; "causal": j <= p; "sliding_window": p - window < j <= p; "chunked": j <= p
    and j // window == p // window. positions: p of each query, [S], or [B * S]; None: p is i for
    query i. padding: [B or 1, 1, 1, K], bool: besides, a key is seen only where it is True.
    """

    mask: str
    positions: View | Computed | None = None
    window: int = 0
    padding: View | Computed | None = None


@dataclass(frozen=True)
class _Line:
    """offset + sum(slopes[d] * index[d]) at every index of a tensor."""

    offset: Size
    slopes: tuple[Size, ...]

    @property
    def constant(self) -> Size | None:
        return self.offset if not any(self.slopes) else None


@dataclass(frozen=True)
class _Compared:
    """True where low <= high + slack."""

    low: View
    high: View
    slack: int


# True or False for all elements, one comparison, or None: unknown.
_Truth = bool | _Compared | None


@dataclass
class _Terms:
    """What a mask is the conjunction of; j a key's place.

    upper: j <= the numbers + the int; None for the numbers: query i's place i. lower: j >= them.
    chunks: j // the int == them // the int. padding: of keys alone, and whether it is True where
    one is seen. whole: whether these are all.
    """

    upper: list[tuple[View | None, int]] = field(default_factory=list)
    lower: list[tuple[View, int]] = field(default_factory=list)
    chunks: list[tuple[View, int]] = field(default_factory=list)
    padding: list[tuple[View, bool]] = field(default_factory=list)
    whole: bool = True


def visible_by(mask: View, batch: Size, queries: Size, sees: bool = True) -> Visible | None:
    """What a boolean mask [B or 1, H or 1, S or 1, K] says to `batch` times `queries` queries.

    sees: a key is seen where the mask is that. None: it cannot be said.
    """
    if mask.value.dtype != torch.bool:
        return None
    terms = _Terms()
    try:
        _collect(mask, sees, terms)
        return _visible(terms, batch, queries) if terms.whole else None
    except InexpressibleError:
        return None


def _visible(terms: _Terms, batch: Size, queries: Size) -> Visible | None:
    padding = _joined(terms.padding)
    if not terms.upper:
        return None if terms.lower or terms.chunks else Visible("none", padding=padding)
    (high, shift), *others = terms.upper
    if any(_apart(high, other) != more - shift for other, more in others):
        return None
    positions = None if high is None else _positions(high, shift, batch, queries)
    windows = {_apart(high, low, shift + 1 - more) for low, more in terms.lower}
    chunks = {size if _apart(high, at, shift) == 0 else None for at, size in terms.chunks}
    if not windows and not chunks:
        return Visible("causal", positions, padding=padding)
    (window,) = windows | chunks if len(windows | chunks) == 1 else (None,)
    if window is None or window < 1 or (windows and chunks):
        return None
    return Visible("sliding_window" if windows else "chunked", positions, window, padding)


def _joined(padding: Sequence[tuple[View, bool]]) -> View | Computed | None:
    """True where all terms show a key."""
    shown = [view if sees else Computed("invert", (view,)) for view, sees in padding]
    return reduce(lambda a, b: Computed("bitwise_and", (a, b)), shown) if shown else None


def _positions(high: View, shift: int, batch: Size, queries: Size) -> View | Computed | None:
    """The numbers + shift for each query; None where they count the queries."""
    line = _line(high)
    steps = (0, 0, 0 if queries == 1 else 1, 0)
    if line is not None and line.slopes == steps and line.offset + shift == 0:
        return None
    of_batch, _, of_query, _ = high.effect.dims
    one = all(atom.axis is None for atom in of_batch)
    both = Effect((() if one else of_batch, of_query), high.effect.start)
    lead = 1 if one else batch
    wide = effects.expand(both, (lead, queries))
    positions = View(high.value, effects.reshape(wide, (effects.product(wide.shape),)))
    return positions if shift == 0 else Computed("add", (positions, shift))


# --- terms ----------------------------------------------------------------------------------------

_AND = {"aten.bitwise_and", "aten.logical_and"}
_OR = {"aten.bitwise_or", "aten.logical_or"}
_NOT = {"aten.bitwise_not", "aten.logical_not"}


def _collect(view: View, sees: bool, terms: _Terms) -> None:
    """Adds the terms of which a mask is the conjunction, or of whose opposite it is."""
    value = view.value
    if value.op in _NOT and len(value.operands) == 1:
        _collect(view.of_operand(value.operands[0]), not sees, terms)
    elif value.op in (_AND if sees else _OR) and len(value.operands) == 2:
        for operand in value.operands:
            _collect(view.of_operand(operand), sees, terms)
    elif sees and _is_triangle(view):
        terms.upper.append((None, 0))
    elif not _add_comparison(view, sees, terms) and not _add_chunks(view, sees, terms):
        terms.whole &= _add_padding(view, sees, terms)


def _add_comparison(view: View, sees: bool, terms: _Terms) -> bool:
    truth = _truth(view) if sees else _negated(_truth(view))
    if not isinstance(truth, _Compared):
        return truth is True
    low, high = _key_offset(truth.low), _key_offset(truth.high)
    if low is not None and _is_of_queries(truth.high):
        terms.upper.append((truth.high, truth.slack - low))
    elif high is not None and _is_of_queries(truth.low):
        terms.lower.append((truth.low, -truth.slack - high))
    else:
        return False
    return True


def _add_chunks(view: View, sees: bool, terms: _Terms) -> bool:
    """j // size == p // size."""
    value = view.value
    if value.op != ("aten.eq" if sees else "aten.ne") or len(value.operands) != 2:
        return False
    for one, other in value.either_way:
        keys, at = (_quotient(view.of_operand(v)) for v in (one, other))
        if keys is None or at is None or keys[1] != at[1]:
            return False
        if _key_offset(keys[0]) == 0 and _is_of_queries(at[0]):
            terms.chunks.append(at)
            return True
    return False


def _quotient(view: View) -> tuple[View, int] | None:
    """(x, n) of x // n."""
    value = view.value
    mode = {} if value.op == "aten.floor_divide" else {"rounding_mode": "floor"}
    if value.op not in ("aten.floor_divide", "aten.div") or dict(value.kwargs) != mode:
        return None
    x, n = value.args
    plain = isinstance(x, View) and isinstance(n, int) and n > 0
    return (view.of_operand(x), n) if plain and value.dtype in _INTEGERS else None


def _add_padding(view: View, sees: bool, terms: _Terms) -> bool:
    """A term that is the same for every head and query."""
    if len(view.shape) != 4 or view.value.dtype != torch.bool:
        return False
    _, heads, queries, keys = view.effect.dims
    if any(atom.axis is not None for dim in (heads, queries) for atom in dim):
        return False
    terms.padding.append((view.with_dims(*_once(view).effect.dims[:3], keys), sees))
    return True


def _key_offset(view: View) -> int | None:
    """n of numbers that are n + j at every key j."""
    line = _line(view)
    if line is None or not isinstance(line.offset, int):
        return None
    return line.offset if line.slopes == (0, 0, 0, 1) else None


def _is_of_queries(view: View) -> bool:
    """Whether integers [B, H, S, K] are the same for every head and key."""
    if view.value.dtype not in _INTEGERS or len(view.shape) != 4:
        return False
    _, heads, _, keys = view.effect.dims
    return all(atom.axis is None for dim in (heads, keys) for atom in dim)


def _apart(one: View | None, other: View | None, more: int = 0) -> int | None:
    """one - other + more where that is the same everywhere."""
    if one is None or other is None:
        return more if one is other else None
    (a, m), (b, n) = _shifted(one), _shifted(other)
    if equal_values(a, b):
        return m - n + more
    lines = _line(one), _line(other)
    if lines[0] is None or lines[1] is None:
        return None
    known = _sum(lines[0], lines[1], -1).constant
    return known + more if isinstance(known, int) else None


def _shifted(view: View) -> tuple[View, int]:
    """(x, n) of integers x + n, what repeats left out."""
    shift = 0
    while view.value.op in ("aten.add", "aten.sub") and len(view.value.args) == 2:
        x, n = view.value.args
        line = _operand(view, n)
        known = None if line is None else line.constant
        if not isinstance(x, View) or not isinstance(known, int) or view.value.kwargs:
            break
        shift += known if view.value.op == "aten.add" else -known
        view = view.of_operand(x)
    return _once(view), shift


def _once(view: View) -> View:
    """What only repeats along a dimension, once."""
    dims = (() if all(a.axis is None for a in dim) else dim for dim in view.effect.dims)
    return view.with_dims(*dims)


# --- truth ----------------------------------------------------------------------------------------


def _truth(view: View) -> _Truth:
    """What a boolean tensor says, broadcast dimensions kept."""
    value = view.value
    if value.op in _JOINED and len(value.operands) == 2:
        one, other = (_truth(view.of_operand(v)) for v in value.operands)
        return _JOINED[value.op](one, other)
    if value.op in ("aten.bitwise_not", "aten.logical_not") and len(value.operands) == 1:
        return _negated(_truth(view.of_operand(value.operands[0])))
    if value.op in _ORDERS and len(value.args) == 2 and not value.kwargs:
        return _compared(view)
    line = _line(view)
    known = None if line is None else line.constant
    return bool(known) if isinstance(known, int) else None


def _both(one: _Truth, other: _Truth) -> _Truth:
    if one is False or other is False:
        return False
    if one is True or other is True:
        return other if one is True else one
    return None


def _negated(truth: _Truth) -> _Truth:
    """not (low <= high + slack) is high <= low - slack - 1."""
    if isinstance(truth, _Compared):
        return _Compared(truth.high, truth.low, -truth.slack - 1)
    return None if truth is None else not truth


_JOINED: dict[str, Callable[[_Truth, _Truth], _Truth]] = {
    "aten.bitwise_and": _both,
    "aten.logical_and": _both,
}

#: op -> (whether its operands change sides, slack): a <= b, a < b, a >= b, a > b.
_ORDERS = {
    "aten.le": (False, 0),
    "aten.lt": (False, -1),
    "aten.ge": (True, 0),
    "aten.gt": (True, -1),
    "aten.eq": None,
    "aten.ne": None,
}


def _compared(view: View) -> _Truth:
    value = view.value
    apart = _difference(view)
    order = _ORDERS[value.op]
    if order is None:
        if not isinstance(apart, int):
            return None
        return (apart == 0) == (value.op == "aten.eq")
    swapped, slack = order
    if isinstance(apart, int):
        return (-apart if swapped else apart) <= slack
    if not all(isinstance(a, View) and a.value.dtype in _INTEGERS for a in value.args):
        return None
    low, high = (view.of_operand(a) for a in value.args)
    return _Compared(high, low, slack) if swapped else _Compared(low, high, slack)


def _difference(view: View) -> Size | None:
    """The difference of an element-wise value's operands, where it is the same everywhere."""
    lines = [_operand(view, item) for item in view.value.args]
    if any(line is None for line in lines):
        return None
    one, other = lines
    return _sum(one, other, -1).constant  # type: ignore[arg-type]


def _is_triangle(mask: View) -> bool:
    """tril(ones): every query sees the keys up to its own index."""
    value = mask.value
    ones = value.args[0] if value.op == "aten.tril" and len(value.args) == 1 else None
    if ones is None or value.kwargs or len(value.shape) != 2 or _constant(ones) != 1:
        return False
    whole = effects.identity(value.shape).dims
    return _once(mask).effect == Effect(((), (), *whole), (0, 0))


# --- lines ----------------------------------------------------------------------------------------


def _line(view: View) -> _Line | None:
    """A view of integers as a linear function of its indices."""
    of = _LINES.get(view.value.op)
    inner = None if of is None else of(view.value)
    return None if inner is None else _seen_through(inner, view.effect)


def _seen_through(line: _Line, effect: Effect) -> _Line | None:
    offset = line.offset
    for first, slope in zip(effect.start, line.slopes, strict=True):
        offset = offset + first * slope
    slopes = []
    for dim in effect.dims:
        atoms = [(0 if a.axis is None else line.slopes[a.axis] * a.step, a.length) for a in dim]
        slope, reach = (atoms[-1][0], atoms[-1][1]) if atoms else (0, 1)
        for step, length in atoms[-2::-1]:
            if step != slope * reach:
                return None
            reach = reach * length
        slopes.append(slope)
    return _Line(offset, tuple(slopes))


def _operand(view: View, item: Any) -> _Line | None:
    """One operand of an element-wise value, as a view of that value sees it."""
    if isinstance(item, View):
        return _line(view.of_operand(item))
    whole = isinstance(item, int) and not isinstance(item, bool)
    return _Line(item, (0,) * len(view.shape)) if whole else None


def _sum(one: _Line, other: _Line, sign: int) -> _Line:
    slopes = (a + sign * b for a, b in zip(one.slopes, other.slopes, strict=True))
    return _Line(one.offset + sign * other.offset, tuple(slopes))


def _arange(value: Value) -> _Line | None:
    numbers = [a for a in value.args if not isinstance(a, View)]
    names = ("start", "end", "step") if len(numbers) > 1 else ("end",)
    given = dict(zip(names, numbers, strict=False)) | dict(value.kwargs)
    start, step = given.get("start", 0), given.get("step", 1)
    plain = isinstance(start, int) and isinstance(step, int)
    return _Line(start, (step,)) if plain and value.dtype in _INTEGERS else None


def _added(value: Value) -> _Line | None:
    if len(value.args) != 2 or value.kwargs.get("alpha", 1) != 1:
        return None
    if value.dtype not in _INTEGERS:
        return None
    one, other = (_operand(value.whole, item) for item in value.args)
    sign = -1 if value.op == "aten.sub" else 1
    return None if one is None or other is None else _sum(one, other, sign)


def _cast(value: Value) -> _Line | None:
    source = value.operands[0]
    if value.dtype not in _INTEGERS or source.value.dtype not in _INTEGERS:
        return None
    return _line(source)


def _filled(value: Value) -> _Line:
    return _Line(_FILLED[value.op], (0,) * len(value.shape))


def _diff(value: Value) -> _Line | None:
    """diff(x, dim, prepend=p): the slope of x along dim, where p continues it backwards."""
    x, before = value.args[0], value.kwargs.get("prepend")
    other = set(value.kwargs) - {"prepend", "dim"}
    if len(value.args) != 1 or other or not isinstance(before, View):
        return None
    dim = value.kwargs.get("dim", -1) % len(value.shape)
    if before.shape[dim] != 1 or x.value.dtype not in _INTEGERS:
        return None
    line, first = _line(x), _line(before)
    if line is None or first is None:
        return None
    slope = line.slopes[dim]
    rest = tuple(0 if axis == dim else s for axis, s in enumerate(line.slopes))
    step = _sum(_Line(line.offset, rest), first, -1)
    return _Line(slope, (0,) * len(value.shape)) if step.constant == slope else None


def _running_sum(value: Value) -> _Line | None:
    """The running sum of one number."""
    if len(value.args) + len(value.kwargs) != 2:
        return None
    dim = value.argument(1, "dim", -1) % len(value.shape)
    source = value.args[0]
    known = _constant(source)
    if not isinstance(known, int):
        return None
    return _Line(known, tuple(known if axis == dim else 0 for axis in range(len(value.shape))))


def _constant(view: View) -> Size | None:
    if view.value.dtype == torch.bool:
        truth = _truth(view)
        return int(truth) if isinstance(truth, bool) else None
    line = _line(view)
    return None if line is None else line.constant


def _gathered(value: Value) -> _Line | None:
    """x[i, j, ...] with an index tensor for every dimension of x."""
    base, indices = value.args
    if [dim for dim, _ in indices] != list(range(len(base.shape))):
        return None
    known = _constant(base)
    if known is not None:
        return _Line(known, (0,) * len(value.shape))
    line = _line(base)
    if line is None:
        return None
    total = _Line(line.offset, (0,) * len(value.shape))
    for slope, (_, index) in zip(line.slopes, indices, strict=True):
        if slope == 0:
            continue
        at = _operand(value.whole, index)
        # A negative index would count from the end.
        if at is None or not _never_negative(at):
            return None
        total = _sum(total, _Line(at.offset * slope, tuple(s * slope for s in at.slopes)), 1)
    return total


def _never_negative(line: _Line) -> bool:
    return all(isinstance(n, int) and n >= 0 for n in (line.offset, *line.slopes))


_LINES: dict[str, Callable[[Value], _Line | None]] = {
    "aten.arange": _arange,
    "aten.add": _added,
    "aten.sub": _added,
    "cast": _cast,
    "aten.diff": _diff,
    "aten.cumsum": _running_sum,
    "aten.index": _gathered,
    **dict.fromkeys(_FILLED, _filled),
}
