"""Argument checks with readable messages. They also run while a graph is traced with symbolic
sizes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch

#: The largest number that kernels support for a count, because they count in 32 bits.
INT32_MAX = 2**31 - 1
FLOAT32 = torch.finfo(torch.float32)
#: The dtypes that ops accept. float64 is computed in float64, and the other dtypes in float32.
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: The 16-bit dtypes that tensor cores multiply.
HALVES = FLOAT_DTYPES[:2]


class ArgumentError(ValueError):
    """Raised for an argument that a fused op cannot accept. Nothing has been written at that
    time."""

    def __init__(self, op: str, argument: str, expected: str, actual: object) -> None:
        super().__init__(f"{op}: {argument}: expected {expected}, got {actual}")
        self.op = op
        self.argument = argument
        self.expected = expected
        self.actual = actual


@contextmanager
def in_words_of(op: str, names: Mapping[str, str]) -> Iterator[None]:
    """Turns the ArgumentErrors of another op's checks into errors of `op`. names: maps each
    argument of the other op to the name of the argument in this op."""
    try:
        yield
    except ArgumentError as error:
        argument = names.get(error.argument, error.argument)
        if (error.op, error.argument) == (op, argument):
            raise
        raise ArgumentError(op, argument, error.expected, error.actual) from None


def holds(condition: Any) -> bool:
    """Returns False only if `condition` is known to be false, and True if it holds or is unknown.

    A symbolic condition never becomes a guard here, so a check cannot specialise a dynamic size. At
    run time, when sizes are numbers, the check decides.
    """
    if isinstance(condition, torch.SymBool):
        return not proven(torch.sym_not(condition))
    return bool(condition)


def proven(condition: Any) -> bool:
    """Whether `condition` is known to hold. Like `holds`, this adds no guard. A relation between
    sympy symbols is known to hold if it holds for all values of the symbols."""
    if isinstance(condition, torch.SymBool):
        # Import sympy's helper here, because loading sympy takes a third of torch's own import
        # time. If the condition has a symbol, sympy is already loaded.
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition == True)  # noqa: E712  # a relation has no truth of its own


def shape_text(sizes: Sequence[Any]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


def check_tensor(op: str, argument: str, value: object, expected: str = "a tensor") -> None:
    """Raises ArgumentError unless `value` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(op, argument, expected, "None" if value is None else repr(value))


def given(tensor: torch.Tensor | None) -> torch.Tensor:
    """Returns the tensor of an argument. An earlier check has ensured that it is not None."""
    assert tensor is not None
    return tensor


def check_number(
    op: str, argument: str, value: float, least: float = -FLOAT32.max, *, above: bool = False
) -> None:
    """Raises ArgumentError unless the number is finite in fp32 and is at least `least`. Kernels use
    the number in fp32. With `above`, the number must also be greater than 0 in fp32."""
    if above:
        least = FLOAT32.tiny
    if not least <= value <= FLOAT32.max:
        lowest = " above 0" if above else "" if least == -FLOAT32.max else f" from {least}"
        finite = isfinite(value) and (above or abs(value) > FLOAT32.max)
        expected = f"a finite number{lowest}" + (" after rounding to fp32" if finite else "")
        raise ArgumentError(op, argument, expected, value)


def check_scale_block(op: str, block: Sequence[int]) -> None:
    """Raises ArgumentError unless scale_block is [rows, columns], each from 1 to INT32_MAX."""
    if len(block) != 2 or not all(1 <= size <= INT32_MAX for size in block):
        expected = f"[rows, columns] that share a scale, from 1 to {INT32_MAX}"
        raise ArgumentError(op, "scale_block", expected, list(block))


def check_choice(op: str, argument: str, value: object, choices: Sequence[object]) -> None:
    """Raises ArgumentError unless `value` is one of `choices`."""
    if value not in choices:
        raise ArgumentError(op, argument, "one of " + ", ".join(map(repr, choices)), repr(value))


