"""Turns `y += delta` into `y = y + delta` where no one can see the difference: `y` is a product
that the graph made and that nothing read before. Patterns then see one form of a sum."""

from __future__ import annotations

import operator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import name_of

_NEW: dict[Any, Any] = {operator.iadd: operator.add, "add_": "add"}
#: What makes the tensor that is added to.
_MADE_BY = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "add"}


def make_sums_new(graph: fx.Graph) -> int:
    """Makes such sums of `graph` return a new tensor; returns how many there were."""
    if not any(map(_adds_to_a_product, graph.nodes)):
        return 0
    owners: dict[int, list[fx.Node]] = {}
    changed = 0
    for node in graph.nodes:
        if _adds_to_a_product(node) and _is_private(base := node.args[0], node, owners):
            # Later nodes share the sum's memory, so the product gets memory of its own.
            for storage in _compat.storages_of(base):
                owners[storage] = []
            base.meta["example_value"] = _like(base)
            base.replace_all_uses_with(node, partial(operator.is_not, node))
            node.target = _NEW[node.target]
            changed += 1
        for storage in _compat.storages_of(node):
            owners.setdefault(storage, []).append(node)
    return changed


def _adds_to_a_product(node: fx.Node) -> bool:
    base = node.args[0] if node.args else None
    return (
        node.target in _NEW
        and isinstance(base, fx.Node)
        and base.op in ("call_function", "call_method")
        and name_of(base) in _MADE_BY
    )


def _is_private(base: fx.Node, node: fx.Node, owners: dict[int, list[fx.Node]]) -> bool:
    """Whether nothing has read the tensor that is written to, and the sum has its dtype."""
    held = base.meta.get("example_value")
    if any(user < node for user in base.users) or not isinstance(held, torch.Tensor):
        return False
    other = node.args[1] if len(node.args) > 1 else None
    if isinstance(other, fx.Node):
        other = other.meta.get("example_value")
    if not isinstance(other, torch.Tensor) or torch.result_type(held, other) != held.dtype:
        return False
    storages = _compat.storages_of(base)
    return bool(storages) and all(owners.get(storage, []) == [base] for storage in storages)


def _like(node: fx.Node) -> torch.Tensor:
    """A fake tensor laid out as a node's, with memory of its own."""
    held = node.meta["example_value"]
    with _compat.fake_mode_of([held]) or nullcontext(), torch.no_grad():
        return torch.empty_like(held)
