"""Recognises integers that are a linear function of their own indices, and the results of
comparisons of such integers.

`arange` gives such integers, and so do differences, running sums and gathers of such tensors. If a
mask compares such integers, the elements of the mask can be decided, or reduced to one comparison,
before any number is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.patterns.arithmetic.steps import INVERSIONS, filled_with, start_and_step
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Effect, Size

#: The dtypes of indices.
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Line:
    """The value offset + sum(slopes[d] * index[d]) at every index of a tensor."""

    offset: Size
    slopes: tuple[Size, ...]

    @property
    def constant(self) -> Size | None:
        return self.offset if not any(self.slopes) else None


@dataclass(frozen=True)
class Compared:
    """A comparison that is True where low <= high + slack. Each of `low` and `high` is a view of
    integers, or an int."""

    low: View | int
    high: View | int
    slack: int


#: True or False for all elements, a comparison, or None if the truth is not known.
Truth = bool | Compared | None


def line_of(view: View) -> Line | None:
    """Returns a view of integers as a linear function of its indices; else None."""
    inner = _LINES.get(view.value.op, _filled)(view.value)
    return None if inner is None else _seen_through(inner, view.effect)


def _seen_through(line: Line, effect: Effect) -> Line | None:
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
    return Line(offset, tuple(slopes))


def line_of_operand(view: View, item: Any) -> Line | None:
    """Returns the line of an operand `item`, in the shape of `view`. `view` shows an element-wise
    value that has this operand."""
    if isinstance(item, View):
        return line_of(view.of_operand(item))
    whole = isinstance(item, int) and not isinstance(item, bool)
    return Line(item, (0,) * len(view.shape)) if whole else None


def sum_lines(one: Line, other: Line, sign: int) -> Line:
    """Returns one + sign * other."""
    slopes = (a + sign * b for a, b in zip(one.slopes, other.slopes, strict=True))
    return Line(one.offset + sign * other.offset, tuple(slopes))


def _arange(value: Value) -> Line | None:
    start, step = start_and_step(value)
    plain = isinstance(start, int) and isinstance(step, int)
    return Line(start, (step,)) if plain and value.dtype in INTEGERS else None


def _added(value: Value) -> Line | None:
    if len(value.args) != 2 or value.kwargs.get("alpha", 1) != 1:
        return None
    if value.dtype not in INTEGERS:
        return None
    one, other = (line_of_operand(value.whole, item) for item in value.args)
    sign = -1 if value.op == "aten.sub" else 1
    return None if one is None or other is None else sum_lines(one, other, sign)


def _cast(value: Value) -> Line | None:
    source = value.operands[0]
    if value.dtype not in INTEGERS or source.value.dtype not in INTEGERS:
        return None
    return line_of(source)


def _filled(value: Value) -> Line | None:
    number = filled_with(value.whole)
    whole = number is not None and number.is_integer()
    return Line(int(number), (0,) * len(value.shape)) if whole else None  # type: ignore[arg-type]


def _diff(value: Value) -> Line | None:
    """Reads diff(x, dim, prepend=p). The result is the slope of x along dim, if p continues x
    backwards."""
    x, before = value.args[0], value.kwargs.get("prepend")
    other = set(value.kwargs) - {"prepend", "dim"}
    if len(value.args) != 1 or other or not isinstance(before, View):
        return None
    dim = value.kwargs.get("dim", -1) % len(value.shape)
    if before.shape[dim] != 1 or x.value.dtype not in INTEGERS:
        return None
    line, first = line_of(x), line_of(before)
    if line is None or first is None:
        return None
    slope = line.slopes[dim]
    rest = tuple(0 if axis == dim else s for axis, s in enumerate(line.slopes))
    step = sum_lines(Line(line.offset, rest), first, -1)
    return Line(slope, (0,) * len(value.shape)) if step.constant == slope else None


def _running_sum(value: Value) -> Line | None:
    """Reads the running sum of one number."""
    if len(value.args) + len(value.kwargs) != 2 or value.dtype not in INTEGERS:
        return None
    dim = value.argument(1, "dim", -1) % len(value.shape)
    source = value.args[0]
    known = same_everywhere(source)
    if not isinstance(known, int):
        return None
    return Line(known, tuple(known if axis == dim else 0 for axis in range(len(value.shape))))


def same_everywhere(view: View) -> Size | None:
    """Returns the integer that all elements of a view are equal to, where True counts as 1. Returns
    None if the elements differ or are not known."""
    if view.value.dtype == torch.bool:
        truth = truth_of(view)
        return int(truth) if isinstance(truth, bool) else None
    line = line_of(view)
    return None if line is None else line.constant


def _gathered(value: Value) -> Line | None:
    """Reads x[i, j, ...], with an index tensor for every dimension of x."""
    base, indices = value.args
    if [dim for dim, _ in indices] != list(range(len(base.shape))):
        return None
    known = same_everywhere(base)
    if known is not None:
        return Line(known, (0,) * len(value.shape))
    line = line_of(base)
    if line is None:
        return None
    total = Line(line.offset, (0,) * len(value.shape))
    for slope, (_, index) in zip(line.slopes, indices, strict=True):
        if slope == 0:
            continue
        if not isinstance(index, View) or index.value.dtype not in INTEGERS:
            return None  # bool and uint8 tensors are masks of rows, not indices
        at = line_of_operand(value.whole, index)
        # A negative index would count from the end.
        if at is None or not _never_negative(at):
            return None
        total = sum_lines(total, Line(at.offset * slope, tuple(s * slope for s in at.slopes)), 1)
    return total


def _never_negative(line: Line) -> bool:
    return all(isinstance(n, int) and n >= 0 for n in (line.offset, *line.slopes))


_LINES: dict[str, Callable[[Value], Line | None]] = {
    "aten.arange": _arange,
    "aten.add": _added,
    "aten.sub": _added,
    "cast": _cast,
    "aten.diff": _diff,
    "aten.cumsum": _running_sum,
    "aten.index": _gathered,
}


# --- truth ----------------------------------------------------------------------------------------


def is_of_bits(value: Value) -> bool:
    """Whether a value is a bitwise operation on integers. Such an operation differs from the
    logical one: `~1` is -2."""
    return value.op.startswith("aten.bitwise_") and value.dtype != torch.bool


def truth_of(view: View) -> Truth:
    """Returns the truth of a boolean tensor. The sides of a comparison have the shape of the
    view."""
    value = view.value
    if is_of_bits(value):
        return None
    if value.op in _JOINED and len(value.operands) == 2:
        one, other = (truth_of(view.of_operand(v)) for v in value.operands)
        return _JOINED[value.op](one, other)
    if value.op in INVERSIONS and len(value.operands) == 1:
        return negated(truth_of(view.of_operand(value.operands[0])))
    if value.op in _ORDERS and len(value.args) == 2 and not value.kwargs:
        return _compared(view)
    line = line_of(view)
    known = None if line is None else line.constant
    return bool(known) if isinstance(known, int) else None


def _both(one: Truth, other: Truth) -> Truth:
    if one is False or other is False:
        return False
    if one is True or other is True:
        return other if one is True else one
    return None


def negated(truth: Truth) -> Truth:
    """Returns the negation of a truth: the negation of low <= high + slack is high <= low - slack -
    1."""
    if isinstance(truth, Compared):
        return Compared(truth.high, truth.low, -truth.slack - 1)
    return None if truth is None else not truth


_JOINED: dict[str, Callable[[Truth, Truth], Truth]] = {
    "aten.bitwise_and": _both,
    "aten.logical_and": _both,
}

#: For each operation: (whether its operands are exchanged, slack), for a <= b, a < b, a >= b and a
#: > b.
_ORDERS = {
    "aten.le": (False, 0),
    "aten.lt": (False, -1),
    "aten.ge": (True, 0),
    "aten.gt": (True, -1),
    "aten.eq": None,
    "aten.ne": None,
}


def _compared(view: View) -> Truth:
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
    if not all(_holds_integers(a) for a in value.args):
        return None
    low, high = (view.of_operand(a) if isinstance(a, View) else a for a in value.args)
    return Compared(high, low, slack) if swapped else Compared(low, high, slack)


def _holds_integers(item: Any) -> bool:
    if isinstance(item, View):
        return item.value.dtype in INTEGERS
    return isinstance(item, int) and not isinstance(item, bool)


def _difference(view: View) -> Size | None:
    """Returns the difference of the operands of an element-wise value, if the difference is the
    same for all elements. Otherwise, returns None."""
    lines = [line_of_operand(view, item) for item in view.value.args]
    if any(line is None for line in lines):
        return None
    one, other = lines
    return sum_lines(one, other, -1).constant  # type: ignore[arg-type]
