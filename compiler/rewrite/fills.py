"""Turns `zeros_like(y)` and `y.new_zeros(sizes)` into `zeros(sizes)` where the graph computes `y`.

The calls read the shape or the dtype of `y`, but none of its elements. If they stayed in the graph,
they would keep `y` alive where a pattern replaces it, and they would look as though they were
computed from `y`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat

_PLAIN: dict[Any, Any] = {
    torch.zeros_like: torch.zeros,
    torch.ones_like: torch.ones,
    torch.ops.aten.zeros_like.default: torch.zeros,
    torch.ops.aten.ones_like.default: torch.ones,
}
# Methods that take only dtype and device from their tensor. Their sizes are arguments.
_NEW: dict[Any, Any] = {
    "new_zeros": torch.zeros,
    "new_ones": torch.ones,
    "new_full": torch.full,
    torch.ops.aten.new_zeros.default: torch.zeros,
    torch.ops.aten.new_ones.default: torch.ones,
    torch.ops.aten.new_full.default: torch.full,
}


def make_fills_plain(graph: fx.Graph) -> int:
    """Replaces fills whose sizes are numbers or inputs of the graph. Returns the number of replaced
    fills."""
    made = sum(_make_new(node) for node in graph.nodes if node.target in _NEW)
    likes = [node for node in graph.nodes if node.target in _PLAIN]
    if not likes:
        return made
    sizes = {
        held.node.expr: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(held := node.meta.get("example_value"), torch.SymInt)
    }
    return made + sum(_make_plain(node, sizes) for node in likes)


def _fills(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns two tensors: the one whose shape or dtype a fill takes, and the one that the fill
    makes.

    Returns None if the graph does not compute the first tensor, or if the first tensor is not
    plain.
    """
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node) or base.op == "placeholder":
        return None
    held: Any = base.meta.get("example_value")
    made = node.meta.get("example_value")
    # Inside vmap, `zeros_like` returns a batched tensor, which has one tensor for each entry of the
    # batch.
    if not _compat.is_plain(held) or not isinstance(made, torch.Tensor):
        return None
    return held, made


def _make_new(node: fx.Node) -> bool:
    said = _said(node)
    if set(said) - {"dtype", "device", "size", "fill_value"} or (fill := _fills(node)) is None:
        return False
    if any(isinstance(a, fx.Node) and _is_tensor(a) for a in (*node.args[1:], *said.values())):
        return False
    kept = {name: given for name, given in node.kwargs.items() if name in ("size", "fill_value")}
    node.op, node.target = "call_function", _NEW[node.target]
    node.args = node.args[1:]
    node.kwargs = {**kept, "dtype": fill[1].dtype, "device": fill[1].device}
    return True


def _said(node: fx.Node) -> dict[str, Any]:
    """Returns the keywords of a call whose values are neither None nor False. An exported graph
    also writes out defaults such as `pin_memory=False`."""
    return {name: given for name, given in node.kwargs.items() if given not in (None, False)}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _make_plain(node: fx.Node, sizes: dict[Any, fx.Node]) -> bool:
    fill = _fills(node) if len(node.args) == 1 and not set(_said(node)) - {"dtype"} else None
    if fill is None:
        return False
    held, made = fill
    if not (held.is_contiguous() and made.is_contiguous()):
        return False
    shape = [n if isinstance(n, int) else sizes.get(n.node.expr) for n in held.shape]
    if any(n is None for n in shape):
        return False
    node.target = _PLAIN[node.target]
    node.args = (shape,)
    node.kwargs = {"dtype": made.dtype, "device": made.device}
    return True
