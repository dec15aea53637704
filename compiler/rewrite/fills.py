"""Turns `zeros_like(y)` into `zeros(sizes)` where `y` is computed in the graph: it reads the shape
of `y` and no element, and would keep `y` where a pattern takes its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat

_PLAIN: dict[Any, Any] = {torch.zeros_like: torch.zeros, torch.ones_like: torch.ones}


def make_fills_plain(graph: fx.Graph) -> int:
    """Gives such tensors sizes of their own, where these are numbers or inputs of the graph;
    returns how many there were."""
    likes = [node for node in graph.nodes if node.target in _PLAIN]
    if not likes:
        return 0
    sizes = {
        held.node.expr: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(held := node.meta.get("example_value"), torch.SymInt)
    }
    return sum(_make_plain(node, sizes) for node in likes)


def _make_plain(node: fx.Node, sizes: dict[Any, fx.Node]) -> bool:
    base = node.args[0] if len(node.args) == 1 else None
    if not isinstance(base, fx.Node) or base.op == "placeholder" or set(node.kwargs) - {"dtype"}:
        return False
    held, made = base.meta.get("example_value"), node.meta.get("example_value")
    if not isinstance(held, torch.Tensor) or not isinstance(made, torch.Tensor):
        return False
    # Inside of vmap a tensor like another is one of each entry.
    if _compat.is_subclass(held) or _compat.is_functorch_wrapper(held):
        return False
    if not (held.is_contiguous() and made.is_contiguous()):
        return False
    shape = [n if isinstance(n, int) else sizes.get(n.node.expr) for n in held.shape]
    if any(n is None for n in shape):
        return False
    node.target = _PLAIN[node.target]
    node.args = (shape,)
    node.kwargs = {"dtype": made.dtype, "device": made.device}
    return True
