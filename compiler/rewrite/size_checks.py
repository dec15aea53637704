"""Erases Dynamo's checks of a size that depends on data, if no other node reads the tensor of that
size any more.

For `where(mask)`, the checks say that `where` finds between 0 and `mask.numel()` places:

    found = where(mask); n = sym_size(found[0], 0); _assert_scalar(n >= 0); _assert_scalar(n <= 24)

Such checks would keep `where` itself alive, and the host would wait for the GPU at each of them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat

_FINDS = {torch.where, torch.nonzero, "nonzero"}
_ASSERTS = torch.ops.aten._assert_scalar.default
_SIZE = torch.ops.aten.sym_size.int


def erase_size_checks(graph: fx.Graph, node: fx.Node) -> None:
    """Erases all readers of `node`, if they do nothing but check bounds of the number of its
    results. This number depends on data, but must always keep the bounds."""
    if node.target not in _FINDS or len(node.args) != 1 or node.kwargs:
        return
    mask: Any = node.args[0]
    most = mask.meta["example_value"].numel()
    readers = _readers(node)
    if all(_is_true(reader, most) for reader in readers):
        for reader in reversed(readers):
            graph.erase_node(reader)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Returns all nodes that depend on a node, in program order."""
    found = dict.fromkeys(node.users)
    front = list(found)
    while front:
        more = [user for user in front.pop().users if user not in found]
        found.update(dict.fromkeys(more))
        front += more
    return sorted(found)


def _is_true(reader: fx.Node, most: Any) -> bool:
    """Whether a node takes a size, or checks a bound that this size always keeps."""
    if reader.target in (operator.ge, operator.le):
        size, bound = reader.args
        if not isinstance(size, fx.Node) or size.target is not _SIZE:
            return False
        bound = bound.meta.get("example_value") if isinstance(bound, fx.Node) else bound
        low = reader.target is operator.ge
        return bool(bound == 0) if low else _compat.is_at_least(bound, most)
    return reader.target in (_ASSERTS, _SIZE, operator.getitem)
