"""A mixture computed densely: every token through every expert, most results weighted by 0.

    y   = bmm(activation(bmm(x, gate_up)), down)           [E, T, H]
    out = sum over e of scores[t, e] * y[e, t]             ⇒   fused_moe on the chosen experts

where the scores are zero outside of a router's choice, which has to be seen in the graph. Finite
results of experts that were not chosen count for nothing; infinite ones would make the sum NaN.
Scores that multiply the input instead (Llama-4) are taken for one expert per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.steps import keeps_dim, reduced_dims
from tilewright.patterns.dataflow import (
    Computed,
    Dataflow,
    Value,
    View,
    common_scope,
    upstream,
)
from tilewright.patterns.language import (
    Match,
    Result,
    Sought,
    Stage,
    register,
    register_code,
    reject,
)
from tilewright.patterns.moe.layer import (
    Layer,
    added_to,
    cast_back,
    contracted,
    first_gemm,
    refuse_activation,
    refuse_combine,
)
from tilewright.patterns.moe.products import DenseGemm, dense_gemms, roles_through
from tilewright.patterns.moe.routes import chosen_experts
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.routing import (
    TAKEN,
    counts_again,
    per_row,
    rows_added_to,
    without_counting,
)

register_code(
    "EXPERT_SCORES", "nothing shows that all but the chosen experts have weight zero for a token"
)

# Operations between the two products: the activation, in any spelling.
_BETWEEN = {
    "cast", "aten.mul", "aten.add", "aten.silu", "aten.sigmoid", "aten.gelu", "aten.relu",
    "aten.clamp", "aten.pow", "aten.square", "aten.tanh", "aten.clamp_max", "aten.sin",
}  # fmt: skip
# How many values they may be.
_REACH = 48


@dataclass(frozen=True)
class Weighted:
    """out [T, H] = the sum over experts. scores [T, E]; None: they were not seen on the way.

    added: what the sum is added to; None for zeros.
    """

    scores: View | None
    end: Value
    absorbed: tuple[Value, ...]
    added: View | None = None


@dataclass(frozen=True)
class MoeDense:
    """The pattern; see the module."""

    name: str = "moe_dense"
    op: str = "fused_moe"
    sought: ClassVar[Sought] = Sought(
        "every expert's product with every token, behind another such product",
        frozenset({"aten.bmm", "aten.einsum", "aten.matmul"}),
        before=frozenset({"product"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """A GEMM with every expert's weight, rows differing by expert, fed by another such GEMM."""
        for value in flow.values:
            if any(not g.is_shared and _fed(g, flow) for g in dense_gemms(value, flow)):
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        down = next(g for g in dense_gemms(anchor, flow) if not g.is_shared and _fed(g, flow))
        _refuse_lookups(down.weight)
        activation = match_activation(down.x.value.whole)
        if activation is None:
            refuse_activation(down.x)

        def gemms_of(value: Value) -> Iterator[DenseGemm]:
            """Those whose experts, tokens and outputs the second product reads as its own."""
            found = dense_gemms(value, flow)
            return (g for g in found if roles_through(down.x, g.roles) == "etn")

        gate = first_gemm(activation.gate, "gate", gemms_of)
        up = None if activation.up is None else first_gemm(activation.up, "up", gemms_of)
        layer = Layer(gate, up, down, activation)
        layer.check_rows()
        weighted = _weighted(flow, down)
        x, scores, on_input = _tokens(gate, weighted)
        ids = chosen_experts(scores)
        if ids is None:
            reject(
                "EXPERT_SCORES",
                Stage.GUARDS,
                f"{scores.value} weighs the experts' results, and may be other than zero for all",
                scores,
                hint="zeros(T, E).scatter(1, expert_ids, weights) of a topk's indices; a sum over "
                "all experts, softly weighted, is no mixture that picks",
            )
        if on_input and any(gemm.bias is not None for gemm in layer.gemms):
            message = "scores of zero on the input leave the biases of experts that were not chosen"
            reject("EXPERT_SCORES", Stage.GUARDS, message, down.end)
        arguments = layer.arguments()
        layer.check_kernels(x, anchor)
        absorbed = [value for gemm in layer.gemms for value in gemm.absorbed]
        absorbed += [*activation.absorbed, *weighted.absorbed, *((gate.x.value,) * on_input)]
        weights = arguments.get("weight_format", "dense")
        weighs = "input" if on_input else "output"
        return Match(
            pattern=self.name,
            op=self.op,
            anchor=anchor,
            arguments={**_routed(x, scores, ids, on_input), **arguments},
            results=(
                Result(weighted.end, effects.identity(weighted.end.shape), added=weighted.added),
            ),
            absorbed=tuple(dict.fromkeys(absorbed)),
            facts=layer.facts(x, ids.shape[1], weights, weighs=weighs),
            scope=common_scope(gate.end.scope, anchor.scope),
        )


def _refuse_lookups(weight: View) -> None:
    """Raises Reject (EXPERT_WEIGHT) for weights that are taken from a stack by the experts'
    numbers, one for each row: a mixture of another kind, in a form that its pattern does not
    know."""
    taken = weight.value
    numbers = [v for v in taken.operands if not v.value.dtype.is_floating_point]
    if taken.op in TAKEN and any(v.value.op != "constant" for v in numbers):
        message = f"{taken} takes a weight for each row in a form that is not known"
        hint = "take whole matrices of the stack: weight[expert_ids], weight [E, N, K]"
        reject("EXPERT_WEIGHT", Stage.GUARDS, message, taken, hint=hint)


