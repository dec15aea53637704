"""Removes dropouts that are off.

Such a dropout returns its input itself. A write to its result therefore writes to the input. In the
trace, however, its fake result has memory of its own. Nodes whose fake tensors lie in that memory
are run again, on the memory that they really have.
"""

from __future__ import annotations

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import argument

_DROPOUTS = (
    torch.nn.functional.dropout,
    torch.dropout,
    torch.dropout_,
    torch.ops.aten.dropout.default,
    torch.ops.aten.dropout_.default,
)


def remove_idle_dropouts(graph: fx.Graph) -> int:
    """Removes the dropouts that are not in train mode, or whose probability is zero. Returns the
    number of removed dropouts."""
    dropouts = _dropouts(graph)
    idle = [
        n for n in dropouts if isinstance(n.args[0] if n.args else None, fx.Node) and _is_idle(n)
    ]
    gone: set[int] = set()
    for node in idle:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        gone |= {*_compat.storages_of(node)} - {*_compat.storages_of(source)}
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    if gone:
        _move(graph, gone)
    return len(idle)


def count_dropouts(graph: fx.Graph) -> int:
    """Returns the number of dropouts that are on."""
    return sum(not _is_idle(node) for node in _dropouts(graph))


def _dropouts(graph: fx.Graph) -> list[fx.Node]:
    return [
        node for target in _DROPOUTS for node in graph.find_nodes(op="call_function", target=target)
    ]


def _move(graph: fx.Graph, gone: set[int]) -> None:
    """Runs the nodes again whose fake tensors lie in storages that no longer exist."""
    for node in graph.nodes:
        if node.op != "placeholder" and not gone.isdisjoint(_compat.storages_of(node)):
            node.meta["example_value"] = _compat.run_fake(node)


def _is_idle(node: fx.Node) -> bool:
    functional = node.target is torch.nn.functional.dropout
    training = argument(node, 2, "training" if functional else "train", True)
    p = argument(node, 1, "p", 0.5)
    return training is False or (isinstance(p, (int, float)) and p == 0)
