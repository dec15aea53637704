"""Finds which tensors a node of a graph writes.

The name of a function does not say what the function writes. For an operator, the schema says it.
For a user's Triton kernel, torch analyses the kernel. For a higher-order operator, this module
reads the bodies. Any other callable runs on fake tensors that stand in for its arguments, as
AOTAutograd would trace it. If a callable cannot run on fake tensors, this module assumes that it
writes all its tensors and, unless the callable is torch's own, any other tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler._compat import trials
from tilewright.compiler.dataflow import spelling
from tilewright.compiler.dataflow.spelling import argument, is_torch_function, name_of
from tilewright.compiler.dataflow.writes import WRITES

#: The largest number of answers that each table of answers keeps. This number is enough, because a
#: model calls few functions at few shapes.
MAX_REMEMBERED = 1024


@dataclass(frozen=True)
class Access:
    """The changes that a node may make in memory.

    written: the tensors whose elements the node may change. They are the example values of the
        graph's nodes, not copies of them.
    everything: whether the node may also change tensors other than its arguments.
    reshaped: the tensors to which the node gives another shape, other strides or another storage in
        place, as `set_` does.
    """

    written: tuple[torch.Tensor, ...] = ()
    everything: bool = False
    reshaped: tuple[torch.Tensor, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.written or self.everything or self.reshaped)


_NONE = Access()
T = TypeVar("T")
# Two groups of positions among a call's tensors: the tensors that the call writes, and the tensors
# that it reshapes.
_Places = tuple[tuple[int, ...], tuple[int, ...]]
_remembered: dict[Any, _Places | None] = {}


def remembered(known: dict[Any, T], key: Any, answer: Callable[[], T]) -> T:
    """Returns the answer for `key`, which the first call computes. `known` keeps at most
    MAX_REMEMBERED answers."""
    if key not in known:
        if len(known) >= MAX_REMEMBERED:
            known.clear()
        known[key] = answer()
    return known[key]


def access_of(node: fx.Node) -> Access:
    """Returns what a node writes. A node may read every tensor that :func:`given` returns."""
    if node.op == "call_module":
        return Access(tuple(given(node)), everything=True)
    if node.op not in ("call_function", "call_method"):
        return _NONE
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _higher_order(node)
    if isinstance(target, torch._ops.OpOverloadPacket):
        called = _overloads(node, target)
        if len(called) == 1:
            return _written_by_schema(node, called[0])
        return _tried(node, given(node)) if any(map(trials.writes, called)) else _NONE
    name = name_of(node)
    if name in _WRITES_ITS_FIRST and spelling.is_tensor_node(argument(node, 0, "input")):
        return Access((argument(node, 0, "input").meta["example_value"],))
    if name in _PURE and "out" not in node.kwargs and not asked_in_place(node):
        return _NONE
    tensors = given(node)
    if not tensors and _is_torchs(node):
        return _NONE
    return _tried(node, tensors)


def given(node: fx.Node) -> list[torch.Tensor]:
    """Returns every tensor among a node's inputs, including the tensors inside containers."""
    return _compat.tensors_of(*node.all_input_nodes)


def _written_by_schema(node: fx.Node, target: Any) -> Access:
    args, kwargs = _held(node.args), _held(dict(node.kwargs))
    written = _compat.tensors_in(trials.written_arguments(target, args, kwargs))
    if torch.Tag.inplace_view in target.tags:
        if name_of(node) in spelling.IDENTITY:  # detach_: changes only what autograd knows
            return _NONE
        return Access(reshaped=tuple(_compat.tensors_in([*args, *kwargs.values()])))
    return Access(tuple(written))


def _overloads(node: fx.Node, packet: Any) -> list[Any]:
    """Returns the overloads of an operator that take the keywords of a call. packet: the
    operator."""
    return [
        overload
        for overload in (getattr(packet, name) for name in packet.overloads())
        if set(node.kwargs) <= {a.name for a in overload._schema.arguments}
        and {a.name for a in overload._schema.arguments if a.is_out} <= set(node.kwargs)
    ]


def _held(item: Any) -> Any:
    """Returns an argument in which example values replace the nodes, and attributes replace the
    `get_attr` nodes."""
    return fx.node.map_arg(item, held_by)


def held_by(node: fx.Node) -> Any:
    """Returns a node's example value. For a `get_attr` node without one, returns the attribute of
    the graph's module."""
    held = node.meta.get("example_value")
    return attribute_of(node) if held is None and node.op == "get_attr" else held


def attribute_of(node: fx.Node) -> Any:
    """Returns the attribute of the graph's module that a `get_attr` node reads."""
    owner: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    return owner


# --- known without trying -------------------------------------------------------------------------

# Calls that write their first argument. A test compares this table, and the next one, with the
# schemas of the operators that have these names.
_WRITES_ITS_FIRST = spelling.IN_PLACE_ARITHMETIC | frozenset(WRITES)
# Calls that write only if `out=` or `inplace=` is given. `embedding` may renormalise its weight.
_PURE = spelling.LISTED - {"embedding"}


def asked_in_place(node: fx.Node) -> bool:
    """Whether a call asks for `inplace`, like `F.relu(x, inplace=True)`."""
    position = None if isinstance(node.target, str) else inplace_position(node.target)
    return position is not None and bool(argument(node, position, "inplace", False))


