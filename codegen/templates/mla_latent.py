"""Everything about latents in one launch: norm, rotation, cache write, gather, quantisation.

Programs below `row_programs` take rows of keys: they find each key's place in the cache and copy
its entry to the key's row of a buffer, quantised where that is wanted. The others take new tokens:
they norm and rotate them and write them to the cache, to a buffer, or both. With FUSED a row that
is a new token is computed from the token itself and not read back, so that neither part waits for
the other.

Entries travel as a tile of latents [rows, L] and two tiles of rope columns [rows, pairs], the two
members of every pair.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.qkv_finish import rounded
from tilewright.codegen.templates.qkv_places import cache_places, sequence_of


@triton.jit
def load_latents(
    pointer, offsets, mask, RANK: tl.constexpr, BLOCK_L: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """pointer[offsets, columns] [rows, BLOCK_L]; zeros past RANK and where mask is false."""
    columns = tl.arange(0, BLOCK_L)
    inside = mask[:, None] & (columns < RANK)[None, :]
    return tl.load(pointer + offsets[:, None] + (columns * STRIDE)[None, :], mask=inside, other=0.0)


@triton.jit
def store_latents(
    pointer, offsets, mask, values,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_L)
    inside = mask[:, None] & (columns < RANK)[None, :]
    tl.store(pointer + offsets[:, None] + (columns * STRIDE)[None, :], values, mask=inside)


@triton.jit
def load_pairs(
    pointer, offsets, mask, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Both members of the pairs of pointer[offsets]: neighbours, or half the columns apart."""
    HALF: tl.constexpr = ROPE_DIM // 2
    if NEIGHBOURS:
        columns = tl.arange(0, 2 * PAIRS)
        inside = mask[:, None] & (columns < ROPE_DIM)[None, :]
        places = offsets[:, None] + (columns * STRIDE)[None, :]
        values = tl.load(pointer + places, mask=inside, other=0.0)
        low, high = tl.split(tl.reshape(values, (offsets.shape[0], PAIRS, 2)))
    else:
        pairs = tl.arange(0, PAIRS)
        inside = mask[:, None] & (pairs < HALF)[None, :]
        places = offsets[:, None] + (pairs * STRIDE)[None, :]
        low = tl.load(pointer + places, mask=inside, other=0.0)
        high = tl.load(pointer + places + HALF * STRIDE, mask=inside, other=0.0)
    return low, high


