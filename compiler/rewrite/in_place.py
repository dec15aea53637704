"""Turns changes in place into the same arithmetic out of place, if no reader can tell the
difference.

`q.mul_(s)`, `q *= s`, `scores.masked_fill_(mask, -inf)`, `F.relu(x, inplace=True)`, `q[:] = other`,
`out.index_add_(0, rows, y)`, `out.index_put_((rows,), y)`: such a call becomes a call that returns
a new tensor. Two conditions must hold: the graph has allocated the memory, and no other view of the
written elements is read afterwards. Readers after the write then read the new tensor. Only a view
that overlaps the write counts: one part of a split may change while other nodes still read the
other parts. After this pass, patterns see one form of each operation.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import asked_in_place, inplace_position
from tilewright.compiler.dataflow.memory import LIES_WITH
from tilewright.compiler.dataflow.spelling import (
    IN_PLACE_ARITHMETIC,
    argument,
    is_tensor_node,
    is_torch_function,
    name_of,
)
from tilewright.compiler.rewrite.strides import same_steps, strides_matter, unbacked
from tilewright.compiler.safety.modes import modes_of
from tilewright.ops.checks import proven
from tilewright.ops.formats.paged_cache import strided_disjoint

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_OPERATOR_NAMES = {function.__name__ for function in (*_OPERATORS, operator.setitem)}
#: Elementwise functions with an argument `inplace`.
_ACTIVATIONS = frozenset(
    {"relu", "relu6", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardtanh",
     "hardswish", "hardsigmoid"}
)  # fmt: skip
# Functions that return zeros. A change of some rows of a tensor becomes a call that also copies the
# other rows. Therefore such a change is replaced only if a function in _ROWS_ADDED or _ROWS_PUT
# returned the tensor, and never in a cache.
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"})
_ROWS_ADDED = dict.fromkeys(
    ("index_add_", "scatter_add_"),
    _ZEROS | _PRODUCTS | {"add", "mul", "clone", "index_add", "scatter_add"},
)
_ROWS_PUT = _ZEROS | {"index_put"}
#: The largest number of nodes whose tensors may lie in one storage. Changes in place of a storage
#: with more nodes stay.
_MAX_NAMES = 64


@dataclass(frozen=True)
class _Call:
    """A call that returns a new tensor with the value that a call in place leaves in memory.
    `target` is a function, or the name of a method."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def put_into(self, node: fx.Node) -> None:
        node.op = "call_method" if isinstance(self.target, str) else "call_function"
        node.target, node.args, node.kwargs = self.target, self.args, self.kwargs


def make_arithmetic_new(graph: fx.Graph) -> int:
    """Replaces in-place arithmetic in `graph` by calls that return new tensors. Returns the number
    of replaced calls."""
    writing = {called for called in {node.target for node in graph.nodes} if _may_write(called)}
    if not any(node.target in writing and _out_of_place(node) for node in graph.nodes):
        return 0
    rewriter = _Rewriter(graph, writing)
    return sum(map(rewriter.visit, list(graph.nodes)))


# --- spellings ------------------------------------------------------------------------------------


def _out_of_place(node: fx.Node) -> _Call | None:
    """Returns the call that returns a new tensor and is equivalent to a node that writes in place.
    Returns None for any other node."""
    if not _is_call(node):
        return None
    base = node.args[0] if node.args else None
    if not is_tensor_node(base) or not _is_call(base):
        return None  # callers see a change of an input
    target, name = node.target, name_of(node)
    if target is operator.setitem:
        return _assigned(node)
    if name == "copy_":
        return _copied(node.args[1]) if len(node.args) == 2 and not node.kwargs else None
    if name == "index_put_":
        given = argument(node, 1, "indices"), argument(node, 2, "values")
        return None if argument(node, 3, "accumulate", False) else _put(base, *given)
    if name in _ACTIVATIONS and is_torch_function(target) and asked_in_place(node):
        return _without_inplace(node)
    if name not in IN_PLACE_ARITHMETIC and not _is_made_by(base, _ROWS_ADDED.get(name)):
        return None
    new = _new_target(target, name)
    return None if new is None else _Call(new, node.args, dict(node.kwargs))


def _is_call(node: Any) -> bool:
    return node.op in ("call_function", "call_method")


