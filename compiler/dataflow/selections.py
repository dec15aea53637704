"""Recognises layout functions by what they do.

The names of the functions are not enough, because a release of torch may give a transpose a new
name. A call that is in no table is traced alone, on its fake tensors and below autograd, where ATen
has few names left. If the trace only selects, each of the call's results is a chain of views that
the tables know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow import spelling
from tilewright.compiler.dataflow.aten_names import AtenCall, traced_alone
from tilewright.compiler.dataflow.spelling import name_of, shape_of
from tilewright.patterns.effects import Effect


@dataclass(frozen=True)
class Selection:
    """A selection of elements from one of the tensors of a call.

    of: the index of this tensor among the call's tensors.
    steps: the steps of the selection, in order.
    """

    of: int
    steps: tuple[Callable[[Effect], Effect], ...] = ()

    def __call__(self, effect: Effect) -> Effect:
        for step in self.steps:
            effect = step(effect)
        return effect

    def then(self, step: Callable[[Effect], Effect]) -> Selection:
        return Selection(self.of, (*self.steps, step))


def selections(
    node: fx.Node, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
) -> tuple[Selection, ...] | None:
    """Returns the selection of each result of a node's call. Returns None if the call does anything
    besides selecting.

    `args` and `kwargs` are the node's arguments, with a `Hole` in place of each tensor in
    `tensors`. Raises any exception that tracing raises.
    """
    if any(map(_compat.is_subclass, tensors)):
        return None
    graph = traced_alone(node, args, kwargs, tensors, pre_dispatch=False)
    inputs = (n for n in graph.nodes if n.op == "placeholder")
    found = {n: Selection(i) for i, n in enumerate(inputs)}
    for called in graph.nodes:
        if called.op in ("placeholder", "output") or not _compat.tensors_in(_made(called)):
            continue
        if _is_split(called) and _first(called) in found:
            continue
        selection = _selection(called, found)
        if selection is None:
            return None
        found[called] = selection
    (results,) = graph.output_node().args
    group = results if isinstance(results, (tuple, list)) else (results,)
    selected = [found[n] for n in group if isinstance(n, fx.Node) and n in found]
    return tuple(selected) if len(selected) == len(group) else None


def _selection(node: fx.Node, found: Mapping[fx.Node, Selection]) -> Selection | None:
    """Returns the selection of one ATen call of a trace. Returns None if the call does anything
    besides selecting."""
    if not node.args:
        return None
    source = node.args[0]
    if node.target is operator.getitem and isinstance(source, fx.Node) and _is_split(source):
        return found[_first(source)].then(_part_of(source, node.args[1]))
    others = node.all_input_nodes[1:]
    if source not in found or any(isinstance(_made(n), torch.Tensor) for n in others):
        return None
    name, result = name_of(node), _made(node)
    if not (name in spelling.IDENTITY or name in spelling.LAYOUT):
        return None
    if result.dtype != _made(_first(node)).dtype:
        return None
    call, shape = _call_of(node, name), shape_of(result)
    return found[_first(node)].then(lambda e: spelling.selected(e, name, call, shape))


def _is_split(node: fx.Node) -> bool:
    return node.op == "call_function" and name_of(node) in spelling.SPLITS


def _part_of(split: fx.Node, at: Any) -> Callable[[Effect], Effect]:
    parts = split.meta.get("parts")
    if parts is None:
        name, shapes = name_of(split), [shape_of(part) for part in _made(split)]
        parts = split.meta["parts"] = spelling.Parts(name, _call_of(split, name), shapes)
    return partial(parts.select, at=at)


def _call_of(node: fx.Node, name: str) -> AtenCall:
    """Returns a call of a trace with the sizes themselves in place of the nodes that compute them,
    because these nodes would keep the traced graph alive."""
    args, kwargs = fx.node.map_arg((node.args[1:], dict(node.kwargs)), _made)
    return AtenCall(name, (None, *args), kwargs)


def _first(node: fx.Node) -> fx.Node:
    return cast(fx.Node, node.args[0])


def _made(node: fx.Node) -> Any:
    """Returns the value of a node of a trace: fake tensors or sizes."""
    return node.meta.get("val")