@triton.jit
def store_pairs(
    pointer, offsets, mask, low, high, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROPE_DIM // 2
    if NEIGHBOURS:
        columns = tl.arange(0, 2 * PAIRS)
        inside = mask[:, None] & (columns < ROPE_DIM)[None, :]
        places = offsets[:, None] + (columns * STRIDE)[None, :]
        values = tl.reshape(tl.join(low, high), (offsets.shape[0], 2 * PAIRS))
        tl.store(pointer + places, values, mask=inside)
    else:
        pairs = tl.arange(0, PAIRS)
        inside = mask[:, None] & (pairs < HALF)[None, :]
        places = offsets[:, None] + (pairs * STRIDE)[None, :]
        tl.store(pointer + places, low, mask=inside)
        tl.store(pointer + places + HALF * STRIDE, high, mask=inside)


@triton.jit
def table_columns(
    pointer, rows, mask, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, FULL_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """What the first and the second members of all pairs take from a table, fp32 [rows, PAIRS].

    Of a table of ROPE_DIM columns each member takes the column where it is after the rotation.
    """
    pairs = tl.arange(0, PAIRS)
    inside = mask[:, None] & (pairs < ROPE_DIM // 2)[None, :]
    starts = pointer + (rows * STRIDES[0])[:, None]
    if FULL_WIDTH and NEIGHBOURS:
        low = tl.load(starts + (2 * pairs * STRIDES[1])[None, :], mask=inside, other=0.0)
        high = tl.load(starts + ((2 * pairs + 1) * STRIDES[1])[None, :], mask=inside, other=0.0)
    else:
        low = tl.load(starts + (pairs * STRIDES[1])[None, :], mask=inside, other=0.0)
        high = low
        if FULL_WIDTH:
            second = (pairs + ROPE_DIM // 2) * STRIDES[1]
            high = tl.load(starts + second[None, :], mask=inside, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def new_entries(
    tokens, mask, positions, latent_ptr, k_rope_ptr, norm_ptr, cos_ptr, sin_ptr, rope_rows,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr, ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """(latents, first and second rope members) of new tokens, normed and rotated in fp32, each
    rounded once to the tokens' dtype."""
    DTYPE: tl.constexpr = k_rope_ptr.dtype.element_ty
    latent = load_latents(
        latent_ptr, tokens.to(tl.int64) * LATENT_STRIDE, mask, RANK, BLOCK_L, 1
    )
    if norm_ptr is not None:
        columns = tl.arange(0, BLOCK_L)
        wide = latent.to(tl.float32)
        mean = tl.sum(wide * wide, axis=1) / RANK
        weight = tl.load(norm_ptr + columns, mask=columns < RANK, other=0.0).to(tl.float32)
        wide = wide * tl.rsqrt(mean + NORM_EPS)[:, None]
        latent = (wide * weight[None, :]).to(DTYPE)
    low, high = load_pairs(
        k_rope_ptr, tokens.to(tl.int64) * ROPE_STRIDE, mask, ROPE_DIM, PAIRS,
        ROPE_STYLE == "interleaved" or ROPE_STYLE == "interleaved_to_half", 1,
    )  # fmt: skip
    if ROPE_STYLE != "none":
        if BY_POSITION:
            rows = positions
            known = mask & (rows >= 0) & (rows < rope_rows)
        else:
            rows = (tokens % rope_rows).to(tl.int64)
            known = mask
        TOGETHER: tl.constexpr = ROPE_STYLE == "interleaved"
        low_cos, high_cos = table_columns(
            cos_ptr, rows, known, ROPE_DIM, PAIRS, TOGETHER, FULL_WIDTH, COS_STRIDES
        )
        low_sin, high_sin = table_columns(
            sin_ptr, rows, known, ROPE_DIM, PAIRS, TOGETHER, FULL_WIDTH, SIN_STRIDES
        )
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        low = (wide_low * low_cos - wide_high * low_sin).to(DTYPE)
        high = (wide_high * high_cos + wide_low * high_sin).to(DTYPE)
    return latent, low, high


@triton.jit
def quantized_groups(
    latent, CAP: tl.constexpr, GROUP: tl.constexpr, BLOCK_L: tl.constexpr
):  # fmt: skip
    """(codes [rows, BLOCK_L], scales [rows, BLOCK_L / GROUP]) of latents; CAP 0: none.

    Zero codes where the scale's inverse is not a finite number.
    """
    ROWS: tl.constexpr = latent.shape[0]
    groups = tl.reshape(latent.to(tl.float32), (ROWS, BLOCK_L // GROUP, GROUP))
    largest = tl.max(tl.abs(groups), axis=2)
    bound = largest
    if CAP > 0.0:
        bound = tl.minimum(largest, CAP)
    scale = tl.math.div_rn(bound, tl.full(bound.shape, 448.0, tl.float32))
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    inverse = tl.where((largest == 0.0) | (inverse == float("inf")), 0.0, inverse)
    codes = rounded(groups * inverse[:, :, None], tl.float8e4nv)
    return tl.reshape(codes, (ROWS, BLOCK_L)), scale


@triton.jit
def write_rows(
    rows, mask, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr, scale_stride,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, OUT_STRIDE: tl.constexpr,
    CAP: tl.constexpr, GROUP: tl.constexpr, ROPE_SCALE: tl.constexpr,
):  # fmt: skip
    """Entries to their rows of the buffers: latents or codes [K, OUT_STRIDE], scales [groups, K],
    rope columns [K, ROPE_DIM]."""
    starts = rows.to(tl.int64)
    if latent_out_ptr is not None:
        if scale_out_ptr is not None:
            codes, scales = quantized_groups(latent, CAP, GROUP, BLOCK_L)
            groups = tl.arange(0, BLOCK_L // GROUP)
            inside = mask[:, None] & (groups < (RANK + GROUP - 1) // GROUP)[None, :]
            places = groups.to(tl.int64)[None, :] * scale_stride + starts[:, None]
            tl.store(scale_out_ptr + places, scales, mask=inside)
            latent = codes
        store_latents(latent_out_ptr, starts * OUT_STRIDE, mask, latent, OUT_STRIDE, BLOCK_L, 1)
    if rope_out_ptr is not None:
        DTYPE: tl.constexpr = rope_out_ptr.dtype.element_ty
        if ROPE_SCALE != 1.0:
            low = low.to(tl.float32) / ROPE_SCALE
            high = high.to(tl.float32) / ROPE_SCALE
        store_pairs(
            rope_out_ptr, starts * ROPE_DIM, mask,
            rounded(low.to(tl.float32), DTYPE), rounded(high.to(tl.float32), DTYPE),
            ROPE_DIM, PAIRS, NEIGHBOURS, 1,
        )  # fmt: skip


@triton.jit
def sequence_places(
    rows, mask, offsets_ptr, num_sequences, run,
    STRIDE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """(sequence, place in it, whether there is one) of each row; by offsets, or by equal runs."""
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
    """The position of each token: given, or after its sequence's tokens in the cache."""
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
    """(page, slot in the page, sequence, position, whether there is such a key) of each row.

    KEYS "slots": by a flat slot for each row; "table": by a lookup table of pages; "pages": page b
    is sequence b. KEY_STRIDES: of offsets, starts and slots.
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
def mla_latents(
    latent_ptr, k_rope_ptr, norm_ptr, cos_ptr, sin_ptr, latent_cache_ptr, rope_cache_ptr,
    slots_ptr, sequences_ptr, positions_ptr, row_offsets_ptr, lengths_ptr, token_positions_ptr,
    lookup_ptr, key_offsets_ptr, key_starts_ptr, key_slots_ptr,
    latent_out_ptr, rope_out_ptr, scale_out_ptr,
    num_tokens, num_rows, row_programs, rope_rows, token_run, key_run, sequence_tokens, num_pages,
    num_sequences, table_rows, table_width, table_stride, lookup_columns, lookup_stride,
    scale_stride,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr, ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr, BY_POSITION: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, LATENT_STRIDES: tl.constexpr, ROPE_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, WRAP_NEGATIVE: tl.constexpr, ADDRESS_STRIDES: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, BATCH_STRIDES: tl.constexpr,
    KEYS: tl.constexpr, LOOKUP_STRIDE: tl.constexpr, KEY_STRIDES: tl.constexpr,
    STORE: tl.constexpr, KEEP: tl.constexpr, GATHER: tl.constexpr, FUSED: tl.constexpr,
    OUT_STRIDE: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, ROPE_SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """latent [T, RANK] and k_rope [T, ROPE_DIM] to their slots of the cache (STORE) and to rows of
    the buffers (KEEP); keys of the cache to rows of the buffers (GATHER).

    table_*: the lookup table that new tokens are written by; lookup_*: the one of keys.

    Grid (row_programs + cdiv(T, BLOCK_T)), row_programs = cdiv(num_rows, BLOCK_T) or 0. Cache
    strides are (page, slot, column); addresses of tokens as in `qkv_places.cache_places`, keys as
    in `key_places`. BATCH_STRIDES: of row_offsets, lengths and token_positions. NEIGHBOURS: how the
    members of a pair lie in the cache and the buffers. FUSED: keys from position lengths[b] on are
    the new tokens of sequence b. BLOCK_L, a power of two, covers RANK, and PAIRS half of ROPE_DIM.
    """
    program = tl.program_id(0)
    if GATHER and program < row_programs:
        rows = program * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = rows < num_rows
        page, slot, sequence, position, valid = key_places(
            rows, mask, lookup_ptr, key_offsets_ptr, key_starts_ptr, key_slots_ptr,
            num_sequences, key_run, num_pages, lookup_columns, lookup_stride,
            KEYS, PAGE_SIZE, LOOKUP_STRIDE, KEY_STRIDES, SEARCH_STEPS,
        )  # fmt: skip
        cached = valid
        if FUSED:
            length = tl.load(lengths_ptr + sequence * BATCH_STRIDES[1], mask=valid, other=0)
            offsets = row_offsets_ptr + sequence * BATCH_STRIDES[0]
            first = tl.load(offsets, mask=valid, other=0).to(tl.int64)
            end = tl.load(offsets + BATCH_STRIDES[0], mask=valid, other=0).to(tl.int64)
            token = first + position - length.to(tl.int64)
            cached = valid & (token < first)
            new = valid & (token >= first) & (token < end)
        places = page * LATENT_STRIDES[0] + slot * LATENT_STRIDES[1]
        latent = load_latents(
            latent_cache_ptr, places, cached, RANK, BLOCK_L, LATENT_STRIDES[2]
        )
        places = page * ROPE_STRIDES[0] + slot * ROPE_STRIDES[1]
        low, high = load_pairs(
            rope_cache_ptr, places, cached, ROPE_DIM, PAIRS, NEIGHBOURS, ROPE_STRIDES[2]
        )
        if FUSED:
            new_latent, new_low, new_high = new_entries(
                tl.where(new, token, 0), new, position,
                latent_ptr, k_rope_ptr, norm_ptr, cos_ptr, sin_ptr, rope_rows,
                RANK, BLOCK_L, ROPE_DIM, PAIRS, LATENT_STRIDE, ROPE_STRIDE, NORM_EPS,
                ROPE_STYLE, FULL_WIDTH, COS_STRIDES, SIN_STRIDES, BY_POSITION,
            )  # fmt: skip
            latent = tl.where(new[:, None], new_latent, latent)
            low = tl.where(new[:, None], new_low, low)
            high = tl.where(new[:, None], new_high, high)
        write_rows(
            rows, mask, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr,
            scale_stride, RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, OUT_STRIDE,
            CAP, GROUP, ROPE_SCALE,
        )  # fmt: skip
    elif STORE or KEEP:
        tokens = (program - row_programs) * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = tokens < num_tokens
        position = tokens.to(tl.int64)
        if BY_POSITION:
            position = token_positions(
                tokens, mask, row_offsets_ptr, lengths_ptr, token_positions_ptr,
                num_sequences, token_run,
                BATCH_STRIDES[0], BATCH_STRIDES[1], BATCH_STRIDES[2], SEARCH_STEPS,
            )  # fmt: skip
        latent, low, high = new_entries(
            tokens, mask, position, latent_ptr, k_rope_ptr, norm_ptr, cos_ptr, sin_ptr, rope_rows,
            RANK, BLOCK_L, ROPE_DIM, PAIRS, LATENT_STRIDE, ROPE_STRIDE, NORM_EPS,
            ROPE_STYLE, FULL_WIDTH, COS_STRIDES, SIN_STRIDES, BY_POSITION,
        )  # fmt: skip
        if KEEP:
            write_rows(
                tokens, mask, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr,
                scale_stride, RANK, BLOCK_L, ROPE_DIM, PAIRS, NEIGHBOURS, OUT_STRIDE,
                CAP, GROUP, ROPE_SCALE,
            )  # fmt: skip
        if STORE:
            page, slot, valid = cache_places(
                tokens, mask, slots_ptr, sequences_ptr, positions_ptr,
                sequence_tokens, num_pages, table_rows, table_width, table_stride,
                PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES, SEARCH_STEPS,
            )  # fmt: skip
            places = page * LATENT_STRIDES[0] + slot * LATENT_STRIDES[1]
            store_latents(
                latent_cache_ptr, places, valid, latent, RANK, BLOCK_L, LATENT_STRIDES[2]
            )
            places = page * ROPE_STRIDES[0] + slot * ROPE_STRIDES[1]
            store_pairs(
                rope_cache_ptr, places, valid, low, high, ROPE_DIM, PAIRS, NEIGHBOURS,
                ROPE_STRIDES[2],
            )  # fmt: skip
