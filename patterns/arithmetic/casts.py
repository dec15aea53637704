"""Casts that fp32 arithmetic may leave out."""

from __future__ import annotations

from tilewright.patterns.dataflow import Value, View, once


def is_float_cast(value: Value) -> bool:
    """Whether a value is a cast between floating types that fp32 arithmetic may leave out.

    A detour through eight bits is a quantisation the user asked for, and stays.
    """
    if value.op != "cast":
        return False
    types = (value.dtype, *(v.value.dtype for v in value.operands))
    return all(t.is_floating_point and t.itemsize > 1 for t in types)


def strip_casts(view: View) -> tuple[View, tuple[Value, ...]]:
    """The view before any casts between floating types, and the casts."""
    if view.value.op != "cast":
        return view, ()  # nearly all
    return _strip_all(view.value) if view.is_whole else _strip(view)


@once
def _strip_all(value: Value) -> tuple[View, tuple[Value, ...]]:
    return _strip(value.whole)


def _strip(view: View) -> tuple[View, tuple[Value, ...]]:
    stripped: list[Value] = []
    while is_float_cast(view.value):
        inner = view.value.args[0]
        stripped.append(view.value)
        view = inner.through(view.effect)
    return view, tuple(stripped)


def value_before_casts(value: Value) -> Value:
    """What a value is computed from by casts between floating types alone, or the value."""
    while value.op == "cast" and is_float_cast(value):
        value = value.args[0].value
    return value


def strip_widening(view: View) -> tuple[View, tuple[Value, ...]]:
    """The view before casts to wider floating types, which change no number, and the casts."""
    stripped: list[Value] = []
    while is_float_cast(view.value):
        inner = view.value.args[0]
        if inner.value.dtype.itemsize >= view.value.dtype.itemsize:
            break
        stripped.append(view.value)
        view = inner.through(view.effect)
    return view, tuple(stripped)


def before_widening(view: View) -> View:
    """The view before casts to wider floating types."""
    return strip_widening(view)[0]
