"""A call once more, for every op that can: its launches, a library's calls, over new memory.

What a call did is noted (`recording.noting_launches`). Repeating it allocates its results, and all
its scratch memory at once, laid out as before, and makes each launch by address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tilewright.ops.runtime import program as program_steps
from tilewright.ops.runtime.launch import split_k_scratch
from tilewright.ops.runtime.program import Buffer, Launch, Library, Machine, Program
from tilewright.ops.runtime.recording import LibraryCall, Noted, Scratch, SplitK

Again = Callable[..., Any]
Result = torch.Tensor | tuple[torch.Tensor, ...] | None

# Parts of scratch memory begin at whole multiples of this.
ALIGNMENT = 256
# An argument's memory. Other parts are numbered: results, scratch, then split K's, two a launch.
GIVEN = -1


@dataclass(frozen=True, slots=True)
class _Given:
    """An argument: its number or name, and its address."""

    name: int | str
    address: int


# (addresses of the parts, the parts, args, kwargs); gives what a library made.
Step = Callable[[list[int], list[Any], Sequence[Any], Mapping[str, Any]], torch.Tensor | None]


@dataclass
class _Layout:
    """Where the storages of a call lie. parts: (number, bytes from the part's start) by storage."""

    given: dict[int, list[_Given]]
    results: tuple[torch.Tensor, ...]
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    size: int = 0
    splits: int = 0
    filled: set[int] = field(default_factory=set)
    makes_result: bool = False

    def __post_init__(self) -> None:
        self.parts |= {_storage(t): (n, 0) for n, t in enumerate(self.results) if t.numel()}

    def add_scratch(self, tensor: torch.Tensor) -> None:
        self.parts[_storage(tensor)] = len(self.results), self.size
        self.size += -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT

    def add_split(self, tensors: Sequence[torch.Tensor]) -> None:
        """Counters are a piece of a storage that many calls share."""
        first = len(self.results) + 1 + 2 * self.splits
        for number, tensor in enumerate(tensors, first):
            self.parts[_storage(tensor)] = number, _storage(tensor) - tensor.data_ptr()
        self.splits += 1

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(part or GIVEN, bytes from its start); KeyError where nobody named the storage."""
        storage = _storage(tensor)
        offset = tensor.data_ptr() - storage
        if storage in self.parts:
            number, start = self.parts[storage]
            if number < len(self.results):
                self.filled.add(number)
            return number, start + offset
        if storage in self.given:
            return GIVEN, offset
        raise KeyError(storage)

    def argument(self, tensor: torch.Tensor) -> _Given:
        """The argument that a view is taken of; where several share a storage, one that starts
        where the view does if there is one."""
        named = self.given[_storage(tensor)]
        return next((g for g in named if g.address == tensor.data_ptr()), named[0])


def repeat(
    program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], machine: Machine
) -> Again | None:
    """Performs a program's steps once more for a call with such arguments: see `call_again`."""
    if not program.repeatable:
        return None
    result = program.outcome.result
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    made = {_storage(tensor) for tensor in results}
    noted: list[Noted] = []
    for step, answer in program.steps:
        match step:
            case Buffer() if _storage(answer) not in made:
                noted.append((Scratch(), (answer,)))
            case program_steps.SplitK(tiles, elements):
                noted.append((SplitK(tiles, elements), answer))
            case Library(function, tensors, makes):
                filled = () if makes is None else (answer,)
                noted.append((LibraryCall(function, makes is not None), (*filled, *tensors)))
            case Launch(_, grid) if 0 not in grid:
                noted.append((machine.launcher(step), step.given))
    return call_again(noted, args, kwargs, result, machine)


def call_again(
    noted: Sequence[Noted],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Result,
    machine: Machine | None = None,
) -> Again | None:
    """Makes what was noted again, called with such arguments; None where that cannot be done.

    result: what the launches fill, all of it, since a new one has no content: contiguous tensors.
    It cannot where a launch reads memory that is neither an argument's, nor a result's, nor
    scratch that was noted, since what filled it is not known; nor where no launch fills a result;
    nor where a result is not laid out as a new one. Holds no tensor.
    """
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    layout = _Layout(_given(args, kwargs), results)
    steps: list[Step] = []
    try:
        for made, values in noted:
            if layout.makes_result:  # the result is made last
                return None
            if isinstance(made, Scratch):
                layout.add_scratch(values[0])
            elif isinstance(made, SplitK):
                layout.add_split(values)
                device, (tiles, elements) = (
                    values[0].device,
                    (made.num_tiles, made.elements_per_tile),
                )
                new = partial(split_k_scratch, tiles, elements, device)
                if machine is not None:
                    new = partial(machine.perform, program_steps.SplitK(tiles, elements))
                steps.append(partial(_new_split, new))
            elif isinstance(made, LibraryCall):
                steps.append(_library_step(made, values, layout))
            else:
                steps.append(_launch_step(made, values, layout))
    except KeyError:
        return None
    plain = all(t.is_contiguous() and t.storage_offset() == 0 for t in results)
    full = layout.filled == {number for number, t in enumerate(results) if t.numel()}
    if not steps or not plain or not full or (not results and layout.size):
        return None
    return _replayed(steps, layout, result)


def _replayed(steps: Sequence[Step], layout: _Layout, result: Result) -> Again:
    results, single = layout.results, isinstance(result, torch.Tensor)
    count, shape = len(results), results[0].shape if results else torch.Size()
    makers: list[Callable[[], Any]] = [
        partial(torch.empty, t.shape, dtype=t.dtype, device=t.device) for t in results
    ]
    if layout.makes_result:
        makers = [_nothing]
    if layout.size:
        makers.append(
            partial(torch.empty, layout.size, dtype=torch.uint8, device=results[0].device)
        )
    elif layout.splits:
        makers.append(_nothing)

    def again(*args: Any, **kwargs: Any) -> Result:
        parts = [make() for make in makers]
        starts = [0 if part is None else part.data_ptr() for part in parts]
        made = None
        for step in steps:
            made = step(starts, parts, args, kwargs)
        if made is not None:
            return made.view(shape)
        if single:
            return parts[0]
        return tuple(parts[:count]) if count else None

    return again


def _nothing() -> None:
    """A part that is not there."""


def _new_split(new: Callable[[], Any], starts: list[int], parts: list[Any], *_: Any) -> None:
    pair = new()
    parts += pair
    starts += [tensor.data_ptr() for tensor in pair]


def _launch_step(launch: Any, values: Sequence[Any], layout: _Layout) -> Step:
    """A launch by address: arguments lie where they lay."""
    known: list[Any] = []
    moved: list[tuple[int, int, int]] = []
    for number, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            known.append(value)
            continue
        known.append(value.data_ptr())
        if value.numel():
            where, offset = layout.place(value)
            if where != GIVEN:
                moved.append((number, where, offset))

    def step(starts: list[int], *_: Any) -> torch.Tensor | None:
        addresses = known.copy()
        for number, where, offset in moved:
            addresses[number] = starts[where] + offset
        launch(addresses)
        return None

    return step


def _library_step(call: LibraryCall, tensors: Sequence[torch.Tensor], layout: _Layout) -> Step:
    """A library's call on the same views of arguments, results and scratch memory. Only the one
    result, of which no launch knows, may be what it makes: KeyError else."""
    function, makes = call.function, call.makes
    if makes:
        if layout.filled or len(layout.results) != 1 or layout.place(tensors[0])[0] != 0:
            raise KeyError(function)
        layout.makes_result = True
    views = [_view_again(tensor, layout) for tensor in tensors[int(makes) :]]

    def step(
        starts: list[int], parts: list[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        made = function(*(view(parts, args, kwargs) for view in views))
        return made if makes else None

    return step


def _view_again(tensor: torch.Tensor, layout: _Layout) -> Callable[..., torch.Tensor]:
    """The view by its distance from an argument, whose storage may begin elsewhere by then, or from
    the start of another part."""
    where, offset = layout.place(tensor)
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    name: int | str = 0
    if where == GIVEN:
        argument = layout.argument(tensor)
        name, offset = argument.name, tensor.data_ptr() - argument.address
    first = offset // tensor.element_size()

    def view(parts: list[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        if where != GIVEN:
            base = parts[where]
        else:
            base = args[name] if isinstance(name, int) else kwargs[name]
        if base.dtype != dtype:
            base = base.view(dtype)
        return base.as_strided(shape, stride, base.storage_offset() + first)

    return view


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, list[_Given]]:
    """Arguments by storage."""
    found: dict[int, list[_Given]] = {}
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        if isinstance(value, torch.Tensor) and value.numel():
            found.setdefault(_storage(value), []).append(_Given(name, value.data_ptr()))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
