"""Traces a single node to learn which ATen operator it calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import name_of


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor argument in a call that is traced by itself."""

    index: int


@dataclass(frozen=True)
class AtenCall:
    """One call of an ATen operator, with a Hole in place of each tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def fill(item: Any, given: Sequence[Any]) -> Any:
    """Returns an argument in which the items of `given` replace the holes."""
    if isinstance(item, Hole):
        return given[item.index]
    if isinstance(item, (tuple, list)):
        return type(item)(fill(i, given) for i in item)
    if isinstance(item, dict):
        return {k: fill(v, given) for k, v in item.items()}
    return item


def traced_alone(
    node: fx.Node, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], pre_dispatch: bool
) -> fx.Graph:
    """Returns the ATen calls that a node makes. `tensors` are the inputs of the traced graph, in
    order."""

    def call(*given: torch.Tensor) -> Any:
        return _compat.call(node.target, fill(tuple(args), given), fill(dict(kwargs), given))

    return _compat.aten_graph(call, tensors, pre_dispatch)


def aten_call(
    node: fx.Node, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
) -> AtenCall | None:
    """Returns the single ATen call that a node makes, with the arguments in ATen's order. Returns
    None if the node makes several calls or computes anything else."""
    graph = traced_alone(node, args, kwargs, tensors, pre_dispatch=True)
    calls = [n for n in graph.nodes if n.op == "call_function" and not _picks(n)]
    if len(calls) != 1:
        return None
    (only,) = calls
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    holes: dict[fx.Node, Any] = {node: Hole(i) for i, node in enumerate(inputs)}
    if not set(only.all_input_nodes) <= set(holes):
        return None
    name = name_of(only)
    given: Any = fx.node.map_arg((only.args, dict(only.kwargs)), holes.__getitem__)
    return AtenCall(name if ":" in name else f"aten.{name}", tuple(given[0]), dict(given[1]))


def _picks(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "_operator"
