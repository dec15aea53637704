"""Checks that rows, weights and biases of a mixture's GEMMs follow one order of the routes.

Dimension letters: T tokens, S slots, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilewright.patterns.dataflow import View, upstream
from tilewright.patterns.language import Stage, register_code, reject
from tilewright.patterns.moe.sentinels import unclamped, unmasked
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.routing import (
    Order,
    gathered,
    in_order,
    match_ends,
    match_order,
    match_rows,
)

_SORTS = ("aten.sort", "aten.argsort")
# How many values the search goes back from the row numbers to their sort.
_REACH = 24

register_code("EXPERT_ENDS", "the rows of each expert are not counted in a known way")
register_code("EXPERT_ORDER", "rows, weights or biases do not follow the order of the experts")


def rows_in_order(gemm: ExpertGemm) -> tuple[Order, Any, View]:
    """(order, S, x [T, H]) of the rows that the first GEMM of a mixture reads.

    Raises Reject (EXPERT_ORDER) for rows that are not gathered by a sort of the experts.
    """
    if gemm.ends is None:
        return _rows_by_route(gemm)
    taken = gathered(unmasked(gemm.x)[0])
    if taken is None:
        reject(
            "EXPERT_ORDER",
            Stage.ACTIVATION,
            f"the rows are {gemm.x.value}, not gathered from the tokens",
            gemm.x,
        )
    source, rows = taken
    for permutation in _permutations(rows):
        order = match_order(permutation)
        num_slots = None if order is None else match_rows(rows, order)
        if order is not None and num_slots is not None:
            return order, num_slots, source
    reject(
        "EXPERT_ORDER",
        Stage.ACTIVATION,
        "the rows are not taken in the order of a sort of the expert numbers",
        rows,
    )


def _rows_by_route(gemm: ExpertGemm) -> tuple[Order, Any, View]:
    """The same where the routes stay in their own order."""
    assert gemm.experts is not None
    rows, hidden = gemm.x.effect.dims
    repeats = rows[-1].axis is None if rows else False
    num_slots = rows[-1].length if repeats else 1
    tokens = gemm.x.with_dims(rows[:-1] if repeats else rows, hidden)  # fmt: skip
    return Order(None, gemm.experts), num_slots, tokens


def _permutations(rows: View) -> Iterator[View]:
    """Sorts that the row numbers are computed from."""
    if rows.value.op in _SORTS:
        yield rows
    for value in upstream(rows.value, _REACH, lambda v: v.op not in _SORTS):
        if value.op not in _SORTS:
            yield from (view for view in value.operands if view.value.op in _SORTS)


def check_groups(gemms: Sequence[ExpertGemm], order: Order) -> None:
    """Raises Reject unless all GEMMs have each row's own expert: EXPERT_ENDS, and EXPERT_ORDER for
    their biases."""
    for gemm in gemms:
        num_experts = gemm.weight.shape[0]
        if gemm.ends is None:
            same = order.permutation is None and gemm.experts == order.ids
        else:
            found = match_ends(gemm.ends)
            same = found is not None and found == (order.ids, num_experts)
        if not same:
            place = gemm.ends or gemm.experts
            assert place is not None
            reject(
                "EXPERT_ENDS",
                Stage.ACTIVATION,
                f"{place.value} does not place the rows of the {num_experts} experts; expected the "
                "running counts of the experts among the sorted routes, or each route's expert",
                place,
            )
        index = gemm.bias_index
        known = () if index is None else (index, unclamped(index, num_experts))
        if known and not any(in_order(ids, order) for ids in known):
            reject(
                "EXPERT_ORDER",
                Stage.ACTIVATION,
                "the bias is not that of each row's expert",
                known[0],
            )
