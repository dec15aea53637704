"""A mixture that is computed densely: every expert computes a result for every token, and most
results are multiplied by 0.

    y   = bmm(activation(bmm(x, gate_up)), down)           [E, T, H]
    out = sum over e of scores[t, e] * y[e, t]             ⇒   fused_moe on the chosen experts

The scores of all experts that a router did not choose must be zero, and the graph must show this:

    scores = zeros(T, E).scatter(1, ids, weights)
    scores = full(T, E, -inf).scatter(1, ids, logits).sigmoid()

The op does not compute the experts that were not chosen. If the results of these experts are
finite, they do not change the sum. If such a result is infinite, the graph's sum is NaN, and the
op's sum is not. If each token has only one expert, the scores may also multiply the input, as in
Llama-4. A route is a token together with one of the experts that were chosen for it. Dimension
letters: E experts, T tokens, S slots (top-k), H hidden, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from tilewright.patterns.effects import Atom
from tilewright.patterns.language import (
    Match,
    Result,
    Sought,
    Stage,
    register,
    reject,
)
from tilewright.patterns.moe.combine import Combine
from tilewright.patterns.moe.layer import (
    Layer,
    first_gemm,
    refuse_activation,
    refuse_combine,
    sum_of_experts,
)
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.routing import (
    TAKEN,
    counts_again,
    is_distinct,
    per_row,
    rows_added_to,
    scattered_into,
    without_counting,
)

_PRODUCTS = ("aten.bmm", "aten.matmul")
# The operations that may be between the two products, where the graph computes the activation.
_BETWEEN = {
    "cast", "aten.mul", "aten.add", "aten.silu", "aten.sigmoid", "aten.gelu", "aten.relu",
    "aten.clamp", "aten.pow", "aten.square", "aten.tanh", "aten.clamp_max", "aten.sin",
}  # fmt: skip
# The largest number of values between the two products.
_REACH = 48
# The largest number of steps from the results of the experts to their sum.
_STEPS = 6


@dataclass(frozen=True)
class MoeDense:
    """Matches a mixture that is computed densely: every expert computes a result for every
    token."""

    name: str = "moe_dense"
    op: str = "fused_moe"
    asked_before: ClassVar[tuple[str, ...]] = ("moe_router",)
    sought: ClassVar[Sought] = Sought(
        "every expert's product with every token, after another such product",
        frozenset({"aten.bmm", "aten.einsum", "aten.matmul"}),
        before=frozenset({"product"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields the GEMMs that have the weights of all experts, and whose rows differ by expert
        and come from another such GEMM."""
        for value in flow.values:
            if any(map(_is_second, _products_of(value))):
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        down = _with_bias(next(filter(_is_second, _products_of(anchor))), flow)
        _refuse_lookups(down.weight)
        activation = match_activation(down.x.value.whole)
        if activation is None or not down.x.is_regrouped:
            refuse_activation(down.x)

        def gemms_of(value: Value) -> Iterator[ExpertGemm]:
            return (_with_bias(gemm, flow) for gemm in _products_of(value))

        gate = first_gemm(activation.gate, "gate", gemms_of)
        up = None if activation.up is None else first_gemm(activation.up, "up", gemms_of)
        layer = Layer(gate, up, down, activation)
        layer.check_rows()
        weighted = _weighted(flow, down)
        x, scores, on_input = _tokens(gate, weighted.weights)
        ids = _chosen_experts(scores)
        if ids is None:
            reject(
                "EXPERT_SCORES",
                Stage.GUARDS,
                f"{scores.value} multiplies the experts' results, and may be nonzero for every "
                "expert",
                scores,
                hint=(
                    "compute the scores by zeros(T, E).scatter(1, expert_ids, weights), with "
                    "ids from a topk; a weighted sum over all experts is not fused"
                ),
            )
        if on_input and any(gemm.bias is not None for gemm in layer.gemms):
            message = (
                "scores multiply the input, so experts that were not chosen still add their biases"
            )
            reject("EXPERT_SCORES", Stage.GUARDS, message, down.end)
        arguments = layer.arguments()
        layer.check_kernels(x, anchor, arguments)
        absorbed = [value for gemm in layer.gemms for value in gemm.absorbed]
        absorbed += [*activation.absorbed, *weighted.absorbed, *((gate.x.value,) * on_input)]
        weights = arguments.get("weight_format", "dense")
        weighs = "input" if on_input else "output"
        return Match(
            anchor=anchor,
            arguments={**_routed(x, scores, ids, on_input), **arguments},
            results=(
                Result(weighted.end, effects.identity(weighted.end.shape), added=weighted.added),
            ),
            absorbed=tuple(dict.fromkeys(absorbed)),
            facts=layer.facts(x, ids.shape[1], weights, weighs=weighs),
            scope=common_scope(gate.end.scope, anchor.scope),
        )


