"""The first half of an MLP: one or two linears that read the same input, and the activation
function after them.

    y   = rms_norm(x) * norm_weight, or layer_norm(x) * norm_weight + norm_bias
    out = act(linear(y, gate_weight)) * linear(y, up_weight)     ⇒   linear_activation(x, ...)

The MLP may be gated or not. The weights of gate and up are separate tensors, or rows of one tensor.
If the graph dequantises a weight, the op reads the codes of the weight. The pattern absorbs the
norm if no other value reads the norm's result. It absorbs a layer norm only for a single token. On
a chip that has a kernel that decodes quantised weights, the pattern also matches many tokens, or a
symbolic number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tilewright.ops.mlp.gains import MOST_TOKENS
from tilewright.ops.mlp.linear_activation import OP
from tilewright.ops.reference.activation import ACTIVATIONS
from tilewright.patterns.collective.sums import unless_summed
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope
from tilewright.patterns.language import Match, Missed, Result, Sought, register
from tilewright.patterns.mlp.linears import (
    WEIGHT_NAMES,
    FewTokens,
    check_linears,
    linear_facts,
    match_codes,
    match_few_tokens,
    match_unlike,
)
from tilewright.patterns.mlp.norms import norms_before
from tilewright.patterns.recognise.activation import Activation, match_activation
from tilewright.patterns.recognise.row_norm import match_norm_before, row_norm_arguments

_NAMES = (WEIGHT_NAMES, ("up_weight", "up_scale", "up_zero", "up_factor"))


@dataclass(frozen=True)
class LinearActivation:
    """Matches the first half of an MLP: one or two linears, and the activation function after
    them."""

    name: str = "linear_activation"
    op: str = "linear_activation"
    asked_before: ClassVar[tuple[str, ...]] = ("linear_residual",)
    takes_leftovers: bool = True
    optional: ClassVar[bool] = True  # without a kernel, PyTorch's products are good enough
    sought: ClassVar[Sought] = Sought(
        f"activation functions after linears of at most {MOST_TOKENS} tokens (more with quantised "
        "weights): after one linear, or after a gate linear and an up linear",
        frozenset({"aten.linear", "aten.addmm", "aten.mm", "aten.matmul"}),
        before=frozenset({"product"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[tuple[Value, ...] | Missed]:
        """Yields the activation functions after linears for few tokens, each with the linears that
        it reads. Leaves out an activation function that is a part of another one. Also yields a
        miss for each norm in front of such a linear, if the op cannot compute this norm."""
        inside: set[Value] = set()
        for value in reversed(flow.values):
            activation = None if value in inside else _activation(value)
            linears = None if activation is None else _linears(value, activation, flow)
            if activation is None:
                continue
            if linears is not None:
                inside.update(activation.absorbed)
                sizes = {"tokens": linears[0].x.shape[0], "weights": len(linears)}
                if OP.slower(**sizes, **linears[0].codes, target=flow.target) is None:
                    yield value, *(linear.product for linear in linears)
                    yield from norms_before(linears[0])
            elif (unlike := _unlike(activation)) is not None:
                yield replace(unlike, stores=(value, *unlike.products))

    def match(self, anchored: tuple[Value, ...], flow: Dataflow) -> Match:
        anchor = anchored[0]
        activation = _activation(anchor)
        assert activation is not None
        linears = _linears(anchor, activation, flow)
        assert linears is not None
        check_linears(linears, (), anchor)
        gate, up = linears[0], linears[1] if len(linears) == 2 else None
        absorbed = (*activation.absorbed, *(v for linear in linears for v in linear.absorbed))
        products, place = [linear.product for linear in linears], flow.positions[anchor.node]
        norm = unless_summed(match_norm_before(gate.x, products, place, flow, OP))
        x: Any = gate.rows
        given = match_codes(linears, _NAMES)
        if norm is not None:
            x = norm.x
            absorbed += norm.absorbed
        return Match(
            anchor=anchor,
            arguments={
                "x": x,
                "up_weight": None,
                "bias": gate.bias,
                "up_bias": up and up.bias,
                "activation": activation.name,
                **given,
                **row_norm_arguments(norm),
            },
            results=(Result.of_rows(anchor, gate.made),),
            absorbed=tuple(dict.fromkeys(absorbed)),
            facts={
                **linear_facts(gate, given),
                "activation": activation.name,
                "gate": _gate_layout(given),
                "bias": "yes" if gate.bias is not None else "no",
                "norm": "no" if norm is None else norm.kind,
            },
            scope=common_scope(gate.product.scope, anchor.scope),
        )


def _activation(value: Value) -> Activation | None:
    """Returns the activation function whose result is `value`; None if the op does not have it."""
    activation = match_activation(value.whole)
    known = activation is not None and activation.name in ACTIVATIONS and not activation.limit
    return activation if known else None


def _linears(value: Value, activation: Activation, flow: Dataflow) -> tuple[FewTokens, ...] | None:
    """Returns the linears that an activation function reads, with the gate first. Returns None if
    the op cannot compute them."""
    views = _entering(activation)
    found = (match_few_tokens(view, target=flow.target) for view in views)
    linears = tuple(one for one in found if one is not None)
    if len(linears) != len(views) or any(not linears[0].reads_as(one) for one in linears):
        return None
    # The scales of codes may be float32. A product with such a scale may be float32 too.
    if value.dtype not in (activation.gate.value.dtype, linears[0].product.dtype):
        return None
    same = all(one.weight.shape == linears[0].weight.shape for one in linears)
    return linears if same else None


def _entering(activation: Activation) -> list[View]:
    return [view for view in (activation.gate, activation.up) if view is not None]


def _unlike(activation: Activation) -> Missed | None:
    """Returns the miss for a product of few tokens that an activation function reads, if the
    product has a form that the op does not support. Returns None if there is no such product."""
    found = (match_unlike(view) for view in _entering(activation))
    return next((one for one in found if one is not None), None)


def _gate_layout(weights: dict[str, Any]) -> str:
    if "up_weight" not in weights:
        return "none"
    packed = weights["up_weight"].value is weights["weight"].value
    return "packed" if packed else "separate"


register(LinearActivation())
