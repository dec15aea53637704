"""Scores [T, E] that are zero for all but the experts that a router chose.

    scores = zeros(T, E).scatter(1, ids, weights)        0 wherever ids do not point
    scores = full(T, E, -inf).scatter(1, ids, logits).sigmoid()
    scores = (one_hot(ids, E) * weights[..., None]).sum(1)
    scores = probabilities.masked_fill(~chosen, 0)

followed from what is stored outside of the choice, through operations that keep zero (or minus
infinity) what it is. T tokens, S slots (top-k), E experts.
"""

from __future__ import annotations

from typing import Any

from tilewright.patterns.arithmetic.steps import is_filled, reduced_dims
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.recognise.routing import (
    is_distinct,
    scattered_into,
    strip_integer_casts,
)

_INFINITY = float("inf")
# f(-inf) is 0; in a softmax such elements do not change the others.
_ELEMENT_WISE = {"aten.sigmoid", "aten.exp"}
_FROM_MINUS_INFINITY = {"aten.sigmoid", "aten.softmax", "aten.exp", "aten.relu"}


def chosen_experts(scores: View) -> View | None:
    """ids [T, S], distinct for each token, outside of which scores [T, E] are zero; None where that
    is not known."""
    ids = _outside(scores, 0.0)
    return ids if ids is not None and is_distinct(ids) else None


def _outside(view: View, number: float) -> View | None:
    """The ids outside of which a view [T, E] holds `number`."""
    value = view.value
    if len(view.shape) != 2:
        return None
    if value.op == "cast" or value.op == "aten.clone":
        return _outside(value.args[0].through(view.effect), number)
    if value.op in _ELEMENT_WISE and number == 0.0 and not view.is_whole:
        return _outside(value.args[0].through(view.effect), -_INFINITY)
    if not view.is_whole:
        return None
    if value.op == "aten.scatter" or value.store is not None:
        return scattered_into(value, number)
    if value.op in ("aten.masked_fill", "aten.where"):
        return _masked(value, number)
    if number != 0.0:
        return None
    if value.op in _FROM_MINUS_INFINITY and _over_experts(value):
        zero = _outside(value.args[0], 0.0) if value.op == "aten.relu" else None
        return zero or _outside(value.args[0], -_INFINITY)
    if value.op == "aten.sum":
        return _summed_hits(value)
    return _product(value)


def _over_experts(value: Value) -> bool:
    return value.op != "aten.softmax" or reduced_dims(value) == (1,)


def _product(value: Value) -> View | None:
    """A product is zero where a factor is; a quotient where its numerator is."""
    first = value.args[0] if value.args else None
    if value.op == "aten.mul":
        wide = (v for v in value.operands if v.shape == value.shape)
        return next((ids for v in wide if (ids := _outside(v, 0.0)) is not None), None)
    if value.op == "aten.div" and isinstance(first, View) and first.shape == value.shape:
        return _outside(first, 0.0) if not value.kwargs.get("rounding_mode") else None
    return None


def _masked(value: Value, number: float) -> View | None:
    """masked_fill(x, ~chosen, number), where(chosen, x, number)."""
    if value.op == "aten.where":
        chosen, _, other = value.args
        return _chosen(chosen) if is_filled(other, number) else None
    _, mask, other = value.args
    if not is_filled(other, number) or not isinstance(mask, View) or not mask.is_whole:
        return None
    inverse = mask.value
    if inverse.op in ("aten.bitwise_not", "aten.logical_not"):
        return _chosen(inverse.args[0])
    zero = inverse.op == "aten.eq" and is_filled(inverse.args[1], 0.0)
    return _chosen(inverse.args[0]) if zero else None


def _chosen(mask: Any) -> View | None:
    """The ids outside of which a mask is false: zeros into which something was scattered."""
    if not isinstance(mask, View) or not mask.is_whole:
        return None
    value = mask.value
    if value.op in ("aten.gt", "aten.ne") and is_filled(value.args[1], 0.0):
        return _chosen(value.args[0])
    return _outside(mask, 0.0)


def _summed_hits(value: Value) -> View | None:
    """one_hot(ids [T, S]), weighted or not, summed over the slots."""
    hits = value.args[0]
    if reduced_dims(value) != (1,) or len(hits.shape) != 3 or not hits.is_whole:
        return None
    return _hits(hits)


def _hits(view: View) -> View | None:
    """ids [T, S] outside of which a view [T, S, E] is zero."""
    value = view.value
    if not view.is_whole:
        return None
    if value.op == "cast":
        return _hits(value.args[0])
    if value.op == "aten.one_hot":
        ids = strip_integer_casts(value.args[0])
        return ids if len(ids.shape) == 2 else None
    if value.op == "aten.mul":
        wide = (v for v in value.operands if v.shape == value.shape)
        return next((hit for v in wide if (hit := _hits(v)) is not None), None)
    return None
