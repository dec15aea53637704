"""Merges activations that are computed alike from the same tensors (value numbering).

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
_PRODUCTS = ("linear", "matmul", "mm", "addmm")


def merge_equal_nodes(graph: fx.Graph) -> int:
    """Gives products whose activations are computed alike one activation; returns how many changed.

    Left alone are calls whose result no table says is decided by their arguments, and nodes whose
    tensors, or whose arguments', lie in memory that the graph writes or returns: there two tensors
    are not one. A graph that switches autocast on or off stays as it is, and so does every node
    that no such activation is made of.
    """
    if has_autocast(graph):
        return 0
    first = _first_alike(graph)
    inputs = dict.fromkeys(x for node in graph.nodes if (x := _activation(node)) is not None)
    wanted = [node for node in inputs if first.get(node, node) is not node]
    if not wanted:
        return 0
    excluded = _written(graph) | {*_compat.storages_of(*graph.output_node().all_input_nodes)}
    merged = 0
    for node in wanted:
        chain = _made_of(node, first)
        nodes = {n for one in chain for n in (one, first[one], *one.all_input_nodes)}
        if excluded.isdisjoint(_compat.storages_of(*nodes)):
            node.replace_all_uses_with(first[node])
            merged += 1
            for one in chain:
                if not one.users:
                    graph.erase_node(one)
    return merged


def _activation(node: fx.Node) -> fx.Node | None:
    """What a product multiplies by a weight; None for other nodes."""
    if node.op not in _CALLS or (name := name_of(node)) not in _PRODUCTS:
        return None
    first, keyword = (1, "mat1") if name == "addmm" else (0, "input")
    x = spelling.argument(node, first, keyword)
    return x if isinstance(x, fx.Node) else None


def _first_alike(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each decided call -> the first that is the same call of the same, by their names."""
    first: dict[fx.Node, fx.Node] = {}
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in graph.nodes:
        if node.op in _CALLS and _is_decided(node):
            args, kwargs = (
                fx.node.map_arg(given, lambda n: first.get(n, n))
                for given in (node.args, node.kwargs)
            )
            key = (node.op, node.target, repr(args), repr(kwargs))
            first[node] = known.setdefault(key, node)
    return first


def _made_of(node: fx.Node, first: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """A node and those behind it that repeat an earlier one, each before what it reads."""
    found: dict[fx.Node, None] = {}
    ahead = [node]
    while ahead:
        one = ahead.pop()
        if one not in found and first.get(one, one) is not one:
            found[one] = None
            ahead += one.all_input_nodes
    return sorted(found, reverse=True)


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