def _may_write(target: Any) -> bool:
    """Whether a call of a target may be a change in place that this module replaces. This is a
    quick test by the name of the target."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    base, _, _ = name.partition(".")  # the name of an overload follows
    return base.endswith("_") or base in _ACTIVATIONS or base in _OPERATOR_NAMES


def _new_target(target: Any, name: str) -> Any:
    if target in _OPERATORS:
        return _OPERATORS[target]
    if isinstance(target, torch._ops.OpOverload):
        packet = getattr(torch.ops.aten, name[:-1], None)
        return getattr(packet, target._overloadname, None)
    if isinstance(target, str):
        return name[:-1] if hasattr(torch.Tensor, name[:-1]) else None
    return getattr(torch, name[:-1], None)


def _is_made_by(base: Any, makers: frozenset[str] | None) -> bool:
    return makers is not None and _is_call(base) and name_of(base) in makers


def _without_inplace(node: fx.Node) -> _Call:
    kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    position = inplace_position(node.target)
    args = tuple(False if at == position else a for at, a in enumerate(node.args))
    return _Call(node.target, args, kwargs)


def _copied(source: Any) -> _Call | None:
    return _Call(torch.clone, (source,)) if is_tensor_node(source) else None


def _assigned(node: fx.Node) -> _Call | None:
    """Returns the call that makes the new tensor for `x[:] = y`, `x[mask] = number` or
    `x[rows] = y`. Returns None for any other assignment."""
    base, index, value = node.args
    items = index if isinstance(index, tuple) else (index,)
    sizes = base.meta["example_value"].shape  # type: ignore[union-attr]
    if _is_whole(items, sizes):
        return _copied(value)
    if not is_tensor_node(index):
        return None
    at, held = index.meta["example_value"], base.meta["example_value"]  # type: ignore[union-attr]
    if at.dtype == torch.bool and tuple(at.shape) == tuple(held.shape):
        return _Call(torch.masked_fill, (base, index, value)) if _holds(held, value) else None
    return _put(base, (index,), value)


def _is_whole(items: tuple[Any, ...], sizes: Any) -> bool:
    """Whether indices select a whole tensor in its order: `...`, `:`, or `:n` in a dimension of
    size n."""
    at = next((number for number, item in enumerate(items) if item is ...), len(items))
    front, back = items[:at], items[at + 1 :]
    pairs = [*zip(front, sizes, strict=False), *zip(back[::-1], sizes[::-1], strict=False)]
    return all(isinstance(item, slice) and _takes_all(item, size) for item, size in pairs)


def _takes_all(part: slice, size: Any) -> bool:
    if part == slice(None):
        return True
    ends = [end for end in (part.start, part.stop, part.step, size) if end is not None]
    return all(isinstance(end, int) for end in ends) and range(size)[part] == range(size)


def _put(base: Any, indices: Any, value: Any) -> _Call | None:
    """Returns the call that puts rows into a tensor of zeros, for `x.index_put_((rows,), y)`.
    Earlier calls may have put other rows into it. Returns None for other arguments."""
    if len(indices) != 1 or not is_tensor_node(indices[0]) or not is_tensor_node(value):
        return None
    at, held, put = (n.meta["example_value"] for n in (indices[0], base, value))
    if at.dtype != torch.int64 or at.dim() != 1:
        return None
    # Assignment drops leading dimensions of size one from the value; index_put refuses them.
    fits = put.dtype == held.dtype and put.dim() <= held.dim()
    call = _Call(torch.index_put, (base, tuple(indices), value))
    return call if fits and _is_made_by(base, _ROWS_PUT) else None


def _holds(held: torch.Tensor, value: Any) -> bool:
    """Whether a number is finite in a tensor's floating-point dtype, or is infinity itself. If a
    number overflows, `masked_fill` raises an error and an assignment does not."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    if not held.is_floating_point():
        return False
    return abs(value) <= torch.finfo(held.dtype).max or value in (float("inf"), float("-inf"))


# --- privacy --------------------------------------------------------------------------------------


class _Written:
    """Stands in for a Dataflow in calls of :func:`strides_matter`, and says that every storage is
    written."""

    def writes_on(self, storage: int) -> Iterator[bool]:
        yield True


