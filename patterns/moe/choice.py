"""Traces the choice of a router, from the chosen experts back to the logits.

    scores = softmax(logits), or sigmoid(logits)
    choice = scores (+ correction)                               one number for each expert
    choice = choice.masked_fill(~mask, -inf)                     only the best groups of experts
    ids    = topk(choice, S)[1]

The mask is computed from one score for each group of experts. This score is the largest score in
the group, or the sum of the two largest scores. Dimension letters: T tokens, E experts, S slots
(top-k), G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.arithmetic.formula import largest, reduction, tensor
from tilewright.patterns.arithmetic.steps import INVERSIONS, chosen_by_mask, is_filled, reduced_dims
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.recognise.routing import (
    are_largest,
    is_top_indices,
    scattered_ones,
    takes_largest,
)

_INFINITY = float("inf")
_SCORES = {"aten.softmax": "softmax", "aten.sigmoid": "sigmoid"}


@dataclass(frozen=True)
class Groups:
    """The choice of `kept` groups among `count` groups of neighbouring experts. The chosen groups
    have the largest sums of their `top` best scores."""

    count: int
    kept: int
    top: int


@dataclass(frozen=True)
class Choice:
    """The scores and logits by which experts were chosen.

    Attributes:
        ids: The indices of a topk.
        num_slots: The number of experts that each token chooses.
        scores: "softmax", "sigmoid" or "logits".
        scored: The value that has the scores.
        logits: The logits [T, E], before casts.
        correction: The numbers [E] that are added to the scores for the choice only, or None.
        groups: The choice of groups that comes first, or None.
        absorbed: The values that the op replaces.
    """

    ids: Value
    num_slots: int
    scores: str
    scored: Value
    logits: View
    correction: View | None
    groups: Groups | None
    absorbed: tuple[Value, ...]

    @property
    def num_experts(self) -> int:
        size = self.logits.shape[1]
        assert isinstance(size, int)
        return size

    @property
    def biased(self) -> bool:
        """Whether experts are compared by other numbers than their scores."""
        return self.correction is not None


def is_choice(value: Value) -> bool:
    """Whether a value is the indices of the largest numbers in each row of a matrix."""
    if value.op != "aten.topk" or value.kwargs.get("output") != 1 or len(value.shape) != 2:
        return False
    return isinstance(value.args[0].shape[-1], int) and isinstance(value.shape[1], int)


def _takes_largest_of_rows(choice: Value) -> bool:
    return is_top_indices(choice) and takes_largest(choice)


def match_choice(ids: Value) -> Choice:
    """Returns the choice that computed `ids`. The function :func:`is_choice` must return True for
    `ids`. Raises Reject if the choice has an unknown form."""
    compared = ids.args[0]
    if not _takes_largest_of_rows(ids) or not compared.is_regrouped:
        message = "the choice does not select the largest numbers of whole rows"
        reject("ROUTER_CHOICE", Stage.ACTIVATION, message, ids)
    slots = ids.shape[1]
    assert isinstance(slots, int)
    numbers, casts = strip_casts(compared)
    groups, masked, absorbed = None, numbers.value, [ids]
    if masked.op in ("aten.masked_fill", "aten.where"):
        if not numbers.is_regrouped:
            reject("ROUTER_CHOICE", Stage.ACTIVATION, f"only a part of {masked} is read", numbers)
        compared, groups, steps = _grouped(masked, numbers)
        absorbed += [*casts, *steps]
        numbers, casts = strip_casts(compared)
    scored, correction, steps = _corrected(numbers)
    scored, more = strip_casts(scored)
    value, scores = scored.value, _SCORES.get(scored.value.op, "logits")
    logits = compared
    if scores != "logits":
        absorbed += [*casts, *steps, *more, value]
        logits = value.args[0]
    if scores == "softmax" and reduced_dims(value) != (1,):
        reject("ROUTER_CHOICE", Stage.ACTIVATION, "the softmax is not over the experts", value)
    if not scored.is_whole or len(logits.shape) != 2 or logits != logits.value.whole.matrix:
        reject("ROUTER_CHOICE", Stage.ACTIVATION, f"only a part of {scored.value} is read", scored)
    may_be_less = correction is not None or scores == "logits"
    if groups is not None and may_be_less and not _fills_infinity(masked):
        what = "a logit" if correction is None else "a corrected score"
        message = f"experts of other groups get 0 and may win, because {what} may be less than 0"
        reject("ROUTER_GROUPS", Stage.GUARDS, message, masked, hint="masked_fill(~mask, -inf)")
    experts = logits.shape[1]
    assert isinstance(experts, int)
    if groups is not None and groups.kept * (experts // groups.count) < slots:
        message = f"{groups.kept} groups have fewer experts than the {slots} that are chosen"
        reject("ROUTER_GROUPS", Stage.GUARDS, message, ids)
    return Choice(ids, slots, scores, value, logits, correction, groups, tuple(absorbed))


def _are_scores(view: View) -> bool:
    return view.value.op in _SCORES and view.value.projected


def _is_per_expert(view: View) -> bool:
    """Whether a view has one number for each expert, and the same numbers for all tokens."""
    *tokens, experts = view.effect.dims or ((),)
    varies = len(experts) == 1 and experts[0].axis is not None
    return all(map(effects.repeats, tokens)) and varies and not view.value.projected


# The bias of a linear is a part of the logits. It is not a correction of scores.
_CORRECTED = tensor("scores", holds=_are_scores) + tensor("correction", holds=_is_per_expert)


def _corrected(compared: View) -> tuple[View, View | None, tuple[Value, ...]]:
    """Returns (scores, correction [E], values absorbed) for the sum `scores + correction`. The
    correction is None if nothing is added."""
    found = _CORRECTED.match(compared)
    if found is None or found.bound["scores"].shape != compared.shape:
        return compared, None, ()
    vector = found.bound["correction"]
    return found.bound["scores"], vector.with_dims(vector.effect.dims[-1]), found.absorbed


# --- groups ---------------------------------------------------------------------------------------


def _fills_infinity(masked: Value) -> bool:
    fill = masked.args[2]
    return is_filled(fill, -_INFINITY)


def _grouped(masked: Value, flat: View) -> tuple[View, Groups | None, tuple[Value, ...]]:
    """Returns (numbers before the mask, groups, values absorbed). Raises Reject (ROUTER_GROUPS) for
    a mask that the op cannot compute.

    flat: the masked numbers as [T, E], if the mask has the shape [T, G, E / G].
    """
    unmasked = _unmasked(masked, flat.shape)
    found = unmasked and _mask_of_groups(*unmasked[1:])
    known = _fills_infinity(masked) or is_filled(masked.args[2], 0.0)
    if unmasked is None or found is None or not known:
        message = f"{masked} excludes experts in an unknown way"
        reject("ROUTER_GROUPS", Stage.ACTIVATION, message, masked)
    numbers, (chosen, num_groups, steps) = unmasked[0], found
    if not is_choice(chosen) or not _takes_largest_of_rows(chosen):
        message = f"the groups are {chosen}, not the best groups of each token"
        reject("ROUTER_GROUPS", Stage.ACTIVATION, message, chosen)
    scores = chosen.args[0]
    top, of_scores = _group_scores(scores.value, numbers, num_groups)
    if top is None or not scores.is_whole:
        message = (
            f"groups are compared by {scores.value}, and not by their best expert or "
            "their two best experts"
        )
        reject("ROUTER_GROUPS", Stage.ACTIVATION, message, scores)
    kept = chosen.shape[1]
    assert isinstance(kept, int)
    groups = None if kept == num_groups else Groups(num_groups, kept, top)
    return numbers, groups, (masked, chosen, *steps, *of_scores)


def _unmasked(masked: Value, shape: tuple[Size, ...]) -> tuple[View, View, bool] | None:
    """Returns (numbers, mask, whether the mask is True where numbers are kept). The numbers and the
    mask are views of shape `shape`. Returns None if `masked` is another operation."""
    chosen, stays = chosen_by_mask(masked), masked.op == "aten.where"
    numbers = chosen and chosen[1 if stays else 2]
    if chosen is None or not isinstance(numbers, View):
        return None
    numbers, mask = (masked.whole.of_operand(view).reshape(*shape) for view in (numbers, chosen[0]))
    return numbers, mask, stays


def _mask_of_groups(mask: View, stays: bool) -> tuple[Value, int, list[Value]] | None:
    """Returns (ids of groups, number of groups, values absorbed) for a mask [T, E] over experts;
    else None.

    The mask repeats each element of a mask [T, G] for all experts of the group. The graph makes the
    mask of groups by scattering ones into zeros at the ids. stays: whether the mask is True for the
    experts that are kept. If not, it is True for the experts that are removed.
    """
    absorbed: list[Value] = []
    while True:
        value = mask.value
        is_zero = value.op == "aten.eq" and is_filled(value.args[1], 0.0)
        if is_zero or value.op in INVERSIONS:
            stays = not stays
        elif value.op not in ("cast", "aten.clone"):
            break
        absorbed.append(value)
        mask = value.args[0].through(mask.effect)
    groups = value.shape[-1]
    mark = int(stays)  # 1: kept groups are ones among zeros; 0: kept groups are zeros among ones
    if len(value.shape) != 2 or not isinstance(groups, int):
        return None
    tokens, experts = mask.shape
    size = effects.divides(groups, experts)
    if size is None:
        return None
    wide = value.whole.unsqueeze(2).expand(tokens, groups, size).reshape(tokens, experts)
    ids = scattered_ones(value, mark)
    if wide != mask or ids is None or not ids.is_whole:
        return None
    zeros = value.args[0]
    return ids.value, groups, [*absorbed, value, *([zeros.value] if zeros else [])]


def _are_best(view: View) -> bool:
    """Whether a view has the largest number, or the two largest numbers, along the last
    dimension."""
    return view.is_whole and are_largest(view.value) and view.shape[-1] in (1, 2)


_GROUP_SCORES = largest(tensor("numbers"), "size") | reduction(
    "sum", tensor("best", holds=_are_best), "top"
)


def _group_scores(
    scores: Value, numbers: View, num_groups: int
) -> tuple[int | None, tuple[Value, ...]]:
    """Returns (top, values absorbed). `top` is 1 if groups are compared by their largest number,
    and 2 if they are compared by the sum of their two largest numbers. It is None if groups are
    compared in an unknown way."""
    tokens, experts = numbers.shape
    size = effects.divides(num_groups, experts)
    found = None if size is None else _GROUP_SCORES.match(scores.whole.unsqueeze(len(scores.shape)))
    if found is None:
        return None, ()
    best = found.bound.get("best")
    compared = found.bound["numbers"] if best is None else best.value.args[0]
    if strip_casts(compared)[0] != strip_casts(numbers.reshape(tokens, num_groups, size))[0]:
        return None, ()
    chosen = () if best is None else (best.value,)
    return found.bound.get("top", 1), (*found.absorbed, *chosen)
