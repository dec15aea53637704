"""The dataflow that patterns read: values, the views between them, and explicit memory.

`compiler.dataflow` builds a :class:`Dataflow` from a Dynamo graph. Layout is not an operation here.
Instead, the operands of a value are :class:`View`s, and a view says which elements of which value
it selects. An in-place write is a value of its own, a `store`. Every later reader of the memory has
this value as an operand.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from operator import attrgetter, itemgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx

from tilewright.codegen.targets import Target
from tilewright.patterns import effects
from tilewright.patterns.effects import Dim, Effect, Size

# `Store.note` of a write whose window is unknown, because the memory is viewed with another dtype
# or shape.
REINTERPRETED = "a reinterpreting view"
WRAPPED = "a tensor subclass"
#: A key in the `meta` of nodes that were inserted to replace a call of a library's operator by
#: ordinary operations.
STANDS_IN = "tilewright_stands_in"


@dataclass(frozen=True, eq=False)
class Value:
    """One tensor, which is computed once.

    Attributes:
        op: `input` or `constant` (placeholders; a constant is a Parameter), `store` (an in-place
            write), `cast`, an ATen name such as `aten.linear`, or `opaque:<target>` for other
            calls.
        args: The operands in ATen's order: views, numbers, strings, None, or tuples of them.
        shape, dtype, device: The metadata of the result. Sizes are ints or sympy expressions.
        node: The node of the graph that computes the value.
        position: The place of the node in program order.
        projected: Whether the value depends on a GEMM with a weight.
        kwargs: The keyword arguments.
        store: For a `store`, what it writes.
    """

    op: str
    args: tuple[Any, ...]
    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    node: fx.Node
    position: int
    projected: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    store: Store | None = None

    def __repr__(self) -> str:
        return f"{self.op}[{', '.join(str(n) for n in self.shape)}]"

    @cached_property
    def operands(self) -> tuple[View, ...]:
        """All views among the arguments, in order."""
        return tuple(iter_views((*self.args, *self.kwargs.values())))

    @cached_property
    def whole(self) -> View:
        return View(self, effects.identity(self.shape))

    @property
    def stands_in(self) -> bool:
        """Whether the value is one of the operations that replace a call of a library's
        operator."""
        return STANDS_IN in self.node.meta

    @property
    def either_way(self) -> tuple[tuple[View, View], ...]:
        """The two operands of a sum or product, in both orders. The result is empty unless the
        value has two operands."""
        if len(self.operands) != 2:
            return ()
        one, other = self.operands
        return (one, other), (other, one)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Returns an argument that is given by position or by name. Returns `default` if it is
        absent or None."""
        given = self.args[position] if len(self.args) > position else self.kwargs.get(name)
        return default if given is None else given

    def named(self, *names: str) -> dict[str, Any]:
        """Returns the arguments that are given, by name. names: the names of the positional
        arguments."""
        return dict(zip(names, self.args, strict=False)) | dict(self.kwargs)

    @property
    def scope(self) -> str:
        """The module path, such as `model.layers.3.self_attn`; empty at the top level."""
        return scope_of(self.node)

    @property
    def source(self) -> str:
        """The place in the user's code, such as `file.py:214`; empty if Dynamo recorded none."""
        return source_of(self.node)


