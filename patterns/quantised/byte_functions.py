"""Recognises decoders of 8-bit codes by running them on all 256 bytes.

A decoder may unpack bits, use a look-up table, compute with sign and exponent, or reinterpret bytes
as another dtype. In each case it is a function of one byte. Two decoders are equal if and only if
their results are equal for all bytes. Each operation runs in the dtype that it has in the graph, so
that it wraps around and rounds as in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.patterns.arithmetic.constants import constant_of
from tilewright.patterns.dataflow import Value, View, upstream
from tilewright.patterns.effects import Effect, InexpressibleError
from tilewright.patterns.quantised.words import follow

_BYTES = (
    torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip

_ELEMENTWISE = frozenset({
    "add", "sub", "mul", "div", "neg", "abs", "sign", "where", "remainder", "floor_divide", "pow",
    "exp2", "ldexp", "clamp", "minimum", "maximum", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "logical_and", "logical_or",
    "logical_not", "eq", "ne", "lt", "le", "gt", "ge", "masked_fill",
})  # fmt: skip
# The largest number of values that a search visits back to a look-up table.
_REACH = 64
_OPTIONS = {"alpha", "rounding_mode", "min", "max"}


@dataclass(frozen=True, eq=False)
class ByteFunction:
    """A view in which each element is `table[byte]`, where `byte` is the element at the same place
    in `leaf`.

    Attributes:
        leaf: A view of stored or computed bytes, with the same shape as the decoded view. Its dtype
            may be an 8-bit float.
        table: The results, [256], or [16] if only bytes below 16 can be looked up.
    """

    leaf: View
    table: torch.Tensor


def byte_function(view: View, size: int = 256) -> ByteFunction | None:
    """Returns a view as a function of one byte for each element. Returns None if the view is no
    such function.

    size: the number of bytes to try. 16 tries only the bytes below 16, for tables that have no more
    entries.
    """
    try:
        found = _Trial(size).run(view)
    except (InexpressibleError, RuntimeError, IndexError, TypeError):
        return None  # torch lacks the operation for this dtype
    if found is None or len(found.leaves) != 1:
        return None
    (leaf,) = found.leaves
    return ByteFunction(leaf, found.numbers.double().expand(size))


@dataclass(frozen=True, eq=False)
class _Numbers:
    """The results for every byte.

    Attributes:
        numbers: The results, [size]. If they are all equal, the shape is [1] or [].
        leaves: The views of bytes that the results depend on.
    """

    numbers: torch.Tensor
    leaves: frozenset[View]


class _Trial:
    def __init__(self, size: int) -> None:
        self.size = size
        self.known: dict[tuple[Value, Effect], _Numbers | None] = {}

    def run(self, view: View) -> _Numbers | None:
        view = follow(view)
        key = (view.value, view.effect)
        if key not in self.known:
            self.known[key] = self._computed(view) or self._leaf(view)
        return self.known[key]

    def _leaf(self, view: View) -> _Numbers | None:
        if view.value.dtype not in _BYTES:
            return None
        stored = torch.arange(self.size).to(torch.uint8).view(view.value.dtype)
        return _Numbers(stored, frozenset((view,)))

    def _computed(self, view: View) -> _Numbers | None:
        """Returns the results of the operation for every byte. Returns None if the operation
        combines several bytes. In that case the view itself may be the bytes that index the
        table."""
        value = view.value
        if value.op in ("input", "constant", "store"):
            return None
        constant = _constant(view)
        if constant is not None:
            return _Numbers(constant, frozenset())
        rule = _RULES.get(value.op)
        name = value.op.removeprefix("aten.")
        try:
            if rule is not None:
                found = rule(self, view)
            elif name in _ELEMENTWISE:
                found = self._elementwise(view, name)
            else:
                return None
        except (InexpressibleError, RuntimeError, IndexError, TypeError):
            return None
        return found if found is not None and len(found.leaves) == 1 else None

    def _elementwise(self, view: View, name: str) -> _Numbers | None:
        value = view.value
        if not set(value.kwargs) <= _OPTIONS:
            return None
        leaves: frozenset[View] = frozenset()
        args = []
        for item in value.args:
            if isinstance(item, View):
                part = self.run(view.of_operand(item))
                if part is None:
                    return None
                leaves |= part.leaves
                item = part.numbers
            elif isinstance(item, (tuple, list)) or not isinstance(item, (int, float, type(None))):
                return None
            args.append(item)
        numbers = getattr(torch, name)(*args, **value.kwargs)
        return _Numbers(numbers.to(value.dtype), leaves)

    def cast(self, view: View) -> _Numbers | None:
        part = self.run(view.of_operand(view.value.operands[0]))
        return part and _Numbers(part.numbers.to(view.value.dtype), part.leaves)

    def bitcast(self, view: View) -> _Numbers | None:
        (operand,) = view.value.operands
        same = operand.value.dtype.itemsize == view.value.dtype.itemsize
        part = self.run(view.of_operand(operand)) if same else None
        return part and _Numbers(part.numbers.contiguous().view(view.value.dtype), part.leaves)

    def look_up(self, view: View) -> _Numbers | None:
        """Returns the result of table[index] for every byte, if the graph computes the table from
        constants; else None."""
        table, index = _table_and_index(view.value)
        if table is None or len(table.shape) != 1:
            return None
        numbers = constant_of(table)
        if numbers is None or index is None or index.value.dtype == torch.bool:
            return None
        part = self.run(view.of_operand(index))
        if part is None or part.numbers.dtype.is_floating_point:
            return None
        entries = torch.from_numpy(numbers).expand(table.shape).to(view.value.dtype)
        return _Numbers(entries[part.numbers.long()], part.leaves)


_RULES: dict[str, Callable[[_Trial, View], _Numbers | None]] = {
    "cast": _Trial.cast,
    "bitcast": _Trial.bitcast,
    "aten.index": _Trial.look_up,
    "aten.index_select": _Trial.look_up,
    "aten.take": _Trial.look_up,
}


def _table_and_index(value: Value) -> tuple[View | None, View | None]:
    """Returns (table, index) for an operation table[index] whose result has the shape of the
    index."""
    table, *rest = value.args
    if value.op == "aten.index":
        (items,) = rest
        index = items[0][1] if len(items) == 1 and items[0][0] == 0 else None
    elif value.op == "aten.index_select":
        index = rest[1] if rest[0] == 0 else None
    else:
        (index,) = rest
    return table, index if isinstance(index, View) else None


def looked_up_inputs(view: View) -> Value | None:
    """Returns the look-up table that a view is computed from, if the table is stored and its
    numbers may therefore change; else None."""
    for value in upstream(view.value, _REACH, lambda v: not v.projected):
        if value.op in ("aten.index", "aten.index_select", "aten.take") and not value.projected:
            table, index = _table_and_index(value)
            stored = table is not None and _stored(table)
            if stored and index is not None and table is not None and len(table.shape) == 1:
                return table.value
    return None


def _stored(view: View) -> bool:
    value = view.value
    while value.op == "cast":
        value = value.operands[0].value
    return value.op in ("input", "constant") and value.dtype.is_floating_point


def _constant(view: View) -> torch.Tensor | None:
    """Returns the number that all elements of a view are equal to, if this number depends on no
    input; else None."""
    numbers = constant_of(view)
    if numbers is None or numbers.size == 0 or not np.all(numbers == numbers.flat[0]):
        return None
    # A 0-d tensor does not promote other dtypes, so it must stay 0-d.
    shape = (1,) if view.value.shape else ()
    return torch.tensor(numbers.flat[0].item()).to(view.value.dtype).expand(shape)
