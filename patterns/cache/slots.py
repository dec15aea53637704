"""Arithmetic of slots: the expressions that compute the place of a token in a paged cache.

    page = block_table[sequence, position // page_size]
    slot = page * page_size + position % page_size

The functions of this module recognise such expressions, and also build them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.cache.addressing import SLOT_FORMS
from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Dataflow, View
from tilewright.patterns.effects import Size
from tilewright.patterns.recognise.routing import gathered, strip_integer_casts

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Slots:
    """The slots of tokens, in a form of `ops.cache.addressing`.

    Attributes:
        form: The name of the form.
        tensors: The tensors that the form reads.
        wraps: Whether a negative index counts from the end, as in cache[slots]. For index_copy_ and
            scatter_, it is an error.
    """

    form: str
    tensors: tuple[View | Computed, ...]
    wraps: bool = True

    @property
    def fact(self) -> str:
        """The form of the slots, for reports."""
        first = self.tensors[0]
        if isinstance(first, Computed):
            return "slice" if first.function == "arange" else "page+offset"
        return self.form

    @property
    def arguments(self) -> dict[str, Any]:
        """The slots, as arguments with the names that all ops with a paged cache use."""
        named = dict(zip(SLOT_FORMS[self.form], self.tensors, strict=True))
        indexing = "torch" if self.wraps else "exact"
        return {"slots": self.form, "indexing": indexing, "slot_mapping": None, **named}


def own_slots(offsets: View, num_pages: Size, page_size: Size, device: torch.device) -> Computed:
    """Returns flat slots [P * T] from offsets [P, T]. Row p of the offsets belongs to page p, as in
    scatter_. Negative offsets become invalid slots."""
    pages = Computed("arange", (num_pages,), (("device", device),))
    rows = Computed("reshape", (pages, [num_pages, 1]))
    slots = paged_slot(rows, offsets, num_pages, page_size, lowest=0)
    return Computed("reshape", (slots, [effects.product(offsets.shape)]))


def paged_slot(
    pages: View | Computed,
    offsets: View,
    num_pages: Size,
    page_size: Size,
    lowest: Size | None = None,
) -> Computed:
    """Returns page * page_size + offset. An offset that is outside of its page keeps the meaning
    that it has in PyTorch.

    A negative offset counts from the end of the page. An offset that is out of range, or less than
    `lowest`, becomes a slot that is out of range, which the op refuses or skips. It never becomes a
    slot of the next page.
    """
    lowest = -page_size if lowest is None else lowest
    start = Computed("mul", (pages, page_size))
    if _position_of(offsets, page_size) is not None:
        return Computed("add", (start, offsets))
    inside = Computed(
        "bitwise_and",
        (Computed("ge", (offsets, lowest)), Computed("lt", (offsets, page_size))),
    )
    slot = Computed("add", (start, Computed("remainder", (offsets, page_size))))
    return Computed("where", (inside, slot, num_pages * page_size))


def block_table(flow: Dataflow, pages: View, offsets: View, page_size: Size) -> Slots | None:
    """Returns slots that a block table, sequences and positions give. Returns None unless `pages`
    are the entries of a block table at the positions from which `offsets` are computed."""
    positions = _position_of(offsets, page_size)
    found = _lookup(strip_integer_casts(pages))
    if positions is None or found is None:
        return None
    table, sequences, columns = found
    of_column = _block_of(strip_integer_casts(columns), page_size)
    if of_column is None or not equal_values(of_column, positions):
        return None
    if not all(_usable(flow, view) for view in (table, sequences, positions)):
        return None
    return Slots("block_table", (table, sequences, positions))


def slot_table(flow: Dataflow, slots: View, page_size: Size) -> Slots | None:
    """Returns slots `page * page_size + offset` in the form of :func:`block_table`; None if the
    pages are not entries of a block table."""
    value = slots.value
    if value.op != "aten.add" or len(value.operands) != 2 or value.kwargs:
        return None
    for first, offsets in value.either_way:
        pages = _scaled_by(first, page_size)
        if pages is not None and pages.shape == offsets.shape == value.shape:
            effect = slots.effect
            found = block_table(flow, pages.through(effect), offsets.through(effect), page_size)
            if found is not None:
                return found
    return None


def _usable(flow: Dataflow, view: View) -> bool:
    """Whether a view is of an integer tensor that the graph never writes. The op may then read the
    tensor at a later place in the program."""
    memory = flow.memory_of.get(flow.home(view.value))
    written = memory is not None and any(map(flow.written.get, flow.on_storage(memory.storage)))
    return view.value.dtype in _INTEGERS and not written


def _operand(view: View, op: str, number: Any, **kwargs: Any) -> View | None:
    """Returns x if the view is the elementwise operation `op(x, number)`; else None."""
    value = view.value
    if value.op != op or len(value.args) != 2 or dict(value.kwargs) != kwargs:
        return None
    x, given = value.args
    if op == "aten.mul" and isinstance(given, View):
        x, given = given, x
    if not isinstance(x, View) or x.shape != value.shape or isinstance(given, View):
        return None
    return x.through(view.effect) if given == number else None


def _position_of(offsets: View, page_size: Size) -> View | None:
    """Returns `position` if the offsets are `position % page_size`, which are always inside a page;
    else None."""
    offsets = strip_integer_casts(offsets)
    found = _operand(offsets, "aten.remainder", page_size)
    if found is None and _shift(page_size) is not None:
        found = _operand(offsets, "aten.bitwise_and", page_size - 1)
    return None if found is None else strip_integer_casts(found)


def _block_of(columns: View, page_size: Size) -> View | None:
    """Returns position if the columns are position // page_size; else None."""
    found = _operand(columns, "aten.floor_divide", page_size)
    if found is None:
        found = _operand(columns, "aten.div", page_size, rounding_mode="floor")
    if found is None and (shift := _shift(page_size)) is not None:
        found = _operand(columns, "aten.bitwise_right_shift", shift)
    return None if found is None else strip_integer_casts(found)


