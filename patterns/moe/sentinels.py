"""Recognises routes to experts on other devices (expert parallelism). A route is a token together
with one of the experts that were chosen for it. The ids of experts on other devices are E or
larger, so that they sort after all other ids. The rows of these experts are filled with zeros.

    foreign = (sorted_ids >= E)[:, None]
    rows    = rows.masked_fill(foreign, 0)
    sorted_ids.clamp_(max=E - 1)                  so that the ids can index biases

Hugging Face transformers uses both the mask and the clamp in every mixture up to version 5.17. Such
routes become expert -1, and `fused_moe` skips them.
"""

from __future__ import annotations

from tilewright.patterns.arithmetic.casts import strip_while
from tilewright.patterns.arithmetic.constants import given_number
from tilewright.patterns.arithmetic.steps import chosen_by_mask, clamp_bounds
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.recognise.routing import Order, experts_of, per_row, strip_integer_casts


def is_row_mask(value: Value) -> bool:
    """Whether a value fills the rows of experts on other devices with zeros."""
    return foreign_experts(value) is not None


def foreign_experts(value: Value) -> tuple[View, Size] | None:
    """Returns (the expert of each row, E) for masked_fill(rows, experts >= E, 0). Returns None for
    every other value."""
    chosen = chosen_by_mask(value) if value.op == "aten.masked_fill" else None
    if chosen is None:
        return None
    mask, fill, rows = chosen
    if given_number(fill) != 0 or rows.shape != value.shape:
        return None
    column = per_row(mask) if len(mask.shape) == 2 else None
    if column is None or column.value.op != "aten.ge" or not column.is_whole:
        return None
    ids, first = column.value.args
    return None if isinstance(first, View) else (ids, first)


def unmasked(view: View) -> tuple[View, tuple[Value, ...]]:
    """Returns (the rows before the masks for experts on other devices, the masked values)."""
    return strip_while(view, is_row_mask)


def unclamped(ids: View, num_experts: Size) -> View:
    """Returns the expert ids before a clamp that changes only the ids of experts on other
    devices."""
    ids = strip_integer_casts(ids)
    low, high = clamp_bounds(ids.value) or (None, None)
    if low not in (None, 0) or high != num_experts - 1:
        return ids
    return ids.value.args[0].through(ids.effect)


def clamps(flow: Dataflow, order: Order, num_experts: Size) -> list[Value]:
    """Returns the results of in-place clamps of the sorted expert ids."""
    stores = (store.store for store in flow.stores if store.store is not None)
    sources = [s.source for s in stores if s.kind in ("clamp_", "clamp_max_") and s.source]
    return [
        source.value
        for source in sources
        if (ids := unclamped(source, num_experts)) != source
        and ids.value.op == "aten.sort"
        and experts_of(ids) == order.ids
    ]