# --- the products ---------------------------------------------------------------------------------


def _products_of(value: Value) -> Iterator[ExpertGemm]:
    """Yields each way to read a value as the product of every expert's rows x [E, T, K] with the
    expert's weight. The product is written bmm(x, weight [E, K, N]) or bmm(weight [E, N, K],
    x^T)."""
    if value.op not in _PRODUCTS or [len(v.shape) for v in value.operands] != [3, 3]:
        return
    one, other = value.operands
    if _is_by_expert(other):
        yield ExpertGemm(one, other.permute(0, 2, 1), value, (value,), column_axis=2)
    if _is_by_expert(one):
        yield ExpertGemm(other.permute(0, 2, 1), one, value, (value,))


def _is_by_expert(weight: View) -> bool:
    by_expert = weight.effect.dims[0] == (Atom(0, 1, weight.shape[0]),)
    return by_expert and not weight.value.projected


def _is_second(gemm: ExpertGemm) -> bool:
    """Whether the rows of a GEMM differ by expert, and come from another such GEMM through a few
    element-wise steps, at least one."""
    activated = gemm.x.value
    if _repeats(gemm.x)[0]:
        return False
    before = upstream(activated, _REACH, lambda v: v.op in _BETWEEN)
    return any(v is not activated and any(_products_of(v)) for v in before)


def _with_bias(gemm: ExpertGemm, flow: Dataflow) -> ExpertGemm:
    """Returns the GEMM with the bias [E, N] that is added to the row of every token, if there is a
    bias."""
    value, add = gemm.end, flow.only_user(gemm.end)
    if add is None or add.op != "aten.add" or add.kwargs.get("alpha", 1) != 1:
        return gemm
    for own, other in add.either_way:
        if own != value.whole or add.shape != value.shape or other.value.projected:
            continue
        bias = add.whole.of_operand(strip_casts(other)[0])
        by_role = {0: "expert", gemm.column_axis: "column"}
        dims = {by_role.get(at, "token"): dim for at, dim in enumerate(bias.effect.dims)}
        if effects.repeats(dims["token"]):
            bias = bias.with_dims(dims["expert"], dims["column"])
            return replace(gemm, bias=bias, end=add, absorbed=(value, add))
    return gemm


def _refuse_lookups(weight: View) -> None:
    """Raises Reject (EXPERT_WEIGHT) if, for each row, the graph looks up a weight in a stack by the
    number of an expert. Another pattern fuses such mixtures, but that pattern does not support this
    form."""
    taken = weight.value
    numbers = [v for v in taken.operands if not v.value.dtype.is_floating_point]
    if taken.op in TAKEN and any(v.value.op != "constant" for v in numbers):
        message = f"{taken} takes a weight for each row in an unknown form"
        hint = "take whole matrices of the stack: weight[expert_ids], weight [E, N, K]"
        reject("EXPERT_WEIGHT", Stage.GUARDS, message, taken, hint=hint)


# --- back to tokens -------------------------------------------------------------------------------


def _weighted(flow: Dataflow, down: ExpertGemm) -> Combine:
    """Follows the results of the experts [E, T, H] through the scores and the sum over experts.
    Returns a combine whose weights are the scores [T, E], or None if no scores multiply the
    results. Raises Reject (EXPERT_COMBINE) if the graph uses the results in another way."""
    value, scores, absorbed = down.end, None, list[Value]()
    for _ in range(_STEPS):
        user = flow.only_user(value)
        if user is None or down.column_axis != 2:  # the axis of H in the results [E, T, H]
            break
        absorbed.append(user)
        summed = user.op == "aten.sum" and reduced_dims(user) == (0,) and not keeps_dim(user)
        if (summed and user.operands[0] == value.whole) or _adds_experts(user, value):
            ends, base = sum_of_experts(flow, user, down.x.value.dtype, absorbed)
            return Combine(scores, value.shape[0], ends[-1], (*absorbed, *ends), base)
        if value.whole not in user.operands or user.shape != value.shape:
            break
        if user.op == "aten.mul" and scores is None and len(user.operands) == 2:
            scores = _scores(user, value)
            if scores is None:
                break
        elif user.op != "aten.clone" and not is_float_cast(user):
            break
        value = user
    refuse_combine(flow.only_user(value), value)


