"""Prepares MLA latents in one launch: norm, rotation, cache write, gather and quantisation.

The last `row_programs` programs compute rows of keys. They find the slot of each key in the cache,
and copy the key's entry from there to the key's row of a buffer. If the buffer has scales, the
entry is quantised. The other programs normalise and rotate new tokens, and store them to the cache,
to a buffer, or to both. If FUSED, a key that is a new token is computed from the token and is not
read from the cache, so that no program waits for another.
"""

import triton
import triton.language as tl

from tilewright.codegen.mla.templates.entries import (
    entry_places,
    load_entries,
    load_tokens,
    normed_and_rotated,
    store_entries,
    through_scalars,
    write_rows,
)
from tilewright.codegen.templates.places import cache_places, sequence_of


@triton.jit
def sequence_places(
    rows, mask, offsets_ptr, num_sequences, run,
    STRIDE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Returns (sequence, place in the sequence, whether the row is valid) of each row. If there are
    offsets, they give the rows of each sequence. If not, each sequence has `run` rows."""
    if offsets_ptr is not None:
        sequence = sequence_of(rows, offsets_ptr, num_sequences, STRIDE, SEARCH_STEPS)
        valid = mask & (sequence < num_sequences)
        first = tl.load(offsets_ptr + sequence * STRIDE, mask=valid, other=0)
        place = rows - first.to(tl.int32)
        valid = valid & (place >= 0)
    else:
        sequence = rows // run
        place = rows % run
        valid = mask
    return sequence, place.to(tl.int64), valid


@triton.jit
def token_positions(
    tokens, mask, row_offsets_ptr, lengths_ptr, token_positions_ptr, num_sequences, token_run,
    OFFSETS_STRIDE: tl.constexpr, LENGTHS_STRIDE: tl.constexpr, POSITIONS_STRIDE: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Returns the position of each token. Positions are read from a tensor. If there is none, they
    continue after the tokens of the sequence that are already in the cache."""
    if token_positions_ptr is not None:
        places = token_positions_ptr + (tokens % token_run) * POSITIONS_STRIDE
        position = tl.load(places, mask=mask, other=0).to(tl.int64)
    else:
        sequence, position, valid = sequence_places(
            tokens, mask, row_offsets_ptr, num_sequences, token_run, OFFSETS_STRIDE, SEARCH_STEPS
        )
        if lengths_ptr is not None:
            length = tl.load(lengths_ptr + sequence * LENGTHS_STRIDE, mask=valid, other=0)
            position += length.to(tl.int64)
    return position


@triton.jit
def key_places(
    rows, mask, lookup_ptr, key_offsets_ptr, key_starts_ptr, key_slots_ptr,
    num_sequences, key_run, num_pages, lookup_columns, lookup_stride,
    KEYS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LOOKUP_STRIDE: tl.constexpr, KEY_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Returns (page, slot in the page, sequence, position, whether the key exists) of each row.

    KEYS: "slots" if each row has a flat slot, "table" if pages are looked up in a block table,
    "pages" if page b holds sequence b. KEY_STRIDES: the strides of offsets, starts and slots.
    """
    if KEYS == "slots":
        flat = tl.load(key_slots_ptr + rows * KEY_STRIDES[2], mask=mask, other=0).to(tl.int64)
        page = flat // PAGE_SIZE
        slot = flat % PAGE_SIZE
        valid = mask & (flat >= 0) & (page < num_pages)
        sequence = rows
        position = flat
    else:
        sequence, position, valid = sequence_places(
            rows, mask, key_offsets_ptr, num_sequences, key_run, KEY_STRIDES[0], SEARCH_STEPS
        )
        if key_starts_ptr is not None:
            start = tl.load(key_starts_ptr + sequence * KEY_STRIDES[1], mask=valid, other=0)
            position += start.to(tl.int64)
        slot = position % PAGE_SIZE
        if KEYS == "table":
            column = position // PAGE_SIZE
            valid = valid & (column < lookup_columns)
            entry = lookup_ptr + sequence.to(tl.int64) * lookup_stride + column * LOOKUP_STRIDE
            page = tl.load(entry, mask=valid, other=0).to(tl.int64)
            valid = valid & (page >= 0) & (page < num_pages)
        else:
            page = sequence.to(tl.int64)
    return page, slot, sequence, position, valid


@triton.jit
def are_keys(
    tokens, mask, row_offsets_ptr, lengths_ptr, key_offsets_ptr, key_starts_ptr,
    num_sequences, token_run, key_run,
    BATCH_STRIDES: tl.constexpr, KEY_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Returns whether each new token is also one of the keys. The programs of keys compute such
    tokens."""
    sequence, place, valid = sequence_places(
        tokens, mask, row_offsets_ptr, num_sequences, token_run, BATCH_STRIDES[0], SEARCH_STEPS
    )
    length = tl.load(lengths_ptr + sequence * BATCH_STRIDES[1], mask=valid, other=0)
    position = place + length.to(tl.int64)
    if key_offsets_ptr is not None:
        offsets = key_offsets_ptr + sequence * KEY_STRIDES[0]
        first = tl.load(offsets, mask=valid, other=0).to(tl.int64)
        count = tl.load(offsets + KEY_STRIDES[0], mask=valid, other=0).to(tl.int64) - first
    else:
        count = tl.zeros_like(position) + key_run
    if key_starts_ptr is not None:
        start = tl.load(key_starts_ptr + sequence * KEY_STRIDES[1], mask=valid, other=0)
        position -= start.to(tl.int64)
    return valid & (position >= 0) & (position < count)


@triton.jit
def mla_latents(
    latent_ptr, k_rope_ptr, norm_ptr, cos_ptr, sin_ptr, latent_cache_ptr, rope_cache_ptr,
    slots_ptr, sequences_ptr, positions_ptr, row_offsets_ptr, lengths_ptr, token_positions_ptr,
    lookup_ptr, key_offsets_ptr, key_starts_ptr, key_slots_ptr,
    latent_out_ptr, rope_out_ptr, scale_out_ptr,
    num_tokens, num_rows, row_programs, rope_rows, token_run, key_run, sequence_tokens, num_pages,
    num_sequences, lookup_columns, lookup_stride, scale_stride,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr, ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr, BY_POSITION: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LATENT_STRIDES: tl.constexpr, ROPE_STRIDES: tl.constexpr,
    UNITS: tl.constexpr, ONE_SOURCE: tl.constexpr,
    ADDRESSING: tl.constexpr, WRAP_NEGATIVE: tl.constexpr, ADDRESS_STRIDES: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, BATCH_STRIDES: tl.constexpr,
    KEYS: tl.constexpr, LOOKUP_STRIDE: tl.constexpr, KEY_STRIDES: tl.constexpr,
    STORE: tl.constexpr, KEEP: tl.constexpr, GATHER: tl.constexpr, FUSED: tl.constexpr,
    OUT_STRIDE: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, ROPE_SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, CHECKED: tl.constexpr,
):  # fmt: skip
    """Stores MLA latents. STORE: new tokens, normalised and rotated, are stored to their slots of a
    paged cache. KEEP: new tokens are stored to rows of buffers. GATHER: keys of the cache are
    copied to rows of the buffers, and quantised if the buffers have scales.

    The new tokens are latent [T, RANK] and k_rope [T, ROPE_DIM]. Grid (cdiv(T, BLOCK_T) +
    row_programs,), where row_programs is cdiv(num_rows, BLOCK_T) or 0. If FUSED, the grid is
    (cdiv(T, CHECKED) + row_programs,).

    Args:
        LATENT_STRIDES, ROPE_STRIDES: The strides of (page, slot, column) of the caches.
        BATCH_STRIDES: The strides of row_offsets, lengths and token_positions.
        NEIGHBOURS: Whether the members of a pair are adjacent in the cache and in the buffers.
        UNITS: Two numbers, one for the cache of latents and one for the cache of rope columns. Each
            divides the strides of its cache's pages and slots.
        ONE_SOURCE: New tokens have the dtype and the layout of cache entries, so one load serves
            both kinds of keys, with different addresses.
        FUSED: Keys from position lengths[b] on are the new tokens of sequence b. The program that
            computes such a key also stores it to the cache. The programs of tokens then compute
            only tokens that are not keys.
        BLOCK_L: A power of two that is at least RANK.
        PAIRS: A power of two that is at least half of ROPE_DIM.

    `cache_places` explains the arguments that address the cache, and `key_places` explains the
    arguments that address the keys.
    """
    # The programs of tokens come first, because they take longest if there are tokens that are not
    # keys.
    program = tl.program_id(0) - (tl.num_programs(0) - row_programs)
    if GATHER and program >= 0:
        rows = program * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = rows < num_rows
        page, slot, sequence, position, valid = key_places(
            rows, mask, lookup_ptr, key_offsets_ptr, key_starts_ptr, key_slots_ptr,
            num_sequences, key_run, num_pages, lookup_columns, lookup_stride,
            KEYS, PAGE_SIZE, LOOKUP_STRIDE, KEY_STRIDES, SEARCH_STEPS,
        )  # fmt: skip
        places = entry_places(page, slot, LATENT_STRIDES, UNITS[0], BLOCK_T)
        rope_places = entry_places(page, slot, ROPE_STRIDES, UNITS[1], BLOCK_T)
        if FUSED:
            length = tl.load(lengths_ptr + sequence * BATCH_STRIDES[1], mask=valid, other=0)
            bounds = row_offsets_ptr + sequence * BATCH_STRIDES[0]
            first = tl.load(bounds, mask=valid, other=0).to(tl.int64)
            end = tl.load(bounds + BATCH_STRIDES[0], mask=valid, other=0).to(tl.int64)
            token = first + position - length.to(tl.int64)
            is_cached = valid & (token < first)
            is_new = valid & (token >= first) & (token < end)
            token = through_scalars(token, BLOCK_T)
            new = through_scalars(is_new.to(tl.int32), BLOCK_T) > 0
            cached = through_scalars(is_cached.to(tl.int32), BLOCK_T) > 0
            if BY_POSITION:
                table_row = through_scalars(position, BLOCK_T)
                known = new & (table_row >= 0) & (table_row < rope_rows)
            else:
                table_row = token % rope_rows
                known = new
            if tl.sum(known.to(tl.int32), axis=0) == BLOCK_T:
                # Usually all keys of a program are new tokens. Nothing is masked or selected then.
                everyone = tl.full((BLOCK_T,), 1, tl.int1)
                latent, low, high = load_tokens(
                    token, everyone, latent_ptr, k_rope_ptr,
                    RANK, BLOCK_L, ROPE_DIM, PAIRS, LATENT_STRIDE, ROPE_STRIDE, ROPE_STYLE,
                )  # fmt: skip
                latent, low, high = normed_and_rotated(
                    latent, low, high, table_row, everyone, norm_ptr, cos_ptr, sin_ptr,
                    RANK, BLOCK_L, ROPE_DIM, PAIRS, NORM_EPS, ROPE_STYLE, FULL_WIDTH,
                    COS_STRIDES, SIN_STRIDES,
                )  # fmt: skip
                store_entries(
                    places, rope_places, everyone, latent, low, high,
                    latent_cache_ptr, rope_cache_ptr,
                    RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, LATENT_STRIDES, ROPE_STRIDES,
                )  # fmt: skip
                write_rows(
                    rows, everyone, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr,
                    scale_stride, RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, OUT_STRIDE,
                    CAP, GROUP, ROPE_SCALE,
                )  # fmt: skip
            else:
                entries, starts = latent_cache_ptr, places
                ropes, rope_starts = rope_cache_ptr, rope_places
                there = cached
                if ONE_SOURCE:
                    entries = tl.where(new, latent_ptr, latent_cache_ptr)[:, None]
                    starts = tl.where(new, token * LATENT_STRIDE, places)
                    ropes = tl.where(new, k_rope_ptr, rope_cache_ptr)[:, None]
                    rope_starts = tl.where(new, token * ROPE_STRIDE, rope_places)
                    there = cached | new
                latent, low, high = load_entries(
                    starts, rope_starts, there, entries, ropes,
                    RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, LATENT_STRIDES[2], ROPE_STRIDES[2],
                )  # fmt: skip
                if tl.sum(new.to(tl.int32), axis=0) > 0:
                    new_latent, new_low, new_high = latent, low, high
                    if not ONE_SOURCE:
                        new_latent, new_low, new_high = load_tokens(
                            tl.where(new, token, 0), new, latent_ptr, k_rope_ptr,
                            RANK, BLOCK_L, ROPE_DIM, PAIRS, LATENT_STRIDE, ROPE_STRIDE, ROPE_STYLE,
                        )  # fmt: skip
                    new_latent, new_low, new_high = normed_and_rotated(
                        new_latent, new_low, new_high, table_row, known, norm_ptr, cos_ptr, sin_ptr,
                        RANK, BLOCK_L, ROPE_DIM, PAIRS, NORM_EPS, ROPE_STYLE, FULL_WIDTH,
                        COS_STRIDES, SIN_STRIDES,
                    )  # fmt: skip
                    latent = tl.where(new[:, None], new_latent, latent)
                    low = tl.where(new[:, None], new_low, low)
                    high = tl.where(new[:, None], new_high, high)
                    store_entries(
                        places, rope_places, new, latent, low, high,
                        latent_cache_ptr, rope_cache_ptr,
                        RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, LATENT_STRIDES, ROPE_STRIDES,
                    )  # fmt: skip
                write_rows(
                    rows, mask, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr,
                    scale_stride, RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, OUT_STRIDE,
                    CAP, GROUP, ROPE_SCALE,
                )  # fmt: skip
        else:
            latent, low, high = load_entries(
                places, rope_places, through_scalars(valid.to(tl.int32), BLOCK_T) > 0,
                latent_cache_ptr, rope_cache_ptr,
                RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, LATENT_STRIDES[2], ROPE_STRIDES[2],
            )  # fmt: skip
            write_rows(
                rows, mask, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr,
                scale_stride, RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, OUT_STRIDE,
                CAP, GROUP, ROPE_SCALE,
            )  # fmt: skip
    elif STORE or KEEP:
        start = tl.program_id(0) * BLOCK_T
        last = start + BLOCK_T
        if FUSED:
            # Tokens that are not keys are rare, so each program searches CHECKED tokens for them.
            start = tl.program_id(0) * CHECKED
            checked = start + tl.arange(0, CHECKED)
            inside = checked < num_tokens
            left = inside & ~are_keys(
                checked, inside, row_offsets_ptr, lengths_ptr, key_offsets_ptr, key_starts_ptr,
                num_sequences, token_run, key_run, BATCH_STRIDES, KEY_STRIDES, SEARCH_STEPS,
            )  # fmt: skip
            last = tl.max(tl.where(left, checked + 1, 0), axis=0)
        for block in range(start, last, BLOCK_T):
            tokens = block + tl.arange(0, BLOCK_T)
            taken = tokens < num_tokens
            if FUSED:
                apart = ~are_keys(
                    tokens, taken, row_offsets_ptr, lengths_ptr, key_offsets_ptr, key_starts_ptr,
                    num_sequences, token_run, key_run, BATCH_STRIDES, KEY_STRIDES, SEARCH_STEPS,
                )  # fmt: skip
                taken = through_scalars((taken & apart).to(tl.int32), BLOCK_T) > 0
            new_latent, new_low, new_high = load_tokens(
                tokens, taken, latent_ptr, k_rope_ptr,
                RANK, BLOCK_L, ROPE_DIM, PAIRS, LATENT_STRIDE, ROPE_STRIDE, ROPE_STYLE,
            )  # fmt: skip
            if BY_POSITION:
                place = token_positions(
                    tokens, taken, row_offsets_ptr, lengths_ptr, token_positions_ptr,
                    num_sequences, token_run,
                    BATCH_STRIDES[0], BATCH_STRIDES[1], BATCH_STRIDES[2], SEARCH_STEPS,
                )  # fmt: skip
                place = through_scalars(place, BLOCK_T)
                known = taken & (place >= 0) & (place < rope_rows)
            else:
                place = (tokens % rope_rows).to(tl.int64)
                known = taken
            new_latent, new_low, new_high = normed_and_rotated(
                new_latent, new_low, new_high, place, known, norm_ptr, cos_ptr, sin_ptr,
                RANK, BLOCK_L, ROPE_DIM, PAIRS, NORM_EPS, ROPE_STYLE, FULL_WIDTH,
                COS_STRIDES, SIN_STRIDES,
            )  # fmt: skip
            if KEEP:
                write_rows(
                    tokens, taken, new_latent, new_low, new_high, latent_out_ptr, rope_out_ptr,
                    scale_out_ptr, scale_stride, RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS,
                    OUT_STRIDE, CAP, GROUP, ROPE_SCALE,
                )  # fmt: skip
            if STORE:
                page, slot, valid = cache_places(
                    tokens, taken, slots_ptr, sequences_ptr, positions_ptr,
                    sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
                    PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES, SEARCH_STEPS,
                )  # fmt: skip
                store_entries(
                    entry_places(page, slot, LATENT_STRIDES, UNITS[0], BLOCK_T),
                    entry_places(page, slot, ROPE_STRIDES, UNITS[1], BLOCK_T),
                    through_scalars(valid.to(tl.int32), BLOCK_T) > 0, new_latent, new_low, new_high,
                    latent_cache_ptr, rope_cache_ptr,
                    RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, LATENT_STRIDES, ROPE_STRIDES,
                )  # fmt: skip
