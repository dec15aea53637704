"""Checks that the rows, the weights and the biases of a mixture's GEMMs follow one order of the
routes. A route is a token together with one of the experts that were chosen for it.

Dimension letters: T tokens, S slots, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Value, View, upstream
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.moe.sentinels import unclamped, unmasked
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.ranks import collective_behind
from tilewright.patterns.recognise.routing import (
    Order,
    flat,
    gathered,
    in_order,
    match_ends,
    match_order,
    match_rows,
    per_row,
    without_counting,
)

_SORTS = ("aten.sort", "aten.argsort")
# The largest number of values that a search visits from the row numbers back to their sort.
_REACH = 24


def refuse_order(message: str, culprit: Value | View, hint: str = "") -> NoReturn:
    """Raises Reject with the code EXPERT_ORDER."""
    reject("EXPERT_ORDER", Stage.ACTIVATION, message, culprit, hint=hint)


@dataclass(frozen=True)
class RouteRows:
    """The rows `x[order // num_slots]` that the first GEMM of a mixture reads.

    Attributes:
        order: The order of the routes.
        num_slots: The number S of experts that each token chooses.
        x: The tokens, [T, H].
        weights: The weights [T, 1] that multiply x before the experts; None if no weights multiply
            x.
        absorbed: The values that the op replaces.
    """

    order: Order
    num_slots: Any
    x: View
    weights: View | None = None
    absorbed: tuple[Value, ...] = ()

    @property
    def argument(self) -> View | Computed:
        """x in the form that the op expects."""
        return self.x if self.weights is None else Computed("mul", (self.x, self.weights))


def rows_in_order(gemm: ExpertGemm) -> RouteRows:
    """Returns the rows that the first GEMM of a mixture reads.

    Raises Reject (EXPERT_ORDER) if the rows are not gathered in the order of a sort of the experts.
    """
    if gemm.ends is None:
        return _rows_by_route(gemm)
    rows = unmasked(gemm.x)[0]
    for tokens, factor in rows.value.either_way if rows.value.op == "aten.mul" else ():
        column = per_row(factor)
        if rows.is_whole and column is not None and gathered(tokens) is not None:
            return _weighed(rows.value, _gathered_rows(tokens), flat(column))
    return _gathered_rows(rows)


def _weighed(product: Value, rows: RouteRows, by_route: View) -> RouteRows:
    """Returns the rows with their weights. by_route: the numbers that multiply the rows before the
    experts, one number for each sorted route. Raises Reject (EXPERT_ORDER) if a token has more than
    one expert."""
    taken = gathered(by_route)
    one_each = rows.num_slots == 1 and product.dtype == rows.x.value.dtype
    one_each &= rows.order.cells is None
    if not one_each or taken is None or taken[1] != rows.order.permutation:
        message = (
            f"{product} multiplies the rows by weights before the experts; this is fused only "
            "for one expert per token"
        )
        hint = (
            "multiply the experts' results by the weights (torchtitan: score_before_experts=False)"
        )
        refuse_order(message, product, hint=hint)
    weights = taken[0].reshape(rows.x.shape[0], 1)
    return replace(rows, weights=weights, absorbed=(product, *rows.absorbed))


def _gathered_rows(view: View) -> RouteRows:
    """Returns rows that are gathered from the tokens. Raises Reject (EXPERT_ORDER) for any other
    rows."""
    taken = gathered(view)
    if taken is None:
        refuse_order(f"the rows are {view.value}, not gathered from the tokens", view)
    source, rows = taken
    for permutation in _permutations(rows):
        order = match_order(permutation)
        num_slots = None if order is None else match_rows(rows, order)
        if order is not None and num_slots is not None:
            if num_slots == 1:
                num_slots, source = _repeated_tokens(source)
            return RouteRows(order, num_slots, source, absorbed=(view.value,))
    refuse_order("the rows are not in the order of a sort of the expert numbers", rows)


def _rows_by_route(gemm: ExpertGemm) -> RouteRows:
    """Returns the rows of a first GEMM that reads the routes in their original order."""
    assert gemm.experts is not None
    num_slots, tokens = _repeated_tokens(gemm.x)
    return RouteRows(Order(None, gemm.experts), num_slots, tokens)


def _repeated_tokens(rows: View) -> tuple[Any, View]:
    """Returns (S, x [T, H]) for rows [T * S, H] that repeat each token S times, one copy after the
    other. S is 1 if the tokens are not repeated."""
    rows = without_counting(rows)
    by_row, hidden = rows.effect.dims
    if not by_row or by_row[-1].axis is not None:
        return 1, rows
    return by_row[-1].length, rows.with_dims(by_row[:-1], hidden)


def _permutations(rows: View) -> Iterator[View]:
    """Yields the sorts from which the row numbers are computed."""
    if rows.value.op in _SORTS:
        yield rows
    for value in upstream(rows.value, _REACH, lambda v: v.op not in _SORTS):
        if value.op not in _SORTS:
            yield from (view for view in value.operands if view.value.op in _SORTS)


def check_groups(gemms: Sequence[ExpertGemm], order: Order) -> None:
    """Raises Reject (EXPERT_ENDS) if a GEMM does not multiply each row with the weight of the row's
    own expert. Raises Reject (EXPERT_ORDER) if a bias is not the bias of the row's own expert."""
    for gemm in gemms:
        num_experts = gemm.weight.shape[0]
        if gemm.ends is None:
            own = gemm.experts
            same = order.permutation is None and own is not None and equal_values(own, order.ids)
        else:
            found = match_ends(gemm.ends)
            same = found is not None and found == (order.ids, num_experts)
        if not same:
            place = gemm.ends or gemm.experts
            assert place is not None
            if sent := collective_behind(place.value, _REACH):
                message = (
                    f"{sent} sends rows and counts between ranks, so the experts' rows "
                    "are not in the "
                )
                reject(
                    "COLLECTIVE", Stage.ACTIVATION, f"{message}order of this rank's tokens", sent
                )
            message = (
                f"{place.value} does not place the rows of the {num_experts} experts; expected the "
                "running counts of the experts among the sorted routes, or each route's expert"
            )
            reject("EXPERT_ENDS", Stage.ACTIVATION, message, place)
        index = gemm.bias_index
        known = () if index is None else (index, unclamped(index, num_experts))
        if known and not any(in_order(ids, order) for ids in known):
            refuse_order("the bias does not belong to the expert of each row", known[0])
