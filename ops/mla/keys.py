"""The keys of each sequence in an MLA op: where they are, and which keys a query attends to. The
argument `keys` says where they are:

    given   rows of this call's latents
    pages   page b of the cache, from its first slot on (a Hugging Face StaticCache)
    table   page lookup_table[b, j // page_size], offset j % page_size, for key j
    slots   flat slot key_slots[i] of the cache, for the i-th key of all sequences

Keys are the rows of one buffer, one sequence after another. Sequence b has the rows from
key_offsets[b] to key_offsets[b + 1]. Without key_offsets, all sequences have the same number of
rows.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention.positions import sequences, token_sequences
from tilewright.ops.cache.ragged_batch import INDEX_DTYPES, check_row_offsets
from tilewright.ops.checks import (
    ArgumentError,
    check_absent,
    check_choice,
    check_operand,
    first,
    given,
    holds,
)
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import LatentArguments, MlaPrefillArguments

KEY_FORMS = ("given", "pages", "table", "slots")


def buffer_rows(a: MlaPrefillArguments) -> Any:
    """Returns the number of keys of all sequences together."""
    if a.keys == "given":
        return given(a.latent).shape[0]
    if a.keys == "slots":
        return given(a.key_slots).shape[0]
    window = CacheWindow.from_ints(a.latent_window)
    if a.keys == "pages":
        return window.capacity
    if a.key_offsets is not None:
        return a.num_keys
    return sequences(a) * given(a.lookup_table).shape[1] * window.page_size


def row_key_offsets(a: MlaPrefillArguments) -> torch.Tensor | None:
    """Returns the offsets of each sequence's keys in the buffer; None if all sequences have the
    same number of keys."""
    if a.keys == "given" and a.key_offsets is None and a.row_offsets is not None:
        return a.row_offsets
    return a.key_offsets


def check_keys(op: str, a: MlaPrefillArguments) -> None:
    """Checks the arguments that say where keys are. Reads only metadata. Raises ArgumentError."""
    check_choice(op, "keys", a.keys, KEY_FORMS)
    if a.keys == "given":
        if a.latent is None:
            raise ArgumentError(op, "latent", "a tensor, since keys is 'given'", None)
    elif a.latent_cache is None:
        raise ArgumentError(op, "latent_cache", f"a tensor, since keys is {a.keys!r}", None)
    batch, device = sequences(a), a.q.device
    _check_index(op, a, "key_offsets", "[B + 1]", (batch + 1,))
    _check_index(op, a, "key_lengths", "[B]", (batch,))
    _check_needed(op, a, "key_slots", a.keys == "slots")
    _check_index(op, a, "key_slots", "[K]", (None,))
    if a.keys == "pages":
        _check_pages(op, a, batch)
    if a.keys == "table":
        _check_needed(op, a, "lookup_table", True)
        form = "[B, columns]", (batch, None), INDEX_DTYPES, device
        check_operand(op, "lookup_table", a.lookup_table, *form, dense=True)
    if a.keys == "given":
        check_absent(op, a, ["key_lengths"], "keys is 'given'")
    counted = a.keys == "table" and a.key_offsets is not None
    if not counted and not _zero(a.num_keys):
        expected = "0, since keys is not 'table' with key_offsets"
        raise ArgumentError(op, "num_keys", expected, a.num_keys)
    if counted and not holds(a.num_keys >= 0):
        raise ArgumentError(op, "num_keys", "the number of keys, not negative", a.num_keys)
    if a.keys in ("given", "slots") and row_key_offsets(a) is None:
        name = "latent" if a.keys == "given" else "key_slots"
        rows = buffer_rows(a)
        if holds(batch > 0) and not holds(rows % batch == 0):
            expected = f"as many keys for each of {batch} sequences, since key_offsets is None"
            raise ArgumentError(op, name, expected, f"{rows} rows")


def _check_pages(op: str, a: MlaPrefillArguments, batch: Any) -> None:
    pages = CacheWindow.from_ints(a.latent_window).num_pages
    if not holds(pages == batch):
        expected = f"num_pages = {batch} sequences, since keys is 'pages'"
        raise ArgumentError(op, "latent_window", expected, pages)
    check_absent(op, a, ["key_offsets"], "keys is 'pages'")


def _zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _check_needed(op: str, a: MlaPrefillArguments, name: str, needed: bool) -> None:
    there = getattr(a, name) is not None
    if there != needed:
        expected = "a tensor" if needed else "None"
        actual = "a tensor" if there else None
        raise ArgumentError(op, name, f"{expected}, since keys is {a.keys!r}", actual)


def _check_index(
    op: str, a: MlaPrefillArguments, name: str, letters: str, shape: tuple[Any, ...]
) -> None:
    tensor = getattr(a, name)
    if tensor is not None:
        check_operand(op, name, tensor, letters, shape, INDEX_DTYPES, a.q.device)


def run_keys(a: MlaPrefillArguments) -> Any:
    """Returns the number of keys of each sequence. All sequences have the same number."""
    return buffer_rows(a) // a.num_sequences


def check_key_values(op: str, a: MlaPrefillArguments) -> None:
    """Checks the values of the offsets, pages and slots of keys. Raises ArgumentError."""
    total = buffer_rows(a)
    if a.key_offsets is not None:
        check_row_offsets(op, "key_offsets", a.key_offsets, total, "the number of keys")
    if a.keys == "given" and a.key_offsets is None and a.row_offsets is not None:
        check_row_offsets(op, "row_offsets", a.row_offsets, total, "the number of keys")
    if a.keys not in ("table", "slots"):
        return
    window = CacheWindow.from_ints(a.latent_window)
    if a.keys == "slots":
        slots = given(a.key_slots).to(torch.int64)
        where = first((slots < 0) | (slots >= window.capacity))
        if where is not None:
            expected = f"slots from 0 to {window.capacity - 1}"
            raise ArgumentError(op, "key_slots", expected, f"{int(slots[where])} at {where}")
        return
    sequence, place = key_places(a)
    column = place // window.page_size
    columns = given(a.lookup_table).shape[1]
    where = first(column >= columns)
    if where is not None:
        room = columns * window.page_size
        expected = f"at most {room} keys for a sequence ({columns} columns of lookup_table)"
        actual = f"{int(place[where]) + 1} or more for sequence {int(sequence[where])}"
        raise ArgumentError(op, "key_offsets", expected, actual)
    entry = given(a.lookup_table).to(torch.int64)[sequence, column]
    seen = entry < 0
    if a.key_lengths is not None:
        bounded = place < a.key_lengths.to(torch.int64)[sequence]
        seen, entry = seen & bounded, torch.where(bounded, entry, 0)
    where = first(seen | (entry >= window.num_pages))
    if where is not None:
        expected = f"pages from 0 to {window.num_pages - 1} where a key is"
        place_text = f"sequence {int(sequence[where])}, key {int(place[where])}"
        actual = f"{int(entry[where])} for {place_text}"
        raise ArgumentError(op, "lookup_table", expected, actual)


def cache_views(a: LatentArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the windows of latents and of rope columns as tensors [num_pages, page_size, L or R]
    on their bases."""
    base = given(a.latent_cache)
    rope_base = base if a.rope_cache is None else a.rope_cache
    latent = CacheWindow.from_ints(a.latent_window).view(base)
    rope = CacheWindow.from_ints(a.rope_window).view(rope_base)
    return latent.squeeze(2), rope.squeeze(2)


def key_places(a: MlaPrefillArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sequence of each row of the buffer, and its index in the sequence, int64 [K]."""
    return token_sequences(buffer_rows(a), row_key_offsets(a), sequences(a), a.q.device)


def gathered_keys(a: MlaPrefillArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (latent [K, L], k_rope [K, R]) of all keys, with their present values in the
    cache."""
    latent, rope = cache_views(a)
    pages, size = latent.shape[:2]
    if a.keys == "pages":
        return latent.flatten(0, 1), rope.flatten(0, 1)
    if a.keys == "slots":
        slots = given(a.key_slots).to(torch.int64)
    else:
        sequence, place = key_places(a)
        table = given(a.lookup_table).to(torch.int64)
        entry = table[sequence, (place // size).clamp(max=table.shape[1] - 1)]
        slots = entry * size + place % size
    slots = slots.clamp(0, max(pages * size - 1, 0))
    return latent[slots // size, slots % size], rope[slots // size, slots % size]
