"""Formulas to match views with, written as arithmetic.

    X, ALPHA = tensor("x"), number("alpha")
    SWISH = X * call("sigmoid", X) | X * call("sigmoid", ALPHA * X)
    found = SWISH.match(view)
    found.bound["x"], found.bound["alpha"], found.absorbed

Factors and summands match in either order. Matching ignores casts between floating types, and
layout (`view`, `transpose`, slices, `expand`) between two steps. A named tensor is bound as a view
with the dimensions of the matched view. If all values in between are read whole, the bound view may
have fewer dimensions and broadcast. A view's signature, that is its last operation and the last
operations of its arguments, tells which formulas can match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isclose
from typing import Any, NamedTuple

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts, value_before_casts
from tilewright.patterns.arithmetic.constants import given_number
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.arithmetic.steps import clamp_bounds, reduced_dims
from tilewright.patterns.dataflow import Value, View, once
from tilewright.patterns.effects import Atom, Effect, InexpressibleError

_COMMUTE = frozenset({"aten.add", "aten.mul"})
# Options with the values that leave an operation plain.
_NEUTRAL = {"alpha": 1, "value": 1, "rounding_mode": None}.items()
# The roots (last operations) of arguments that are not views.
_NUMBER, _ABSENT = "number", "absent"
# The number of signatures remembered for each formula; a model has a few hundred.
_KNOWN = 4096

#: The last operations of a view and of its arguments, by ATen's names, without casts.
Signature = tuple[str, ...]


class Found(NamedTuple):
    """Bindings of a formula's names, and the values that it matched, the last one first."""

    bound: dict[str, Any]
    absorbed: tuple[Value, ...]


#: Continues with the bindings so far. If it returns None, the formula tries its next alternative.
Then = Callable[[Found], Any]
_Matcher = Callable[[Any, Found, Then], Any]
_Strip = Callable[[View], tuple[View, tuple[Value, ...]]]


@dataclass(frozen=True, eq=False)
class Formula:
    """A pattern of arithmetic; `|` tries the first formula, then the second.

    matcher: matches an argument. roots: the possible last operations, None for any. fits: whether
    an argument with a signature can match. ways: the alternatives of this formula.
    """

    matcher: _Matcher
    roots: frozenset[str] | None
    fits: Callable[[Signature], bool]
    ways: tuple[Formula, ...] = ()

    def match(self, item: Any, then: Then = lambda found: found) -> Any:
        """Returns the result of `then` for the first match for which it is not None; else None.

        item: a view, a number or another argument.
        """
        return self.matcher(item, Found({}, ()), then) if self.may_match(item) else None

    def may_match(self, item: Any) -> bool:
        """Whether the last operation of an argument is one of the formula's."""
        return self.roots is None or _root(item) in self.roots

    def giving(self, **facts: Any) -> Formula:
        """Returns the formula whose matches also bind these names."""

        def match(item: Any, found: Found, then: Then) -> Any:
            return self.matcher(
                item, found, lambda f: then(Found({**f.bound, **facts}, f.absorbed))
            )

        return replace(self, matcher=match, ways=())

    def named(self, name: str) -> Formula:
        """Returns the formula whose matches also bind the view. All views of one name are equal."""
        view = tensor(name)

        def match(item: Any, found: Found, then: Then) -> Any:
            def bind(so_far: Found) -> Any:
                return view.matcher(item, so_far, lambda f: then(Found(f.bound, so_far.absorbed)))

            return self.matcher(item, found, bind)

        return replace(self, matcher=match, ways=())

    def __or__(self, other: Formula) -> Formula:
        return _either((*(self.ways or (self,)), *(other.ways or (other,))))

    def __add__(self, other: Any) -> Formula:
        return call("add", self, other)

    def __mul__(self, other: Any) -> Formula:
        return call("mul", self, other)

    def __sub__(self, other: Any) -> Formula:
        return call("sub", self, other)

    def __truediv__(self, other: Any) -> Formula:
        return call("div", self, other)

    def __rtruediv__(self, other: Any) -> Formula:
        return call("div", other, self)

    def __pow__(self, other: Any) -> Formula:
        return call("pow", self, other)

    __radd__, __rmul__ = __add__, __mul__


def tensor(
    name: str, holds: Callable[[View], bool] | None = None, strip: _Strip = strip_casts
) -> Formula:
    """Matches any view, and binds it to a name. All views of one name are equal.

    holds: a further condition. strip: removes casts from the view.
    """

    def match(item: Any, found: Found, then: Then) -> Any:
        if not isinstance(item, View):
            return None
        bare, casts = _strip(item, strip)
        bound, known = found.bound, found.bound.get(name)
        if known is None:
            if holds is not None and not holds(bare):
                return None
            bound = {**bound, name: bare}
        elif not equal_values(known, bare):
            return None
        return then(Found(bound, (*found.absorbed, *casts)))

    return _formula(match)