@cache
def inplace_position(function: Callable[..., Any]) -> int | None:
    """Returns the position of a function's parameter `inplace`, or None."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # many built-in functions have no signature
        return None
    return names.index("inplace") if "inplace" in names else None


# --- higher-order operators -----------------------------------------------------------------------


def _higher_order(node: fx.Node) -> Access:
    tensors = given(node)
    if str(node.target) == "triton_kernel_wrapper_mutation":
        written = trials.triton_kernel_writes(_held(dict(node.kwargs)))
        return Access(tuple(tensors if written is None else written))
    bodies = [attribute_of(n) for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [body for body in bodies if not isinstance(body, torch.Tensor)]
    known = bodies and all(isinstance(body, fx.GraphModule) for body in bodies)
    if known and not any(_writes_outside(body) for body in bodies):
        return _NONE
    return Access(tuple(tensors))


def _writes_outside(body: fx.GraphModule) -> bool:
    """Whether a body may write memory that it did not allocate itself."""
    own: set[int] = set()
    outside: set[int] = set()
    for node in body.graph.nodes:
        access = access_of(node)
        if access.everything or access.reshaped:
            return True
        for tensor in access.written:
            keys = _compat.storage_keys(tensor)
            if not keys or not own.issuperset(keys) or outside.intersection(keys):
                return True
        into = outside if node.op in ("placeholder", "get_attr") else own
        into.update(_compat.storages_of(node))
    return False


# --- tried out ------------------------------------------------------------------------------------


def _tried(node: fx.Node, tensors: list[torch.Tensor]) -> Access:
    """Returns what a call writes when it runs on stand-ins for its tensors. If the call cannot run,
    returns all its tensors."""
    torchs = _is_torchs(node)

    def answer() -> _Places | None:
        return _places(node, tensors, torchs)

    places = remembered(_remembered, call_key(node), answer) if torchs else answer()
    if places is None:
        return Access(tuple(tensors), everything=not torchs)
    written, reshaped = (tuple(tensors[i] for i in at) for at in places)
    return Access(written, reshaped=reshaped)


def _places(node: fx.Node, tensors: list[torch.Tensor], torchs: bool) -> _Places | None:
    """Returns the positions of the `tensors` that a call writes, and of those whose shape, strides
    or storage it changes. Returns None if the call cannot be tried on stand-ins."""
    if not torchs and has_unbacked(node):
        return None  # another size may take another branch of the user's code
    try:
        args, kwargs = _held(node.args), _held(dict(node.kwargs))
        written, reshaped = trials.run_recorded(node.target, args, kwargs)
    except Exception:  # after any error, the writes are unknown
        return None

    def places(group: list[torch.Tensor]) -> tuple[int, ...]:
        ids = set(map(id, group))
        parts = [set(map(id, _compat.parts_of(tensor))) for tensor in tensors]
        return tuple(i for i, own in enumerate(parts) if own & ids)

    return places(written), places(reshaped)


def has_unbacked(node: fx.Node) -> bool:
    """Whether a node's input is a number that depends on data, or has such a number in its shape.
    Other symbols cause no problem: Dynamo has run the call with them already, and guards on the
    branch that the call took."""
    values = [source.meta.get("example_value") for source in node.all_input_nodes]
    return any(map(_compat.is_unbacked, (*values, *given(node))))


def has_symbols(node: fx.Node) -> bool:
    """Whether a node's input is a symbolic number, or has one in its shape."""
    values = [source.meta.get("example_value") for source in node.all_input_nodes]
    return any(map(_compat.is_symbolic, (*values, *given(node))))


def _is_torchs(node: fx.Node) -> bool:
    """Whether a node calls a method, or a function that comes with torch. A function that Dynamo
    wraps (`nonstrict_trace`, an allowed autograd.Function) counts as the user's own."""
    if node.op == "call_method":
        return True
    module = getattr(node.target, "__module__", None) or ""
    local = "<locals>" in getattr(node.target, "__qualname__", "")
    return is_torch_function(node.target) and not local and not module.startswith("torch._dynamo")


def call_key(node: fx.Node) -> Any:
    """Returns a key that holds everything that determines a call, except the data. It holds the
    target, the layouts of the tensors, which tensors share memory, and the other arguments. For a
    tensor subclass, it also holds the metadata, such as placements. Keys with symbolic sizes may be
    compared only within one graph."""
    inputs = {source: i for i, source in enumerate(node.all_input_nodes)}
    storages: dict[tuple[int, ...], int] = {}

    def described(source: fx.Node) -> str:
        held = source.meta.get("example_value")
        return f"{inputs[source]}: {[*map(laid_out, _compat.tensors_in(held))] or held!r}"

    def laid_out(tensor: torch.Tensor) -> tuple[Any, ...]:
        storage = storages.setdefault(_compat.storage_keys(tensor), len(storages))
        layout = (tensor.dtype, tensor.device, *_compat.layout_of(tensor), storage)
        return type(tensor), *layout, _compat.wrapping_of(tensor)

    return node.target, repr(fx.node.map_arg((node.args, node.kwargs), described))
