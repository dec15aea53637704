"""A call once more: the launches and library calls of its program, over new memory.

A repeat allocates the call's results, and all its scratch memory at once, laid out as before, and
makes each launch by address: arguments lie where they lay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    Machine,
    PeerMemory,
    Peers,
    Program,
    Result,
    SplitK,
)

Again = Callable[..., Any]
# (addresses of the parts, the parts, args, kwargs); gives what a library made.
Call = Callable[[list[int], list[Any], Sequence[Any], Mapping[str, Any]], torch.Tensor | None]

# Parts of scratch memory begin at whole multiples of this.
ALIGNMENT = 256
# An argument's memory. Other parts are numbered: results, scratch, then split K's, two a launch.
GIVEN = -1


class _NotOurs(Exception):
    """A step reads memory of which it is not known what filled it."""


class _Memory:
    """Where the tensors of a call lie.

    parts: (number, bytes from the part's start) by address. size: bytes of scratch memory. new: the
    `id` of what the call's machine made. filled: the results that a step works on. made: a library
    made the only result.
    """

    def __init__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]
    ) -> None:
        self.given: dict[int, tuple[int | str, torch.Tensor]] = {}
        for named in (enumerate(args), kwargs.items()):
            for name, value in named:
                if isinstance(value, torch.Tensor) and value.numel():
                    self.given.setdefault(value.data_ptr(), (name, value))
        self.parts = {t.data_ptr(): (n, 0) for n, t in enumerate(results) if t.numel()}
        self.count, self.size, self.splits = len(results), 0, 0
        self.new: set[int] = set()
        self.filled: set[int] = set()
        self.made = False

    def add_scratch(self, tensor: torch.Tensor) -> None:
        self.parts[tensor.data_ptr()] = self.count, self.size
        self.size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def add_split(self, tensors: Sequence[torch.Tensor]) -> None:
        first = self.count + 1 + 2 * self.splits
        self.parts |= {tensor.data_ptr(): (n, 0) for n, tensor in enumerate(tensors, first)}
        self.splits += 1

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(part or GIVEN, bytes from its start). Raises _NotOurs."""
        address = tensor.data_ptr()
        found, offset = self.parts.get(address), 0
        if found is None:
            storage = _storage(tensor)
            found, offset = self.parts.get(storage), address - storage
        if found is None:
            self.argument(tensor)
            return GIVEN, 0
        number, start = found
        if number < self.count:
            self.filled.add(number)
        return number, start + offset

    @cached_property
    def storages(self) -> dict[int, tuple[int | str, int]]:
        """(number or name, address) of an argument by where its storage begins."""
        return {_storage(tensor): (name, start) for start, (name, tensor) in self.given.items()}

    def argument(self, tensor: torch.Tensor) -> tuple[int | str, int]:
        """The number or name of the argument that a view is taken of, and its distance in bytes:
        where several share a storage, of one that begins where the view does, if there is one."""
        address = tensor.data_ptr()
        if address in self.given:
            return self.given[address][0], 0
        found = self.storages.get(_storage(tensor))
        if found is None:
            raise _NotOurs
        return found[0], address - found[1]


def repeat(
    program: Program, args: Sequence[Any], kwargs: Mapping[str, Any], machine: Machine
) -> Again | None:
    """Performs the steps of a program once more, called with such arguments; None where that cannot
    be done. args, kwargs: of the call that the program is of.

    It cannot where the program says so; where a step reads memory that is neither an argument's nor
    new in this call, since what filled it is not known; where no step fills a result; or where a
    result is not laid out as a new one. Holds no tensor.
    """
    if not program.repeatable:
        return None
    result = program.outcome.result
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    memory = _Memory(args, kwargs, results)
    calls: list[Call] = []
    try:
        for step, answer in program.steps:
            if memory.made:
                return None  # what a library makes, it makes last
            call = _again(step, answer, memory, machine)
            if call is not None:
                calls.append(call)
    except _NotOurs:
        return None
    full = memory.filled == {number for number, t in enumerate(results) if t.numel()}
    if not calls or not full:
        return None
    if not all(id(tensor) in memory.new or _is_as_new(tensor) for tensor in results):
        return None
    return _repeated(calls, memory, results, result, machine)


def _again(step: Any, answer: Any, memory: _Memory, machine: Machine) -> Call | None:
    """The step once more; None where there is nothing to do but to allocate memory."""
    match step:
        case Buffer():
            memory.new.add(id(answer))
            if answer.data_ptr() not in memory.parts and answer.numel():
                memory.add_scratch(answer)
        case Launch() if answer is not None:
            return _launch(answer, step.given, memory)
        case Library(function, tensors, makes):
            return _library(function, tensors, answer if makes else None, memory)
        case SplitK():
            memory.add_split(answer)
            return partial(_new_split, partial(machine.perform, step))
        case Peers() if answer is not None:
            return partial(_check_shared, answer)
    return None


def _check_shared(memory: PeerMemory, *_: Any) -> None:
    """Raises where the group's name is that of another group by now."""
    if not memory.holds():
        raise RuntimeError("the ranks that shared this memory are no longer the group")


def _is_as_new(tensor: torch.Tensor) -> bool:
    """Whether it has all of its storage, and lies there as a new tensor of its shape does."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _repeated(
    calls: Sequence[Call],
    memory: _Memory,
    results: Sequence[torch.Tensor],
    result: Result,
    machine: Machine,
) -> Again:
    single, count = isinstance(result, torch.Tensor), len(results)
    shape = results[0].shape if results else torch.Size()
    makers: list[Callable[[], Any]] = [machine.maker(Buffer.like(t)) for t in results]
    if memory.made:
        makers = [_nothing]
    if memory.size:
        makers.append(machine.maker(Buffer((memory.size,), torch.uint8)))
    elif memory.splits:
        makers.append(_nothing)

    def again(*args: Any, **kwargs: Any) -> Result:
        parts = [make() for make in makers]
        starts = [0 if part is None else part.data_ptr() for part in parts]
        made = None
        for call in calls:
            made = call(starts, parts, args, kwargs)
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


def _launch(
    launch: Callable[[Sequence[Any]], None], values: Sequence[Any], memory: _Memory
) -> Call:
    """A launch by address."""
    known: list[Any] = []
    moved: list[tuple[int, int, int]] = []
    for number, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            known.append(value)
            continue
        address = value.data_ptr()
        known.append(address)
        if address not in memory.given and value.numel():
            where, offset = memory.place(value)
            if where != GIVEN:
                moved.append((number, where, offset))

    def call(starts: list[int], *_: Any) -> torch.Tensor | None:
        addresses = known.copy()
        for number, where, offset in moved:
            addresses[number] = starts[where] + offset
        launch(addresses)
        return None

    return call


def _library(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    made: torch.Tensor | None,
    memory: _Memory,
) -> Call:
    """A library's call on the same views of arguments, results and scratch memory. Only the one
    result, of which no other step knows, may be what it makes: raises _NotOurs else."""
    makes = made is not None
    if made is not None:
        if memory.filled or memory.count != 1 or memory.place(made)[0] != 0:
            raise _NotOurs
        memory.made = True
    views = [_view(tensor, memory) for tensor in tensors]

    def call(
        starts: list[int], parts: list[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        answer = function(*[view(parts, args, kwargs) for view in views])
        return answer if makes else None

    return call


def _view(tensor: torch.Tensor, memory: _Memory) -> Callable[..., torch.Tensor]:
    """The same view by its distance from an argument, whose storage may begin elsewhere by then, or
    from the start of another part."""
    where, offset = memory.place(tensor)
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    name: int | str = 0
    if where == GIVEN:
        name, offset = memory.argument(tensor)
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


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
