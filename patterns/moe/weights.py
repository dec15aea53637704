"""Follows the scores of the chosen experts to their weights, which may be normalised and scaled, in
any spelling.

    w = topk(scores, S)[0], or scores.gather(1, ids)
    w = softmax(w)                                       of chosen logits
    w = w / (w.sum(-1, keepdim=True) + eps), or / w.sum(-1, keepdim=True).clamp(min=least)
    w = w * scaling

S slots (top-k) per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.formula import (
    ABSENT,
    Formula,
    Found,
    call,
    clamp,
    number,
    reduction,
    tensor,
)
from tilewright.patterns.arithmetic.steps import reduced_dims
from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.moe.choice import Choice

# The most values computed from the scores, up to the weights.
_REACH = 16


@dataclass(frozen=True)
class Weights:
    """The weights computed from the chosen scores. end: the value [T, S]. scores: the op's argument
    of that name. The other fields are the steps that the op performs."""

    end: Value
    scores: str
    normalise: bool = False
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scaling: float | None = None
    absorbed: tuple[Value, ...] = ()


def match_weights(flow: Dataflow, choice: Choice) -> Weights:
    """Returns the weights of a choice, as far as their steps are known; raises Reject."""
    start = _chosen_scores(flow, choice)
    shapes = start.shape, (start.shape[0], 1)
    ends = reversed(flow.downstream(start, _REACH, lambda value: value.shape in shapes))
    found = (
        _WEIGHTS.match(end.whole, partial(_made, end=end, start=start, choice=choice, flow=flow))
        for end in ends
    )
    return next(weights for weights in found if weights is not None)


def _chosen_scores(flow: Dataflow, choice: Choice) -> Value:
    """Returns the scores of the chosen experts, [T, S]: a gather, or the topk's own values. Raises
    Reject."""
    ids = choice.ids
    gathers = [user for user in flow.users.get(ids, ()) if _gathers(user, choice)]
    if gathers:
        return gathers[0]
    made = flow.values_at([ids.node])
    values = next((v for v in made if v.kwargs.get("output") == 0), None)
    if values is None or not _is_read(flow, values):
        _refuse_changed(flow, choice)
        message = (
            f"the scores of the experts of {ids} are not read by gather, nor the topk's values"
        )
        reject("ROUTER_WEIGHTS", Stage.ACTIVATION, message, ids)
    if choice.biased:
        message = "the weights are computed from corrected scores"
        hint = "scores.gather(1, ids) of scores without the correction"
        reject("ROUTER_WEIGHTS", Stage.GUARDS, message, values, hint=hint)
    return values


def _is_read(flow: Dataflow, value: Value) -> bool:
    return bool(flow.users.get(value)) or value in flow.output_values


def _refuse_changed(flow: Dataflow, choice: Choice) -> None:
    """Raises Reject if the tensor that is gathered for the chosen experts was written before."""
    gathers = [u for u in flow.users.get(choice.ids, ()) if u.op == "aten.gather"]
    sources = [strip_casts(u.args[0])[0].value.node for u in gathers]
    write = next((v.store for v in flow.values_at(sources) if v.store is not None), None)
    if write is None:
        return
    reject(
        "ROUTER_WEIGHTS",
        Stage.ACTIVATION,
        f"the scores that are gathered for {choice.ids} were changed in place ({write.kind}) after "
        "they were computed",
        choice.ids,
        hint="mask a copy of the scores: masked_fill or where, or clone before the write",
    )


def _gathers(user: Value, choice: Choice) -> bool:
    """Whether a value is the scores at the chosen experts."""
    if user.op != "aten.gather" or user.argument(1, "dim") not in (1, -1):
        return False
    source, index = user.args[0], user.argument(2, "index")
    wanted = strip_casts(source)[0]
    known = (choice.scored.whole, choice.logits if choice.scores == "logits" else None)
    return wanted in known and index == choice.ids.whole


# --- the formulas ---------------------------------------------------------------------------------


def _is_over_slots(softmax: Value) -> bool:
    return reduced_dims(softmax) == (1,)


def _from(scores: Formula) -> Formula:
    """Matches the weights computed from scores: divided by their sum, or not, and scaled, or
    not."""
    total = reduction("sum", scores, "slots")
    least = clamp(total, number("least"), ABSENT)
    divided = scores / (total | total + number("eps") | least)
    weights = divided.giving(normalise=True) | scores
    return weights * number("scaling") | weights


_CHOSEN = tensor("chosen")
_WEIGHTS = (
    _from(_CHOSEN)
    | _from(call("softmax", _CHOSEN, holds=_is_over_slots)).giving(scores="softmax_of_chosen")
    | _from(call("sigmoid", _CHOSEN)).giving(scores="sigmoid")
)


def _made(
    found: Found, *, end: Value, start: Value, choice: Choice, flow: Dataflow
) -> Weights | None:
    """Returns `end` as weights. None if they come from other scores than `start`, if other values
    read a step before them, or if the op would give other numbers."""
    named = found.bound
    scores, eps, least = named.get("scores"), named.get("eps", 0.0), named.get("least")
    if named["chosen"] != start.whole or end.shape != start.shape:
        return None
    if is_float_cast(end):  # the cast stays: readers in a wider dtype may omit it
        return None
    if scores is not None and choice.scores != "logits":
        return None
    # Sums of logits may choose other groups than sums of sigmoids do.
    if scores == "sigmoid" and choice.groups is not None and choice.groups.top == 2:
        return None
    # For the op, a bound of 0 means none, while sums of logits may be negative.
    if eps < 0 or (least is not None and not least > 0):
        return None
    absorbed = {start, *found.absorbed}
    inside = absorbed - {end}
    read = {user for value in inside for user in flow.users.get(value, ())}
    if not read <= absorbed or not flow.output_values.isdisjoint(inside):
        return None
    return Weights(
        end,
        scores or choice.scores,
        normalise="normalise" in named,
        norm_eps=eps,
        norm_min=least or 0.0,
        scaling=named.get("scaling"),
        absorbed=tuple(absorbed),
    )
