"""Repeats a call: makes the launches and library calls of its program again, with new memory.

A repeat allocates each result of the call separately, and all scratch memory of the call at once,
with the same layout as before. It passes addresses, not tensors, to each launch. The arguments are
at the same addresses as before, except arguments that may move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
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
    SplitK,
)

Again = Callable[..., Any]
#: Repeats a step. Its arguments are the parts of the call's memory, and the address of each part.
Call = Callable[[list[Any], list[int]], None]

# The alignment of the tensors in scratch memory, in bytes.
ALIGNMENT = 256


class _NotOurs(Exception):
    """Raised when a step reads memory that the call is not known to fill, or memory that may belong
    to either of two arguments."""


class _Memory:
    """The location of each tensor of a call: its part of the memory, and the offset within this
    part.

    Parts are numbered: first the arguments, then all scratch memory, then other memory that the
    steps allocate, in order. made: the buffers that are separate parts, each with the shape of its
    result. scratch_bytes: the size of all scratch memory.
    """

    def __init__(
        self, given: Sequence[Any], moving: frozenset[int], results: Sequence[torch.Tensor]
    ) -> None:
        self.scratch = len(given)
        self.fixed = frozenset(range(len(given))) - moving
        self.scratch_bytes = 0
        self.count = len(given) + 1
        self.made: dict[int, Buffer] = {}
        self._shapes = {t.data_ptr(): t.shape for t in results if t.numel()}
        # Maps a storage to the known tensors in it, each as (address, part, offset in bytes within
        # the part).
        self._known: dict[int, list[tuple[int, int, int]]] = {}
        self._used: set[int] = set()
        tensors = {n: t for n, t in enumerate(given) if isinstance(t, torch.Tensor) and t.numel()}
        for number, tensor in tensors.items():
            self._know(tensor, number)
        for number in moving & tensors.keys():
            if any(_overlap(tensors[number], other) for other in tensors.values()):
                raise _NotOurs  # a view could belong to either argument

    def _know(self, tensor: torch.Tensor, part: int, offset: int = 0) -> None:
        place = tensor.data_ptr(), part, offset
        self._known.setdefault(_storage(tensor), []).append(place)

    def _find(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns (part, offset in bytes) of a tensor. Both follow from the known tensor with the
        highest address that is not above the tensor's own address. Raises _NotOurs if there is no
        such tensor."""
        address, known = tensor.data_ptr(), self._known.get(_storage(tensor), ())
        begun = [place for place in known if place[0] <= address]
        if not begun:
            raise _NotOurs
        start, part, offset = max(begun, key=itemgetter(0))
        return part, offset + address - start

    def add(self, tensor: torch.Tensor) -> int:
        """Adds a step's answer as a separate part, and returns the number of the part."""
        self._know(tensor, self.count)
        self.count += 1
        return self.count - 1

    def add_buffer(self, tensor: torch.Tensor) -> None:
        """Adds new memory. If a result begins at the address of the memory, the memory is a
        separate part; otherwise, it belongs to the scratch memory."""
        if not tensor.numel():
            return
        if tensor.data_ptr() in self._shapes:
            self.made[self.add(tensor)] = Buffer(self.shape_of(tensor), tensor.dtype)
            return
        self._know(tensor, self.scratch, self.scratch_bytes)
        self.scratch_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def shape_of(self, tensor: torch.Tensor) -> Sequence[int]:
        """Returns the shape of the result that begins at a step's answer. If no result begins
        there, returns the answer's own shape."""
        return self._shapes.get(tensor.data_ptr(), tensor.shape)

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns (part, offset in bytes) of a tensor that a step uses. Raises _NotOurs."""
        part, offset = self._find(tensor)
        self._used.add(part)
        return part, offset

    def result(self, tensor: torch.Tensor) -> int:
        """Returns the part of a result. Raises _NotOurs if no step uses the result, or if the
        result does not fill its storage like a new tensor of its shape."""
        if not tensor.numel():
            self.made[self.count] = Buffer.like(tensor)
            self.count += 1
            return self.count - 1
        part, _ = self._find(tensor)
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if part not in self._used or part <= self.scratch or not whole:
            raise _NotOurs
        return part


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage begin at different addresses, and one of them begins
    inside the other."""
    (low, end), (high, _) = sorted(map(_extent, (one, other)))
    return low < high < end and _storage(one) == _storage(other)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first element and the end of its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def repeat(
    program: Program,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    machine: Machine,
    moving: frozenset[int] = frozenset(),
) -> Again | None:
    """Returns a function that repeats the steps of a program; None if they cannot be repeated.

    args, kwargs: the arguments of the call that made the program. moving: the positions in args of
    tensors that may have another address in another call.

    Steps cannot be repeated in these cases:

    - The program is marked as not repeatable.
    - A step reads memory that is neither an argument nor allocated by this call. The contents of
      such memory are unknown.
    - A moving argument partly overlaps another argument.
    - No step fills a result.
    - A result does not have the layout of a new tensor.

    The returned function keeps no tensor alive.
    """
    if not program.repeatable:
        return None
    result, several = program.outcome.result, isinstance(program.outcome.result, tuple)
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    try:
        memory = _Memory((*args, *kwargs.values()), moving, results)
        steps = [_again(step, answer, memory, machine) for step, answer in program.steps]
        numbers = [memory.result(tensor) for tensor in results]
    except _NotOurs:
        return None
    if memory.scratch_bytes:
        memory.made[memory.scratch] = Buffer((memory.scratch_bytes,), torch.uint8)
    makers = [(number, machine.maker(buffer)) for number, buffer in memory.made.items()]
    calls = [call for call in steps if call is not None]
    moved = tuple(n for n in moving if n < len(args) and isinstance(args[n], torch.Tensor))
    nowhere = [0] * memory.count
    absent = [None] * (memory.count - memory.scratch)

    def again(*args: Any, **kwargs: Any) -> Any:
        parts, starts = [*args, *kwargs.values(), *absent], nowhere.copy()
        for number in moved:
            starts[number] = args[number].data_ptr()
        for number, make in makers:
            made = parts[number] = make()
            starts[number] = made.data_ptr()
        for call in calls:
            call(parts, starts)
        if several:
            return tuple([parts[number] for number in numbers])
        return parts[numbers[0]] if numbers else None

    return again


