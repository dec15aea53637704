"""Experts that a Python loop goes through one by one: no graph holds their products.

    expert_mask = one_hot(expert_ids);  for e in (expert_mask.sum(...) > 0).nonzero(): ...

How many tokens an expert gets decides shapes there, so Dynamo ends the graph before the loop; what
is left to see is the routing, prepared and handed out. Never a match: these anchors exist so that
the user is told what to change.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from tilewright.patterns.dataflow import Dataflow, Value, View, upstream
from tilewright.patterns.language import Miss, Reject, Stage, register_code
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.norm import strip_casts

register_code("EXPERT_LOOP", "the experts run one by one in Python, where no pattern sees them")

# By these a loop finds the tokens of an expert.
_PREPARED = {
    "aten.one_hot", "aten.eq", "aten.sort", "aten.argsort", "aten.histc", "aten.bincount",
    "aten.nonzero", "aten.unique", "aten.where", "opaque:unique", "opaque:bincount",
}  # fmt: skip
_TRANSFORMERS = "experts_implementation='grouped_mm' (model.set_experts_implementation)"
_PLAIN = (
    "sort the routes by expert and multiply with torch._grouped_mm (or gather weights[expert_ids] "
    "for torch.bmm); torch._dynamo.config.capture_dynamic_output_shape_ops makes one graph of a "
    "loop over all experts, which still is not fused"
)


@dataclass(frozen=True)
class ExpertLoop:
    """All loops' traces in a graph: they share one cause, so they get one Miss."""

    values: tuple[Value, ...]

    @property
    def node(self) -> fx.Node:
        return self.values[0].node

    def refuse(self, pattern: str) -> Reject:
        """The answer: EXPERT_LOOP, with the setting that helps."""
        text = "".join(v.node.meta.get("stack_trace") or "" for v in self.values)
        library = "/transformers/" in text.replace("\\", "/")
        message = (
            "the experts run in a Python loop over the tokens that each of them gets: their "
            "products are in no graph, or each in one of its own"
        )
        hint = _TRANSFORMERS if library else _PLAIN
        nodes = tuple(v.node for v in self.values)
        return Reject(Miss(pattern, "EXPERT_LOOP", Stage.ANCHORED, message, nodes, hint))


def find_expert_loop(flow: Dataflow) -> ExpertLoop | None:
    """What shows that a graph was cut before a loop over experts, or holds one; else None."""
    prepared = [v for v in flow.values if v.op in _PREPARED and _of_experts(v) and _by_ids(v)]
    found = [v for v in prepared if _finds_tokens(v) or _leaves(v, flow)]
    alone = [v for v in flow.values if _is_lone_expert(v) and _of_experts(v)]
    found += alone if len(alone) == 1 else []
    return ExpertLoop(tuple(found)) if found else None


def _finds_tokens(value: Value) -> bool:
    """Whether the data decides how many numbers a value holds: captured, not cut."""
    return value.op == "aten.nonzero" or (value.op == "aten.where" and len(value.args) == 1)


def _is_lone_expert(value: Value) -> bool:
    """Whether a value is an MLP whose weights are one of many in a tensor: a graph of its own."""
    if value.op != "aten.linear" or not _is_one_of_many(value.args[1]):
        return False
    activation = match_activation(strip_casts(value.args[0])[0])
    gate = None if activation is None else activation.gate.value
    if gate is None or gate.op != "aten.linear" or not _is_one_of_many(gate.args[1]):
        return False
    return gate.args[0].value.op == "input"


def _is_one_of_many(weight: View) -> bool:
    stacked = weight.value.op == "constant" and len(weight.value.shape) == 3
    return stacked and len(weight.shape) == 2


def _of_experts(value: Value) -> bool:
    """Whether the user's code speaks of experts there: a mere hint, for a mere message."""
    words = (value.node.meta.get("stack_trace") or "").lower() + value.scope.lower()
    return "expert" in words or "moe" in words


def _by_ids(value: Value, reach: int = 12) -> bool:
    """Whether a value comes from expert numbers: a router's choice, or integers from outside."""
    return any(
        item.op == "aten.topk" or (item.op == "input" and not item.dtype.is_floating_point)
        for item in upstream(value, reach)
        if item is not value
    )


def _leaves(value: Value, flow: Dataflow, reach: int = 12) -> bool:
    """Whether a value, or masks and numbers made of it, are handed out of the graph."""
    front, seen = [value], set[Value]()
    while front and len(seen) < reach:
        item = front.pop(0)
        if item in seen or item.dtype.is_floating_point:
            continue
        if item in flow.output_values:
            return True
        seen.add(item)
        front += flow.users.get(item, ())
    return False
