"""The four forms in which the places of the tokens' K and V are given:

    flat           slot_mapping[t]
    per_sequence   page b, offset slot_mapping[s], for token t = b * S + s
    block_table    page lookup_table[sequence_ids[t], positions[t] // page_size],
                   offset positions[t] % page_size
    ragged         like block_table; token t of sequence b has the position
                   cache_lengths[b] + t - row_offsets[b]

A token whose place is outside the cache is never written. The meaning of negative numbers depends
on `indexing`. With "paged", a negative slot, page, position or sequence means that the token has no
place, as for padding. With "torch", a negative index counts from the end, as in PyTorch. With
"exact", it is an error.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tilewright.ops.checks import (
    ArgumentError,
    check_choice,
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
    given,
    holds,
)
from tilewright.ops.formats.paged_cache import CacheWindow, slot_limit

INDEXINGS = ("paged", "torch", "exact")

#: The tensors that each form reads, in the order of the kernels' parameters. All other tensors are
#: None.
SLOT_FORMS: dict[str, tuple[str, ...]] = {
    "flat": ("slot_mapping",),
    "per_sequence": ("slot_mapping",),
    "block_table": ("lookup_table", "sequence_ids", "positions"),
    "ragged": ("lookup_table", "row_offsets", "cache_lengths"),
}
ADDRESS_TENSORS = tuple(dict.fromkeys(name for names in SLOT_FORMS.values() for name in names))

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CachePlace(Protocol):
    """The arguments that say where T tokens of B sequences are stored in a paged cache. Every op
    uses these names.

    Attributes:
        slots: One of SLOT_FORMS. It determines which of the tensors below are read. The tensors are
            int32 or int64; with "ragged", they may also be uint32.
        indexing: One of INDEXINGS: the meaning of negative numbers.
        slot_mapping: With "flat", the slot of each token [T]. With "per_sequence", the offset of
            each token in its page, the same for all pages [T / num_pages].
        lookup_table: The pages of each sequence [B, columns].
        sequence_ids: The sequence of each token [T].
        positions: The position of each token in its sequence [T].
        row_offsets: The index of the first token of each sequence, and T at the end [B + 1].
        cache_lengths: The number of tokens that each sequence has before this call [B].
    """

    @property
    def slots(self) -> str: ...
    @property
    def indexing(self) -> str: ...
    @property
    def slot_mapping(self) -> torch.Tensor | None: ...
    @property
    def lookup_table(self) -> torch.Tensor | None: ...
    @property
    def sequence_ids(self) -> torch.Tensor | None: ...
    @property
    def positions(self) -> torch.Tensor | None: ...
    @property
    def row_offsets(self) -> torch.Tensor | None: ...
    @property
    def cache_lengths(self) -> torch.Tensor | None: ...


def address_tensors(place: CachePlace) -> tuple[torch.Tensor | None, ...]:
    """Returns a call's tensors in the order of ADDRESS_TENSORS."""
    return tuple([getattr(place, name) for name in ADDRESS_TENSORS])


def named_tensors(place: CachePlace) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that this call's form reads."""
    return tuple([getattr(place, name) for name in SLOT_FORMS[place.slots]])


def address_values(place: CachePlace) -> dict[str, Any]:
    """Returns the tensors and numbers that kernels need to address a cache, by parameter name."""
    slots, *table = named_tensors(place)
    sequences, positions = table or (None, None)
    values: dict[str, Any] = {
        "slots": slots,
        "sequences": sequences,
        "positions": positions,
        "sequence_tokens": slots.shape[0] if sequences is None else 1,
    }
    if sequences is None:
        return values
    rows, columns = slots.shape
    counts = {"num_sequences": rows, "lookup_columns": columns, "lookup_stride": slots.stride(0)}
    return {**values, **counts}


def check_addressing(
    op: str,
    place: CachePlace,
    num_tokens: Any,
    window: CacheWindow,
    device: torch.device,
    *,
    others: bool = False,
) -> None:
    """Checks the shapes, dtypes and device of the tensors that the form reads. Also checks that the
    tensors of other forms are None, unless the op has another use for them (`others`)."""
    check_choice(op, "slots", place.slots, tuple(SLOT_FORMS))
    check_choice(op, "indexing", place.indexing, INDEXINGS)
    dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
    if place.slots == "ragged":
        dtypes = (*dtypes, torch.uint32)
        if place.indexing != "paged":
            raise ArgumentError(op, "indexing", "'paged', since slots is 'ragged'", place.indexing)
    named = SLOT_FORMS[place.slots]
    for name in named if others else ADDRESS_TENSORS:
        tensor, needed = getattr(place, name), name in named
        if (tensor is not None) != needed:
            expected = "a tensor" if needed else "None"
            actual = "None" if tensor is None else "a tensor"
            raise ArgumentError(op, name, f"{expected}, since slots is {place.slots!r}", actual)
        if tensor is not None:
            check_dtype(op, name, tensor, dtypes)
            check_device(op, name, tensor, device)
    if "slot_mapping" in named:
        _check_slot_mapping(op, place, num_tokens, window)
    else:
        _check_table(op, place, num_tokens)