def check_absent(op: str, a: Any, names: Iterable[str], since: str) -> None:
    """Raises ArgumentError if one of these arguments is given. since: the reason why they must be
    None."""
    for name in names:
        if getattr(a, name) is not None:
            raise ArgumentError(op, name, f"None, since {since}", "a tensor")


def check_shape(
    op: str, argument: str, tensor: torch.Tensor | None, letters: str, sizes: Sequence[Any]
) -> None:
    """Raises ArgumentError unless the tensor is given, has the rank of `sizes`, and has every size
    in `sizes` that is not None. (torch passes None for an undefined tensor.) letters: the names of
    the axes for the message, such as `[Hkv, D, K]`."""
    if not isinstance(tensor, torch.Tensor):
        actual = None if tensor is None else repr(tensor)
        raise ArgumentError(op, argument, f"a tensor of shape {letters}", actual)
    shape = tensor.shape
    right = len(shape) == len(sizes) and all(
        want is None or holds(have == want) for have, want in zip(shape, sizes, strict=True)
    )
    if not right:
        known = shape_text(["*" if size is None else size for size in sizes])
        expected = f"shape {letters} = {known}"
        raise ArgumentError(op, argument, expected, f"shape {shape_text(shape)}")


def check_dtype(
    op: str, argument: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]
) -> None:
    """Raises ArgumentError unless the dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        expected = "dtype " + " or ".join(dict.fromkeys(map(str, allowed)))
        raise ArgumentError(op, argument, expected, tensor.dtype)


def check_device(op: str, argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises ArgumentError unless the tensor is on `device`."""
    if tensor.device != device:
        raise ArgumentError(
            op, argument, f"a tensor on {device}, where the input is", tensor.device
        )


def check_operand(
    op: str,
    argument: str,
    tensor: torch.Tensor | None,
    letters: str,
    sizes: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    *,
    dense: bool = False,
) -> None:
    """Raises ArgumentError unless the shape passes check_shape, the dtype is one of `dtypes`, and
    the tensor is on `device` (None: any device). With `dense`, the last dimension must also be
    contiguous."""
    check_shape(op, argument, tensor, letters, sizes)
    assert tensor is not None
    check_dtype(op, argument, tensor, dtypes)
    if device is not None:
        check_device(op, argument, tensor, device)
    if dense:
        check_last_dim_dense(op, argument, tensor)


def check_last_dim_dense(op: str, argument: str, tensor: torch.Tensor) -> None:
    """Raises ArgumentError unless the last dimension is contiguous."""
    if not (holds(tensor.stride(-1) == 1) or proven(tensor.shape[-1] <= 1)):
        expected = "a contiguous last dimension (stride 1)"
        raise ArgumentError(op, argument, expected, f"strides {shape_text(tensor.stride())}")


def first(bad: torch.Tensor) -> int | None:
    """Returns the index of the first True in a flattened mask; None if there is no True."""
    flat = bad.flatten()
    if flat.numel() == 0:
        return None
    where = int(torch.where(flat.any(), flat.int().argmax(), -1))
    return None if where < 0 else where


# Use the dictionary that os.environ wraps. A look-up in os.environ itself converts the name first.
# This takes longer than all other work that finds the recorded launches of an earlier, equal call.
_environment: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)


def debug_values() -> bool:
    """Whether values on a GPU are checked too (TILEWRIGHT_DEBUG=1).

    Reading these values waits for the GPU at every call, and fails while a CUDA graph is captured.
    """
    return _environment.get(b"TILEWRIGHT_DEBUG", b"").strip().lower() not in _OFF


#: The texts of an environment variable that mean "off". Any other text means "on".
OFF = ("", "0", "no", "off", "false")
_OFF = frozenset(text.encode() for text in OFF)


def is_on(variable: str) -> bool:
    """Returns whether the text of an environment variable means "on"."""
    return variable.strip().lower() not in OFF


def readable(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether the values of all these tensors may be read: they are on the CPU, or
    TILEWRIGHT_DEBUG=1 is set."""
    return debug_values() or all(t is None or t.device.type == "cpu" for t in tensors)