@dataclass
class _Rewriter:
    """Goes through a graph in program order.

    writing: the targets that may write in place.
    names: for each storage, the nodes visited so far whose tensors lie in it.
    last: for each node, the position of its last reader.
    result: for each node whose tensor a replaced call wrote, that call. Later nodes read the result
        of the call instead of the tensor.
    former: the inverse of `result`.
    moved: the nodes whose tensors now lie in other storages, because their input is new, each with
        its former storages.
    stepped: the moved nodes whose strides changed, too.
    kept: the former tensors of nodes. They are kept alive so that no new storage gets the key of an
        old one.
    shared: the storages that share memory with other storages, as LIES_WITH says.
    """

    graph: fx.Graph
    writing: Set[Any]
    names: dict[int, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    position: dict[fx.Node, int] = field(default_factory=dict)
    last: dict[fx.Node, int] = field(default_factory=dict)
    result: dict[fx.Node, fx.Node] = field(default_factory=dict)
    former: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    moved: dict[fx.Node, set[int]] = field(default_factory=dict)
    stepped: set[fx.Node] = field(default_factory=set)
    kept: list[Any] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        modes = modes_of(self.graph, torch.is_grad_enabled())
        # A change under no_grad keeps the autograd history of the tensor, and a new tensor has
        # none.
        self.recorded = modes.recorded | modes.differentiated
        for at, node in enumerate(self.graph.nodes):
            self.position[node] = at
            self.last.update(dict.fromkeys(node.all_input_nodes, at))
            for tensor in node.meta.get(LIES_WITH, ()):
                self.shared.update((*_compat.storage_keys(tensor), *_compat.storages_of(node)))

    def visit(self, node: fx.Node) -> bool:
        """Updates a node whose inputs moved, and replaces it by a call that returns a new tensor if
        that is possible. Returns whether the node was replaced."""
        if self.result:
            for source in node.all_input_nodes:
                if source in self.result:
                    node.replace_input_with(source, self._result_of(source))
            self._follow(node)
        # The replacement is looked up here and not earlier, because the node's inputs may just have
        # been made new.
        call = _out_of_place(node) if node.target in self.writing else None
        done = call is not None and self._make_new(node, call)
        for storage in dict.fromkeys(_compat.storages_of(node)):
            self.names[storage].append(node)
        return done

    def _result_of(self, node: fx.Node) -> fx.Node:
        newest = node
        while newest in self.result:
            newest = self.result[newest]
        while node is not newest:  # this makes the next search shorter
            self.result[node], node = newest, self.result[node]
        return newest

    def _follow(self, node: fx.Node) -> None:
        sources = [source for source in node.all_input_nodes if source in self.moved]
        before = set(_compat.storages_of(node)) if sources else None
        if not before:
            return
        shares = any(before & self.moved[source] for source in sources)
        if not shares and (self.stepped.isdisjoint(sources) or _is_dense(node)):
            return
        made = _compat.run_fake(node)
        held = zip(_compat.tensors_of(node), _compat.tensors_in(made), strict=True)
        alike = all(same_steps(old, new) for old, new in held)
        if not alike:
            self.stepped.add(node)
        if shares or not alike:
            self.moved[node] = before
            self._hold(node, made)

    def _hold(self, node: fx.Node, made: Any) -> None:
        self.kept.append(node.meta.get("example_value"))
        node.meta["example_value"] = made

    def _make_new(self, node: fx.Node, call: _Call) -> bool:
        base = node.args[0]
        assert isinstance(base, fx.Node)
        if not self._is_private(base, node):
            return False
        old = _Call(node.target, node.args, dict(node.kwargs))
        call.put_into(node)
        made = self._computed(node, base)
        if made is None:
            old.put_into(node)
            return False
        # The nodes that view the new tensor viewed the storages of `base` before.
        self.moved[node] = self.moved.get(base, set()) | set(_compat.storages_of(base))
        if base in self.stepped or not same_steps(made, base.meta["example_value"]):
            self.stepped.add(node)
        self._hold(node, made)
        self.result[base] = node
        self.former.setdefault(node, self.former.pop(base, [])).append(base)
        self.last[node] = max(self.last.get(node, 0), self.last[base])
        self.last[base] = self.position[node]
        return True

    def _computed(self, node: fx.Node, base: fx.Node) -> torch.Tensor | None:
        """Returns the result that the call for a new tensor has on fake tensors. Returns None if it
        differs from the tensor that the call in place leaves."""
        held = base.meta["example_value"]
        try:
            made = _compat.run_fake(node)
        except (RuntimeError, TypeError, ValueError):
            return None
        if not isinstance(made, torch.Tensor) or made.dtype != held.dtype:
            return None
        if tuple(made.shape) != tuple(held.shape) or made.device != held.device:
            return None
        if not set(_compat.storages_of(base)).isdisjoint(_compat.storage_keys(made)):
            return None
        return made if same_steps(made, held) or self._may_be_packed(node, base, made) else None

    def _may_be_packed(self, node: fx.Node, base: fx.Node, made: torch.Tensor) -> bool:
        """Whether the strides of `made` suit the readers of a node, and the later readers of its
        base."""
        for name in self.former.get(base, ()):
            name.replace_all_uses_with(base, lambda user: node < user)
        if strides_matter(node, made, _Written()):
            return False
        before, node.meta["example_value"] = node.meta.get("example_value"), made
        matter = strides_matter(base, made, _Written())
        node.meta["example_value"] = before
        return not matter

    def _is_private(self, base: fx.Node, node: fx.Node) -> bool:
        """Whether the graph allocated a tensor's memory and, after `node`, reads no other tensor
        that overlaps the tensor."""
        held = base.meta["example_value"]
        if not _is_plain(held) or _meets_itself(held) or not self.recorded.isdisjoint((base, node)):
            return False
        storages = _compat.storage_keys(held)
        names = self.names[storages[0]] if len(storages) == 1 else []
        if base not in names or len(names) > _MAX_NAMES or storages[0] in self.shared:
            return False
        if not all(map(_makes_memory, names)):
            return False
        here = self.position[node]
        others = [n for n in names if n is not base and self.last.get(n, 0) > here]
        return all(
            _lies_apart(tensor, held)
            for other in others
            for tensor in self._read_behind(other, node)
            if storages[0] in _compat.storage_keys(tensor)
        )

    def _read_behind(self, name: fx.Node, node: fx.Node) -> list[torch.Tensor]:
        """Returns the tensors of the node `name` that may be read after another node. If `name` has
        several tensors, returns only those that a later node takes from it."""
        behind = [user for user in name.users if node < user]
        several = not isinstance(name.meta["example_value"], torch.Tensor)
        if several and all(user.target is operator.getitem for user in behind):
            return _compat.tensors_of(*behind)
        return _compat.tensors_of(name)


def _is_dense(node: fx.Node) -> bool:
    """Whether a node that shares no memory has a dense result, whatever the strides of its
    inputs."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) or bool(unbacked(node))


def _makes_memory(node: fx.Node) -> bool:
    """Whether the tensors of a node lie in memory that the graph allocated, as far as fake tensors
    show it.

    An opaque Python function may keep the tensor that it returns, and fake tensors without storage
    may share memory without showing it.
    """
    if not _is_call(node) or name_of(node).startswith("python::"):
        return False
    return all(map(_compat.storage_keys, _compat.tensors_of(*node.all_input_nodes)))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and _compat.is_plain(tensor)


def _meets_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may lie at the same address."""
    reach: Any = 0
    for stride, size in sorted(_axes(tensor), key=_compat.hints_of):
        if not proven(stride > reach):
            return True
        reach = reach + (size - 1) * stride
    return False


def _axes(tensor: torch.Tensor) -> list[tuple[Any, Any]]:
    """Returns (stride, size) of each axis that may have more than one element."""
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in axes if not proven(size == 1)]