def _check_slot_mapping(op: str, place: CachePlace, num_tokens: Any, window: CacheWindow) -> None:
    shape = list(given(place.slot_mapping).shape)
    if len(shape) != 1:
        raise ArgumentError(op, "slot_mapping", "one axis", f"shape {shape}")
    per_slot = window.num_pages if place.slots == "per_sequence" else 1
    if not holds(shape[0] * per_slot == num_tokens):
        form = (
            f"[S] with num_pages * S = {per_slot} * S = {num_tokens} tokens"
            if place.slots == "per_sequence"
            else f"[T] = [{num_tokens}]"
        )
        raise ArgumentError(op, "slot_mapping", f"shape {form}", f"shape {shape}")


def _check_table(op: str, place: CachePlace, num_tokens: Any) -> None:
    table = given(place.lookup_table)
    check_shape(op, "lookup_table", table, "[B, columns]", (None, None))
    check_last_dim_dense(op, "lookup_table", table)
    sequences = table.shape[0]
    if place.slots == "block_table":
        check_shape(op, "sequence_ids", place.sequence_ids, "[T]", (num_tokens,))
        check_shape(op, "positions", place.positions, "[T]", (num_tokens,))
    else:
        check_shape(op, "row_offsets", place.row_offsets, "[B + 1]", (sequences + 1,))
        check_shape(op, "cache_lengths", place.cache_lengths, "[B]", (sequences,))
    shape = list(table.shape)
    if holds(num_tokens != 0) and not all(holds(size != 0) for size in shape):
        expected = f"pages for {num_tokens} tokens"
        raise ArgumentError(op, "lookup_table", expected, f"shape {shape}")


def resolve_places(place: CachePlace, window: CacheWindow, num_tokens: int) -> Places:
    """Returns three tensors [T] for the tokens: the page (int64), the offset in the page (int64),
    and whether the token is written (bool)."""
    if "slot_mapping" in SLOT_FORMS[place.slots]:
        return resolve_slots(given(place.slot_mapping), window, place.slots, place.indexing)
    sequence, position, known = token_positions(place, num_tokens)
    slot, named = table_slots(place, sequence, position, window.page_size)
    page, offset, written = resolve_slots(slot, window, "flat", place.indexing)
    return page, offset, written & named & known


def resolve_slots(
    slot_mapping: torch.Tensor, window: CacheWindow, slots: str, indexing: str
) -> Places:
    """Returns the places of tokens whose slots are given in the form "flat" or "per_sequence"."""
    limit = slot_limit(window, slots)
    slot = slot_mapping.to(torch.int64)
    if indexing == "torch":
        slot = torch.where(slot < 0, slot + limit, slot)
    written = (slot >= 0) & (slot < limit)
    if slots == "per_sequence":
        page = torch.arange(window.num_pages, device=slot.device).repeat_interleave(slot.numel())
        return page, slot.repeat(window.num_pages), written.repeat(window.num_pages)
    return slot // window.page_size, slot % window.page_size, written


def token_positions(place: CachePlace, num_tokens: int) -> Places:
    """Returns three tensors [T] for the tokens: the sequence, the position in the sequence, and
    whether the token belongs to a sequence."""
    if place.slots == "block_table":
        sequence, position = given(place.sequence_ids), given(place.positions)
        sequence, position = sequence.to(torch.int64), position.to(torch.int64)
        return sequence, position, torch.ones_like(sequence, dtype=torch.bool)
    cache_lengths = given(place.cache_lengths)
    sequence, index = ragged_sequences(given(place.row_offsets), num_tokens)
    known = (sequence >= 0) & (sequence < cache_lengths.shape[0])
    length = cache_lengths.to(torch.int64)[torch.where(known, sequence, 0)]
    return sequence, length + index, known


def ragged_sequences(
    row_offsets: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors int64 [T] for the tokens: the sequence, and the index in the sequence.
    They follow from row_offsets [B + 1]. For a token outside of the offsets, the sequence is
    outside of [0, B)."""
    offsets = row_offsets.to(torch.int64).contiguous()
    token = torch.arange(num_tokens, device=offsets.device)
    # Find the last sequence that starts at or before the token. This skips sequences of length
    # zero.
    sequence = torch.searchsorted(offsets, token, right=True) - 1
    return sequence, token - offsets[sequence.clamp(0, max(offsets.shape[0] - 2, 0))]


def table_slots(
    place: CachePlace, sequence: torch.Tensor, position: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the flat slot that a block table has for each position, and whether the table has an
    entry for the position."""
    table = given(place.lookup_table)
    rows, columns = table.shape
    column = position.div(page_size, rounding_mode="floor")
    if place.indexing == "torch":
        sequence = torch.where(sequence < 0, sequence + rows, sequence)
        column = torch.where(column < 0, column + columns, column)
    named = (sequence >= 0) & (sequence < rows) & (column >= 0) & (column < columns)
    entry = table.to(torch.int64)[torch.where(named, sequence, 0), torch.where(named, column, 0)]
    return entry * page_size + position.remainder(page_size), named
