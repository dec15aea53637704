"""From the scores of the chosen experts to their weights: normalised, scaled, in any spelling.

w = topk(scores, S)[0], or scores.gather(1, ids)
w = softmax(w)                                       of chosen logits
w = w / (w.sum(-1, keepdim=True) + eps), or / w.sum(-1, keepdim=True).clamp(min=least)
w = w * scaling
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.language import Stage, register_code, reject
from tilewright.patterns.moe.choice import Choice
from tilewright.patterns.recognise.casts import is_float_cast, strip_casts
from tilewright.patterns.recognise.constants import given_number
from tilewright.patterns.recognise.steps import clamp_bounds, keeps_dim, reduced_dims

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
    if found.normalise or found.scaling is not None or len(users) != 2:
        return None
    normalised = _normalised(flow, end, users)
    if normalised is None:
        return None
    quotient, steps, eps, least = normalised
    absorbed = (*inside, *steps, quotient)
    return replace(
        found, end=quotient, normalise=True, norm_eps=eps, norm_min=least, absorbed=absorbed
    )


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
    factor = _other_number(user) if user.op == "aten.mul" else None
    if factor is None or found.scaling is not None:
        return None
    return replace(step, scaling=factor)


def _other_number(value: Value) -> float | None:
    """The number that a sum or product has beside its one tensor."""
    if len(value.operands) != 1 or value.kwargs.get("alpha", 1) != 1:
        return None
    return next((given_number(a) for a in value.args[:2] if not isinstance(a, View)), None)


def _normalised(
    flow: Dataflow, end: Value, users: list[Value]
) -> tuple[Value, tuple[Value, ...], float, float] | None:
    """(quotient, what makes its divisor, eps, least divisor) of a value divided by its sums."""
    total = next((u for u in users if u.op == "aten.sum"), None)
    quotient = next((u for u in users if u.op == "aten.div"), None)
    if total is None or quotient is None or quotient.kwargs.get("rounding_mode"):
        return None
    if not total.dtype.is_floating_point:
        return None  # `dtype` asks for sums of what is left of the scores as integers
    if reduced_dims(total) != (1,) or not keeps_dim(total) or total.args[0] != end.whole:
        return None
    if quotient.shape != end.shape or quotient.args[0] != end.whole or quotient.store is not None:
        return None
    divisor, eps, least = quotient.args[1], 0.0, 0.0
    steps: list[Value] = []
    while isinstance(divisor, View) and divisor.value is not total:
        value = divisor.value
        steps.append(value)
        low, high = clamp_bounds(value) or (None, None)
        is_sum = value.op == "aten.add"
        number = _other_number(value) if is_sum else given_number(low)
        if not is_float_cast(value):
            if number is None or high is not None or eps or least:
                return None
            if not is_sum and number <= 0:  # the op has no bound of 0: sums of logits pass it
                return None
            eps, least = (number, 0.0) if is_sum else (0.0, number)
        divisor = value.operands[0].through(divisor.effect)
    repeats = divisor == total.whole or divisor == total.whole.expand(*end.shape)
    inner = all(flow.only_user(value) is not None for value in (total, *steps))
    if not isinstance(divisor, View) or not repeats or not inner or eps < 0:
        return None
    return quotient, (total, *steps), eps, least