P = ParamSpec("P")
T = TypeVar("T")
_ANSWERS: ContextVar[dict[Any, Any] | None] = ContextVar("answers", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Inside this context, functions that are marked with :func:`once` compute each result once for
    equal arguments."""
    token = _ANSWERS.set({})
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Caches a function of values and views. The function must read only its arguments, and the
    values that they are computed from.

    Results are kept as long as :func:`remembering` is active. They are not stored on the values,
    because this would keep the values alive.
    """

    @wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> T:
        answers = _ANSWERS.get()
        if answers is None:
            return function(*args, **kwargs)
        key = function, args, *kwargs.items()
        if key not in answers:
            answers[key] = function(*args, **kwargs)
        answer: T = answers[key]
        return answer

    return remembered


@dataclass(frozen=True)
class View:
    """The part of `value` that `effect` selects; `value.whole` is the view of all of it."""

    value: Value
    effect: Effect

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.effect.shape

    @property
    def is_whole(self) -> bool:
        return self.effect == self.value.whole.effect

    @property
    def is_regrouped(self) -> bool:
        """Whether the view has all elements of its value, in order, in any shape."""
        try:
            return self == self.value.whole.reshape(*self.shape)
        except effects.InexpressibleError:
            return False

    def through(self, effect: Effect) -> View:
        """Returns the part of this view that `effect` selects."""
        return View(self.value, effects.compose(effect, self.effect))

    @property
    def matrix(self) -> View:
        """The view with all dimensions except the last one merged into one."""
        *rows, columns = self.shape
        return self.reshape(effects.product(rows), columns)

    def with_dims(self, *dims: Dim) -> View:
        """Returns a view with these dimensions and the same start."""
        return View(self.value, Effect(dims, self.effect.start))

    def reshape(self, *sizes: Size) -> View:
        return View(self.value, effects.reshape(self.effect, sizes))

    def expand(self, *sizes: Size) -> View:
        return View(self.value, effects.expand(self.effect, sizes))

    def permute(self, *order: int) -> View:
        return View(self.value, effects.permute(self.effect, order))

    def unsqueeze(self, dim: int) -> View:
        return View(self.value, effects.unsqueeze(self.effect, dim))

    def select(self, dim: int, index: Size) -> View:
        return View(self.value, effects.select(self.effect, dim, index))

    def narrow(self, dim: int, start: Size, length: Size, step: int = 1) -> View:
        return View(self.value, effects.narrow(self.effect, dim, start, length, step))

    def of_operand(self, operand: View) -> View:
        """Returns the part of an operand that corresponds to this view of the result. The value
        must be elementwise.

        Raises InexpressibleError if the operand does not broadcast to the shape of the value.
        """
        wide = operand.expand(*self.value.shape)
        return wide if self.is_whole else wide.through(self.effect)


@dataclass(frozen=True)
class Computed:
    """A small expression that the rewriter adds to the graph, such as page * page_size + offset.

    Attributes:
        function: A function of tensors that the graph may call, a name that
            `compiler.rewrite.materialise` knows, or the name of a fused op.
        operands, options: The arguments and keyword arguments of the call: views, numbers, or other
            Computed.
    """

    function: str | Callable[..., Any]
    operands: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, eq=False)
class Memory:
    """A region of storage. The region is identified by the node whose tensor covers it.

    Attributes:
        root: The placeholder, or the node that allocated the region.
        is_input: Whether the root is a placeholder.
        is_constant: Whether the root is a Parameter.
        shape, strides, offset, dtype: The metadata of the root's tensor; strides and offset count
            elements.
        storage: A number, which is equal for memories that alias.
    """

    root: fx.Node
    is_input: bool
    is_constant: bool
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    dtype: torch.dtype
    storage: int


@dataclass(frozen=True, eq=False)
class Store:
    """One in-place write: `memory[target][index...] = source`.

    Attributes:
        memory: The memory that is written.
        target: The part of the memory's root tensor that the written view selects.
        index: For advanced indexing, maps a target dimension to its index tensor; empty for a plain
            copy.
        source: The view whose values are written. The broadcast index dimensions come first, then
            the other dimensions of the target in order. It is None if the written value is not
            known.
        kind: How the user wrote the write (`index_copy_`, `setitem`, ...).
        dtype: The dtype of the view that is written. It differs from the memory's dtype if the
            memory is viewed with another dtype.
        accumulate: Whether the write adds instead of overwriting.
        note: Why something is not known about the write.
        along: A target dimension in which each row has its own slots, as in `scatter_`. The first
            dimension of the index tensors runs over its rows, too. In the order of `source`, it is
            therefore one of the index dimensions, and not one of the other dimensions.
    """

    memory: Memory
    target: Effect
    index: Mapping[int, View]
    source: View | None
    kind: str
    dtype: torch.dtype
    accumulate: bool = False
    note: str = ""
    along: int | None = None