def _lies_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on one storage certainly share no element."""
    if not _is_plain(one) or not _is_plain(other) or one.element_size() != other.element_size():
        return False
    # The sequences of a batch may lie a symbolic stride apart. The elements of one sequence lie
    # within this stride.
    far = [[stride for stride, _ in _axes(t) if not isinstance(stride, int)] for t in (one, other)]
    near = [[axis for axis in _axes(t) if isinstance(axis[0], int)] for t in (one, other)]
    starts = [t.storage_offset() for t in (one, other)]
    if far[0] or far[1]:
        if len(far[0]) != 1 or len(far[1]) != 1 or not proven(far[0][0] == far[1][0]):
            return False
        first = starts[0] if proven(starts[0] <= starts[1]) else starts[1]
        ends = [
            start + sum(stride * (size - 1) for stride, size in axes)
            for start, axes in zip(starts, near, strict=True)
        ]
        if not all(proven(end - first < far[0][0]) for end in ends):
            return False
    (strides_a, shape_a), (strides_b, shape_b) = (_transposed(axes) for axes in near)
    return strided_disjoint(shape_a, strides_a, shape_b, strides_b, starts[1] - starts[0])


def _transposed(axes: list[tuple[Any, Any]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(stride for stride, _ in axes), tuple(size for _, size in axes)