def _again(step: Any, answer: Any, memory: _Memory, machine: Machine) -> Call | None:
    """Returns a function that repeats a step; None for a step that only allocates memory."""
    match step:
        case Buffer():
            memory.add_buffer(answer)
        case SplitK():
            first, _ = [memory.add(tensor) for tensor in answer]
            return partial(_new_parts, partial(machine.perform, step), first)
        case Launch() if answer is not None:
            return _launch(answer, step.given, memory)
        case Library(function, tensors, makes):
            views = [_view(tensor, memory) for tensor in tensors]
            if makes is None:
                return lambda parts, _: function(*[view(parts) for view in views])
            part, _ = memory.add(answer), memory.place(answer)
            return partial(_made_part, function, views, part, memory.shape_of(answer))
        case Peers() if answer is not None:
            return partial(_check_shared, answer)
    return None


def _check_shared(memory: PeerMemory, *_: Any) -> None:
    """Raises RuntimeError if the group's name now belongs to another group."""
    if not memory.holds():
        raise RuntimeError("the group now has other ranks than those that share this memory")


def _new_parts(make: Callable[[], Any], first: int, parts: list[Any], starts: list[int]) -> None:
    for number, tensor in enumerate(make(), first):
        parts[number], starts[number] = tensor, tensor.data_ptr()


def _made_part(
    function: Callable[..., Any],
    views: Sequence[Callable[[list[Any]], torch.Tensor]],
    number: int,
    shape: Sequence[int],
    parts: list[Any],
    starts: list[int],
) -> None:
    made = parts[number] = function(*[view(parts) for view in views]).view(shape)
    starts[number] = made.data_ptr()


def _launch(
    launch: Callable[[Sequence[Any]], None], values: Sequence[Any], memory: _Memory
) -> Call:
    """Returns a function that repeats a launch, by addresses."""
    known: list[Any] = []
    moved: list[tuple[int, int, int]] = []
    for number, value in enumerate(values):
        is_tensor = isinstance(value, torch.Tensor)
        known.append(value.data_ptr() if is_tensor else value)
        if is_tensor and value.numel():
            part, offset = memory.place(value)
            if part not in memory.fixed:
                moved.append((number, part, offset))

    def call(_: list[Any], starts: list[int]) -> None:
        addresses = known.copy()
        for number, part, offset in moved:
            addresses[number] = starts[part] + offset
        launch(addresses)

    return call


def _view(tensor: torch.Tensor, memory: _Memory) -> Callable[[list[Any]], torch.Tensor]:
    """Returns a function that makes a view again from new parts. The view has the same offset
    within its part as before."""
    part, offset = memory.place(tensor)
    shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
    first = offset // tensor.element_size()

    def view(parts: list[Any]) -> torch.Tensor:
        base = parts[part]
        if base.dtype != dtype:
            base = base.view(dtype)
        return base.as_strided(shape, stride, base.storage_offset() + first)

    return view


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