def scope_of(node: fx.Node) -> str:
    """Returns the module path of a node, as `named_modules()` writes it."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return _spelled_plainly(next(reversed(stack.values()))[0])


@lru_cache(maxsize=1024)
def _spelled_plainly(path: str) -> str:
    # If a decorator wraps the model's forward, the `self` of forward is `args[0]` of the wrapper.
    path = re.sub(r"^L\['(?:args'\]\[0|\w+')\]\.?", "", path)
    path = re.sub(r"(?:\._modules)?\[['\"]?([\w.]+)['\"]?\]", r".\1", path)
    # If a wrapper forwards __getattr__, as PEFT's does, Dynamo traces through its __dict__.
    parts = (part for part in path.split(".") if part not in ("_modules", "__dict__", ""))
    return ".".join(parts)


def common_scope(one: str, other: str) -> str:
    """Returns the innermost module that contains both modules."""
    shared = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        shared.append(a)
    return ".".join(shared)


def source_of(node: fx.Node) -> str:
    """Returns `file.py:line` of the innermost frame outside of torch. If all frames are in torch,
    returns the innermost frame; without frames, returns ""."""
    frames = frames_of(node.meta.get("stack_trace") or "")
    found = innermost_outside_torch(frames) or (frames[-1] if frames else None)
    return f"{os.path.basename(found[0])}:{found[1]}" if found else ""


def is_in_package(node: fx.Node, package: str) -> bool:
    """Whether a library's code made a node: the node's stack trace has a file in a folder of this
    name."""
    trace = node.meta.get("stack_trace") or ""
    return f"/{package}/" in trace.replace("\\", "/")


# Matches a frame. Its function and its line of code are matched if the trace has them.
_FRAME = re.compile(
    r'File "([^"]+)", line (\d+)(?:, in (\S+)[ \t]*(?:\n(?![ \t]*File "))?[ \t]*([^\n]*))?'
)


def lines_of(trace: str) -> dict[tuple[str, int], str]:
    """Returns the code of every (file, line) in a trace, the outermost frame first. The code is ""
    if the trace does not have it."""
    return {(file, int(line)): code for file, line, _, code in _FRAME.findall(trace)}


def frames_of(trace: str) -> list[tuple[str, int]]:
    """Returns (file, line) of every frame in a trace, the outermost frame first."""
    return [(file, int(line)) for file, line, _, _ in _FRAME.findall(trace)]


def calls_of(trace: str) -> list[str]:
    """Returns `file.py function line-of-code` of every frame outside of torch in a trace, the
    outermost frame first. File names have no folders."""
    return [
        f"{os.path.basename(file)} {function} {code}"
        for file, _, function, code in _FRAME.findall(trace)
        if function and f"{os.sep}torch{os.sep}" not in file
    ]


def innermost_outside_torch(frames: Sequence[tuple[str, int]]) -> tuple[str, int] | None:
    """Returns the innermost frame that is not in torch. frames: pairs (file, line), the outermost
    first."""
    return next((f for f in reversed(frames) if f"{os.sep}torch{os.sep}" not in f[0]), None)


def iter_views(args: Any) -> Iterator[View]:
    """Yields every view in nested arguments."""
    if isinstance(args, View):
        yield args
    elif isinstance(args, (tuple, list)):
        for item in args:
            yield from iter_views(item)
    elif isinstance(args, Mapping):
        yield from iter_views(tuple(args.values()))


def upstream(
    value: Value, reach: int, through: Callable[[Value], bool] = lambda value: True
) -> Iterator[Value]:
    """Yields `value` and the values that it is computed from, each once, the nearest first. Yields
    at most `reach` values, and does not go past values for which `through` returns False."""
    found, seen = [value], {value}
    for count, item in enumerate(found):  # the list grows during the loop
        if count == reach:
            return
        yield item
        if through(item):
            for view in item.operands:
                if view.value not in seen:
                    seen.add(view.value)
                    found.append(view.value)


@dataclass(frozen=True, eq=False)
class Dataflow:
    """A read-only description of a graph by its values. The graph itself is not changed.

    Attributes:
        graph: The graph that is described.
        values: The values, in program order.
        users: Maps a value to the values that read it.
        views: Maps a node to its tensor, as the tensor was when the node ran.
        memory_of: Maps a node to the memory of its tensor.
        written: Maps a memory to the writes to it.
        read: Maps a memory to its readers and their positions.
        outputs: The views that the graph returns.
        positions: Maps a node to its position in program order.
        homes: Maps a value to the node whose tensor has it, if that is not the value's own node
            (see :meth:`home`).
        same_size: A function that returns whether two sizes are equal. A comparison of symbols adds
            a guard to the compiled code.
        storage_of: A function that returns the number of a fake tensor's storage. The number is
            equal for tensors that may share memory.
        unknown: Nodes whose result is not known.
        reshaped: The storages of tensors whose shape, strides or storage change in place (`set_`).
        failed: Nodes that could not be read, each with the reason. They are assumed to read and
            write anything.
        opaque: Calls whose writes are unknown. They are assumed to write all tensors.
        target: The chip that the graph is compiled for; None if it is unknown.
    """

    graph: fx.Graph
    values: Sequence[Value]
    users: Mapping[Value, Sequence[Value]]
    views: Mapping[fx.Node, Any]
    memory_of: Mapping[fx.Node, Memory]
    written: Mapping[Memory, Sequence[Value]]
    read: Mapping[Memory, Sequence[tuple[int, fx.Node]]]
    outputs: Sequence[View]
    positions: Mapping[fx.Node, int]
    homes: Mapping[Value, fx.Node]
    same_size: Callable[[Size, Size], bool]
    storage_of: Callable[[torch.Tensor], int]
    unknown: Sequence[fx.Node]
    reshaped: frozenset[int]
    failed: Sequence[tuple[fx.Node, Exception]]
    opaque: Sequence[fx.Node] = ()
    target: Target | None = None

    def downstream(
        self,
        value: Value,
        reach: int | None = None,
        through: Callable[[Value], bool] = lambda value: True,
    ) -> list[Value]:
        """Returns `value` and the values that are computed from it through values that `through`
        accepts, the nearest first. Values that `through` does not accept are not returned.

        reach: the largest number of values; None for all values.
        """
        found, seen = [value], {value}
        for item in found:  # the list grows during the loop
            for user in self.users.get(item, ()):
                if user not in seen and len(found) != reach and through(user):
                    seen.add(user)
                    found.append(user)
        return found

    def only_user(self, value: Value) -> Value | None:
        """Returns the only value that reads `value`. Returns None if several values read it, or if
        the graph returns it."""
        users = dict.fromkeys(self.users.get(value, ()))
        return next(iter(users)) if len(users) == 1 and value not in self.output_values else None

    def home(self, value: Value) -> fx.Node:
        """Returns the node whose tensor has the value. For a write, this is the root of the written
        memory."""
        return self.homes.get(value, value.node)

    def rows_are_dense(self, view: View) -> bool:
        """Whether the last dimension of a view is contiguous in memory. If the dimension consists
        of several axes of the value, each axis must continue the next inner one."""
        width = view.effect.dims[-1]
        if any(atom.axis is None for atom in width):
            return False
        held = self.home(view.value).meta["example_value"]
        run: Size = 1
        for atom in reversed(width):
            if not isinstance(run, int) or held.stride(atom.axis) * atom.step != run:
                return False  # comparing a symbolic length would add a guard
            run = run * atom.length
        return True

    @cached_property
    def nodes_by_view(self) -> Mapping[View, fx.Node]:
        """The first node that selects each view. Only nodes whose memory is never written are
        included."""
        found: dict[View, fx.Node] = {}
        for node, view in self.views.items():
            if isinstance(view, View) and not self.written.get(self.memory_of[node]):
                found.setdefault(view, node)
        return found

    def values_at(self, nodes: Iterable[fx.Node]) -> list[Value]:
        """Returns the values that these nodes compute, in program order."""
        found = [value for node in dict.fromkeys(nodes) for value in self._values_at.get(node, ())]
        return sorted(found, key=attrgetter("position"))

    @cached_property
    def _values_at(self) -> Mapping[fx.Node, Sequence[Value]]:
        found: dict[fx.Node, list[Value]] = {}
        for value in self.values:
            found.setdefault(value.node, []).append(value)
        return found

    def nodes_of(self, value: Value) -> Sequence[fx.Node]:
        """Returns the nodes that select a part of a value, in program order."""
        return self._nodes_of.get(value, ())

    @cached_property
    def _nodes_of(self) -> Mapping[Value, Sequence[fx.Node]]:
        found: dict[Value, list[fx.Node]] = {}
        for node, view in self.views.items():
            if isinstance(view, View):
                found.setdefault(view.value, []).append(node)
        return found

    def written_back(self, value: Value) -> Iterator[Value]:
        """Yields the in-place writes whose source is exactly this value. The last step of `x[...]
        += y` and of `dist.all_reduce(x)` is such a write."""
        for user in self.users.get(value, ()):
            if user.store is not None and user.store.source == value.whole:
                yield user

    def on_storage(self, storage: int) -> Sequence[Memory]:
        """Returns all memories that share a storage."""
        return self._by_storage.get(storage, ())

    def writes_on(self, storage: int) -> Iterator[Value]:
        """Yields every in-place write to a memory on a storage."""
        for memory in self.on_storage(storage):
            yield from self.written.get(memory, ())

    def changes(self, view: View, place: int) -> Iterator[Value]:
        """Yields the in-place writes to a view's memory that come after the view is computed and
        before a place in program order."""
        memory = self.memory_of.get(self.home(view.value))
        if memory is not None:
            yield from self.writes_between(memory.storage, view.value.position, place)

    def writes_between(self, storage: int, first: int, last: int) -> Sequence[Value]:
        """Returns the in-place writes on a storage that come after one place in program order and
        before another."""
        positions, writes = self._writes_in_order.get(storage, ((), ()))
        return writes[bisect_right(positions, first) : bisect_left(positions, last)]

    def reads_between(self, memory: Memory, first: int, last: int) -> Sequence[tuple[int, fx.Node]]:
        """Returns the readers of a memory, with their positions, that come after one place in
        program order and before another."""
        reads = self.read.get(memory, ())
        begin, end = (bisect_left(reads, at, key=itemgetter(0)) for at in (first + 1, last))
        return reads[begin:end]

    @cached_property
    def _writes_in_order(self) -> Mapping[int, tuple[Sequence[int], Sequence[Value]]]:
        """The positions and the values of the writes to each storage, in program order."""
        found: dict[int, tuple[list[int], list[Value]]] = {}
        for value in self.stores:
            assert value.store is not None
            positions, writes = found.setdefault(value.store.memory.storage, ([], []))
            positions.append(self.positions[value.node])
            writes.append(value)
        return found

    @cached_property
    def _by_storage(self) -> Mapping[int, Sequence[Memory]]:
        found: dict[int, list[Memory]] = {}
        for memory in dict.fromkeys(self.memory_of.values()):
            found.setdefault(memory.storage, []).append(memory)
        return found

    @cached_property
    def stores(self) -> tuple[Value, ...]:
        return tuple(v for v in self.values if v.op == "store")

    @cached_property
    def store_nodes(self) -> frozenset[fx.Node]:
        """The nodes that write in place."""
        return frozenset(v.node for v in self.stores)

    @cached_property
    def output_values(self) -> frozenset[Value]:
        return frozenset(view.value for view in self.outputs)
