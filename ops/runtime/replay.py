"""A call once more: the launches and library calls of its program, over new memory.

A repeat allocates the call's results, and all its scratch memory at once, laid out as before, and
makes each launch by address. Arguments lie where they lay, but for those that may move.
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
#: A step once more, of (the parts of the call's memory, the address of each).
Call = Callable[[list[Any], list[int]], None]

# Parts of scratch memory begin at whole multiples of this.
ALIGNMENT = 256


class _NotOurs(Exception):
    """A step reads memory of which it is not known what filled it, or which argument's it is."""


class _Memory:
    """Where the tensors of a call lie: in which part, and how far from where the part begins.

    Parts are numbered: the arguments, all scratch memory, then what else the steps make, in order.
    made: the buffers that are parts of their own, each as the result that it holds.
    scratch_bytes: of all scratch memory.
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
        # What lies in a storage, each as (address, part, bytes from where the part begins).
        self._known: dict[int, list[tuple[int, int, int]]] = {}
        self._used: set[int] = set()
        tensors = {n: t for n, t in enumerate(given) if isinstance(t, torch.Tensor) and t.numel()}
        for number, tensor in tensors.items():
            self._know(tensor, number)
        for number in moving & tensors.keys():
            if any(_overlap(tensors[number], other) for other in tensors.values()):
                raise _NotOurs  # a view may be of either argument

    def _know(self, tensor: torch.Tensor, part: int, offset: int = 0) -> None:
        place = tensor.data_ptr(), part, offset
        self._known.setdefault(_storage(tensor), []).append(place)

    def _find(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(part, bytes from where it begins) of the last that begins up to where the tensor does.
        Raises _NotOurs."""
        address, known = tensor.data_ptr(), self._known.get(_storage(tensor), ())
        begun = [place for place in known if place[0] <= address]
        if not begun:
            raise _NotOurs
        start, part, offset = max(begun, key=itemgetter(0))
        return part, offset + address - start

    def add(self, tensor: torch.Tensor) -> int:
        """The number of a step's answer that is a part of its own."""
        self._know(tensor, self.count)
        self.count += 1
        return self.count - 1

    def add_buffer(self, tensor: torch.Tensor) -> None:
        """New memory: scratch, or a part where a result begins there."""
        if not tensor.numel():
            return
        if tensor.data_ptr() in self._shapes:
            self.made[self.add(tensor)] = Buffer(self.shape_of(tensor), tensor.dtype)
            return
        self._know(tensor, self.scratch, self.scratch_bytes)
        self.scratch_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def shape_of(self, tensor: torch.Tensor) -> Sequence[int]:
        """The shape of the result that begins where a step's answer does; else its own."""
        return self._shapes.get(tensor.data_ptr(), tensor.shape)

    def place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(part, bytes from where it begins) of what a step works on. Raises _NotOurs."""
        part, offset = self._find(tensor)
        self._used.add(part)
        return part, offset

    def result(self, tensor: torch.Tensor) -> int:
        """The part that a result is. Raises _NotOurs where no step works on it, or where it is not
        all of its storage, as a new tensor of its shape is."""
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
    """Whether two tensors of one storage begin apart, and one of them within the other."""
    (low, end), (high, _) = sorted(map(_extent, (one, other)))
    return low < high < end and _storage(one) == _storage(other)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first element and behind its last."""
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
    """Performs the steps of a program once more, called with such arguments; None where that cannot
    be done. args, kwargs: of the call that the program is of. moving: the positions in args of
    tensors that may lie elsewhere in another call.

    It cannot where the program says so; where a step reads memory that is neither an argument's nor
    new in this call, since what filled it is not known; where an argument that moves lies within
    another one or around it; where no step fills a result; or where a result is not laid out as a
    new one. Holds no tensor.
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
    """The step once more; None where all that it does is to have new memory."""
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
    """Raises where the group's name is that of another group by now."""
    if not memory.holds():
        raise RuntimeError("the ranks that shared this memory are no longer the group")


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
    """A launch by address."""
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
    """Returns a function that makes a view again from parts that lie elsewhere: the view keeps its
    distance from where its part begins."""
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