def number(known: str | float, within: float = 0.0) -> Formula:
    """Matches a number. If `known` is a name, matches any number and binds the name to it; all
    numbers of one name are equal. Otherwise matches only the number `known`.

    within: the allowed relative difference.
    """

    def match(item: Any, found: Found, then: Then) -> Any:
        given = given_number(item)
        if given is None:
            return None
        if isinstance(known, str):
            bound = _bind(found, known, given)
            return None if bound is None else then(bound)
        return then(found) if isclose(given, known, rel_tol=within) else None

    return _formula(match, _NUMBER)


def call(
    ops: str,
    *operands: Any,
    holds: Callable[[Value], bool] | None = None,
    read: Callable[[View], tuple[Any, ...] | None] | None = None,
) -> Formula:
    """Matches an element-wise operation on formulas and numbers, one of `ops`, as in "clamp
    clamp_min".

    holds: a further condition on the value. read: returns the operands of a view of the value, if
    they are not its first arguments; None if the operation does not fit.
    """
    names = frozenset(op if op == "cast" else f"aten.{op}" for op in ops.split())
    formulas = tuple(one if isinstance(one, Formula) else number(one) for one in operands)
    matchers, count = tuple(one.matcher for one in formulas), len(formulas)
    orders = (1, -1) if names <= _COMMUTE else (1,)

    @lru_cache(_KNOWN)
    def turns_of(signature: Signature) -> tuple[int, ...]:
        """Returns the orders of the arguments that can match."""
        if signature[0] not in names:
            return ()
        return tuple(turn for turn in orders if read or _fit(formulas, signature[1:][::turn]))

    def match(item: Any, found: Found, then: Then) -> Any:
        turns = turns_of(_signature(item))
        if not turns:
            return None
        bare, casts = _strip(item)
        value = bare.value
        if value.op not in names or (holds is not None and not holds(value)):
            return None
        items = _positional(value, count) if read is None else read(bare)
        if items is None or (not bare.is_whole and (items := _seen(bare, items)) is None):
            return None
        found = Found(found.bound, (*found.absorbed, *casts, value))
        for turn in turns:
            answer = _in_turn(matchers, items[::turn], found, then)
            if answer is not None:
                return answer
        return None

    return Formula(match, names, lambda signature: bool(turns_of(signature)))


def clamp(of: Formula, low: Formula, high: Formula) -> Formula:
    """Matches a clamp in any of its spellings, with bounds that are numbers or ABSENT."""

    def bounds(view: View) -> tuple[Any, ...]:
        return view.value.args[0], *(clamp_bounds(view.value) or ())

    return call("clamp clamp_ hardtanh clamp_min clamp_max", of, low, high, read=bounds)


def reduction(
    op: str, operand: Formula, width: str, holds: Callable[[Value], bool] | None = None
) -> Formula:
    """Matches a reduction `op` of each run of numbers along the last dimension.

    operand: matches the input, in a view that has each number of a run at the index of the run's
    result. width: the name of the length of a run. holds: a further condition on the value.
    """
    name = f"aten.{op}"

    def match(item: Any, found: Found, then: Then) -> Any:
        if not isinstance(item, View):
            return None
        bare, casts = _strip(item)
        value = bare.value
        runs = _runs_of(bare) if value.op == name else None
        if runs is None or (holds is not None and not holds(value)):
            return None
        bound, inner = _bind(found, width, runs.shape[-1]), _in_run(bare, runs)
        if bound is None or inner is None:
            return None
        absorbed = (*found.absorbed, *casts, value)
        return operand.matcher(inner, Found(bound.bound, absorbed), then)

    return _formula(match, name)


def largest(of: Formula, width: str) -> Formula:
    """Matches the largest number of each run along the last dimension; see :func:`reduction`."""
    among = reduction("max", of, width, holds=lambda value: value.kwargs.get("output", 0) == 0)
    return reduction("amax", of, width) | among


def aside(formula: Formula) -> Formula:
    """Returns a formula with the same matches that absorbs no values: they stay in the graph."""

    def match(item: Any, found: Found, then: Then) -> Any:
        return formula.matcher(item, found, lambda f: then(Found(f.bound, found.absorbed)))

    return replace(formula, matcher=match, ways=())


