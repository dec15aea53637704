"""Linears of DTensors as linears of the tensors inside of them.

`parallelize_module` wraps the input of a linear in a DTensor, multiplies it with a weight that is
one, and unwraps the result. Where a rank's part of the result is the same product of its own parts,
and nothing else is done to the DTensor in between, the graph can say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import access_of
from tilewright.compiler.dataflow.spelling import argument, name_of


def make_linears_local(graph: fx.Graph) -> None:
    """Replaces linears of DTensors, with all that unwraps them, by those of their local tensors."""
    for node in list(graph.nodes):
        if name_of(node) == "linear" and _is_dtensor(node):
            _make_local(node)


def _is_dtensor(node: fx.Node) -> bool:
    held = node.meta.get("example_value")
    return _compat.is_subclass(held) and hasattr(held, "to_local")


def _make_local(node: fx.Node) -> None:
    behind = _unwrapping(node)
    if not behind or not all(map(_is_dtensor, node.all_input_nodes)) or not _is_local(node):
        return
    graph = node.graph
    with graph.inserting_before(node):
        inner = {source: _inner(source) for source in node.all_input_nodes}
        args, kwargs = _with(node, inner)
        local = graph.create_node(node.op, node.target, args, kwargs)
    (held,) = _compat.parts_of(node.meta["example_value"])
    local.meta = node.meta | {"example_value": held}
    for user in behind:
        if not _is_dtensor(user):
            user.replace_all_uses_with(local)
    for gone in (*reversed(behind), node):
        graph.erase_node(gone)
    for source in inner:
        if not source.users and _plain_source(source) is not None:
            graph.erase_node(source)


def _unwrapping(node: fx.Node) -> list[fx.Node]:
    """All that is done to a DTensor until plain tensors are left, in program order, where that is
    nothing but to take what is inside; empty where it is more, or the graph returns it."""
    found = [node]
    for wrapper in found:  # grows meanwhile
        if _is_dtensor(wrapper):
            if not all(_holds(user, wrapper) for user in wrapper.users):
                return []
            found += [user for user in wrapper.users if user not in found]
    return sorted(found[1:])


def _holds(user: fx.Node, source: fx.Node) -> bool:
    """Whether a node writes nothing and gives the very tensor inside of what it is given."""
    one, other = user.meta.get("example_value"), source.meta.get("example_value")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return user.op != "output" and _compat.holds_in_place(other, one) and not access_of(user)


def _plain_source(node: fx.Node) -> fx.Node | None:
    """The plain tensor that `DTensor.from_local` wraps, without a check by the other ranks."""
    if name_of(node) != "from_local" or argument(node, 3, "run_check", False):
        return None
    source = argument(node, 0, "local_tensor")
    plain = isinstance(source, fx.Node) and not _is_dtensor(source)
    return source if plain and _holds(node, source) else None


def _inner(node: fx.Node) -> fx.Node:
    """A node with the tensor inside of a DTensor: what was wrapped, or a new `to_local`."""
    plain = _plain_source(node)
    if plain is not None:
        return plain
    inner = node.graph.call_method("to_local", (node,))
    (held,) = _compat.parts_of(node.meta["example_value"])
    inner.meta = node.meta | {"example_value": held}
    return inner


def _with(node: fx.Node, given: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    """A node's arguments and keywords with what is given for nodes."""
    args, kwargs = (fx.node.map_arg(a, given.__getitem__) for a in (node.args, node.kwargs))
    return args, kwargs


def _is_local(node: fx.Node) -> bool:
    """Whether a call on DTensors makes of their local tensors what it makes of plain ones: both
    are traced, and ATen is called alike."""
    sources = node.all_input_nodes
    wrapped = [source.meta["example_value"] for source in sources]
    if any(len(_compat.parts_of(tensor)) != 1 for tensor in wrapped):
        return False
    inside = [_compat.parts_of(tensor)[0] for tensor in wrapped]

    def call(given: list[torch.Tensor]) -> Any:
        tensors = dict(zip(sources, given, strict=True))
        args, kwargs = _with(node, tensors)
        return _compat.call(node.target, args, kwargs)

    def sharded(*given: torch.Tensor) -> torch.Tensor:
        made = call([_compat.wrapped_like(w, g) for w, g in zip(wrapped, given, strict=True)])
        return _compat.parts_of(made)[0]

    def plain(*given: torch.Tensor) -> Any:
        return call(list(given))

    try:
        one, other = (_compat.aten_graph(f, inside, pre_dispatch=False) for f in (sharded, plain))
    except Exception:  # what cannot be traced stays as it is
        return False
    return _calls(one) == _calls(other)


def _calls(graph: fx.Graph) -> list[Any]:
    """A graph's nodes by what they call on which earlier nodes."""
    at = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    return [
        (node.op, str(node.target), repr(fx.node.map_arg((node.args, node.kwargs), at.__getitem__)))
        if node.op != "placeholder"
        else (node.op,)
        for node in graph.nodes
    ]