def _scaled_by(view: View, page_size: Size) -> View | None:
    """Returns `page` if the view is page * page_size; else None."""
    view = strip_integer_casts(view)
    found = _operand(view, "aten.mul", page_size)
    if found is None and (shift := _shift(page_size)) is not None:
        found = _operand(view, "aten.bitwise_left_shift", shift)
    return found


def _shift(page_size: Size) -> int | None:
    """Returns log2 of page_size if it is a power of two; else None."""
    if not isinstance(page_size, int) or page_size < 1 or page_size & (page_size - 1):
        return None
    return page_size.bit_length() - 1


def _lookup(pages: View) -> tuple[View, View, View] | None:
    """Returns (table, sequence, column) if the view is `table[sequence, column]`, however it is
    written; else None."""
    value = pages.value
    if value.op == "aten.index":
        base, indices = value.args
        if [dim for dim, _ in indices] != [0, 1] or len(base.shape) != 2:
            return None
        try:
            wide = [i.expand(*value.shape) for _, i in indices]
        except effects.InexpressibleError:
            return None
        rows, columns = (w.through(pages.effect) for w in wide)
        return base, rows, columns
    if value.op == "aten.gather" and len(value.args) == 3 and value.args[1] in (1, -1):
        return _gathered(pages)
    return None


def _gathered(pages: View) -> tuple[View, View, View] | None:
    """Handles `table[sequence].gather(1, column[:, None])`, which selects rows first and then an
    element of each row."""
    rows, _, columns = pages.value.args
    if not rows.is_whole or len(rows.shape) != 2 or columns.shape[1] != 1:
        return None
    taken = gathered(rows)
    if taken is None:
        return None
    table, sequences = taken
    if len(table.shape) != 2 or len(sequences.shape) != 1:
        return None
    column = sequences.unsqueeze(1)
    return table, column.through(pages.effect), columns.through(pages.effect)
