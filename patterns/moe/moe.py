"""The experts of a mixture, computed by one grouped GEMM for each projection.

    order = sort(expert_ids)
    rows  = x[order // S]
    h     = activation(grouped_mm(rows, gate_up, ends))          ⇒   fused_moe
    y     = grouped_mm(h, down, ends) * expert_weights[order]
    out   = y, put back into the order of the tokens, and summed over the S slots of each token

If the graph quantises both `rows` and `h`, and the weights are fp8, the op quantises them too. The
op does not compute the router. A route is a token together with one of the experts that were chosen
for it. Dimension letters: T tokens, S slots, E experts, H hidden, I inner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View, common_scope, upstream
from tilewright.patterns.language import Match, Missed, Result, Sought, Stage, register, reject
from tilewright.patterns.moe.combine import (
    SHAPED_LIKE,
    Combine,
    match_combine,
    times,
    weights_in_order,
)
from tilewright.patterns.moe.layer import Layer, first_gemm, refuse_activation, refuse_rows
from tilewright.patterns.moe.order import RouteRows, check_groups, refuse_order, rows_in_order
from tilewright.patterns.moe.refused import choices_of, refused_experts
from tilewright.patterns.moe.sentinels import (
    clamps,
    foreign_experts,
    unmasked,
)
from tilewright.patterns.quantised.activations import (
    before_quantisation,
    check_formats,
    holds_codes,
    match_quantised_rows,
    refuse_format,
)
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.grouped_gemm import (
    ExpertGemm,
    before_widening_rows,
    is_expert_gemm,
    match_expert_gemm,
    routes_of,
    rows_of,
)
from tilewright.patterns.recognise.outside import Outside, both, experts_argument, is_natural
from tilewright.patterns.recognise.routing import Order, flat, gathered, in_order, per_row

# The largest number of values that a search visits from the rows of a GEMM back to the GEMM before
# it.
_REACH = 48
# The largest number of values that a search visits from the routes of a GEMM back to the GEMMs of
# earlier layers. The way leads through the router and the norm in front of the router.
_ROUTING_REACH = 192


@dataclass(frozen=True)
class Moe:
    """Matches the experts of a mixture, computed by one grouped GEMM for each projection."""

    name: str = "moe"
    op: str = "fused_moe"
    asked_before: ClassVar[tuple[str, ...]] = ("moe_dense",)
    takes_leftovers: bool = True
    sought: ClassVar[Sought] = Sought(
        "experts: two products of rows in groups (torch._grouped_mm, bmm), with an activation "
        "between them",
        frozenset({"aten._grouped_mm", "aten.bmm", "aten.index_add", "aten.where", "aten.sort"}),
        before=frozenset({"product", "top-k", "softmax"}),
        depth=2,
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value | Missed]:
        """Yields the GEMMs with expert weights whose rows come from another such GEMM through an
        activation. Two such GEMMs without an activation between them are a LoRA adapter."""
        for value in flow.values:
            rows = rows_of(value)
            if rows is None or is_expert_gemm(strip_casts(rows)[0].value):
                continue
            before = upstream(rows.value, _REACH, lambda v: not is_expert_gemm(v))
            others = {v for v in before if is_expert_gemm(v)}
            if others and not others <= _of_earlier_layers(value):
                yield value
        yield from refused_experts(flow)

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        down = match_expert_gemm(anchor, flow)
        if down is None:
            message = f"the graph computes the weight of {anchor}"
            reject("EXPERT_WEIGHT", Stage.ACTIVATION, message, anchor)
        down, coded = before_quantisation(before_widening_rows(down))
        activated, masked = unmasked(down.x)
        down = replace(down, absorbed=(*down.absorbed, *masked))
        weighed = _weighed_inside(activated)
        activated = activated if weighed is None else weighed.rows
        regrouped = activated.is_regrouped
        activation = match_activation(activated.value.whole if regrouped else activated)
        if activation is None and holds_codes(down.x):
            refuse_format(down.x, "are quantised in another way than the op quantises them")
        if activation is None:
            refuse_activation(down.x)
        gate, gate_coded = before_quantisation(_first_gemm(activation.gate, "gate", flow))
        up, up_coded = None, gate_coded
        if activation.up is not None:
            up, up_coded = before_quantisation(_first_gemm(activation.up, "up", flow))
        layer = Layer(gate, up, down, activation)
        if holds_codes(gate.x):
            refuse_format(gate.x, "are quantised in another way than the op quantises them")
        rows = rows_in_order(gate)
        x, order = rows.x, rows.order
        layer.check_rows()
        if up_coded != gate_coded:
            refuse_rows(down.x)
        early = coded and not gate_coded and rows.weights is None
        tokens = match_quantised_rows(x) if early else None
        if tokens is not None:
            # The graph quantises the tokens before it gathers them, perhaps for other readers too.
            # If there are no other readers, the quantisation becomes dead code.
            x, gate_coded = tokens.source, True
        check_groups(layer.gemms, order)
        early_weights = rows.weights is not None or weighed is not None
        combine = match_combine(flow, down, order, rows.num_slots, weighed=early_weights)
        if weighed is not None:
            if coded or gate_coded or rows.weights is not None:
                refuse_activation(down.x)
            combine = weighed.weigh(combine, down, order, rows.num_slots)
        arguments = layer.arguments()
        if coded or gate_coded:
            check_formats(coded, gate_coded, x, activated, arguments)
            arguments["activation_format"] = "fp8"
        layer.check_kernels(x, anchor, arguments)
        return _match(flow, anchor, replace(rows, x=x), layer, combine, arguments)


@dataclass(frozen=True)
class _Weighed:
    """The last GEMM's input, if it is a product `rows * factor` that has one factor for each
    row."""

    rows: View
    factor: View
    absorbed: tuple[Value, ...]

    def weigh(self, combine: Combine, down: ExpertGemm, order: Order, num_slots: Any) -> Combine:
        """Returns the combine with the factors as its weights. Raises Reject if the factors are not
        weights of routes, or if there is a bias that the factors do not multiply."""
        weights = weights_in_order(self.factor, order, num_slots)
        if weights is None:
            refuse_order(
                f"{self.factor.value} multiplies the rows, but is not in the order of the rows",
                self.factor,
            )
        if down.bias is not None:
            message = "the rows are multiplied by weights before the last GEMM, but its bias is not"
            refuse_order(
                message, self.factor, hint=("multiply the experts' results by the weights")
            )
        absorbed = (*combine.absorbed, *self.absorbed)
        return times(replace(combine, weights=weights, absorbed=absorbed), combine.factor)


def _weighed_inside(entering: View) -> _Weighed | None:
    bare, casts = strip_casts(entering)
    for rows, factor in bare.value.either_way if bare.value.op == "aten.mul" else ():
        column = per_row(strip_casts(factor)[0])
        taken = None if column is None else gathered(strip_casts(flat(column))[0].value.whole)
        if bare.is_whole and taken is not None and rows.shape == bare.shape:
            rows, more = strip_casts(rows)
            return _Weighed(rows, factor, (*casts, bare.value, *more))
    return None


def _of_earlier_layers(value: Value) -> set[Value]:
    """Returns the GEMMs that the routes of a GEMM are computed from. They belong to earlier layers,
    because the routes of a layer are known before its first GEMM."""
    routes = routes_of(value)
    if routes is None:
        return set()
    before = upstream(routes.value, _ROUTING_REACH, lambda v: not is_expert_gemm(v))
    return {v for v in before if is_expert_gemm(v)}


def _first_gemm(part: View, name: str, flow: Dataflow) -> ExpertGemm:
    """Returns the GEMM whose gate half or up half is `part`. A mask of rows may be between them."""
    part, masked = unmasked(part)

    found = first_gemm(part, name, lambda value: filter(None, [match_expert_gemm(value, flow)]))
    return before_widening_rows(replace(found, absorbed=(*found.absorbed, *masked)))


# --- the match ------------------------------------------------------------------------------------


def _match(
    flow: Dataflow,
    anchor: Value,
    rows: RouteRows,
    layer: Layer,
    combine: Combine,
    arguments: dict[str, Any],
) -> Match:
    x, order, num_slots = rows.x, rows.order, combine.num_slots
    tokens = effects.divides(num_slots, effects.product(order.ids.shape))
    ids = order.ids.reshape(tokens, num_slots)
    _, masked = unmasked(layer.gate.x)
    absorbed = {value for gemm in layer.gemms for value in gemm.absorbed}
    absorbed |= {*layer.activation.absorbed, *combine.absorbed}
    absorbed |= {*rows.absorbed, *masked} if order.permutation is not None else set()
    absorbed.update(clamps(flow, order, layer.down.weight.shape[0]))
    expert_ids = _expert_ids(ids, order, absorbed, layer.gemms)
    absorbed |= {
        user
        for value in absorbed
        for user in flow.users.get(value, ())
        if user.op in SHAPED_LIKE and user.operands[0].value is value
    }
    made = flow.values_at(value.node for value in absorbed)
    # A `max` over a dimension has two outputs, values and indices. The op replaces both.
    absorbed |= {v for v in made if v.op == "aten.max"}
    scratch = tuple(v for v in made if v.op == "store")
    weights = arguments.get("weight_format", "dense")
    biased = any(gemm.bias is not None for gemm in (layer.gate, layer.down))
    own = {"gate": _gate_layout(layer), "bias": "yes" if biased else "no"}
    facts = layer.facts(x, num_slots, weights, **own)
    if "activation_format" in arguments:
        facts["activations"] = "fp8"
    routed = _routed_experts(ids, layer.down.weight.shape[0])
    if routed is not None:
        facts["routed"] = routed
    return Match(
        anchor=anchor,
        arguments={
            "x": rows.argument,
            "expert_ids": expert_ids,
            "expert_weights": _expert_weights(combine, ids, x),
            **arguments,
        },
        results=(Result.of_rows(combine.end, (tokens, x.shape[1]), added=combine.added),),
        absorbed=tuple(sorted(absorbed.difference(scratch), key=lambda value: value.position)),
        scratch=scratch,
        facts=facts,
        scope=common_scope(layer.gate.end.scope, anchor.scope),
    )


def _routed_experts(ids: View, num_experts: Any) -> Any:
    """Returns the number of experts among which a router chooses, if this device has only some of
    these experts; else None."""
    choice = next(choices_of(ids.value, _ROUTING_REACH), None)
    among = None if choice is None else choice.args[0].shape[-1]
    return None if among == num_experts else among


def _expert_ids(
    ids: View, order: Order, absorbed: Iterable[Value], gemms: Sequence[ExpertGemm]
) -> Any:
    """Returns the `expert_ids` argument.

    The ids of experts on other devices become -1 if the graph masks the rows of these experts. They
    also become -1 if the graph clamps the ids before it looks up the biases. In that case, the rows
    of these experts come after the last group of the GEMM, so the graph does not define the results
    of these rows.
    """
    num_experts = gemms[-1].weight.shape[0]
    masks = [(v, found) for v in absorbed if (found := foreign_experts(v)) is not None]
    for value, found in masks:
        if not in_order(found[0], order) or found[1] != num_experts:
            refuse_order(
                f"{value} does not fill the rows of the experts from {num_experts} on", value
            )
    outside = _outside(gemms, order)
    if outside is None and not is_natural(ids):
        message = f"for numbers below 0 in {ids.value}, weight and bias belong to different experts"
        refuse_order(message, ids, hint="clamp the experts' numbers to at least 0")
    outside = outside or gemms[-1].outside
    ends, permutation = gemms[-1].ends, order.permutation
    by = None if ends is None or permutation is None else (ends, permutation)
    return experts_argument(ids, num_experts, outside, by)


def _outside(gemms: Sequence[ExpertGemm], order: Order) -> Outside | None:
    """Returns how the weights and biases treat a number that is not the number of an expert.
    Returns None if they do not all treat it in the same way."""
    found: Outside | None = gemms[0].outside
    for gemm in gemms:
        found = found and both(found, gemm.outside)
        index = gemm.bias_index
        if found is not None and index is not None:
            clamped = not in_order(index, order)
            above = "none" if clamped else gemm.bias_outside.above
            found = both(found, replace(gemm.bias_outside, above=above))
    return found


def _expert_weights(combine: Combine, ids: View, x: View) -> View | Computed:
    """Returns the `expert_weights` argument. The argument is the weights of the combine. If the
    rows were multiplied by weights before the experts, the argument is a tensor that is filled with
    the factor of the combine."""
    if combine.weights is not None:
        return combine.weights
    options = (("dtype", torch.float32), ("device", x.value.device))
    return Computed("full", (list(ids.shape), combine.factor), options)


def _gate_layout(layer: Layer) -> str:
    if layer.up is None:
        return "none"
    if layer.up.end is not layer.gate.end:
        return "separate"
    columns = layer.gate.columns_of(layer.activation.gate)
    return "interleaved" if columns is not None and columns[2] == 2 else "halves"


register(Moe())
