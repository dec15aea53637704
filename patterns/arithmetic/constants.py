"""Evaluates constants that the graph computes without inputs, such as shift tables, column orders
and group numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Dim

_MOST = 1 << 20
_MADE = {"aten.arange", "aten.tensor", "aten.full", "aten.zeros", "aten.ones"}
_COMPUTED = {
    "aten.add", "aten.sub", "aten.mul", "aten.neg", "aten.floor_divide", "aten.remainder",
    "aten.bitwise_and", "aten.bitwise_or", "aten.bitwise_left_shift", "aten.bitwise_right_shift",
    "aten.sqrt", "aten.div", "aten.reciprocal",
}  # fmt: skip

_DIVISIONS = ("aten.floor_divide", "aten.remainder")


def number_of(item: float | fx.Node) -> float:
    """Returns a number of the graph as a float. With `dynamic=True`, Dynamo traces floats as
    symbols; this function specialises such a symbol."""
    return float(item.meta["example_value"] if isinstance(item, fx.Node) else item)


def given_number(item: Any) -> float | None:
    """Returns the number that an argument stands for. Dynamo may have traced it as a symbol.
    Returns None for a tensor, and for a symbolic size, which must not be specialised."""
    if isinstance(item, fx.Node):
        traced = isinstance(item.meta.get("example_value"), (float, torch.SymFloat))
        return number_of(item) if traced else None
    return float(item) if isinstance(item, (int, float)) else None


def one_number(item: Any) -> float | None:
    """Returns the number that an operand is: a number, or a tensor that has one known element.
    Returns None for any other operand."""
    if not isinstance(item, View):
        return given_number(item)
    numbers = constant_of(item)
    return float(numbers.reshape(())) if numbers is not None and numbers.size == 1 else None


def constant_of(view: View) -> np.ndarray | None:
    """Returns the numbers of a view that depends on no input. Broadcast dimensions have length one
    in the result.

    Returns None if the view depends on an input, or if it has too many numbers.
    """
    tensor = _evaluate(view.value)
    return None if tensor is None else _select(tensor, view)


def _evaluate(value: Value) -> torch.Tensor | None:
    if not all(isinstance(n, int) for n in value.shape) or effects.product(value.shape) > _MOST:
        return None
    if value.op in _MADE:
        return _made(value)
    if value.op == "cast":
        operand = _operand(value.args[0])
        return None if operand is None else operand.to(value.dtype)
    if value.op in _COMPUTED and value.operands and dict(value.kwargs) in ({}, {"alpha": 1}):
        operands = [_operand(a) if isinstance(a, View) else a for a in value.args]
        if any(not isinstance(a, (int, float, torch.Tensor)) for a in operands):
            return None
        if value.op in _DIVISIONS and not torch.as_tensor(operands[1]).all():
            return None  # division by zero: for integers, it is an error or undefined
        result: torch.Tensor = getattr(torch, value.op.removeprefix("aten."))(*operands)
        return result
    if value.op == "aten.index":
        return _picked(value)
    return None


def _made(value: Value) -> torch.Tensor | None:
    numbers = [*value.args, *value.kwargs.values()]
    if value.operands or not _plain(numbers):
        return None
    named = {k: v for k, v in value.kwargs.items() if k in ("start", "end", "step")}
    positional = value.args
    if value.op in ("aten.zeros", "aten.ones"):
        return torch.full(value.shape, float(value.op == "aten.ones")).to(value.dtype)
    if value.op == "aten.full":
        fill = value.kwargs.get("fill_value", positional[-1] if positional else None)
        return torch.full(value.shape, fill).to(value.dtype)
    if value.op == "aten.tensor":
        return torch.tensor(positional[0], dtype=value.dtype)
    return torch.arange(*positional, **named).to(value.dtype)


def _plain(items: Any) -> bool:
    """Whether all arguments are numbers, dtypes or similar objects, and none is a symbol."""
    if isinstance(items, (list, tuple)):
        return all(_plain(item) for item in items)
    plain = (int, float, str, torch.dtype, torch.device, torch.layout)
    return items is None or isinstance(items, plain)


def _picked(value: Value) -> torch.Tensor | None:
    base, indices = value.args
    tensor = _operand(base)
    if tensor is None or len(indices) != 1:
        return None
    (dim, index), *_ = indices
    at = torch.tensor(index) if isinstance(index, tuple) else _operand(index)
    if at is None or at.dim() != 1 or at.dtype == torch.bool:
        return None
    size, at = tensor.shape[dim], at.long()
    if bool(((at < -size) | (at >= size)).any()):
        return None  # the graph raises an error
    return tensor.index_select(dim, torch.where(at < 0, at + size, at))


def _operand(view: View) -> torch.Tensor | None:
    tensor = _evaluate(view.value)
    if tensor is None:
        return None
    numbers = torch.from_numpy(_select(tensor, view)).to(tensor.dtype)
    return numbers.expand(view.shape)


def _select(tensor: torch.Tensor, view: View) -> np.ndarray:
    """Returns the numbers that a view selects from the numbers of its value."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        tensor = tensor.float()  # numpy lacks bfloat16 and 8-bit floats
    strides = tensor.contiguous().stride()
    at = np.array(sum(int(s) * n for s, n in zip(view.effect.start, strides, strict=True)))
    for dim in effects.once(view.effect.dims):
        at = at[..., None] + offsets(dim, dict(enumerate(strides)))
    return np.asarray(tensor.contiguous().view(-1).numpy()[at])


def offsets(dim: Dim, strides: Mapping[int, int]) -> np.ndarray:
    """Returns, for each index of a dimension, the distance in the base's memory from index 0 of the
    dimension to this index. strides: the strides of the base's axes. An axis without a stride
    counts as 0."""
    at = np.zeros(1, dtype=np.int64)
    for atom in dim:
        step = 0 if atom.axis is None else atom.step * strides.get(atom.axis, 0)
        at = (at[:, None] + np.arange(int(atom.length)) * step).reshape(-1)
    return at
