"""Recognises reductions, clamps, fills and other single operations, however they are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewright.patterns.arithmetic.constants import given_number
from tilewright.patterns.dataflow import Value, View

# The position of a bound among the arguments of a clamp, its name, and its default.
_Bound = tuple[int, str, float | None]
_MIN: _Bound = (1, "min", None)
_MAX: _Bound = (2, "max", None)
#: Operations that are true where their operand is false.
INVERSIONS = frozenset({"aten.bitwise_not", "aten.logical_not"})
_BOUNDS: dict[str, tuple[_Bound | None, _Bound | None]] = {
    "aten.clamp": (_MIN, _MAX),
    "aten.clamp_": (_MIN, _MAX),
    "aten.hardtanh": ((1, "min_val", -1.0), (2, "max_val", 1.0)),
    "aten.clamp_min": (_MIN, None),
    "aten.clamp_max": (None, (1, "max", None)),
}


def reduced_dims(value: Value) -> tuple[int, ...]:
    """Returns the dimensions of a reduction or softmax, as nonnegative numbers. Returns () if the
    call names no dimensions."""
    dims = value.argument(1, "dim", ())
    rank = len(value.operands[0].shape) if value.operands else 0
    listed = dims if isinstance(dims, (tuple, list)) else (dims,)
    return tuple(d % rank for d in listed) if rank else ()


def keeps_dim(value: Value) -> bool:
    """Whether a reduction keeps the dimensions that it reduces, with length one."""
    return bool(value.argument(2, "keepdim", False))


def clamp_bounds(value: Value) -> tuple[Any, Any] | None:
    """Returns (lowest, highest) of a clamp. Each is a number, a view or None. Returns None for
    another value."""
    places = _BOUNDS.get(value.op)
    if places is None:
        return None
    low, high = (None if place is None else value.argument(*place) for place in places)
    return low, high


def chosen_by_mask(value: Value) -> tuple[View, Any, Any] | None:
    """Returns (mask, operand where the mask is true, operand elsewhere) of `where` and
    `masked_fill`. Returns None for another value, or if some arguments are keyword arguments."""
    if len(value.args) != 3 or value.kwargs:
        return None
    if value.op == "aten.where":
        mask, one, other = value.args
    elif value.op == "aten.masked_fill":
        other, mask, one = value.args
    else:
        return None
    return (mask, one, other) if isinstance(mask, View) else None


def constant_factor(
    value: Value, number_of: Callable[[Any], float | None] = given_number
) -> tuple[View, float] | None:
    """Returns (x, factor) of a value that is x times a finite factor other than zero. Returns None
    for another value.

    number_of: a function that returns the number that an operand is, or None. `one_number` also
    reads tensors of one element.
    """
    if value.op not in ("aten.mul", "aten.div") or len(value.args) != 2 or value.kwargs:
        return None
    multiplies = value.op == "aten.mul"
    for x, number in (value.args, value.args[::-1])[: 1 + multiplies]:
        factor = number_of(number)
        if not isinstance(x, View) or factor is None or number_of(x) is not None:
            continue
        if factor != 0 and math.isfinite(factor):
            return x, factor if multiplies else 1 / factor
    return None


def floor_quotient(value: Value) -> tuple[View, int] | None:
    """Returns (x, n) if a value is x // n for a positive integer n; None for another value."""
    mode = {} if value.op == "aten.floor_divide" else {"rounding_mode": "floor"}
    if value.op not in ("aten.floor_divide", "aten.div") or dict(value.kwargs) != mode:
        return None
    x, n = value.args
    return (x, n) if isinstance(x, View) and isinstance(n, int) and n > 0 else None


def is_filled(item: Any, number: float) -> bool:
    """Whether an item is the given number, or a tensor that was created with this number as every
    element."""
    return filled_with(item) == number


def filled_with(item: Any) -> float | None:
    """Returns the number that an item is, or with which every element of a tensor was created.
    Returns None for any other item."""
    if not isinstance(item, View):
        return given_number(item)
    value = item.value
    if value.op == "cast":
        number = filled_with(value.operands[0])
        survives = number is not None and float(torch.tensor(number).to(value.dtype)) == number
        return number if survives else None
    kind = value.op.removeprefix("aten.").removeprefix("new_").removesuffix("_like")
    if kind in ("zeros", "ones"):
        return float(kind == "ones")
    if kind in ("tensor", "scalar_tensor"):
        given = value.args[0] if value.args else None
    elif kind == "full":
        named = value.kwargs.get("fill_value")
        given = value.args[-1] if named is None else named
    else:
        return None
    number = filled_with(given)
    # An integer tensor that is filled with 0.5 has the value 0, and a bool tensor has the value
    # True.
    if number is None:
        return None
    return float(torch.tensor(number, dtype=torch.float64).to(value.dtype))


def start_and_step(arange: Value) -> tuple[Any, Any]:
    """Returns the start and the step of an `aten.arange`."""
    given = [a for a in arange.args if not isinstance(a, View)]
    names = ("start", "end", "step") if len(given) > 1 or "end" in arange.kwargs else ("end",)
    named = dict(zip(names, given, strict=False)) | dict(arange.kwargs)
    return named.get("start", 0), named.get("step", 1)
