"""Finds in-place writes that read at most the elements that they overwrite, and how much they
write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import held_by
from tilewright.compiler.dataflow.spelling import argument, name_of
from tilewright.compiler.dataflow.writes import WRITES

_ADDS = frozenset({"index_add_", "scatter_add_"})
_INDEX_PUT = frozenset({"index_put_", "_index_put_impl_"})


@dataclass(frozen=True)
class Put:
    """A write `target[...] = source`.

    target: the node whose memory is written. Its other elements stay and are not read.
    shape: the shape of the written elements.
    reads: whether the write reads the old elements, because it adds something to them.
    also: whether `target` is also another argument of the write.
    """

    target: fx.Node
    shape: tuple[Any, ...]
    reads: bool
    also: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def put_of(node: fx.Node) -> Put | None:
    """Returns a node's write into its first argument. Returns None if the node writes nothing, or
    may read other elements of the argument."""
    name = name_of(node)
    target = argument(node, 0, "input")
    if name not in WRITES or not isinstance(target, fx.Node):
        return None
    held = target.meta.get("example_value")
    if not isinstance(held, torch.Tensor):
        return None
    others = {key: value for key, value in node.kwargs.items() if key != "input"}
    also = target in _nodes((node.args[1:], others))
    reads = name in _ADDS or "reduce" in others
    if name in _INDEX_PUT:
        reads = bool(argument(node, 3, "accumulate", False))
    return Put(target, tuple(_shape(node, name, held)), reads, also)


def _shape(node: fx.Node, name: str, held: torch.Tensor) -> Sequence[Any]:
    """Returns the shape of the written elements, which is at most the shape of the target."""
    if name in ("index_copy_", "index_add_"):
        return held_by(argument(node, 3, "source")).shape
    if name in ("scatter_", "scatter_add_"):
        return held_by(argument(node, 2, "index")).shape
    if name == "setitem":
        return _selected(held, node.args[1])
    if name in _INDEX_PUT:
        index = argument(node, 1, "indices")
        return _selected(held, tuple(slice(None) if i is None else i for i in index))
    return held.shape


def _selected(held: torch.Tensor, index: Any) -> Sequence[Any]:
    """Returns the shape of a selection. The size of a selection by a mask is unknown, so a mask
    gives the whole shape."""
    try:
        return _compat.selected(held, fx.node.map_arg(index, held_by)).shape
    except (RuntimeError, IndexError, TypeError, ValueError):
        return held.shape


def _nodes(item: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    fx.node.map_arg(item, found.add)
    return found
