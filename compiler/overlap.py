"""Whether the inputs of a call share memory as those of the traced call did.

A rewrite is proven on the traced inputs: which of them share memory is known then. Dynamo guards on
shapes and strides, and not on where tensors lie: at a later call an activation may lie inside a
cache, or two caches on top of each other. Then the graph has to run as it was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from tilewright.compiler import _compat
from tilewright.compiler.legality import lie_apart
from tilewright.ops.formats.paged_cache import strided_disjoint
from tilewright.patterns.dataflow import Dataflow

log = logging.getLogger("tilewright")


@dataclass(frozen=True)
class InputMemory:
    """Which inputs of a graph are written, and which of them lay together when it was traced.

    tensors: positions of the inputs that are looked at: all but parameters. written: of those that
    the graph writes. together: pairs (in either order) not shown to be apart in the traced call;
    the rewrites took them for one memory. sizes: of the numbers, on which shapes may depend.
    """

    tensors: tuple[int, ...]
    written: frozenset[int]
    together: frozenset[tuple[int, int]]
    sizes: tuple[int, ...]

    def are_apart(self, inputs: Sequence[Any]) -> bool:
        """Whether no written input shares an element with another that it was apart from."""
        pieces = sorted(self._pieces(inputs), key=lambda piece: piece.start)
        return all(
            self._apart(piece, other)
            for at, piece in enumerate(pieces)
            for other in _that_start_before(piece.end, pieces[at + 1 :])
        )

    def _apart(self, one: _Piece, other: _Piece) -> bool:
        pair = (one.index, other.index)
        known = self.written.isdisjoint(pair) or pair[0] == pair[1] or pair in self.together
        return known or strided_disjoint(
            *_bytes(one.tensor), *_bytes(other.tensor), other.start - one.start
        )

    def _pieces(self, inputs: Sequence[Any]) -> Iterator[_Piece]:
        for index in self.tensors:
            for tensor in _compat.parts_of(inputs[index]):
                if tensor.numel() and _compat.has_address(tensor):
                    yield _Piece(index, tensor, tensor.data_ptr())


@dataclass(frozen=True)
class _Piece:
    """A plain tensor of an input, by position, and its first byte's address."""

    index: int
    tensor: torch.Tensor
    start: int

    @property
    def end(self) -> int:
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        reach = sum((size - 1) * stride for size, stride in steps)
        return self.start + (reach + 1) * self.tensor.element_size()


def _that_start_before(end: int, pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    return takewhile(lambda piece: piece.start < end, pieces)


def _bytes(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in bytes, with the bytes of an element as the last axis."""
    width = tensor.element_size()
    return (*tensor.shape, width), (*(s * width for s in tensor.stride()), 1)


def input_memory(flow: Dataflow) -> InputMemory:
    """Which inputs a graph writes, and which lie together. flow: before anything is rewritten."""
    nodes = [node for node in flow.graph.nodes if node.op == "placeholder"]
    memories = {i: flow.memory_of[n] for i, n in enumerate(nodes) if n in flow.memory_of}
    looked_at = {i: memory for i, memory in memories.items() if not memory.is_constant}
    written = {
        i
        for i, memory in looked_at.items()
        if any(flow.written.get(alias) for alias in flow.on_storage(memory.storage))
    }
    together = {
        (i, j)
        for i in written
        for j in looked_at
        if looked_at[i].storage == looked_at[j].storage
        and not lie_apart(looked_at[i], looked_at[j])
    }
    numbers = (int, torch.SymInt)
    sizes = [i for i, n in enumerate(nodes) if isinstance(n.meta.get("example_value"), numbers)]
    both_ways = together | {(j, i) for i, j in together}
    return InputMemory(tuple(looked_at), frozenset(written), frozenset(both_ways), tuple(sizes))


def unfused_where_inputs_meet(
    memory: InputMemory, fused: Callable[..., Any], unfused: Callable[..., Any]
) -> Callable[..., Any]:
    """`fused`, but `unfused` for a call in which inputs share memory that were proven apart.

    Says so in the log, once. Calls at the addresses of the call before are not looked at again.
    """
    seen: Any = None
    said = False

    def run(*inputs: Any) -> Any:
        nonlocal seen, said
        places = _places(memory, inputs)
        if places is None or places != seen:
            if not memory.are_apart(inputs):
                if not said:
                    log.warning(MEETING)
                said = True
                return unfused(*inputs)
            seen = places
        return fused(*inputs)

    return run


MEETING = (
    "two inputs of a compiled graph share memory in this call, and did not when it was traced; "
    "such calls run unfused"
)


def _places(memory: InputMemory, inputs: Sequence[Any]) -> Any:
    """Where tensors lie and what shapes depend on; None where torch does not tell addresses."""
    try:
        addresses = [inputs[i].data_ptr() for i in memory.tensors]
    except RuntimeError:  # fake tensors and subclasses
        return None
    return addresses, [inputs[i] for i in memory.sizes]
