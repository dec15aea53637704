"""Merges nodes that compute the same from the same tensors (value numbering).

Libraries quantise an activation once for each linear that reads it, by one formula. Patterns see
different activations until these are one node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler._compat.autocast import has_autocast
from tilewright.compiler.dataflow import spelling
from tilewright.compiler.dataflow.access import access_of
from tilewright.compiler.dataflow.spelling import name_of

_CALLS = ("call_function", "call_method")


def merge_equal_nodes(graph: fx.Graph) -> int:
    """Merges each node into an earlier one that makes the same call; returns how many there were.

    Left alone are calls whose result no table says is decided by their arguments, and nodes whose
    tensors, or whose arguments', lie in memory that the graph writes or returns: there two tensors
    are not one. A graph that switches autocast on or off stays as it is.
    """
    if has_autocast(graph):
        return 0
    merged, excluded = 0, None
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in _CALLS or not _is_decided(node):
            continue
        # Arguments are merged before: nodes are known by name here.
        key = (node.op, node.target, repr(node.args), repr(node.kwargs))
        known = first.setdefault(key, node)
        if known is node:
            continue
        if excluded is None:
            excluded = _written(graph) | {
                *_compat.storages_of(*graph.output_node().all_input_nodes)
            }
        if excluded.isdisjoint(_compat.storages_of(node, known, *node.all_input_nodes)):
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            merged += 1
    return merged


def _is_decided(node: fx.Node) -> bool:
    """Whether a call gives the same tensors whenever it is made with the same ones."""
    name = name_of(node)
    if name in ("getitem", *spelling.LAYOUT, *spelling.CASTS):
        return True
    return name in spelling.PLAIN and torch.Tag.nondeterministic_seeded not in _compat.aten_tags(
        name
    )


def _written(graph: fx.Graph) -> set[int]:
    """The storages that some node may write: all, where one may write what it is not given."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    found = [access_of(node) for node in nodes]
    if any(access.everything for access in found):
        return {*_compat.storages_of(*graph.nodes)}
    tensors = [tensor for access in found for tensor in (*access.written, *access.reshaped)]
    return {key for tensor in tensors for key in _compat.storage_keys(tensor)}
