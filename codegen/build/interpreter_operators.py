"""Operators of tensors that make Triton's interpreter faster: each computes in one numpy call.

Triton passes `x + y` through a dozen functions, which find out the same for every pair of operands
of the same types: that neither is converted, which numpy function adds them, and which type the sum
has. The operators here cache this by the types of the operands for the length of one launch. They
cover operands of one element type, signed integers, a pointer with an offset, a tensor with a
number, new axes, and casts; everything else takes Triton's own way. The first result for each pair
of types is compared with Triton's own result, bit for bit, and a pair that differs is left to
Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

#: The operators of a tensor with their numpy functions.
_FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}

_SIGNED = (tl.int8, tl.int16, tl.int32, tl.int64)  # numpy widens the narrower one as Triton does
_INTEGERS = (*_SIGNED, tl.uint8, tl.uint16, tl.uint32, tl.uint64)

#: Elements that numpy computes with as the hardware does.
_NUMBERS = (tl.int1, *_INTEGERS, tl.float16, tl.float32, tl.float64)

#: Elements that a number becomes without a rounding, beside such a tensor.
_BESIDE_NUMBERS = {int: (tl.int32, tl.int64, tl.float32), float: (tl.float32,)}

#: Maps elements to those that one call of the builder casts them to.
_CASTS = {
    tl.bfloat16: (tl.float32,),
    tl.float16: (tl.float32,),
    tl.float32: (tl.bfloat16, tl.float16, *_INTEGERS),
    **dict.fromkeys((tl.int1, *_INTEGERS), (*_INTEGERS, tl.float16, tl.bfloat16, tl.float32)),
}

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127


def quick(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a faster method `name` of a tensor, or `original` if there is none.

    original: Triton's own method, bound to the interpreter.
    """
    if interpreter.interpreter_builder.options.debug:  # reports overflows
        return original
    if name == "__getitem__":
        return _new_axes(original)
    if name == "to":
        return _casts(original)
    plain = name.removeprefix("__").removesuffix("__")
    if plain in _FUNCTIONS:
        return _operator(original, plain, reverse=False)
    if plain.startswith("r") and plain[1:] in _FUNCTIONS:
        return _operator(original, plain[1:], reverse=True)
    return original


@dataclass(frozen=True, slots=True)
class _Result:
    """Knowledge of the result of an operator on operands of certain types.

    compute: from the operands' numpy arrays. dtypes: of these arrays. element: of the result's
    handle. attributes: of the result, without its handle. operands: the types, which stay alive, so
    that no other type gets their id.
    """

    compute: Callable[..., np.ndarray]
    dtypes: tuple[np.dtype, ...]
    element: Any
    attributes: dict[str, Any]
    operands: tuple[Any, ...]

    def of(self, *arrays: np.ndarray) -> Any:
        return _tensor(_handle(self.compute(*arrays), self.element), self.attributes)


def _handle(data: np.ndarray, element: Any) -> TensorHandle:
    """Returns a handle whose data is known to fit its element."""
    handle = TensorHandle.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, element, {}
    return handle


def _tensor(handle: TensorHandle, attributes: dict[str, Any]) -> Any:
    result = tl.tensor.__new__(tl.tensor)
    result.__dict__.update(attributes)
    result.handle = handle
    return result


def _known(
    compute: Callable[..., np.ndarray], made: Any, arrays: tuple[np.ndarray, ...],
    operands: tuple[Any, ...],
) -> _Result | None:  # fmt: skip
    """Returns what later calls need, or None if `compute` does not give what Triton made."""
    theirs, ours = made.handle.data, compute(*arrays)
    same = theirs.dtype == ours.dtype and theirs.shape == ours.shape
    if not same or theirs.tobytes() != ours.tobytes():
        return None
    attributes = {key: value for key, value in made.__dict__.items() if key != "handle"}
    dtypes = tuple(array.dtype for array in arrays)
    return _Result(compute, dtypes, made.handle.dtype, attributes, operands)


def _shared(type_: Any) -> int:
    """Returns a key that is the same for equal types: equal blocks have one shape object."""
    return id(type_.__dict__.get("shape", type_))