def _either(ways: tuple[Formula, ...]) -> Formula:
    """Returns a formula that matches any of these, tried in order."""
    roots = [way.roots for way in ways if way.roots is not None]

    @lru_cache(_KNOWN)
    def matchers_of(signature: Signature) -> tuple[_Matcher, ...]:
        return tuple(way.matcher for way in ways if way.fits(signature))

    def match(item: Any, found: Found, then: Then) -> Any:
        for matcher in matchers_of(_signature(item)):
            answer = matcher(item, found, then)
            if answer is not None:
                return answer
        return None

    known = frozenset().union(*roots) if len(roots) == len(ways) else None
    return Formula(match, known, lambda signature: bool(matchers_of(signature)), ways)


def _formula(matcher: _Matcher, root: str = "") -> Formula:
    """Returns a formula whose last operation is `root`, or any."""
    if not root:
        return Formula(matcher, None, lambda signature: True)
    return Formula(matcher, frozenset({root}), lambda signature: signature[0] == root)


#: Matches an argument that is not given.
ABSENT = _formula(lambda item, found, then: then(found) if item is None else None, _ABSENT)


# --- matching closures ----------------------------------------------------------------------------


def _in_turn(
    matchers: tuple[_Matcher, ...], items: tuple[Any, ...], found: Found, then: Then, at: int = 0
) -> Any:
    """Matches each item with its formula. If a later one fails, the earlier ones try their next
    alternatives."""
    if at == len(matchers) - 1:
        return matchers[at](items[at], found, then)
    return matchers[at](items[at], found, lambda f: _in_turn(matchers, items, f, then, at + 1))


def _bind(found: Found, name: str, item: Any) -> Found | None:
    """Returns the bindings with a name bound to a number; None if it is bound to another one."""
    known = found.bound.get(name)
    if known is None:
        return Found({**found.bound, name: item}, found.absorbed)
    return found if known == item else None


def _strip(view: View, strip: _Strip = strip_casts) -> tuple[View, tuple[Value, ...]]:
    """Returns the view before casts, and the casts; the view itself if it cannot be expressed
    before them."""
    if view.value.op != "cast":
        return view, ()
    try:
        return strip(view)
    except InexpressibleError:
        return view, ()


def _signature(item: Any) -> Signature:
    if not isinstance(item, View):
        return (_ABSENT,) if item is None else (_NUMBER,)
    return _signature_of(item.value)


@once
def _signature_of(value: Value) -> Signature:
    value = value_before_casts(value)
    return (value.op, *(_root(item) for item in value.args))


def _root(item: Any) -> str:
    if not isinstance(item, View):
        return _ABSENT if item is None else _NUMBER
    return value_before_casts(item.value).op


def _fit(wanted: Sequence[Formula], given: Signature) -> bool:
    """Whether arguments with these roots can match formulas."""
    pairs = zip(wanted, given, strict=False)
    return all(formula.roots is None or root in formula.roots for formula, root in pairs)


def _positional(value: Value, count: int) -> tuple[Any, ...] | None:
    """Returns the first `count` arguments of a plain operation; None for another. More arguments
    are allowed if `count` is one: they are options."""
    args, kwargs = value.args, value.kwargs
    if len(args) != count and (count != 1 or not args):
        return None
    if kwargs and any(kwargs.get(name, neutral) != neutral for name, neutral in _NEUTRAL):
        return None
    return args[:count]


def _seen(view: View, items: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns, for a view of an element-wise value, the corresponding parts of the value's
    operands."""
    try:
        return tuple(view.of_operand(one) if isinstance(one, View) else one for one in items)
    except InexpressibleError:
        return None


def _runs_of(view: View) -> View | None:
    """Returns the input of a reduction along the last dimension; else None. The result must have a
    floating type: integers would be rounded."""
    value = view.value
    source = value.args[0] if value.args else None
    if not isinstance(source, View) or not source.shape or not value.dtype.is_floating_point:
        return None
    return source if reduced_dims(value) == (len(source.shape) - 1,) else None


def _in_run(view: View, runs: View) -> View | None:
    """Returns the input of a reduction as a view that has each number of a run where `view` has the
    run's result: [..., n] for [..., 1], or for a view whose last dimension repeats every result n
    times. None for another view."""
    *lead, last = view.effect.dims or ((),)
    axis, length = len(runs.shape) - 1, runs.shape[-1]
    if last and (last[-1].axis is not None or last[-1].length != length):
        return None
    own = effects.coalesce((*last[:-1], Atom(axis, 1, length)))
    try:
        return runs.through(Effect((*lead, own), (*view.effect.start[:axis], 0)))
    except InexpressibleError:
        return None
