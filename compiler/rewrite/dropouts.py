"""Takes a dropout that is off out of the graph: it returns the very tensor that it is given, and a
change in place of its result would look like one of a tensor that has other names."""

from __future__ import annotations

import torch
from torch import fx

from tilewright.compiler.dataflow.spelling import argument

_DROPOUTS = (
    torch.nn.functional.dropout,
    torch.dropout,
    torch.dropout_,
    torch.ops.aten.dropout.default,
    torch.ops.aten.dropout_.default,
)


def remove_idle_dropouts(graph: fx.Graph) -> int:
    """Removes the dropouts that do not train or drop nothing; returns how many there were."""
    idle = [
        node
        for target in _DROPOUTS
        for node in graph.find_nodes(op="call_function", target=target)
        if isinstance(node.args[0] if node.args else None, fx.Node) and _is_idle(node)
    ]
    for node in idle:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    return len(idle)


def _is_idle(node: fx.Node) -> bool:
    functional = node.target is torch.nn.functional.dropout
    training = argument(node, 2, "training" if functional else "train", True)
    p = argument(node, 1, "p", 0.5)
    return training is False or (isinstance(p, (int, float)) and p == 0)
