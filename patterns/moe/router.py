"""The router of a mixture: it chooses the experts of each token, and computes their weights.

    logits  = x @ weight^T
    scores  = softmax(logits)
    w, ids  = topk(scores, S)            ⇒   moe_router
    weights = w / w.sum(-1)

If other values also read the logits, their product stays in the graph, and the op chooses from its
result. Unknown operations after the weights stay in the graph as well. Dimension letters: T tokens,
K hidden, E experts, S slots (top-k).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import before_widening, strip_casts
from tilewright.patterns.dataflow import Dataflow, Value, View, common_scope, upstream
from tilewright.patterns.language import (
    Match,
    Missed,
    Parts,
    Result,
    Sought,
    Stage,
    miss_at,
    register,
    reject,
)
from tilewright.patterns.moe.choice import Choice, is_choice, match_choice
from tilewright.patterns.moe.combine import SHAPED_LIKE
from tilewright.patterns.moe.weights import Weights, match_weights
from tilewright.patterns.recognise.dtypes import FLOATS, dtype_name, dtype_names, rows_fact
from tilewright.patterns.recognise.gemm import Gemm, match_gemm, named_product
from tilewright.patterns.recognise.routing import match_order

# A top-k over more entries than this is not a router. For example, it may choose from a vocabulary.
MOST_EXPERTS = 1024
# The largest number of values that a search visits from a choice back to the product that computes
# the logits.
_REACH = 32


@dataclass(frozen=True)
class MoeRouter:
    """Matches the router of a mixture, which chooses the experts of each token and computes their
    weights."""

    name: str = "moe_router"
    op: str = "moe_router"
    asked_before: ClassVar[tuple[str, ...]] = ("all_reduce_residual_norm",)
    sought: ClassVar[Sought] = Sought(
        "a choice of experts: the topk of the numbers in the rows of a product",
        frozenset({"aten.topk", "aten.sort", "aten.argmax"}),
        before=frozenset({"top-k", "softmax", "product"}),
        behind=frozenset({"softmax"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value | Missed]:
        """Yields the last choice after each product. The earlier choices may be choices of groups
        of experts.

        Also yields misses for expert ids by which the graph sorts the routes, but which no choice
        computed. Ids that were renumbered for one rank still come from a choice.
        """
        made = (v for v in flow.values if is_choice(v) and _of_experts(v) and _is_used(v, flow))
        choices = {v: set(_before(v)) for v in made}
        within = {one for before in choices.values() for one in before}
        for value, before in choices.items():
            if value not in within and any(_is_projection(v) for v in before):
                yield value
        orders = (order for v in flow.values if (order := match_order(v.whole)) is not None)
        sorted_ids = dict.fromkeys(order.ids.value for order in orders)
        for value in sorted_ids:
            if value.projected and not any(map(is_choice, upstream(value, _REACH))):
                message = f"the experts are {value}, not the indices of a topk of their scores"
                miss = miss_at("ROUTER_CHOICE", Stage.ACTIVATION, message, value)
                yield Missed(miss, stores=(value,), values=tuple(_softmaxes(value, flow)))

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        choice = match_choice(anchor)
        weights = match_weights(flow, choice)
        own = (*choice.absorbed, *weights.absorbed)
        absorbed = set(flow.values_at(v.node for v in own))
        absorbed |= _shaped_like(flow, absorbed)
        x, weight, bias, product = _logits(flow, choice, absorbed)
        absorbed |= set(product)
        _check(x, weight, bias, choice, weights, absorbed)
        made = flow.values_at(v.node for v in absorbed)
        scratch = {v for v in made if v.op == "store"}
        groups = choice.groups
        arguments: dict[str, Any] = {
            "x": x,
            "weight": weight,
            "num_slots": choice.num_slots,
            "bias": bias,
            "scores": weights.scores,
            "correction": choice.correction,
            "normalise": weights.normalise,
            "norm_eps": weights.norm_eps,
            "norm_min": weights.norm_min,
            "scaling": 1.0 if weights.scaling is None else weights.scaling,
            "weights_dtype": weights.end.dtype,
        }
        if groups is not None:
            arguments |= {
                "num_groups": groups.count, "top_groups": groups.kept, "group_top": groups.top,
            }  # fmt: skip
        return Match(
            anchor=anchor,
            arguments=arguments,
            results=(_result(weights.end, 0), _result(anchor, 1)),
            absorbed=tuple(sorted(absorbed - scratch, key=lambda value: value.position)),
            scratch=tuple(sorted(scratch, key=lambda value: value.position)),
            facts=_facts(x, weight, choice, weights),
            scope=common_scope(choice.scored.scope, anchor.scope),
            needs_kernel=True,
            miss_weight="advice",
        )


def _is_used(choice: Value, flow: Dataflow) -> bool:
    """Whether the graph uses a choice, or the scores of the chosen experts. Dynamo keeps choices
    that are not used."""
    return any(flow.users.get(v) or v in flow.output_values for v in flow.values_at([choice.node]))


def _of_experts(value: Value) -> bool:
    compared = value.args[0].shape[-1]
    return isinstance(compared, int) and compared <= MOST_EXPERTS


def _is_product(value: Value) -> bool:
    return match_gemm(value) is not None


def _is_projection(value: Value) -> bool:
    """Whether a value is a product with a weight. The weight is computed from other inputs than the
    activation. In a product of the tokens with each other, both operands are computed from the same
    input."""
    gemm = match_gemm(value)
    if gemm is None:
        return False
    made_of = {v for v in upstream(gemm.weight.value, _REACH) if v.op == "input"}
    return made_of.isdisjoint(upstream(gemm.x.value, _REACH))


def _is_of_activations(value: Value) -> bool:
    """Whether a value is a product of the results of two earlier products, as the scores of
    attention are."""
    product = named_product(value)
    return product is not None and all(side.view.value.projected for side in product.sides)


def _before(choice: Value) -> Iterable[Value]:
    """Returns the values that a choice is computed from. The search stops at products, which
    include products of activations."""
    found = upstream(choice, _REACH, lambda v: not (_is_product(v) or _is_of_activations(v)))
    return [value for value in found if value is not choice]


def _softmaxes(ids: Value, flow: Dataflow) -> Iterator[Value]:
    """Yields the softmaxes of the scores by which experts were chosen. Such a softmax has one
    number for each expert."""
    for product in filter(_is_product, upstream(ids, _REACH, lambda v: not _is_product(v))):
        yield from (v for v in _of_width(product, flow) if v.op == "aten.softmax")


def _of_width(product: Value, flow: Dataflow) -> list[Value]:
    """Returns the values that are computed from a product through values of the same width."""
    return flow.downstream(product, None, lambda v: v.shape[-1:] == product.shape[-1:])


def _shaped_like(flow: Dataflow, absorbed: set[Value]) -> set[Value]:
    """Returns the tensors that only use the shape of absorbed values, and that only absorbed values
    read."""
    users = {user for value in absorbed for user in flow.users.get(value, ())}
    made = {user for user in users if user.op in SHAPED_LIKE}
    return {v for v in made if set(flow.users.get(v, ())) <= absorbed}


# --- the logits -----------------------------------------------------------------------------------


def _logits(
    flow: Dataflow, choice: Choice, absorbed: set[Value]
) -> tuple[View, View | None, View | None, tuple[Value, ...]]:
    """Returns (x, weight, bias, values absorbed). If the product of the logits cannot be absorbed,
    for example because other values read it, `x` is the logits and `weight` is None."""
    logits, casts = strip_casts(choice.logits)
    gemm = match_gemm(logits.value)
    steps = (*casts, logits.value)
    if gemm is None or not _is_plain(gemm, logits) or _escapes(flow, steps, absorbed):
        return logits, None, None, ()
    x, weight = before_widening(gemm.flat_x), before_widening(gemm.weight)
    bias = None if gemm.bias is None else before_widening(gemm.bias)
    if x.value.dtype not in FLOATS or weight.value.dtype not in FLOATS:
        return logits, None, None, ()
    read = ((gemm.x, x), (gemm.weight, weight), (gemm.bias, bias))
    widened = [wide.value for wide, before in read if wide and before and wide != before]
    own = [v for v in widened if flow.only_user(v) is logits.value]
    return x, weight, bias, (*steps, *own)


def _is_plain(gemm: Gemm, logits: View) -> bool:
    """Whether logits [T, E] are a whole product that multiplies no codes, with the features as the
    last dimension."""
    plain = gemm.x_scale is None and gemm.weight_scale is None
    order = gemm.layout == effects.identity(gemm.shape)
    return plain and order and logits == logits.value.whole.matrix and len(logits.shape) == 2


def _escapes(flow: Dataflow, steps: tuple[Value, ...], absorbed: set[Value]) -> bool:
    """Whether a value outside of the router reads the logits, or a cast of them."""
    inside = absorbed.union(steps)
    readers = {user for value in steps for user in flow.users.get(value, ())}
    return bool(readers - inside) or not flow.output_values.isdisjoint(steps)


def _check(
    x: View,
    weight: View | None,
    bias: View | None,
    choice: Choice,
    weights: Weights,
    absorbed: set[Value],
) -> None:
    """Raises Reject (DTYPE, UNSUPPORTED) for dtypes that have no kernel. The kernels compute in
    float32."""
    tensors = (x, weight, bias, choice.correction)
    dtypes = {view.value.dtype for view in tensors if view is not None} | {weights.end.dtype}
    if not dtypes <= set(FLOATS):
        message = f"the router has {dtype_names(dtypes)}; expected {dtype_names(FLOATS)}"
        reject("DTYPE", Stage.GUARDS, message, choice.ids, weight="advice")
    wide = next((v for v in absorbed if v.dtype == torch.float64), None)
    if wide is not None:
        reject("DTYPE", Stage.GUARDS, f"{wide} is computed in float64", wide, weight="advice")


# --- results --------------------------------------------------------------------------------------


def _result(value: Value, output: int) -> Result | Parts:
    """Returns the result that replaces a value by an output of the op. If the node of the value has
    several values, only the readers of this value are redirected."""
    if "output" in value.kwargs:
        return Parts(value, lambda effect: effect, output)
    return Result(value, effects.identity(value.shape), output)


def _facts(x: View, weight: View | None, choice: Choice, weights: Weights) -> dict[str, Any]:
    """Returns the facts that reports show about the router."""
    groups = choice.groups
    return {
        "experts": choice.num_experts,
        "slots": choice.num_slots,
        "scores": weights.scores,
        "groups": "none" if groups is None else f"{groups.kept} of {groups.count}",
        "correction": "no" if choice.correction is None else "yes",
        "normalised": "yes" if weights.normalise else "no",
        "logits": "given" if weight is None else "computed",
        "x": rows_fact(x.value.dtype, *x.shape),
        "weights": dtype_name(weights.end.dtype),
    }


register(MoeRouter())
