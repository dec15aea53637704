"""Finds values that the graph shows to be zero or positive."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.patterns.arithmetic.constants import constant_of
from tilewright.patterns.arithmetic.steps import chosen_by_mask, clamp_bounds, filled_with
from tilewright.patterns.dataflow import Value, View

# The largest number of values that a search visits back from a value.
_REACH = 24
_ALWAYS = frozenset(
    f"aten.{name}" for name in ("abs", "exp", "exp2", "sigmoid", "softmax", "square")
)
# Operations whose result is not negative if no operand is negative.
_KEEPING = frozenset(
    f"aten.{name}"
    for name in (
        "add", "mul", "maximum", "minimum", "amax", "amin", "max", "min", "sum", "mean", "sqrt",
        "clone", "cat", "index", "index_select", "expand", "flip",
    )
)  # fmt: skip


def never_negative(item: Any, *, zero: bool = True, reach: int = _REACH) -> bool:
    """Whether no element of a view is below zero, or whether a number is not below zero. Elements
    may be NaN.

    zero: whether -0 is allowed. A number that is divided by -0 would be negative.
    """
    if isinstance(item, (bool, int, float)):
        return item >= 0 and not (item == 0 and np.signbit(item))
    if not isinstance(item, View) or reach == 0:
        return False
    number = filled_with(item)
    if number is not None:
        return never_negative(number)
    numbers = constant_of(item)
    if numbers is not None:
        return not np.any(np.signbit(numbers) & ~np.isnan(numbers))
    value = item.value
    if not value.dtype.is_floating_point:
        return not value.dtype.is_signed
    if value.op in _ALWAYS:
        return True
    if clamp_bounds(value) is not None:
        return _clamped(value, zero, reach)
    if value.op in _KEEPING:
        return _kept(value, zero, reach)
    rule = _RULES.get(value.op)
    return rule is not None and rule(value, zero, reach - 1)


def _clamped(value: Value, zero: bool, reach: int) -> bool:
    low, high = clamp_bounds(value) or (None, None)
    if high is not None and not never_negative(high, zero=zero, reach=reach - 1):
        return False
    bounded = isinstance(low, (int, float)) and (low >= 0 if zero else low > 0)
    return bounded or never_negative(value.args[0], zero=zero, reach=reach - 1)


def _kept(value: Value, zero: bool, reach: int) -> bool:
    if value.kwargs.get("alpha", 1) != 1:
        return False
    if value.op == "aten.mul" and value.args[0] == value.args[1]:
        return True
    of = value.args[:2] if value.op in _OF_TWO else value.operands
    if value.op in ("aten.index", "aten.index_select"):
        of = value.args[:1]
    return len(of) > 0 and all(never_negative(v, zero=zero, reach=reach - 1) for v in of)


_OF_TWO = ("aten.add", "aten.mul", "aten.maximum", "aten.minimum")


def _cast(value: Value, zero: bool, reach: int) -> bool:
    return never_negative(value.args[0], zero=zero, reach=reach)


def _quotient(value: Value, zero: bool, reach: int) -> bool:
    one, other = value.args[:2]
    return never_negative(one, zero=zero, reach=reach) and never_negative(
        other, zero=False, reach=reach
    )


def _inverse(value: Value, zero: bool, reach: int) -> bool:
    return never_negative(value.args[0], zero=False, reach=reach)


def _either(value: Value, zero: bool, reach: int) -> bool:
    _, *sides = chosen_by_mask(value) or (None,)
    return bool(sides) and all(never_negative(v, zero=zero, reach=reach) for v in sides)


def _without_nan(value: Value, zero: bool, reach: int) -> bool:
    given = (*value.args[1:3], *(value.kwargs.get(name) for name in ("nan", "posinf")))
    known = all(item is None or never_negative(item) for item in given)
    return known and never_negative(value.args[0], zero=zero, reach=reach)


_RULES: dict[str, Any] = {
    "cast": _cast,
    "aten.div": _quotient,
    "aten.reciprocal": _inverse,
    "aten.where": _either,
    "aten.masked_fill": _either,
    "aten.nan_to_num": _without_nan,
}
