"""Removes casts between floating types that a computation in fp32 may leave out."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.patterns.dataflow import Value, View, once


def is_float_cast(value: Value) -> bool:
    """Whether a value is a cast between floating types that a computation in fp32 may omit.

    A cast to eight bits is a quantisation that the user requested, so it is not omitted.
    """
    if value.op != "cast":
        return False
    types = [value.dtype, *[v.value.dtype for v in value.operands]]
    return all(t.is_floating_point and t.itemsize > 1 for t in types)


def strip_casts(view: View) -> tuple[View, tuple[Value, ...]]:
    """Returns the view before any casts between floating types, and the casts."""
    if view.value.op != "cast":
        return view, ()  # the usual case
    return _strip_all(view)


@once
def _strip_all(view: View) -> tuple[View, tuple[Value, ...]]:
    return strip_while(view, is_float_cast)


def strip_while(view: View, passes: Callable[[Value], bool]) -> tuple[View, tuple[Value, ...]]:
    """Walks from a view's value to the first argument of that value, and on from argument to
    argument, as long as `passes` accepts the value. Returns (the view before the accepted values,
    the accepted values)."""
    stripped: list[Value] = []
    while passes(view.value):
        stripped.append(view.value)
        view = view.value.args[0].through(view.effect)
    return view, tuple(stripped)


def value_before_casts(value: Value) -> Value:
    """Returns the value before any casts between floating types."""
    while value.op == "cast" and is_float_cast(value):
        value = value.args[0].value
    return value


def strip_widening(view: View) -> tuple[View, tuple[Value, ...]]:
    """Returns the view before casts to wider floating types, which do not change numbers. Also
    returns the casts."""
    return strip_while(view, _widens)


def _widens(value: Value) -> bool:
    return is_float_cast(value) and value.args[0].value.dtype.itemsize < value.dtype.itemsize


def before_widening(view: View) -> View:
    """Returns the view before casts to wider floating types."""
    return strip_widening(view)[0]
