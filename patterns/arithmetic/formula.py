"""Formulas: patterns of views, written as arithmetic.

    X, ALPHA = tensor("x"), number("alpha")
    SWISH = X * call("sigmoid", X) | X * call("sigmoid", ALPHA * X)
    found = SWISH.match(view)
    found.bound["x"], found.bound["alpha"], found.absorbed

Factors and summands may have either order. Matching ignores casts between floating types, and
layout operations (`view`, `transpose`, slices, `expand`) between two steps. A named tensor is bound
as a view that has the dimensions of the matched view. If the matched operations read all their
operands whole, the bound view may have fewer dimensions. It then broadcasts to the dimensions of
the matched view.

The signature of a view consists of the view's last operation and the last operations of its
arguments. The signature determines which formulas can match.
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
# Options, with the values for which an operation behaves as if the option were not given.
_NEUTRAL = {"alpha": 1, "value": 1, "rounding_mode": None}.items()
# The entry of a signature for an argument that is a number.
_NUMBER = "number"
# The entry of a signature for an argument that is not given.
_ABSENT = "absent"
# How many signatures each formula remembers. A model has a few hundred.
_KNOWN = 4096

#: The last operation of a view and the last operations of its arguments, as ATen names, ignoring
#: casts.
Signature = tuple[str, ...]


class Found(NamedTuple):
    """The bindings of a formula's names, and the values that the formula matched. The value that is
    computed last comes first."""

    bound: dict[str, Any]
    absorbed: tuple[Value, ...]


#: A function that continues the matching with the bindings so far. If the function returns None,
#: the formula tries its next alternative.
Then = Callable[[Found], Any]
_Matcher = Callable[[Any, Found, Then], Any]
_Strip = Callable[[View], tuple[View, tuple[Value, ...]]]


@dataclass(frozen=True, eq=False)
class Formula:
    """A pattern of arithmetic. `a | b` tries the formula a, and then b.

    Attributes:
        matcher: A function that matches an argument of an operation.
        roots: The operations that may compute a matched value; None for any operation.
        fits: A function that returns whether an argument with a given signature can match.
        ways: The alternatives of this formula.
    """

    matcher: _Matcher
    roots: frozenset[str] | None
    fits: Callable[[Signature], bool]
    ways: tuple[Formula, ...] = ()

    def match(self, item: Any, then: Then = lambda found: found) -> Any:
        """Calls `then` for each match, and returns the first result of `then` that is not None. If
        there is no such result, returns None.

        item: a view, a number or another argument.
        """
        return self.matcher(item, Found({}, ()), then) if self.may_match(item) else None

    def may_match(self, item: Any) -> bool:
        """Whether the formula can match the last operation of an argument."""
        return self.roots is None or _root(item) in self.roots

    def giving(self, **facts: Any) -> Formula:
        """Returns a formula with the same matches. A match also binds the given names to the given
        facts."""

        def match(item: Any, found: Found, then: Then) -> Any:
            return self.matcher(
                item, found, lambda f: then(Found({**f.bound, **facts}, f.absorbed))
            )

        return replace(self, matcher=match, ways=())

    def named(self, name: str) -> Formula:
        """Returns a formula with the same matches. A match also binds the view to this name. All
        views of one name must be equal."""
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
    """Matches any view, and binds it to a name. All views of one name must be equal.

    holds: one more condition on the view. strip: a function that removes casts from the view.
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
    numbers of one name must be equal. If `known` is a number, matches only this number.

    within: the relative difference that is allowed.
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
    """Matches an elementwise operation on formulas and numbers. ops: the names of the operation,
    separated by spaces, as in "clamp clamp_min".

    holds: one more condition on the value. read: a function that returns the operands of a view of
    the value, for operations whose operands are not their first arguments. It returns None if the
    operation does not fit.
    """
    names = frozenset(op if op == "cast" else f"aten.{op}" for op in ops.split())
    formulas = tuple(one if isinstance(one, Formula) else number(one) for one in operands)
    matchers, count = tuple(one.matcher for one in formulas), len(formulas)
    orders = (1, -1) if names <= _COMMUTE else (1,)

    @lru_cache(_KNOWN)
    def turns_of(signature: Signature) -> tuple[int, ...]:
        """Returns the orders of the arguments in which a formula can match."""
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
    """Matches a clamp, however it is written. The bounds are numbers or ABSENT."""

    def bounds(view: View) -> tuple[Any, ...]:
        return view.value.args[0], *(clamp_bounds(view.value) or ())

    return call("clamp clamp_ hardtanh clamp_min clamp_max", of, low, high, read=bounds)