def _adds_experts(user: Value, value: Value) -> bool:
    """Whether `user` adds the rows of all experts, [E * T, H], to the tokens."""
    added = rows_added_to(user)
    if added is None:
        return False
    _, index, source = added
    by_row = per_row(index) if len(index.shape) == 2 else None
    return counts_again(by_row or index) == user.shape[0] and source == value.whole.matrix


def _scores(product: Value, value: Value) -> View | None:
    """Returns the scores [T, E] of the product `value * scores`, if the scores repeat along the
    hidden dimension; else None."""
    other = next((v for v in product.operands if v.value is not value), None)
    if other is None:
        return None
    wide = product.whole.of_operand(strip_casts(other)[0])
    experts, tokens, hidden = wide.effect.dims
    known = experts and (tokens or wide.shape[1] == 1)
    return wide.with_dims(tokens, experts) if known and effects.repeats(hidden) else None


# --- tokens and routes ----------------------------------------------------------------------------


def _tokens(gate: ExpertGemm, scores: Any) -> tuple[View, View, bool]:
    """Returns (x [T, H], scores [T, E], whether the scores multiply x). scores: the scores that
    multiply the results of the experts; None if no scores multiply them."""
    _, tokens, hidden = gate.x.effect.dims
    if _repeats(gate.x)[0] and scores is not None:
        return gate.x.with_dims(tokens, hidden), scores, False
    product = gate.x.value
    if scores is None and product.op == "aten.mul" and len(product.operands) == 2:
        for a, b in product.either_way:
            x, by = without_counting(gate.x.of_operand(a)), gate.x.of_operand(b)
            over, repeats = _repeats(x), _repeats(by)
            if over == [True, False, False] and repeats == [False, False, True]:
                e, t, _ = by.effect.dims
                return x.with_dims(*x.effect.dims[1:]), by.with_dims(t, e), True
    message = (
        f"the experts read {gate.x.value}; expected the tokens, or the tokens times their scores"
    )
    hint = "capacity buffers and dispatch masks are not fused: sort the routes by expert"
    reject("EXPERT_SCORES", Stage.GUARDS, message, gate.x, hint=hint)


def _repeats(view: View) -> list[bool]:
    """Returns, for each dimension of a view [E, T, n], whether all elements along this dimension
    are equal because the view repeats them. For T the answer is False if there is a single
    token."""
    one = view.shape[1] == 1
    found = [effects.repeats(dim) for dim in view.effect.dims]
    return [found[0], found[1] and not one, found[2]]


def _chosen_experts(scores: View) -> View | None:
    """Returns ids [T, S] such that the scores [T, E] of all other experts are zero. The ids of a
    token are distinct. Returns None if no such ids are known."""
    ids = _outside(scores, 0.0)
    return ids if ids is not None and is_distinct(ids) else None


def _outside(view: View, number: float) -> View | None:
    """Returns ids [T, S] such that a view [T, E] has `number` for all other experts; else None."""
    value = view.value
    if value.op in ("cast", "aten.clone"):
        return _outside(value.args[0].through(view.effect), number)
    if value.op == "aten.sigmoid" and number == 0.0:
        return _outside(value.args[0].through(view.effect), -float("inf"))
    if not view.is_whole:
        return None
    if value.op == "aten.softmax" and number == 0.0 and reduced_dims(value) == (1,):
        return _outside(value.args[0], -float("inf"))
    return scattered_into(value, number)


def _routed(x: View, scores: View, ids: View, on_input: bool) -> dict[str, Any]:
    """Returns the arguments `x`, `expert_ids` and `expert_weights` of the op."""
    weights = Computed("gather", (scores, 1, ids))
    if not on_input:
        return {"x": x, "expert_ids": ids, "expert_weights": weights}
    if ids.shape[1] != 1 or scores.value.dtype != x.value.dtype:
        message = (
            f"the scores of {ids.shape[1]} experts multiply a token's input; expected one expert"
        )
        reject("UNSUPPORTED", Stage.CAPABILITY, message, scores)
    options = (("dtype", torch.float32), ("device", x.value.device))
    ones = Computed("full", (list(ids.shape), 1.0), options)
    return {"x": Computed("mul", (x, weights)), "expert_ids": ids, "expert_weights": ones}


register(MoeDense())
