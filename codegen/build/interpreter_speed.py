"""What Triton's interpreter makes anew at every operation, made once per launch.

An interpreted operation on a small block costs some 100 microseconds, nearly all of it spent on
the types of operands and results: shapes are unwrapped and checked, names formatted, tables of
dtypes built; and a sum of integers is a dozen further operations that look for an overflow and tell
nobody. Here, within a launch, types with equal element and shape share what they are made of, and
tensors what follows from their type. What kernels compute, and what is refused, stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value), with memories of their own: none outlives a launch."""
    overflow = "binary_op_sanitize_overflow_impl"
    return [
        (interpreter, "_get_np_dtype", _kept_by_name(interpreter._get_np_dtype)),
        (tl.dtype, "__eq__", _same_first(tl.dtype.__eq__)),
        (tl.block_type, "__init__", _kept_by_shape(tl.block_type.__init__)),
        (tl.tensor, "__init__", _kept_by_type(tl.tensor.__init__)),
        (TritonSemantic, overflow, _if_it_is_read(getattr(TritonSemantic, overflow))),
    ]


def _kept_by_name(original: Callable) -> Callable:
    """numpy's dtype of a type, which hangs on nothing but its name."""
    known: dict[str, np.dtype] = {}

    @functools.wraps(original)
    def function(type_: Any) -> np.dtype:
        found = known.get(type_.name)
        if found is None:
            found = known[type_.name] = original(type_)
        return found

    return function


def _same_first(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, other: Any) -> bool:
        return self is other or original(self, other)

    return method


def _kept_by_shape(original: Callable) -> Callable:
    """What a block type is made of, by element and shape. A shape of anything but plain integers is
    unwrapped and checked as ever; one that is refused is not kept."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    @functools.wraps(original)
    def method(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if type(s) is tl.constexpr else s for s in shape]
        # What is kept holds the element, so that its id is no other's.
        key = (id(element_ty), *sizes)
        if {*map(type, sizes)} != {int}:
            original(self, element_ty, shape)
        elif key in known:
            self.__dict__.update(known[key])
        else:
            original(self, element_ty, shape)
            known[key] = dict(self.__dict__)

    return method


def _kept_by_type(original: Callable) -> Callable:
    """Type, shape, size and dtype of a tensor; equal block types have one shape, see above."""
    known: dict[int, dict[str, Any]] = {}

    @functools.wraps(original)
    def method(self: Any, handle: Any, type: Any) -> None:
        key = id(type.__dict__.get("shape", type))
        if key in known:
            self.__dict__.update(known[key])
            self.handle = handle
        else:
            original(self, handle, type)
            known[key] = {k: v for k, v in self.__dict__.items() if k != "handle"}

    return method


def _if_it_is_read(original: Callable) -> Callable:
    """The search for an overflow ends in an assertion, which only debugging makes."""

    @functools.wraps(original)
    def method(self: TritonSemantic, *args: Any) -> None:
        if self.builder.options.debug:
            original(self, *args)

    return method
