"""Checks of a cache write that need real tensors (not fake ones): aliases and slots.

Each check raises ArgumentError. The errors of slots give the index of the token. The checks run on
the device of the tensors: on a GPU, a check computes there and reads one number back.
"""

from __future__ import annotations

import torch

from tilewright.ops.cache.addressing import (
    SLOT_FORMS,
    CachePlace,
    address_tensors,
    resolve_places,
    table_slots,
    token_positions,
)
from tilewright.ops.cache.checks import (
    KvCache,
    check_aliases,
    shares_memory,
    storage_address,
    v_base,
)
from tilewright.ops.cache.ragged_batch import check_row_offsets
from tilewright.ops.checks import ArgumentError, given, readable
from tilewright.ops.checks import first as first
from tilewright.ops.formats.paged_cache import CacheWindow, slot_limit


def check_values(op: str, a: KvCache, num_tokens: int, *, writes_v: bool = True) -> None:
    """Checks that no source shares memory with a cache, that K and V share no memory, and that
    every token has a valid place.

    a: the op's arguments. All of its tensors except the caches are sources. Scales may be any
    numbers; the results follow IEEE 754. Values on a GPU are read only if TILEWRIGHT_DEBUG=1 is
    set, because reading them waits for the GPU.
    """
    if a.v_cache is a.k_cache:
        # If the same tensor were passed as two mutated arguments, functionalisation would update
        # two copies of it.
        raise ArgumentError(
            op, "v_cache", "None where V lives in k_cache too", "k_cache itself, a second time"
        )
    written = [("k_cache", a.k_cache, a.k_window)]
    if writes_v:
        written.append((*v_base(a), a.v_window))
    check_aliases(op, a, written)
    if (
        a.v_cache is not None
        and len(written) == 2
        and storage_address(a.k_cache) == storage_address(a.v_cache)
    ):
        v_view = CacheWindow(*a.v_window).view(a.v_cache)
        if shares_memory(v_view, a.k_cache, CacheWindow(*a.k_window)):
            expected = "a window that shares no memory with the window on k_cache"
            raise ArgumentError(op, "v_cache", expected, "overlapping windows on one storage")
    if readable(address_tensors(a)):
        check_address_values(op, a, CacheWindow(*a.k_window), num_tokens)


def check_address_values(
    op: str,
    place: CachePlace,
    window: CacheWindow,
    num_tokens: int,
) -> None:
    """Checks that every token's place is in the cache. If negative slots are skipped, also checks
    that no two tokens have the same place."""
    if "slot_mapping" in SLOT_FORMS[place.slots]:
        _check_slots(op, place, window)
        return
    if place.slots == "ragged":
        _check_offsets(op, place, num_tokens)
    if num_tokens == 0:
        return
    sequence, position, _ = token_positions(place, num_tokens)
    if place.slots == "block_table":
        _check_sequences(op, place, sequence)
    _check_positions(op, place, sequence, position, window.page_size)
    _check_entries(op, place, sequence, position, window)
    if place.indexing == "paged":
        _check_once(op, resolve_places(place, window, num_tokens), window)


def _check_slots(op: str, place: CachePlace, window: CacheWindow) -> None:
    slots = given(place.slot_mapping)
    limit = slot_limit(window, place.slots)
    where = first(slots >= limit)
    if where is not None:
        expected = f"slots below {limit}"
        raise ArgumentError(op, "slot_mapping", expected, f"{int(slots[where])} at {where}")
    if place.indexing != "paged":
        lowest = -limit if place.indexing == "torch" else 0
        where = first(slots < lowest)
        if where is not None:
            counts = " (a negative slot counts from the end)" if lowest else ""
            expected = f"slots from {lowest}{counts}"
            raise ArgumentError(op, "slot_mapping", expected, f"{int(slots[where])} at {where}")
        return
    kept = slots[slots >= 0]
    unique, counts = kept.unique(return_counts=True)
    if unique.numel() != kept.numel():
        expected = "every slot at most once"
        actual = f"slot {int(unique[counts > 1][0])} {int(counts[counts > 1][0])} times"
        raise ArgumentError(op, "slot_mapping", expected, actual)


