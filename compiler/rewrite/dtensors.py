"""Replaces calls on DTensors by calls on their local tensors.

`parallelize_module` wraps the input of a linear in a DTensor, multiplies it by a weight that is a
DTensor, and unwraps the result. A linear that is sharded by its input columns gives partial sums,
and redistributing them as a replicated tensor is an all-reduce of the ranks' local tensors. Where
such a DTensor has no other use, the graph can call that all-reduce directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import access_of
from tilewright.compiler.dataflow.spelling import argument, calls_of, name_of
from tilewright.compiler.rewrite.writer import with_inputs

_PLACED_ANEW = ("redistribute", "full_tensor")


def make_dtensors_plain(graph: fx.Graph) -> None:
    """Replaces linears, and sums over ranks, by the same calls on local tensors, if their DTensor
    results are only unwrapped."""
    for node in calls_of(graph, _PLACED_ANEW):
        if (group := _summed_by(node)) is not None:
            _sum_locally(node, group)
    for node in filter(_is_dtensor, calls_of(graph, ("linear",))):
        _multiply_locally(node)


def _is_dtensor(node: fx.Node) -> bool:
    held = node.meta.get("example_value")
    return _compat.is_subclass(held) and hasattr(held, "to_local")


def _inside(node: fx.Node) -> torch.Tensor:
    (held,) = _compat.parts_of(node.meta["example_value"])
    return held


def _new(like: fx.Node, held: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Adds a call before `like`, with the module and source line of `like`. Returns its node.
    `held` is the fake result of the call."""
    kind = "call_method" if isinstance(target, str) else "call_function"
    with like.graph.inserting_before(like):
        made = like.graph.create_node(kind, target, args, kwargs)
    made.meta = like.meta | {"example_value": held}
    return made


# --- sums -----------------------------------------------------------------------------------------


def _summed_by(node: fx.Node) -> str | None:
    """Returns the group over which a node sums a DTensor to replicate the sum. Returns None for
    other nodes, and for meshes of more than one dimension."""
    source = node.args[0] if node.args else None
    held = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    placements: tuple[Any, ...] = getattr(held, "placements", ())
    if held is None or len(placements) != 1:
        return None
    from torch.distributed.tensor import Partial

    # A subclass of Partial, such as the one of a sharded embedding, does more than sum.
    if type(placements[0]) is not Partial or placements[0].reduce_op != "sum":
        return None
    made = node.meta.get("example_value")
    if any(not one.is_replicate() for one in getattr(made, "placements", ())):
        return None
    return str(held.device_mesh.get_group().group_name)


def _sum_locally(node: fx.Node, group: str) -> None:
    plain = list(node.users) if name_of(node) == "redistribute" else [node]
    if not plain or not all(map(_gives_what_is_inside, plain)):
        return
    source, ops = node.args[0], torch.ops._c10d_functional
    assert isinstance(source, fx.Node)
    held = _inside(source)
    made = _new(node, held, "to_local", source)
    held = ops.all_reduce.default(held, "sum", group)
    made = _new(node, held, ops.all_reduce.default, made, "sum", group)
    made = _new(node, ops.wait_tensor.default(held), ops.wait_tensor.default, made)
    for user in plain:
        user.replace_all_uses_with(made)
    for gone in dict.fromkeys((*plain, node)):
        node.graph.erase_node(gone)


def _gives_what_is_inside(node: fx.Node) -> bool:
    """Whether a node unwraps a DTensor into a plain tensor."""
    unwraps = name_of(node) in ("to_local", "full_tensor")
    return unwraps and not _compat.is_subclass(node.meta.get("example_value"))


# --- linears --------------------------------------------------------------------------------------


def _multiply_locally(node: fx.Node) -> None:
    """Replaces a linear of DTensors by a linear of local tensors, if that computes the local tensor
    of the result."""
    behind = _unwrapping(node)
    if not behind or not all(map(_is_dtensor, node.all_input_nodes)) or not _is_local(node):
        return
    inner = {
        source: _plain_source(source) or _new(node, _inside(source), "to_local", source)
        for source in node.all_input_nodes
    }
    args, kwargs = with_inputs(node, inner)
    local = _new(node, _inside(node), node.target, *args, **kwargs)
    for user in behind:
        if not _is_dtensor(user):
            user.replace_all_uses_with(local)
    unused = [s for s in inner if _plain_source(s) is not None and set(s.users) == {node}]
    for gone in (*reversed(behind), node, *unused):
        node.graph.erase_node(gone)


def _unwrapping(node: fx.Node) -> list[fx.Node]:
    """Returns all nodes that read a node's DTensor, directly or through other DTensors, up to the
    plain tensors, in program order.

    The list is empty if one of them does more than unwrap, or if the graph returns the DTensor.
    """
    found = [node]
    for wrapper in found:  # the list grows in the loop
        if _is_dtensor(wrapper):
            if not all(_holds(user, wrapper) for user in wrapper.users):
                return []
            found += [user for user in wrapper.users if user not in found]
    return sorted(found[1:])


def _holds(user: fx.Node, source: fx.Node) -> bool:
    """Whether a node writes nothing and returns the local tensor of `source` itself."""
    one, other = user.meta.get("example_value"), source.meta.get("example_value")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return user.op != "output" and _compat.holds_in_place(other, one) and not access_of(user)


def _plain_source(node: fx.Node) -> fx.Node | None:
    """Returns the plain tensor that `DTensor.from_local` wraps. Returns None if the call compares
    the tensors of all ranks."""
    if name_of(node) != "from_local" or argument(node, 3, "run_check", False):
        return None
    source = argument(node, 0, "local_tensor")
    plain = isinstance(source, fx.Node) and not _is_dtensor(source)
    return source if plain and _holds(node, source) else None


def _is_local(node: fx.Node) -> bool:
    """Whether a call on DTensors does to their local tensors exactly what it does to plain tensors.
    Both calls are traced, and the ATen calls in the traces are compared."""
    sources = node.all_input_nodes
    wrapped = [source.meta["example_value"] for source in sources]
    if any(len(_compat.parts_of(tensor)) != 1 for tensor in wrapped):
        return False
    inside = [_inside(source) for source in sources]

    def plain(*given: torch.Tensor) -> Any:
        return _compat.call(node.target, *with_inputs(node, dict(zip(sources, given, strict=True))))

    def sharded(*given: torch.Tensor) -> torch.Tensor:
        made = plain(*map(_compat.wrapped_like, wrapped, given))
        return _compat.parts_of(made)[0]

    try:
        one, other = (_compat.aten_graph(f, inside, pre_dispatch=False) for f in (sharded, plain))
    except Exception:  # a call that cannot be traced stays
        return False
    return _calls(one) == _calls(other)


def _calls(graph: fx.Graph) -> list[Any]:
    """Returns a graph's nodes. Each is given by its target and the positions of the nodes that it
    reads."""
    at: Mapping[fx.Node, Any] = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    return [
        (node.op, str(node.target), repr(with_inputs(node, at)))
        if node.op != "placeholder"
        else (node.op,)
        for node in graph.nodes
    ]
