"""A call of several launches, and of a library's, once more: over new memory, laid out as before.

What a call did is noted (`repeats.noting_launches`). Repeating it allocates its result and all its
scratch memory at once, and makes each launch by address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.ops.repeats import LibraryCall, Noted, Scratch

Again = Callable[..., Any]

# Parts of scratch memory begin at whole multiples of this.
ALIGNMENT = 256
SCRATCH, RESULT, GIVEN = 0, 1, 2


@dataclass(frozen=True)
class _Memory:
    """What one repetition works on."""

    scratch: torch.Tensor | None
    result: torch.Tensor | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def start(self, where: int) -> int:
        part = self.scratch if where == SCRATCH else self.result
        assert part is not None
        return part.data_ptr()


# Gives what a library made.
Step = Callable[[_Memory], torch.Tensor | None]


@dataclass
class _Layout:
    """Where the storages of a call lie. given: by storage, the argument's number or name."""

    given: dict[int, int | str]
    result: int | None
    scratch: dict[int, int] = field(default_factory=dict)
    size: int = 0
    fills_result: bool = False
    makes_result: bool = False

    def add_scratch(self, tensor: torch.Tensor) -> None:
        self.scratch[_storage(tensor)] = self.size
        self.size += -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(SCRATCH, RESULT or GIVEN, bytes from there); KeyError where nobody named the storage."""
        storage = _storage(tensor)
        offset = tensor.data_ptr() - storage
        if storage in self.scratch:
            return SCRATCH, self.scratch[storage] + offset
        if storage == self.result:
            self.fills_result = True
            return RESULT, offset
        if storage in self.given:
            return GIVEN, offset
        raise KeyError(storage)


def call_again(
    noted: Sequence[Noted],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: torch.Tensor | None,
) -> Again | None:
    """Makes what was noted again, called with such arguments; None where that cannot be done.

    It cannot where a launch reads memory that is neither an argument's, nor the result's, nor
    scratch that was noted, since what filled it is not known; nor where no launch fills the result.
    Holds no tensor.
    """
    layout = _Layout(_given(args, kwargs), None if result is None else _storage(result))
    steps: list[Step] = []
    try:
        for made, values in noted:
            if layout.makes_result:  # the result is made last
                return None
            if isinstance(made, Scratch):
                layout.add_scratch(values[0])
            elif isinstance(made, LibraryCall):
                steps.append(_library_step(made, values, layout))
                layout.makes_result = made.makes
            else:
                steps.append(_launch_step(made, values, layout))
    except KeyError:
        return None
    if not steps or (result is None and layout.size):
        return None
    if result is None:
        return _replayed(steps, layout, None)
    plain = result.is_contiguous() and result.storage_offset() == 0
    return _replayed(steps, layout, result) if plain and layout.fills_result else None


def _replayed(steps: Sequence[Step], layout: _Layout, like: torch.Tensor | None) -> Again:
    size, makes_result = layout.size, layout.makes_result
    new = None if like is None else (like.shape, like.dtype, like.device)

    def again(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        result = scratch = made = None
        if new is not None:
            shape, dtype, device = new
            scratch = torch.empty(size, dtype=torch.uint8, device=device) if size else None
            if not makes_result:
                result = torch.empty(shape, dtype=dtype, device=device)
        memory = _Memory(scratch, result, args, kwargs)
        for step in steps:
            made = step(memory)
        if made is not None and new is not None:
            return made.view(new[0])
        return result

    return again


def _launch_step(launch: Any, values: Sequence[Any], layout: _Layout) -> Step:
    """A launch by address: arguments lie where they lay."""
    known: list[Any] = []
    moved: list[tuple[int, int, int]] = []
    for number, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            known.append(value)
            continue
        where, offset = layout.place(value)
        known.append(value.data_ptr())
        if where != GIVEN:
            moved.append((number, where, offset))

    def step(memory: _Memory) -> torch.Tensor | None:
        addresses = known.copy()
        for number, where, offset in moved:
            addresses[number] = memory.start(where) + offset
        launch(addresses)
        return None

    return step


def _library_step(call: LibraryCall, tensors: Sequence[torch.Tensor], layout: _Layout) -> Step:
    """A library's call on the same views of arguments, result and scratch memory. Only the result
    may be what it makes: KeyError else."""
    function, makes = call.function, call.makes
    if makes and layout.place(tensors[0])[0] != RESULT:
        raise KeyError(function)
    views = [_view_again(tensor, layout) for tensor in tensors[int(makes) :]]

    def step(memory: _Memory) -> torch.Tensor | None:
        made = function(*(view(memory) for view in views))
        return made if makes else None

    return step


def _view_again(tensor: torch.Tensor, layout: _Layout) -> Callable[[_Memory], torch.Tensor]:
    where, offset = layout.place(tensor)
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    first = offset // tensor.element_size()
    name = layout.given[_storage(tensor)] if where == GIVEN else 0

    def view(memory: _Memory) -> torch.Tensor:
        base: Any = memory.scratch if where == SCRATCH else memory.result
        if where == GIVEN:
            base = memory.args[name] if isinstance(name, int) else memory.kwargs[name]
        if base.dtype != dtype:
            base = base.view(dtype)
        return base.as_strided(shape, stride, first)

    return view


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, int | str]:
    """Arguments by storage; of several on one storage, any."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {_storage(t): name for name, t in named if isinstance(t, torch.Tensor)}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
