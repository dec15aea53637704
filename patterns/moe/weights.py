"""From the scores of the chosen experts to their weights: normalised, scaled, in any spelling.

w = topk(scores, S)[0], or scores.gather(1, ids)
w = softmax(w)                                       of chosen logits
w = w / (w.sum(-1, keepdim=True) + eps), or / w.sum(-1, keepdim=True).clamp(min=least)
w = w * scaling
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.formula import (
    ABSENT,
    clamp,
    number,
    reduction,
    tensor,
    times_number,
)
from tilewright.patterns.arithmetic.steps import reduced_dims
from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import Stage, register_code, reject
from tilewright.patterns.moe.choice import Choice

register_code(
    "ROUTER_WEIGHTS", "the chosen experts' weights are made of no scores of theirs", weight="advice"
)

# Steps from the scores to the weights, at most.
_REACH = 8


@dataclass(frozen=True)
class Weights:
    """What the chosen scores become. end: the value [T, S]. scores: the op's; steps by name."""

    end: Value
    scores: str
    normalise: bool = False
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scaling: float | None = None
    absorbed: tuple[Value, ...] = ()


def match_weights(flow: Dataflow, choice: Choice) -> Weights:
    """The weights of a choice, as far as their steps are known; raises Reject."""
    start = _chosen_scores(flow, choice)
    found = Weights(start, choice.scores, absorbed=(start,))
    casts: tuple[Value, ...] = ()
    for _ in range(_REACH):
        step = _next(flow, choice, found, casts)
        if step is None:
            break
        if is_float_cast(step.end) and step.absorbed[-1:] == (step.end,):
            # A cast at the end stays: readers that compute wider may go without it.
            casts = (*casts, step.end)
            continue
        found, casts = step, ()
    return found


def _chosen_scores(flow: Dataflow, choice: Choice) -> Value:
    """The scores of the chosen experts, [T, S]: a gather, or the topk's own values."""
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
        message = "the weights are made of corrected scores"
        hint = "scores.gather(1, ids) of scores without the correction"
        reject("ROUTER_WEIGHTS", Stage.GUARDS, message, values, hint=hint)
    return values


def _is_read(flow: Dataflow, value: Value) -> bool:
    return bool(flow.users.get(value)) or value in flow.output_values


def _refuse_changed(flow: Dataflow, choice: Choice) -> None:
    """Raises Reject where what is gathered for the chosen experts was written meanwhile."""
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


def _next(
    flow: Dataflow, choice: Choice, found: Weights, casts: tuple[Value, ...]
) -> Weights | None:
    """One step further; None where no known one follows."""
    end = casts[-1] if casts else found.end
    if end in flow.output_values:
        return None
    users = list(dict.fromkeys(flow.users.get(end, ())))
    inside = (*found.absorbed, *casts)
    if len(users) == 1 and (step := _alone(users[0], end, choice, found)) is not None:
        return replace(step, absorbed=(*inside, *step.absorbed))
    if found.normalise or found.scaling is not None:
        return None
    return _normalised(flow, end, replace(found, absorbed=inside))


def _alone(user: Value, end: Value, choice: Choice, found: Weights) -> Weights | None:
    """A step that alone reads the value before; absorbed: its own."""
    if user.operands != (end.whole,) or user.shape != end.shape or user.store is not None:
        return None
    step = replace(found, end=user, absorbed=(user,))
    if is_float_cast(user) or user.op == "aten.clone":
        return step
    plain = found.scores == "logits" and not found.normalise and found.scaling is None
    if plain and user.op == "aten.softmax" and reduced_dims(user) == (1,):
        return replace(step, scores="softmax_of_chosen")
    # Of groups that sums of logits decide between, no sums of sigmoids would.
    by_sums = choice.groups is not None and choice.groups.top == 2
    if plain and user.op == "aten.sigmoid" and not by_sums:
        return replace(step, scores="sigmoid")
    scaled = times_number(user.whole)
    if scaled is None or found.scaling is not None:
        return None
    return replace(step, scaling=scaled[1])


_SCORES = tensor("scores")
_TOTAL = reduction("sum", _SCORES, "slots")
_NORMALISED = _SCORES / (_TOTAL | _TOTAL + number("eps") | clamp(_TOTAL, number("least"), ABSENT))


def _normalised(flow: Dataflow, end: Value, found: Weights) -> Weights | None:
    """The step that divides by their sums the scores that `found` ends with; end: the last of their
    casts, all of which it absorbs."""
    quotient = next((user for user in flow.users.get(end, ()) if user.op == "aten.div"), None)
    match = None if quotient is None else _NORMALISED.match(quotient.whole)
    if quotient is None or match is None or match.bound["scores"] != found.end.whole:
        return None
    eps, least = match.bound.get("eps", 0.0), match.bound.get("least")
    # The op has no bound of 0: sums of logits pass it.
    if quotient.shape != end.shape or eps < 0 or (least is not None and not least > 0):
        return None
    absorbed = tuple(dict.fromkeys((*found.absorbed, *match.absorbed)))
    inside = [value for value in (end, *match.absorbed) if value is not quotient]
    read = {user for value in inside for user in flow.users.get(value, ())}
    if not read <= set(absorbed) or not flow.output_values.isdisjoint(inside):
        return None
    return replace(
        found,
        end=quotient,
        normalise=True,
        norm_eps=eps,
        norm_min=least or 0.0,
        absorbed=absorbed,
    )
