"""Sums over ranks that a DTensor stands for, as collectives of the tensors inside.

A linear that is cut along its columns gives a DTensor of partial sums, and placing that anew on all
ranks is an all-reduce of what each rank has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import name_of

_PLACED_ANEW = ("redistribute", "full_tensor")


def make_rank_sums_plain(graph: fx.Graph) -> None:
    """Replaces what unwraps a DTensor of partial sums, placed on all ranks, by the functional
    all-reduce of the local tensors, where nothing else is done with the DTensor in between."""
    for node in list(graph.nodes):
        group = _summed_by(node) if name_of(node) in _PLACED_ANEW else None
        if group is not None:
            plain = list(node.users) if name_of(node) == "redistribute" else [node]
            if plain and all(_is_plain(user) for user in plain):
                _sum_locally(node, plain, group)


def _summed_by(node: fx.Node) -> str | None:
    """The group that sums a DTensor of one dimension of ranks, and gets the whole; else None."""
    source = node.args[0] if node.args else None
    held = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    placements: tuple[Any, ...] = getattr(held, "placements", ())
    if held is None or len(placements) != 1:
        return None
    from torch.distributed.tensor import Partial

    # Subclasses, of lookups in a part of a table, do more than to sum.
    if type(placements[0]) is not Partial or placements[0].reduce_op != "sum":
        return None
    made = node.meta.get("example_value")
    if any(not one.is_replicate() for one in getattr(made, "placements", ())):
        return None
    return str(held.device_mesh.get_group().group_name)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node gives the tensor inside, and nothing else is asked of it."""
    return name_of(node) in ("to_local", "full_tensor") and not _compat.is_subclass(
        node.meta.get("example_value")
    )


def _sum_locally(node: fx.Node, plain: list[fx.Node], group: str) -> None:
    graph, source = node.graph, node.args[0]
    assert isinstance(source, fx.Node)
    (held,) = _compat.parts_of(source.meta["example_value"])
    ops = torch.ops._c10d_functional
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (ops.all_reduce.default, ("sum", group)),
        (ops.wait_tensor.default, ()),
    )
    with graph.inserting_before(node):
        made = graph.call_method("to_local", (source,))
        made.meta = node.meta | {"example_value": held}
        for function, options in calls:
            held = function(held, *options)
            made = graph.call_function(function, (made, *options))
            made.meta = node.meta | {"example_value": held}
    for user in plain:
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    if node not in plain:
        graph.erase_node(node)
