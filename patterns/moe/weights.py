"""Follows the scores of the chosen experts to the weights of these experts. The weights may be
normalised and scaled, and the graph may write this in any way.

    w = topk(scores, S)[0], or scores.gather(1, ids)
    w = softmax(w)                                       if the scores are logits
    w = w / (w.sum(-1, keepdim=True) + eps), or / w.sum(-1, keepdim=True).clamp(min=least)
    w = w * scaling

Each token has S slots (top-k).
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

# The largest number of values that are computed from the scores, up to the weights.
_REACH = 16


@dataclass(frozen=True)
class Weights:
    """The weights that are computed from the chosen scores.

    Attributes:
        end: The value of the weights, [T, S].
        scores: The op's argument `scores`.
        normalise, norm_eps, norm_min, scaling: The op's arguments with these names. They describe
            the steps from the scores to the weights.
        absorbed: The values that the op replaces.
    """

    end: Value
    scores: str
    normalise: bool = False
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scaling: float | None = None
    absorbed: tuple[Value, ...] = ()


def match_weights(flow: Dataflow, choice: Choice) -> Weights:
    """Returns the weights of a choice after all steps that the op knows. Raises Reject
    (ROUTER_WEIGHTS) if the scores of the chosen experts are not found."""
    start = _chosen_scores(flow, choice)
    shapes = start.shape, (start.shape[0], 1)
    ends = reversed(flow.downstream(start, _REACH, lambda value: value.shape in shapes))
    found = (
        _WEIGHTS.match(end.whole, partial(_made, end=end, start=start, choice=choice, flow=flow))
        for end in ends
    )
    return next(weights for weights in found if weights is not None)


def _chosen_scores(flow: Dataflow, choice: Choice) -> Value:
    """Returns the scores of the chosen experts, [T, S]. They come from a gather, or are the values
    of the topk itself. Raises Reject (ROUTER_WEIGHTS) if neither is found."""
    ids = choice.ids
    gathers = [user for user in flow.users.get(ids, ()) if _gathers(user, choice)]
    if gathers:
        return gathers[0]
    made = flow.values_at([ids.node])
    values = next((v for v in made if v.kwargs.get("output") == 0), None)
    if values is None or not _is_read(flow, values):
        _refuse_changed(flow, choice)
        message = (
            f"the scores of the experts {ids} are neither read by a gather nor the values of "
            "the topk"
        )
        reject("ROUTER_WEIGHTS", Stage.ACTIVATION, message, ids)
    if choice.biased:
        message = "the weights are computed from corrected scores"
        hint = "gather scores without the correction: scores.gather(1, ids)"
        reject("ROUTER_WEIGHTS", Stage.GUARDS, message, values, hint=hint)
    return values


def _is_read(flow: Dataflow, value: Value) -> bool:
    return bool(flow.users.get(value)) or value in flow.output_values


def _refuse_changed(flow: Dataflow, choice: Choice) -> None:
    """Raises Reject if the tensor from which the scores of the chosen experts are gathered was
    changed before the gather."""
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
        hint=(
            "mask a copy of the scores: use masked_fill or where, or clone the scores before "
            "the write"
        ),
    )


def _gathers(user: Value, choice: Choice) -> bool:
    """Whether a value gathers the scores of the chosen experts."""
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
    """Matches the weights that are computed from scores. They may be divided by their sum, and they
    may be scaled."""
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
    """Returns `end` as weights. Returns None if the weights are computed from other scores than
    `start`, if other values read an intermediate step, or if the op would compute other numbers."""
    named = found.bound
    scores, eps, least = named.get("scores"), named.get("eps", 0.0), named.get("least")
    if named["chosen"] != start.whole or end.shape != start.shape:
        return None
    if is_float_cast(end):  # the cast stays: readers in a wider dtype may omit it
        return None
    if scores is not None and choice.scores != "logits":
        return None
    # Sums of logits may choose other groups than sums of sigmoids would choose.
    if scores == "sigmoid" and choice.groups is not None and choice.groups.top == 2:
        return None
    # A bound of 0 means for the op that there is no bound, but sums of logits may be negative.
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
