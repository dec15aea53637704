"""The same call again: where metadata and addresses are those of an earlier call, so is the launch.
Here is how a call is known again, and how it is noted what it does; `ops.replay` does that again.

A decode step makes, layer after layer, calls it made the step before: the same weights, the same
caches, activations at the same addresses. What was checked, planned and laid out for the first of
them holds for the others, and one look-up finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

#: A launch and the values it was given; or a LibraryCall, Scratch or SplitK and its tensors.
Noted = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True)
class LibraryCall:
    """Not a kernel of ours: a function of the tensors noted with it, into some of them; or, makes,
    what it made is noted before them."""

    function: Callable[..., Any]
    makes: bool = False


class Scratch:
    """Says that a tensor is a call's own, with no content but what launches noted later leave."""


@dataclass(frozen=True)
class SplitK:
    """Says that a workspace and counters are one launch's, to be asked for anew for another."""

    num_tiles: int
    elements_per_tile: int


_recording = threading.local()


def address_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shape, strides, dtype and address of every tensor, the device of the first argument, and
    every argument that is no tensor.

    Tensors of equal keys are the same memory seen the same way, unless it was freed in between;
    their contents may differ, and so may where in its storage each lies.
    """
    # An address that one device gave back may be another's.
    parts: list[Any] = [args[0].device if args and isinstance(args[0], torch.Tensor) else None]
    for value in args:
        if isinstance(value, torch.Tensor):
            parts += (value.shape, value.stride(), value.dtype, value.data_ptr())
        else:
            parts.append(tuple(value) if isinstance(value, list) else value)
    for name, value in kwargs.items():
        parts.append(name)
        if isinstance(value, torch.Tensor):
            parts += (value.shape, value.stride(), value.dtype, value.data_ptr())
        else:
            parts.append(tuple(value) if isinstance(value, list) else value)
    return tuple(parts)


@contextmanager
def noting_launches() -> Iterator[list[Noted]]:
    """The launches that this thread makes inside, in order."""
    before = getattr(_recording, "noted", None)
    noted: list[Noted] = []
    _recording.noted = noted
    try:
        yield noted
    finally:
        _recording.noted = before


def note_launch(launch: Any, values: tuple[Any, ...]) -> None:
    """Called for every launch; kept where somebody asked with `noting_launches`."""
    noted = getattr(_recording, "noted", None)
    if noted is not None:
        noted.append((launch, values))


def call_library(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Calls a function that works into tensors that it is given, and notes it."""
    function(*tensors)
    note_launch(LibraryCall(function), tensors)


def made_by_library(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """What a function makes of tensors, noted."""
    out = function(*tensors)
    note_launch(LibraryCall(function, makes=True), (out, *tensors))
    return out


def noted_scratch(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, new and empty, noted as scratch memory."""
    note_launch(Scratch(), (tensor,))
    return tensor
