"""Follows the rows of the experts' last GEMM to the result for each token. Along the way, the rows
are multiplied by the expert weights, put back into the order of the tokens, and summed over the
slots. These steps may come in any order, and may be written in any way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.steps import (
    constant_factor,
    keeps_dim,
    reduced_dims,
)
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View
from tilewright.patterns.moe.layer import refuse_combine, refuse_sum, sum_of_experts
from tilewright.patterns.moe.sentinels import is_row_mask
from tilewright.patterns.recognise.gemm import named_product
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.routing import (
    Order,
    by_cell,
    flat,
    gathered,
    match_inverse,
    match_rows,
    per_row,
    rows_added_to,
)

# Operations that read only the shape of a tensor.
SHAPED_LIKE = ("aten.empty_like", "aten.zeros_like")
_PRODUCTS = ("aten.einsum", "aten.bmm", "aten.matmul")
# The largest number of steps from the results of the experts to their sum.
_STEPS = 8


@dataclass(frozen=True)
class Combine:
    """The operations between the rows of the down GEMM and the tokens.

    Attributes:
        weights: The expert weights [T, S]. None if the rows were multiplied by weights before the
            experts; then `factor` multiplies all results.
        num_slots: The number S of experts that each token chooses.
        end: The result [T, H].
        absorbed: The values that the op replaces.
        added: The tensor that the sum is added to; None if it is zeros.
        factor: The number that multiplies all results if `weights` is None.
    """

    weights: View | Computed | None
    num_slots: Any
    end: Value
    absorbed: tuple[Value, ...]
    added: View | None = None
    factor: float = 1.0


def match_combine(
    flow: Dataflow, down: ExpertGemm, order: Order, num_slots: Any, weighed: bool = False
) -> Combine:
    """Follows the result of the down GEMM through the multiplication with weights, the
    un-permutation and the sum. Raises Reject (EXPERT_COMBINE) if the graph uses the result in
    another way.

    weighed: whether the rows were multiplied by weights before the experts, and must not be
    multiplied by weights again.
    """
    value, absorbed, factor = down.end, list[Value](), 1.0
    weights: View | Computed | None = None
    for _ in range(_STEPS):
        user = _only_user(flow, value)
        if user is None:
            break
        absorbed.append(user)
        in_token_order = order.permutation is None
        if in_token_order and weights is None and user.op in _PRODUCTS:
            weights = _contracted(user, value, (num_slots, down.weight.shape[1]))
            summed = weights is not None
        else:
            summed = in_token_order and _sums_slots(user, value, num_slots)
            summed = summed or _adds_rows(user, value, order, num_slots)
        if summed:
            if weights is None and not weighed:
                refuse_sum("the experts' results are summed without weights", user)
            ends, base = sum_of_experts(flow, user, down.x.value.dtype, absorbed)
            found = Combine(weights, num_slots, ends[-1], (*absorbed, *ends), base)
            return times(found, factor)
        scaled = constant_factor(user)
        unchanged = user.op == "aten.clone" or is_float_cast(user) or scaled is not None
        unchanged |= is_row_mask(user) and not in_token_order
        if unchanged and _keeps_rows(user, value):
            factor *= 1.0 if scaled is None else scaled[1]
        elif user.op == "aten.mul" and weights is None and not weighed:
            weights = _weights(user, value, order, num_slots)
            if weights is None:
                break
        elif not in_token_order and _is_unpermuted(user, value, order):
            order = replace(order, permutation=None)
        else:
            break
        value = user
    refuse_combine(absorbed[-1] if absorbed else None, down.end)


def _keeps_rows(user: Value, value: Value) -> bool:
    """Whether an element-wise operation reads the whole value with its rows in order."""
    own = [v for v in user.operands if v.value is value]
    return len(own) == 1 and user.shape == own[0].shape and own[0].is_regrouped


def _contracted(product: Value, value: Value, last: tuple[Any, Any]) -> View | None:
    """Returns the weights [T, S] if a product computes einsum("ts, tsh -> th", weights, value),
    however it is written; else None.

    last: the sizes (S, H) of the result's last two dimensions in `value`.
    """
    found = named_product(product)
    if found is None or not found.names_differ:
        return None
    for y, by in found.either_way:
        if y.view.value is not value or y.view.shape[1:] != last or not y.view.is_regrouped:
            continue
        t, s, h = tuple(y.names)
        single = {name for name, dim in by.dims.items() if name not in y.names and not dim}
        result = [name for name in found.result if name not in single]
        if set(by.names) - single == {t, s} and result == [t, h]:
            return strip_casts(by.ordered((t, s)))[0]
    return None


def times(found: Combine, factor: float) -> Combine:
    """Returns the combine, in which all results are also multiplied by a number. The weights become
    float32, so that their product with the number is not rounded to a smaller dtype."""
    if found.weights is None or factor == 1.0:
        return replace(found, factor=factor)
    wide = Computed("to", (found.weights, torch.float32))
    return replace(found, weights=Computed("mul", (wide, factor)))


def _only_user(flow: Dataflow, value: Value) -> Value | None:
    users = [u for u in dict.fromkeys(flow.users.get(value, ())) if u.op not in SHAPED_LIKE]
    # An in-place operation has two values: the computation, and the store of its result.
    users = [u for u in users if not (u.op == "store" and u.store and u.store.source == value.whole
                                      and not u.store.index)]  # fmt: skip
    return users[0] if len(users) == 1 else None


def _weights(product: Value, value: Value, order: Order, num_slots: Any) -> View | Computed | None:
    """Returns the expert weights [T, S] if a product is `value * weight`; else None."""
    weight = next((v for v in product.operands if v.value is not value), None)
    if weight is None or len(product.operands) != 2 or not _keeps_rows(product, value):
        return None
    if order.permutation is None:
        return _by_token(per_row(strip_casts(weight)[0]), num_slots)
    return weights_in_order(weight, order, num_slots)


def weights_in_order(weight: View, order: Order, num_slots: Any) -> View | Computed | None:
    """Returns the expert weights [T, S] for a view that has one number for each row, in sorted
    order; else None."""
    column = per_row(strip_casts(weight)[0])
    if column is None:
        return None
    base, _ = strip_casts(flat(column))
    # A column [M, 1] may be gathered in the same way as a list [M].
    taken = gathered(base.value.whole) if base == flat(base.value.whole) else None
    if taken is None or taken[1] != order.permutation:
        return None
    if order.cells is None:
        return _by_token(strip_casts(taken[0])[0], num_slots)
    scores = by_cell(taken[0])
    if scores is None or scores.shape != order.cells.shape:
        return None
    return Computed("gather", (scores, 1, order.ids.reshape(scores.shape[0], num_slots)))


def _by_token(view: View | None, num_slots: Any) -> View | None:
    """Returns a view [T * S] or [T, S] as [T, S]."""
    if view is None:
        return None
    total = effects.product(view.shape)
    tokens = effects.divides(num_slots, total)
    if tokens is None:
        return None
    return view.reshape(tokens, num_slots)


def _is_unpermuted(user: Value, value: Value, order: Order) -> bool:
    """Whether `user` is `value` with its rows put back into the original order of the routes."""
    taken = gathered(user.whole)
    if taken is not None and taken[0] == value.whole and match_inverse(taken[1], order):
        return True
    store = user.store
    if store is None or store.accumulate or store.memory.is_input or order.cells is not None:
        return False
    by_index = list(store.index.items()) == [(0, order.permutation)]
    whole = effects.is_identity(store.target, store.memory.shape)
    return by_index and whole and store.source == value.whole


def _sums_slots(user: Value, value: Value, num_slots: Any) -> bool:
    """Whether `user` sums `value`, viewed as [T, S, H], over S."""
    if user.op != "aten.sum" or not user.operands or user.operands[0].value is not value:
        return False
    view = user.operands[0]
    if len(view.shape) != 3 or view.shape[1] != num_slots or reduced_dims(user) != (1,):
        return False
    routes = effects.reshape(view.effect, (effects.product(view.shape[:2]), view.shape[2]))
    flat_value = effects.product(value.shape[:-1])
    expected = effects.reshape(effects.identity(value.shape), (flat_value, value.shape[-1]))
    return routes == expected and not keeps_dim(user)


def _adds_rows(user: Value, value: Value, order: Order, num_slots: Any) -> bool:
    """Whether `user` adds each row of `value` to the row of its token."""
    added = rows_added_to(user)
    if added is None or user.shape != (effects.divides(num_slots, value.shape[0]), value.shape[-1]):
        return False  # otherwise, the sum has more rows than there are tokens
    _, index, source = added
    column = per_row(index) if len(index.shape) == 2 else None
    if column is not None and index.shape != source.shape:
        return False  # the scatter writes only some columns
    return match_rows(column or index, order) == num_slots and source == value.whole
