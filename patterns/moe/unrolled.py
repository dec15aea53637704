"""Experts written out one after the other, each over all tokens and weighed by a column.

    for e in range(E):  out = out + scores[:, e, None] * down_e(activation(gate_e(x), up_e(x)))

Such a graph grows with the number of experts and computes all of them; it is told, not fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.language import Miss, Reject, Stage, register_code
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.norm import strip_casts

register_code("EXPERT_UNROLLED", "the experts are written out one by one, each over all tokens")


@dataclass(frozen=True)
class UnrolledExperts:
    """All experts of one layer: they share one cause, so they get one Miss."""

    values: tuple[Value, ...]

    @property
    def node(self) -> fx.Node:
        return self.values[0].node

    def refuse(self, pattern: str) -> Reject:
        """The answer: EXPERT_UNROLLED."""
        count = len(self.values)
        message = f"{count} experts are computed one by one, each for all tokens, and weighed"
        hint = (
            "keep the experts' weights in one tensor [E, N, K] and use torch._grouped_mm with the "
            "routes sorted by expert, or torch.bmm with all experts and scores scattered into zeros"
        )
        nodes = tuple(v.node for v in self.values)
        return Reject(Miss(pattern, "EXPERT_UNROLLED", Stage.ANCHORED, message, nodes, hint))


def find_unrolled_experts(flow: Dataflow) -> Iterator[UnrolledExperts]:
    """Two or more MLPs of one x, each weighed by a number per token."""
    by_x: dict[View, list[Value]] = {}
    for value in flow.values:
        if value.op == "aten.linear" and _is_weighed(value, flow):
            x = _input_of(value)
            if x is not None:
                by_x.setdefault(x, []).append(value)
    for values in by_x.values():
        if len(values) > 1:
            yield UnrolledExperts(tuple(values))


def _is_weighed(value: Value, flow: Dataflow, reach: int = 4) -> bool:
    """Whether a product's result is multiplied by a number per token that the graph computes."""
    front, seen = [value], 0
    while front and seen < reach:
        item = front.pop(0)
        seen += 1
        for user in dict.fromkeys(flow.users.get(item, ())):
            if user.op == "aten.mul" and any(
                v.value is not item and v.value.projected and _is_column(v) for v in user.operands
            ):
                return True
            if user.op in ("cast", "aten.mul", "aten.add"):
                front.append(user)
    return False


def _is_column(view: View) -> bool:
    return bool(view.effect.dims) and all(a.axis is None for a in view.effect.dims[-1])


def _input_of(down: Value) -> View | None:
    """The x of an MLP, from its last product."""
    activation = match_activation(strip_casts(down.args[0])[0])
    if activation is None:
        return None
    gate = activation.gate.value
    return gate.args[0] if gate.op == "aten.linear" else None
