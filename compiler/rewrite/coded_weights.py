"""Spells out linears whose weight is a tensor subclass of a quantisation library.

    y = linear(x, Int8Tensor)   ⇒   y = linear(x, weight.qdata.to(bfloat16)) * weight.scale

The graph then reads the tensors inside the weight and decodes them, as the modules of
`compiler/quantised` do. A call stays as it was written if no pattern took a part of it
(`spelled.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler._compat.autocast import autocast_at_devices
from tilewright.compiler.dataflow.spelling import argument
from tilewright.compiler.quantised import tensor_subclasses
from tilewright.compiler.quantised.operators import UnfitError
from tilewright.compiler.rewrite.declared import (
    Trace,
    Traces,
    copied,
    end_of,
    needed_for,
    require_same_layout,
    trace_of,
    traced,
    unfit_of,
)
from tilewright.compiler.rewrite.spelled import SpelledOut, stand_in
from tilewright.compiler.rewrite.writer import Writer
from tilewright.patterns.language import Miss, Stage

_OPERANDS = ("input", "weight", "bias")


class CodedWeights:
    """The linears of one graph whose weights can be read. Linears with equal layouts share a
    trace."""

    def __init__(self) -> None:
        self._traces: Traces = {}

    def takes(self, target: Any) -> bool:
        return target in (F.linear, torch.ops.aten.linear.default)

    def spell(self, call: fx.Node, write: Writer) -> SpelledOut | None:
        """Returns the spelled-out call. Returns None for a linear that stays as it is, for example
        because its weight is plain, or belongs to a class that cannot be read."""
        x, weight, bias = (argument(call, at, name) for at, name in enumerate(_OPERANDS))
        if not _is_read(weight) or not call.users:
            return None
        tensors = _compat.tensors_of(*call.all_input_nodes)
        devices = {tensor.device.type for tensor in tensors}
        plain = all(_compat.is_plain(node.meta["example_value"]) for node in (x, bias) if node)
        if not plain or autocast_at_devices(call, devices):
            return None
        trace = trace_of(call, self._traces, partial(_decoded, call, x, weight, bias))
        names, _ = weight.meta["example_value"].__tensor_flatten__()
        inner = [write.call(getattr, weight, name) for name in names]
        sources = [x, *inner, *([bias] if bias else [])]
        (output,) = trace.outputs
        made = copied(sources, trace, trace.outputs, (), write)[output]
        return stand_in(write, [call], [end_of(made, call, call.all_input_nodes, write)])

    def refused(self, call: fx.Node, error: Exception) -> Miss:
        weight = type(argument(call, 1, "weight").meta["example_value"]).__name__
        why = unfit_of(error)
        message = f"the codes of the linear's weight, a {weight}, are read {why}"
        return Miss("declare", "SUBCLASS", Stage.ANCHORED, message, (call,))


def _is_read(weight: Any) -> bool:
    """Whether a weight is an input of the graph and has a class whose codes the backend can decode
    in a graph."""
    held = weight.meta.get("example_value") if isinstance(weight, fx.Node) else None
    if held is None or weight.op not in ("placeholder", "get_attr"):
        return False
    return _compat.is_subclass(held) and tensor_subclasses.obstacle(held) == ("", True)


class _Inside:
    """Shows the attributes of a weight, with other tensors in place of its inner tensors."""

    def __init__(self, weight: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self.weight, self.tensors = weight, tensors

    def __getattr__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else getattr(self.weight, name)


def _decoded(call: fx.Node, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> Trace:
    """Traces a linear as a function of x, the tensors inside its weight, and the bias.

    Raises UnfitError if the library's own linear reads other tensors than the linear that decodes.
    """
    held = weight.meta["example_value"]
    names, _ = held.__tensor_flatten__()
    outer = [_compat.detached(node.meta["example_value"]) for node in (x, bias) if node]
    inner = [_compat.detached(getattr(held, name)) for name in names]
    tensors = [outer[0], *inner, *outer[1:]]

    def ours(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        inside = _Inside(held, dict(zip(names, rest, strict=False)))
        linear = tensor_subclasses.read(type(held), inside, *(rest[len(names) :] or [None]))
        assert not isinstance(linear, str)
        return linear(x)

    def theirs(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        parts = iter(rest)
        own = _compat.with_parts(held, lambda _: next(parts))
        return F.linear(x, own, *parts)

    trace = traced(ours, tensors)
    require_same_layout(trace, [call.meta["example_value"]])
    library = _compat.aten_graph(theirs, tensors, pre_dispatch=False)
    read = [_inputs_read(graph) for graph in (trace.graph, library)]
    if read[0] != read[1]:
        all_names = ["x", *names, "bias"]
        one, other = (", ".join(all_names[at] for at in sorted(places)) for places in read)
        raise UnfitError(f"from {one}; the library's linear reads {other}")
    return trace


def _inputs_read(graph: fx.Graph) -> set[int]:
    """Returns the positions of the inputs of a trace on which its result depends."""
    needed = needed_for(graph, graph.output_node().all_input_nodes)
    inputs = graph.find_nodes(op="placeholder")
    return {at for at, node in enumerate(inputs) if node in needed}
