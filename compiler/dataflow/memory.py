"""Tracks memory: which tensors share a storage, and which value each memory holds when a node
runs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from networkx.utils import UnionFind
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import shape_of, size_of, sizes
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Memory, Store, Value, View
from tilewright.patterns.effects import Effect, InexpressibleError, Size

#: A key in a node's metadata. Its value is a list of further fake tensors. Their storages stand for
#: the memory in which the node's own tensor lies.
LIES_WITH = "tilewright_lies_with"


@dataclass
class Place:
    """The place of a node's tensor in memory.

    effect: the tensor's selection from the memory; None if the selection has no normal form.
    why: the reason why there is no normal form.
    dtype: the dtype as which the tensor reads the memory.
    version: the number of writes to the memory before the node ran.
    view: the value that the tensor held when the node ran.
    """

    memory: Memory
    effect: Effect | None
    dtype: torch.dtype
    version: int
    view: View
    why: str = ""


class Storages:
    """Numbers the memories of a graph's tensors. Tensors that may share memory have equal numbers.

    A tensor subclass has the memory of the tensors inside it. If torch does not tell the storage of
    a tensor, the tensor may lie in the memory of any tensor argument of its node.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._joined: UnionFind = UnionFind()
        self._unknown: dict[int, int] = {}
        #: Nodes inside vmap, grad and jvp. Their tensors hide dimensions or tangents.
        self.wrapped: set[fx.Node] = set()
        #: Nodes whose tensors have a class that wraps other tensors.
        self.subclasses: set[fx.Node] = set()
        # The memory keys of the graph's tensors, by the `id` of the tensor. The entry keeps the
        # tensor alive, so that no other tensor gets its `id`.
        self._keys: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}
        for node in graph.nodes:
            for tensor in _compat.tensors_of(node):
                if _compat.is_functorch_wrapper(tensor):
                    self.wrapped.add(node)
                if _compat.is_subclass(tensor):
                    self.subclasses.add(node)
                keys = _compat.storage_keys(tensor)
                self._keys[id(tensor)] = tensor, keys
                if not keys:
                    keys = (self._unknown.setdefault(id(tensor), -id(tensor)), *self._given(node))
                for other in node.meta.get(LIES_WITH, ()):
                    keys = (*keys, *_compat.storage_keys(other))
                if len(keys) > 1:
                    self._joined.union(*keys)

    def _given(self, node: fx.Node) -> list[int]:
        return [
            self._unknown.get(id(tensor), key)
            for tensor in _compat.tensors_of(*node.all_input_nodes)
            for key in _compat.storage_keys(tensor) or (-id(tensor),)
        ]

    def keys(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Returns the keys of a tensor's memory. A tensor has keys even if torch does not tell its
        storage."""
        known = self._keys.get(id(tensor))
        return _compat.storage_keys(tensor) if known is None else known[1]

    def of(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's memory."""
        keys = self.keys(tensor)
        key = keys[0] if keys else -id(tensor)
        return self._joined[key] if key in self._joined.parents else key


@dataclass
class MemoryMap:
    """All memories of a graph, filled in program order."""

    storages: Storages
    places: dict[fx.Node, Place] = field(default_factory=dict)
    by_storage: dict[int, list[Memory]] = field(default_factory=lambda: defaultdict(list))
    version: dict[Memory, int] = field(default_factory=lambda: defaultdict(int))
    state: dict[Memory, View | None] = field(default_factory=dict)
    stores: dict[Memory, list[Value]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[Memory, list[tuple[int, fx.Node]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    slices: dict[Memory, Slices] = field(default_factory=lambda: defaultdict(Slices))

    def allocate(
        self,
        node: fx.Node,
        tensor: torch.Tensor,
        view: View,
        is_input: bool,
        is_constant: bool | None = None,
    ) -> None:
        """Adds a node that has its own memory: an input, or a node that computes or copies.

        `is_constant` says whether an input is a parameter. If it is None, the tensor itself
        decides.
        """
        if is_constant is None:
            is_constant = is_input and isinstance(tensor, torch.nn.Parameter)
        strided = bool(self.storages.keys(tensor))
        memory = Memory(
            root=node,
            is_input=is_input,
            is_constant=is_constant,
            shape=shape_of(tensor),
            strides=sizes(tensor.stride()) if strided else (),
            offset=size_of(tensor.storage_offset()) if strided else 0,
            dtype=tensor.dtype,
            storage=self.storages.of(tensor),
        )
        self.by_storage[memory.storage].append(memory)
        whole = view.effect if view.is_whole else effects.identity(memory.shape)
        self.places[node] = Place(memory, whole, memory.dtype, 0, view)

    def shared_with(self, tensor: torch.Tensor, node: fx.Node | None) -> Place | None:
        """Returns the place of `node` if `tensor` lies on the same storage, else None."""
        place = self.places.get(node) if node is not None else None
        if place is None or place.memory.storage != self.storages.of(tensor):
            return None
        return place

    def alias(
        self,
        node: fx.Node,
        of: Place,
        effect: Effect | None,
        view: View,
        why: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Adds a node that shares the memory of the place `of`, selects `effect` of this memory and
        reads it as `dtype`."""
        version = self.version[of.memory]
        self.places[node] = Place(of.memory, effect, dtype or of.dtype, version, view, why)

    def note_read(self, memory: Memory, reader: tuple[int, fx.Node]) -> None:
        """Records once that a node reads a memory. `reader` holds the position of the node and the
        node."""
        reads = self.reads[memory]
        if not reads or reads[-1] is not reader:
            reads.append(reader)

    def read(self, node: fx.Node) -> View | None:
        """Returns the value that a node's tensor holds now. Returns None if a write made the value
        unknown."""
        place = self.places[node]
        memory = place.memory
        if self.version[memory] == place.version:
            return place.view
        state = self.state[memory]
        if state is None or place.effect is None or place.dtype != memory.dtype:
            return None
        try:
            return state.through(place.effect)
        except InexpressibleError:
            return None

    def is_written(self, storage: int) -> bool:
        """Whether any node so far wrote to a storage."""
        return any(self.version[memory] for memory in self.by_storage.get(storage, ()))

    def write(self, store: Store, value: Value) -> None:
        """Records an in-place write. The values of other memories on the same storage become
        unknown."""
        memory = store.memory
        self.version[memory] += 1
        self.stores[memory].append(value)
        self.state[memory] = self._state_after(store, value)
        for other in self.by_storage.get(memory.storage, ()):
            if other is not memory:
                self.version[other] += 1
                self.state[other] = None

    def _state_after(self, store: Store, value: Value) -> View:
        memory, source = store.memory, store.source
        kept = store.accumulate or source is None or source.value.dtype != memory.dtype
        kept = kept or store.dtype != memory.dtype
        if source is not None and not kept and not store.index:
            try:
                # The write covers the whole memory, though perhaps through a view of another shape.
                if effects.is_identity(effects.reshape(store.target, memory.shape), memory.shape):
                    return View(source.value, effects.reshape(source.effect, memory.shape))
            except InexpressibleError:
                pass
        return value.whole


@dataclass
class Slices:
    """Slice copies that fill the memory of a `new_empty`. They are collected write by write,
    because a loop may make thousands of them.

    axis: the axis along which the tensor is sliced.
    covered: the length along this axis that is written so far.
    plain: whether all writes so far are slice copies.
    """

    plain: bool = True
    axis: int | None = None
    covered: Size = 0
    pieces: list[tuple[int, int, View]] = field(default_factory=list)

    def add(self, store: Store) -> None:
        """Adds the next write to the memory."""
        piece = _slice_copied(store) if self.plain else None
        if piece is None or self.axis not in (None, piece[0]):
            self.plain, self.pieces = False, []
            return
        self.axis, start, length, source = piece
        self.covered += length
        self.pieces.append((start, length, source))

    def joined(self, shape: tuple[Size, ...]) -> tuple[int, list[View]] | None:
        """Returns (axis, pieces in order) if the pieces fill a memory of `shape` exactly, else
        None."""
        if not self.plain or self.axis is None or self.covered != shape[self.axis]:
            return None
        self.pieces.sort(key=lambda piece: piece[0])
        end = 0
        for start, length, _ in self.pieces:
            if start != end:
                return None
            end += length
        return self.axis, [source for _, _, source in self.pieces]


def _slice_copied(store: Store) -> tuple[int, int, int, View] | None:
    """Returns (axis, start, length, source) of a write that copies into a slice. Returns None for
    other writes."""
    if store.index or store.accumulate or store.source is None:
        return None
    shape, window = store.memory.shape, store.target.shape
    cut = [a for a in range(len(shape)) if len(shape) == len(window) and shape[a] != window[a]]
    if len(cut) != 1:
        return None
    start, length = store.target.start[cut[0]], window[cut[0]]
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    # Excludes slices with a step, and transposed squares.
    if store.target != effects.narrow(effects.identity(shape), cut[0], start, length):
        return None
    if {store.source.value.dtype, store.dtype} != {store.memory.dtype}:
        return None
    return cut[0], start, length, store.source
