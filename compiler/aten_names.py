"""Asks a node which ATen operators it is, by running it under a recording mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.spelling import name_of


class Hole:
    """Stands for a tensor argument while a node is asked for its ATen name."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<{self.index}>"


def aten_names(
    node: fx.Node, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
) -> tuple[str, ...]:
    def fill(item: Any, given: Sequence[torch.Tensor]) -> Any:
        if isinstance(item, Hole):
            return given[item.index]
        if isinstance(item, (tuple, list)):
            return type(item)(fill(i, given) for i in item)
        if isinstance(item, dict):
            return {k: fill(v, given) for k, v in item.items()}
        return item

    def call(*given: torch.Tensor) -> Any:
        positional, named = fill(tuple(args), given), fill(dict(kwargs), given)
        if isinstance(node.target, str):
            return getattr(positional[0], node.target)(*positional[1:], **named)
        return node.target(*positional, **named)

    calls = _compat.aten_calls(call, tensors)
    return tuple(name if ":" in (name := name_of(c)) else f"aten.{name}" for c in calls)