def _check_offsets(op: str, place: CachePlace, num_tokens: int) -> None:
    row_offsets, cache_lengths = given(place.row_offsets), given(place.cache_lengths)
    check_row_offsets(op, "row_offsets", row_offsets, num_tokens, "the number of tokens")
    lengths = cache_lengths.to(torch.int64)
    where = first(lengths < 0)
    if where is not None:
        actual = f"{int(lengths[where])} of sequence {where}"
        raise ArgumentError(op, "cache_lengths", "no negative length", actual)


def _check_sequences(op: str, place: CachePlace, sequence: torch.Tensor) -> None:
    bad, inside = _outside(place, sequence, given(place.lookup_table).shape[0])
    where = first(bad)
    if where is not None:
        actual = f"{int(sequence[where])} of token {where}"
        raise ArgumentError(op, "sequence_ids", f"sequences {inside}", actual)


def _outside(place: CachePlace, index: torch.Tensor, count: int) -> tuple[torch.Tensor, str]:
    """Returns (mask of the values that are not an index into `count` things, the allowed range in
    words). With indexing="paged", a negative value means that a token has no place, and is
    allowed."""
    if place.indexing == "paged":
        return index >= count, f"below {count}"
    lowest = -count if place.indexing == "torch" else 0
    return (index >= count) | (index < lowest), f"from {lowest} to {count - 1}"


def _check_positions(
    op: str,
    place: CachePlace,
    sequence: torch.Tensor,
    position: torch.Tensor,
    page_size: int,
) -> None:
    """Checks that `lookup_table` has a column for the position of each token."""
    columns = given(place.lookup_table).shape[1]
    bad, inside = _outside(place, position, columns * page_size)
    if place.indexing == "paged":
        bad = bad & (sequence >= 0)
    where = first(bad)
    if where is not None:
        name = "cache_lengths" if place.slots == "ragged" else "positions"
        room = f"({columns} columns of lookup_table, {page_size} slots a page)"
        actual = f"{int(position[where])} of token {where} (sequence {int(sequence[where])})"
        raise ArgumentError(op, name, f"positions {inside} {room}", actual)


def _check_entries(
    op: str,
    place: CachePlace,
    sequence: torch.Tensor,
    position: torch.Tensor,
    window: CacheWindow,
) -> None:
    """Checks the entries of `lookup_table` that the tokens use: each must be the number of a page.
    Other entries may have any values."""
    pages, size = window.num_pages, window.page_size
    slot, named = table_slots(place, sequence, position, size)
    entry = slot.div(size, rounding_mode="floor")
    lowest = -pages if place.indexing == "torch" else 0
    bad = named & (entry >= pages)
    if place.indexing != "paged" or place.slots == "ragged":
        bad = bad | (named & (entry < lowest))
    where = first(bad)
    if where is not None:
        token = f"sequence {int(sequence[where])}, position {int(position[where])}"
        raise ArgumentError(
            op,
            "lookup_table",
            f"pages from {lowest} to {pages - 1} where a token goes",
            f"{int(entry[where])} for token {where} ({token})",
        )


def _check_once(
    op: str,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    window: CacheWindow,
) -> None:
    page, offset, written = places
    token = torch.arange(page.numel(), device=page.device)
    # Give each token that is not written a unique number.
    slot = torch.where(written, page * window.page_size + offset, -1 - token)
    order = slot.argsort(stable=True)
    ordered = slot[order]
    where = first(ordered[1:] == ordered[:-1])
    if where is not None:
        one, two = order[where : where + 2].tolist()
        actual = f"slot {int(ordered[where])} for tokens {one} and {two}"
        raise ArgumentError(op, "lookup_table", "every slot for at most one token", actual)
