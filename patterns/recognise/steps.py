"""What one operation does, whichever way its arguments are given: reductions, clamps, fills."""

from __future__ import annotations

from typing import Any

from torch import fx

from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.recognise.constants import number_of

_BOUNDS = {
    "aten.clamp": ((1, "min"), (2, "max")),
    "aten.clamp_": ((1, "min"), (2, "max")),
    "aten.hardtanh": ((1, "min_val"), (2, "max_val")),
    "aten.clamp_min": ((1, "min"), None),
    "aten.clamp_max": (None, (1, "max")),
}


def reduced_dims(value: Value) -> tuple[int, ...]:
    """The dimensions, from 0 on, that a reduction or softmax goes over; () where none is named."""
    dims = value.argument(1, "dim", ())
    rank = len(value.args[0].shape)
    return tuple(d % rank for d in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def keeps_dim(value: Value) -> bool:
    """Whether a reduction leaves a dimension of one."""
    return bool(value.argument(2, "keepdim", False))


def clamp_bounds(value: Value) -> tuple[Any, Any] | None:
    """(lowest, highest) of a clamp, numbers, views or None; None for another value."""
    places = _BOUNDS.get(value.op)
    if places is None:
        return None
    low, high = (None if place is None else value.argument(*place) for place in places)
    return low, high


def is_filled(item: Any, number: float) -> bool:
    """Whether a number, or every element of a tensor as it was made, is `number`."""
    if not isinstance(item, View):
        return isinstance(item, (int, float, fx.Node)) and number_of(item) == number
    value = item.value
    while value.op == "cast":
        value = value.operands[0].value
    kind = value.op.removeprefix("aten.").removeprefix("new_").removesuffix("_like")
    if kind in ("zeros", "ones"):
        return number == (kind == "ones")
    if kind == "full":
        return is_filled(value.kwargs.get("fill_value", value.args[-1]), number)
    return kind in ("tensor", "scalar_tensor") and is_filled(value.args[0], number)