def _fed(gemm: DenseGemm, flow: Dataflow) -> bool:
    """Whether a few element-wise steps, at least one, lead back to another such GEMM."""
    return any(
        value.op not in _BETWEEN and any(True for _ in dense_gemms(value, flow))
        for value in upstream(gemm.x.value, _REACH, lambda v: v.op in _BETWEEN)
        if value is not gemm.x.value
    )


# --- back to tokens -------------------------------------------------------------------------------


def _weighted(flow: Dataflow, down: DenseGemm) -> Weighted:
    """Follows the experts' results through scores and the sum over experts; raises Reject."""
    value, roles, scores = down.end, down.roles.replace("n", "h"), None
    absorbed: list[Value] = []
    dtype = down.x.value.dtype

    def by_expert(view: View) -> str | None:
        order = roles_through(view, roles)
        return None if order is None else order.replace("e", "s")

    for _ in range(6):
        user = flow.only_user(value)
        if user is None:
            break
        if scores is None and _adds_experts(user, value, roles):
            return _finish(flow, user, scores, absorbed, "th", dtype)
        own = [v for v in user.operands if v.value is value]
        order = roles_through(own[0], roles) if len(own) == 1 else None
        if order is None:
            break
        if user.op == "aten.clone" or is_float_cast(user):
            pass
        elif user.op == "aten.mul" and scores is None and len(user.operands) == 2:
            scores = _scores(user, value, order)
            if scores is None:
                break
        elif (
            user.op == "aten.sum"
            and reduced_dims(user) == (order.index("e"),)
            and not keeps_dim(user)
        ):
            return _finish(flow, user, scores, absorbed, order.replace("e", ""), dtype)
        elif scores is None and (by := contracted(user, value, by_expert)) is not None:
            return _finish(flow, user, by, absorbed, "th", dtype)
        else:
            break
        absorbed.append(user)
        value, roles = user, order
    refuse_combine(flow.only_user(value), value)


def _adds_experts(user: Value, value: Value, roles: str) -> bool:
    """Whether `user` adds the rows of every expert, [E * T, H], to the tokens."""
    added = rows_added_to(user)
    if added is None:
        return False
    _, index, source = added
    rows = value.whole.permute(*(roles.index(role) for role in "eth"))
    by_row = per_row(index) if len(index.shape) == 2 else None
    return counts_again(by_row or index) == user.shape[0] and source == rows.matrix


def _finish(
    flow: Dataflow,
    end: Value,
    scores: View | None,
    absorbed: list[Value],
    order: str,
    dtype: torch.dtype,
) -> Weighted:
    if order != "th" or len(end.shape) != 2:
        reject("EXPERT_COMBINE", Stage.GUARDS, f"the sum {end} is not [tokens, hidden]", end)
    added = rows_added_to(end)
    ends = cast_back(flow, end, dtype)
    base = None if added is None else added_to(added[0], ends, absorbed)
    return Weighted(scores, ends[-1], (*absorbed, *ends), base)


def _scores(product: Value, value: Value, order: str) -> View | None:
    """scores [T, E] of value * scores, that repeat along the hidden dimension."""
    own = next(v for v in product.operands if v.value is value)
    other = next((v for v in product.operands if v.value is not value), None)
    if other is None or product.shape != own.shape:
        return None
    wide = product.whole.of_operand(strip_casts(other)[0])
    dims = dict(zip(order, wide.effect.dims, strict=True))
    one = wide.shape[order.index("t")] == 1
    if any(a.axis is not None for a in dims["h"]) or not dims["e"] or not (dims["t"] or one):
        return None
    return wide.with_dims(dims["t"], dims["e"])


# --- tokens and routes ----------------------------------------------------------------------------


def _tokens(gate: DenseGemm, weighted: Weighted) -> tuple[View, View, bool]:
    """(x [T, H], scores [T, E], whether they multiply x)."""
    _, tokens, hidden = gate.x.effect.dims
    if gate.is_shared and weighted.scores is not None:
        x = gate.x.with_dims(tokens, hidden)
        return x, weighted.scores, False
    product = gate.x.value
    if weighted.scores is None and product.op == "aten.mul" and len(product.operands) == 2:
        for a, b in product.either_way:
            x, by = without_counting(gate.x.of_operand(a)), gate.x.of_operand(b)
            over, repeats = _repeats(x), _repeats(by)
            if over == [True, False, False] and repeats == [False, False, True]:
                e, t, _ = by.effect.dims
                x = x.with_dims(*x.effect.dims[1:])
                return x, by.with_dims(t, e), True
    message = (
        f"{gate.x.value} reaches the experts, neither the tokens nor the tokens times their scores"
    )
    hint = "capacity buffers and dispatch masks are not fused: sort the routes by expert"
    reject("EXPERT_SCORES", Stage.GUARDS, message, gate.x, hint=hint)


def _repeats(view: View) -> list[bool]:
    """Which dimensions of a view [E, T, n] only repeat; one token does not."""
    one = view.shape[1] == 1
    found = [all(atom.axis is None for atom in dim) for dim in view.effect.dims]
    return [found[0], found[1] and not one, found[2]]


def _routed(x: View, scores: View, ids: View, on_input: bool) -> dict[str, Any]:
    """The op's x, expert_ids and expert_weights."""
    weights = Computed("gather", (scores, 1, ids))
    if not on_input:
        return {"x": x, "expert_ids": ids, "expert_weights": weights}
    if ids.shape[1] != 1 or scores.value.dtype != x.value.dtype:
        message = f"{ids.shape[1]} experts of a token weigh its input; one at most is fused"
        reject("UNSUPPORTED", Stage.CAPABILITY, message, scores)
    options = (("dtype", torch.float32), ("device", x.value.device))
    ones = Computed("full", (list(ids.shape), 1.0), options)
    return {"x": Computed("mul", (x, weights)), "expert_ids": ids, "expert_weights": ones}


register(MoeDense())
