"""Runs the original graph in calls whose inputs share memory that they did not share in the trace.

A rewrite is proven safe only while no two inputs share memory, except inputs that shared memory in
the trace. Dynamo guards on shapes and strides but not on addresses. In a later call an activation
may lie inside a cache, or two caches may overlap.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from tilewright.compiler import _compat
from tilewright.compiler.safety.legality import lie_apart
from tilewright.ops.formats.paged_cache import in_bytes, strided_disjoint
from tilewright.patterns.dataflow import Dataflow

log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class InputMemory:
    """The inputs of a graph that are written, and the inputs that overlapped when the graph was
    traced.

    tensors: the positions of the inputs to check. These are all inputs except parameters that are
        only read.
    written: the positions of the inputs that the graph writes.
    together: the pairs of positions, in either order, that could overlap in the traced call. The
        rewrites treated each pair as one memory.
    sizes: the positions of the numbers on which shapes may depend.
    names: the names of all inputs.
    """

    tensors: tuple[int, ...]
    written: frozenset[int]
    together: frozenset[tuple[int, int]]
    sizes: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Piece:
    """A plain tensor of an input.

    start, end: the address of the first byte, and the address after the last byte.
    shape: the shape of the tensor.
    strides: the strides of the tensor in bytes.
    """

    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _pieces(tensor: torch.Tensor) -> list[_Piece]:
    if type(tensor) in _PLAIN and (start := tensor.data_ptr()) and tensor.is_contiguous():
        size = tensor.nbytes
        return [_Piece(start, start + size, (size,), (1,))] if size else []
    found = []
    for part in _compat.parts_of(tensor):
        if part.numel() and _compat.has_address(part):
            shape, strides = in_bytes(part.shape, part.stride(), part.element_size())
            reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            start = part.data_ptr()
            found.append(_Piece(start, start + reach + 1, shape, strides))
    return found


# The result is cached, because the test for interleaved caches of one pool is slow, and every call
# needs the result.
_disjoint = lru_cache(1 << 14)(strided_disjoint)


class _Ranges:
    """Finds the pieces of inputs that a given piece may touch. The pieces are sorted by address."""

    def __init__(self, pieces: Mapping[int, Sequence[_Piece]], inputs: Iterable[int]) -> None:
        found = ((piece, index) for index in inputs for piece in pieces[index])
        self.ordered = sorted(found, key=lambda one: one[0].start)
        self.starts = [piece.start for piece, _ in self.ordered]
        self.reach = list(accumulate((piece.end for piece, _ in self.ordered), max))

    def touching(self, piece: _Piece) -> Iterator[tuple[_Piece, int]]:
        """Yields (other piece, its input) for every piece whose range of addresses overlaps that of
        `piece`."""
        at = bisect_left(self.starts, piece.end)
        while at and self.reach[at - 1] > piece.start:  # pieces further down end earlier
            at -= 1
            if self.ordered[at][0].end > piece.start:
                yield self.ordered[at]


@dataclass
class _Watch:
    """Remembers where the inputs of the latest call lay, and the first pair that overlapped, if
    any.

    :meth:`look` runs before every call and must be fast. Therefore it compares only tensors that
    have moved since the latest call.
    """

    memory: InputMemory
    places: list[Any] | None = None
    sizes: list[Any] | None = None
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)
    meeting: tuple[int, int] | None = None
    written: _Ranges | None = None

    def look(self, inputs: Sequence[Any]) -> tuple[int, int] | None:
        """Returns the positions of two inputs that share memory in this call but did not share it
        in the trace. Returns None if there are no such inputs."""
        places = _places([inputs[i] for i in self.memory.tensors])
        sizes = [inputs[i] for i in self.memory.sizes]
        if places == self.places and sizes == self.sizes:
            return self.meeting
        known = self.places if sizes == self.sizes and self.meeting is None else None
        moved = self.memory.tensors
        if known is not None:
            pairs = zip(moved, known, places, strict=True)
            moved = tuple(index for index, before, now in pairs if before != now)
        self.pieces.update((index, _pieces(inputs[index])) for index in moved)
        self.places, self.sizes = places, sizes
        self.meeting = self._first_meeting(moved)
        return self.meeting

    def _first_meeting(self, moved: Sequence[int]) -> tuple[int, int] | None:
        """Returns the first pair that overlaps, or None if no pair does. `moved` has the positions
        of the inputs that have moved since the latest call."""
        memory = self.memory
        written_moved = not memory.written.isdisjoint(moved)
        if self.written is None or written_moved:
            self.written = _Ranges(self.pieces, memory.written)
        everything = _Ranges(self.pieces, memory.tensors) if written_moved else self.written
        for index in moved:
            ranges = everything if index in memory.written else self.written
            for one in self.pieces[index]:
                for two, other in ranges.touching(one):
                    if other != index and (index, other) not in memory.together:
                        apart = two.start - one.start
                        if not _disjoint(one.shape, one.strides, two.shape, two.strides, apart):
                            return index, other
        return None


def _places(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Returns a list that differs between two calls if a tensor has moved. The entry of a tensor
    without an address is its `id`."""
    return [t.data_ptr() if type(t) in _PLAIN else _place(t) for t in tensors]


def _place(tensor: torch.Tensor) -> list[int]:
    parts = _compat.parts_of(tensor)
    return [part.data_ptr() if _compat.has_address(part) else id(part) for part in parts]


def input_memory(flow: Dataflow) -> InputMemory:
    """Returns which inputs a graph writes, and which inputs overlap. `flow` is the view of the
    graph before any rewrite."""
    nodes = [node for node in flow.graph.nodes if node.op == "placeholder"]
    memories = {i: flow.memory_of[n] for i, n in enumerate(nodes) if n in flow.memory_of}
    written = {i for i, memory in memories.items() if any(flow.writes_on(memory.storage))}
    looked_at = {i: m for i, m in memories.items() if i in written or not m.is_constant}
    sharing: dict[int, list[int]] = defaultdict(list)
    for i, memory in looked_at.items():
        sharing[memory.storage].append(i)
    together = {
        (i, j)
        for i in written
        for j in sharing[memories[i].storage]
        if not lie_apart(memories[i], memories[j])
    }
    numbers = (int, torch.SymInt)
    sizes = [i for i, n in enumerate(nodes) if isinstance(n.meta.get("example_value"), numbers)]
    both_ways = together | {(j, i) for i, j in together}
    return InputMemory(
        tensors=tuple(looked_at),
        written=frozenset(written),
        together=frozenset(both_ways),
        sizes=tuple(sizes),
        names=tuple(node.name for node in nodes),
    )


def unfused_where_inputs_meet(
    memory: InputMemory,
    fused: Callable[..., Any],
    unfused: Callable[..., Any],
    tell: Callable[[str], None],
) -> Callable[..., Any]:
    """Returns a function that runs `unfused` if inputs overlap that did not overlap in the trace,
    and otherwise runs `fused`.

    At the first unfused call, the function calls `tell` with a sentence that names the inputs.
    """
    watch = _Watch(memory)
    # Dynamo wraps the function returned here anyway; a second wrapper inside would cost tens of
    # microseconds a call.
    fused = _compat.innermost_fn(fused)
    told = False

    def run(*inputs: Any) -> Any:
        nonlocal told
        meeting = watch.look(inputs)
        if meeting is None:
            return fused(*inputs)
        if not told:
            told = True
            one, other = (memory.names[index] for index in meeting)
            why = f"{one} and {other} share memory in a call, but did not when the graph was traced"
            log.warning("%s: such calls run unfused", why)
            tell(f"{why}: such calls run unfused")
        return unfused(*inputs)

    return run
