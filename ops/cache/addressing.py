"""The four ways to say where a token's K and V go, and what each means.

    flat           slot_mapping[t]
    per_sequence   page b, offset slot_mapping[s], for token b * S + s
    block_table    lookup_table[sequence_ids[t], positions[t] // page_size], offset by the remainder
    ragged         the same, where token t of sequence b has the position
                   cache_lengths[b] + t - row_offsets[b]

What resolves outside the cache is never written. With indexing="paged" a negative slot, page,
position or sequence means a token without a place, such as padding; with indexing="torch" a
negative index counts from the end, as PyTorch's does, and with indexing="exact" it is an error.

Everywhere `a` is the arguments of an op: `slots`, `indexing` and ADDRESS_TENSORS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.codegen.addressing import Addressing
from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
    holds,
)
from tilewright.ops.formats.paged_cache import CacheWindow, slot_limit
from tilewright.ops.runtime.operands import operand_of

INDEXINGS = ("paged", "torch", "exact")

#: The tensors that each form reads, in the order in which kernels take them; the others are None.
SLOT_FORMS: dict[str, tuple[str, ...]] = {
    "flat": ("slot_mapping",),
    "per_sequence": ("slot_mapping",),
    "block_table": ("lookup_table", "sequence_ids", "positions"),
    "ragged": ("lookup_table", "row_offsets", "cache_lengths"),
}
ADDRESS_TENSORS = tuple(dict.fromkeys(name for names in SLOT_FORMS.values() for name in names))

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def address_values(a: Any) -> dict[str, Any]:
    """Tensors and counts of the kernels, by parameter name."""
    slots, *table = (getattr(a, name) for name in SLOT_FORMS[a.slots])
    sequences, positions = table or (None, None)
    values: dict[str, Any] = {
        "slots_ptr": slots,
        "sequences_ptr": sequences,
        "positions_ptr": positions,
        "sequence_tokens": slots.shape[0] if sequences is None else 1,
    }
    if sequences is None:
        return values
    rows, columns = slots.shape
    counts = {"num_sequences": rows, "lookup_columns": columns, "lookup_stride": slots.stride(0)}
    return {**values, **counts}


def addressing_operands(a: Any, values: Mapping[str, Any]) -> Addressing:
    """The static part of the arguments; values: those of `address_values`."""
    slots, sequences, positions = (values[f"{x}_ptr"] for x in ("slots", "sequences", "positions"))
    return Addressing(
        form=a.slots,
        slots=operand_of(slots, -1),
        sequences=operand_of(sequences, 0),
        positions=operand_of(positions, 0),
        wrap_negative=a.indexing == "torch",
        search_steps=slots.shape[0].bit_length() if a.slots == "ragged" else 0,
    )


def check_addressing(
    op: str,
    a: Any,
    num_tokens: Any,
    window: CacheWindow,
    device: torch.device,
    *,
    others: bool = False,
) -> None:
    """Checks that the tensors of the form are there, their shapes, dtypes and device, and that no
    tensors of other forms are, unless those have another use in the op (`others`)."""
    check_choice(op, "slots", a.slots, tuple(SLOT_FORMS))
    check_choice(op, "indexing", a.indexing, INDEXINGS)
    dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
    if a.slots == "ragged":
        dtypes = (*dtypes, torch.uint32)
        if a.indexing != "paged":
            raise ArgumentError(op, "indexing", "'paged', since slots is 'ragged'", a.indexing)
    named = SLOT_FORMS[a.slots]
    for name in named if others else ADDRESS_TENSORS:
        tensor, needed = getattr(a, name), name in named
        if (tensor is not None) != needed:
            expected = "a tensor" if needed else "None"
            actual = "None" if tensor is None else "a tensor"
            raise ArgumentError(op, name, f"{expected}, since slots is {a.slots!r}", actual)
        if tensor is not None:
            check_dtype(op, name, tensor, dtypes)
            check_device(op, name, tensor, device)
    if "slot_mapping" in named:
        _check_slot_mapping(op, a, num_tokens, window)
    else:
        _check_table(op, a, num_tokens)


def _check_slot_mapping(op: str, a: Any, num_tokens: Any, window: CacheWindow) -> None:
    shape = list(a.slot_mapping.shape)
    if len(shape) != 1:
        raise ArgumentError(op, "slot_mapping", "one axis", f"shape {shape}")
    per_slot = window.num_pages if a.slots == "per_sequence" else 1
    if not holds(shape[0] * per_slot == num_tokens):
        form = (
            f"[S] with num_pages * S = {per_slot} * S = {num_tokens} tokens"
            if a.slots == "per_sequence"
            else f"[T] = [{num_tokens}]"
        )
        raise ArgumentError(op, "slot_mapping", f"shape {form}", f"shape {shape}")


def _check_table(op: str, a: Any, num_tokens: Any) -> None:
    check_shape(op, "lookup_table", a.lookup_table, "[B, columns]", (None, None))
    check_last_dim_dense(op, "lookup_table", a.lookup_table)
    sequences = a.lookup_table.shape[0]
    if a.slots == "block_table":
        for name in ("sequence_ids", "positions"):
            check_shape(op, name, getattr(a, name), "[T]", (num_tokens,))
    else:
        check_shape(op, "row_offsets", a.row_offsets, "[B + 1]", (sequences + 1,))
        check_shape(op, "cache_lengths", a.cache_lengths, "[B]", (sequences,))
    shape = list(a.lookup_table.shape)
    if holds(num_tokens != 0) and not all(holds(size != 0) for size in shape):
        expected = f"pages for {num_tokens} tokens"
        raise ArgumentError(op, "lookup_table", expected, f"shape {shape}")


def resolve_places(a: Any, window: CacheWindow, num_tokens: int) -> Places:
    """Page, offset in the page and "is written" for every token; int64, int64, bool, each [T]."""
    if "slot_mapping" in SLOT_FORMS[a.slots]:
        return resolve_slots(a.slot_mapping, window, a.slots, a.indexing)
    sequence, position, known = token_positions(a, num_tokens)
    slot, named = table_slots(a, sequence, position, window.page_size)
    page, offset, written = resolve_slots(slot, window, "flat", a.indexing)
    return page, offset, written & named & known


def resolve_slots(
    slot_mapping: torch.Tensor, window: CacheWindow, slots: str, indexing: str
) -> Places:
    """The places of tokens whose slots are given, flat or per sequence."""
    limit = slot_limit(window, slots)
    slot = slot_mapping.to(torch.int64)
    if indexing == "torch":
        slot = torch.where(slot < 0, slot + limit, slot)
    written = (slot >= 0) & (slot < limit)
    if slots == "per_sequence":
        page = torch.arange(window.num_pages, device=slot.device).repeat_interleave(slot.numel())
        return page, slot.repeat(window.num_pages), written.repeat(window.num_pages)
    return slot // window.page_size, slot % window.page_size, written


def token_positions(a: Any, num_tokens: int) -> Places:
    """Sequence, position in the sequence and "belongs to a sequence" for every token."""
    if a.slots == "block_table":
        sequence, position = a.sequence_ids.to(torch.int64), a.positions.to(torch.int64)
        return sequence, position, torch.ones_like(sequence, dtype=torch.bool)
    sequence, place = ragged_sequences(a.row_offsets, num_tokens)
    known = (sequence >= 0) & (sequence < a.cache_lengths.shape[0])
    length = a.cache_lengths.to(torch.int64)[torch.where(known, sequence, 0)]
    return sequence, length + place, known


def ragged_sequences(
    row_offsets: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and place in it for each token, int64 [T], by row_offsets [B + 1]; a token outside
    the offsets gets a sequence outside [0, B)."""
    offsets = row_offsets.to(torch.int64).contiguous()
    token = torch.arange(num_tokens, device=offsets.device)
    # The last sequence that starts at or before the token: those of length zero are passed over.
    sequence = torch.searchsorted(offsets, token, right=True) - 1
    return sequence, token - offsets[sequence.clamp(0, max(offsets.shape[0] - 2, 0))]


def table_slots(
    a: Any, sequence: torch.Tensor, position: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The flat slot that a block table gives each position, and whether the table has an entry."""
    rows, columns = a.lookup_table.shape
    column = position.div(page_size, rounding_mode="floor")
    if a.indexing == "torch":
        sequence = torch.where(sequence < 0, sequence + rows, sequence)
        column = torch.where(column < 0, column + columns, column)
    named = (sequence >= 0) & (sequence < rows) & (column >= 0) & (column < columns)
    entry = a.lookup_table.to(torch.int64)[
        torch.where(named, sequence, 0), torch.where(named, column, 0)
    ]
    return entry * page_size + position.remainder(page_size), named