def reduction(
    op: str, operand: Formula, width: str, holds: Callable[[Value], bool] | None = None
) -> Formula:
    """Matches a reduction `op` over runs of numbers along the last dimension.

    operand: a formula that matches the input of the reduction. The formula gets the input as a view
    [..., n], in which the last dimension is a run of n numbers. width: the name of the length of a
    run. holds: one more condition on the value.
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
    """Matches the largest number of each run along the last dimension, like :func:`reduction`."""
    among = reduction("max", of, width, holds=lambda value: value.kwargs.get("output", 0) == 0)
    return reduction("amax", of, width) | among


def aside(formula: Formula) -> Formula:
    """Returns a formula with the same matches that absorbs no values, so that the matched values
    stay in the graph."""

    def match(item: Any, found: Found, then: Then) -> Any:
        return formula.matcher(item, found, lambda f: then(Found(f.bound, found.absorbed)))

    return replace(formula, matcher=match, ways=())


def _either(ways: tuple[Formula, ...]) -> Formula:
    """Returns a formula that matches any of these formulas, tried in this order."""
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
    """Returns a formula whose last operation is `root`. If root is "", the last operation may be
    any."""
    if not root:
        return Formula(matcher, None, lambda signature: True)
    return Formula(matcher, frozenset({root}), lambda signature: signature[0] == root)


#: Matches an argument that is not given.
ABSENT = _formula(lambda item, found, then: then(found) if item is None else None, _ABSENT)


# --- matching closures ----------------------------------------------------------------------------


def _in_turn(
    matchers: tuple[_Matcher, ...], items: tuple[Any, ...], found: Found, then: Then, at: int = 0
) -> Any:
    """Matches each item with its formula. If a formula does not match, the formulas before it try
    their next alternatives."""
    if at == len(matchers) - 1:
        return matchers[at](items[at], found, then)
    return matchers[at](items[at], found, lambda f: _in_turn(matchers, items, f, then, at + 1))


def _bind(found: Found, name: str, item: Any) -> Found | None:
    """Returns the bindings with a name bound to a number; None if the name is already bound to
    another number."""
    known = found.bound.get(name)
    if known is None:
        return Found({**found.bound, name: item}, found.absorbed)
    return found if known == item else None


def _strip(view: View, strip: _Strip = strip_casts) -> tuple[View, tuple[Value, ...]]:
    """Returns the view before casts, and the casts. If the view cannot be expressed before the
    casts, returns the view itself and no casts."""
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
    """Whether arguments with these last operations can match these formulas."""
    pairs = zip(wanted, given, strict=False)
    return all(formula.roots is None or root in formula.roots for formula, root in pairs)


def _positional(value: Value, count: int) -> tuple[Any, ...] | None:
    """Returns the first `count` arguments of an operation. Returns None if it has another number of
    arguments, or a keyword argument that changes its result. If `count` is one, the operation may
    have more arguments, because these are options."""
    args, kwargs = value.args, value.kwargs
    if len(args) != count and (count != 1 or not args):
        return None
    if kwargs and any(kwargs.get(name, neutral) != neutral for name, neutral in _NEUTRAL):
        return None
    return args[:count]


def _seen(view: View, items: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Returns the parts of the operands that correspond to a view of an elementwise operation's
    result."""
    try:
        return tuple(view.of_operand(one) if isinstance(one, View) else one for one in items)
    except InexpressibleError:
        return None


def _runs_of(view: View) -> View | None:
    """Returns the input of a reduction along the last dimension; None for another view. The result
    must have a floating dtype, because integers would be rounded."""
    value = view.value
    source = value.args[0] if value.args else None
    if not isinstance(source, View) or not source.shape or not value.dtype.is_floating_point:
        return None
    return source if reduced_dims(value) == (len(source.shape) - 1,) else None


def _in_run(view: View, runs: View) -> View | None:
    """Returns the input of a reduction as a view that has each number of a run at the place where
    `view` has the result of the run. The returned view is [..., n] if `view` is [..., 1], or if the
    last dimension of `view` repeats every result n times. Returns None for any other `view`."""
    *lead, last = view.effect.dims or ((),)
    axis, length = len(runs.shape) - 1, runs.shape[-1]
    if last and (last[-1].axis is not None or last[-1].length != length):
        return None
    own = effects.coalesce((*last[:-1], Atom(axis, 1, length)))
    try:
        return runs.through(Effect((*lead, own), (*view.effect.start[:axis], 0)))
    except InexpressibleError:
        return None