def _operator(original: Callable[..., Any], plain: str, reverse: bool) -> Callable[..., Any]:
    known: dict[tuple[int, Any], _Result | None] = {}
    function = _FUNCTIONS[plain]

    def of_tensors(self: Any, other: Any) -> Any:
        key = _shared(self.type), _shared(other.type)
        arrays = self.handle.data, other.handle.data
        result = known.get(key, _UNKNOWN)
        if result is None:
            return original(self, other)
        if result is not _UNKNOWN and result.dtypes == (arrays[0].dtype, arrays[1].dtype):
            return result.of(*arrays)
        made = original(self, other)
        if result is _UNKNOWN:
            compute = _between(function, plain, self, other)
            types = self.type, other.type
            known[key] = compute and _known(compute, made, arrays, types)
        return made

    def with_number(self: Any, number: Any) -> Any:
        key = _shared(self.type), type(number)
        array = self.handle.data
        result = known.get(key, _UNKNOWN)
        if result is _UNKNOWN and self.type.scalar not in _BESIDE_NUMBERS[type(number)]:
            result = known[key] = None
        if result is None or not _is_exact(number):
            return original(self, number)
        constant = np.array([number + 0.0 if type(number) is float else number], array.dtype)
        arrays = (constant, array) if reverse else (array, constant)
        if result is not _UNKNOWN and result.dtypes == (array.dtype, array.dtype):
            return result.of(*arrays)
        made = original(self, number)
        if result is _UNKNOWN:
            known[key] = _known(function, made, arrays, (self.type,))
        return made

    def method(self: Any, other: Any) -> Any:
        if isinstance(other, tl.tensor):
            return original(self, other) if reverse else of_tensors(self, other)
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) in _BESIDE_NUMBERS:
            return with_number(self, other)
        return original(self, other)

    return method


_UNKNOWN: Any = object()


def _is_exact(number: Any) -> bool:
    """Whether Triton makes an int32 or float32 of a number, and nothing wider."""
    if type(number) is int:
        return -(2**31) <= number < 2**31
    return number == 0 or math.isinf(number) or _SMALLEST <= abs(number) <= _LARGEST


def _between(function: Any, plain: str, left: Any, right: Any) -> Callable[..., np.ndarray] | None:
    """Returns what computes an operator of two tensors, or None if they are converted first."""
    first, second = left.type.scalar, right.type.scalar
    if first.is_ptr():
        if plain != "add" or second not in (tl.int32, tl.int64):
            return None
        width = max(1, first.element_ty.primitive_bitwidth // 8)
        return lambda pointers, offsets: pointers + width * offsets.astype(np.uint64)
    alike = first == second and first in _NUMBERS
    return function if alike or (first in _SIGNED and second in _SIGNED) else None


def _new_axes(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], _Result | None] = {}

    def method(self: Any, slices: Any) -> Any:
        places = slices if type(slices) is tuple else (slices,)
        if not self.type.is_block() or not all(p is None or p == _ALL for p in places):
            return original(self, slices)
        key = (_shared(self.type), *(place is None for place in places))
        array = self.handle.data
        if key not in known:
            made = original(self, slices)
            known[key] = _known(lambda data: data[places], made, (array,), (self.type,))
            return made
        result = known[key]
        if result is None or result.dtypes[0] != array.dtype:
            return original(self, slices)
        return result.of(array)

    return method


_ALL = slice(None)


def _casts(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[int, Any], tuple[Any, dict[str, Any], Any]] = {}
    builder = interpreter.interpreter_builder

    def method(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, dtype, *args, **kwargs)
        target = dtype.value if type(dtype) is tl.constexpr else dtype
        key = _shared(self.type), id(target)
        if key in known:
            type_, attributes, _ = known[key]
            return _tensor(builder.cast_impl(self.handle, type_), attributes)
        made = original(self, dtype)
        if target in _CASTS.get(self.type.scalar, ()):
            attributes = {name: value for name, value in made.__dict__.items() if name != "handle"}
            known[key] = made.type, attributes, (self.type, target)
        return made

    return method
