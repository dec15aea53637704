"""Finds where projected heads are stored: q in the result tensor, and k and v in their token's slot
of a cache."""

import triton
import triton.language as tl

QUERY = tl.constexpr(0)
KEY = tl.constexpr(1)
VALUE = tl.constexpr(2)

# The largest number of (token, sequence) pairs that are compared at once. If there are more pairs,
# a binary search is faster, which needs more loads but fewer registers.
COMPARED_PAIRS = tl.constexpr(4096)


@triton.jit
def head_of_tile(tile_head, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr):
    """Returns (kind, head within q, k or v) of a head. tile_head counts the heads of q, then k,
    then v."""
    # Select instead of branching: Triton 3.6 cannot flatten a loop over tiles that has a branch
    # here.
    is_kv = (tile_head >= NUM_HEADS).to(tl.int32)
    is_value = (tile_head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int32)
    kind = is_kv + is_value
    head = tile_head - is_kv * NUM_HEADS - is_value * NUM_KV_HEADS
    return kind, head


@triton.jit
def turned_kind(kind, head, GATE_RUN: tl.constexpr):
    """Returns the `kind` that determines whether a head has a norm and a rotation. A gate among q's
    heads counts as v, which has neither.

    GATE_RUN: q's heads alternate between this many queries and this many gates. If GATE_RUN is 0,
    there are no gates.
    """
    if GATE_RUN > 0:
        kind = tl.where((kind == QUERY) & (head // GATE_RUN % 2 == 1), VALUE, kind)
    return kind


@triton.jit
def sequence_of(
    tokens, row_offsets_ptr, num_sequences, OFFSETS_STRIDE: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Returns each token's sequence, according to row_offsets [num_sequences + 1]. For tokens after
    the last sequence, returns num_sequences.

    2 ** SEARCH_STEPS is greater than num_sequences.
    """
    if tokens.shape[0] * 2**SEARCH_STEPS <= COMPARED_PAIRS:
        ends = 1 + tl.arange(0, 2**SEARCH_STEPS)
        offsets = tl.load(
            row_offsets_ptr + ends * OFFSETS_STRIDE, mask=ends <= num_sequences, other=2**31 - 1
        ).to(tl.int32)
        sequence = tl.sum((offsets[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
    else:
        sequence = tokens * 0
        for step in tl.static_range(SEARCH_STEPS):
            later = sequence + 2 ** (SEARCH_STEPS - 1 - step)
            offset = tl.load(
                row_offsets_ptr + later * OFFSETS_STRIDE,
                mask=later <= num_sequences,
                other=2**31 - 1,
            ).to(tl.int32)
            sequence = tl.where(offset <= tokens, later, sequence)
    return sequence


@triton.jit
def table_places(
    tokens, token_mask, lookup_ptr, sequences_ptr, positions_ptr,
    num_sequences, lookup_columns, lookup_stride,
    PAGE_SIZE: tl.constexpr, ADDRESSING: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    ADDRESS_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Returns (page, slot in the page, mask) of tokens. Their pages are looked up in a block
    table."""
    if ADDRESSING == "ragged":
        sequence = sequence_of(
            tokens, sequences_ptr, num_sequences, ADDRESS_STRIDES[1], SEARCH_STEPS
        )
        valid = token_mask & (sequence < num_sequences)
        first = tl.load(sequences_ptr + sequence * ADDRESS_STRIDES[1], mask=valid, other=0)
        length = tl.load(positions_ptr + sequence * ADDRESS_STRIDES[2], mask=valid, other=0)
        place = tokens - first.to(tl.int64)
        valid = valid & (place >= 0)
        position = length.to(tl.int64) + place
        sequence = sequence.to(tl.int64)
    else:
        sequence = tl.load(
            sequences_ptr + tokens * ADDRESS_STRIDES[1], mask=token_mask, other=0
        ).to(tl.int64)
        position = tl.load(
            positions_ptr + tokens * ADDRESS_STRIDES[2], mask=token_mask, other=0
        ).to(tl.int64)
        if WRAP_NEGATIVE:
            sequence = tl.where(sequence < 0, sequence + num_sequences, sequence)
            # Convert a negative position to a nonnegative one first, because the quotient rounds
            # towards zero.
            positive = position + lookup_columns.to(tl.int64) * PAGE_SIZE
            position = tl.where(position < 0, positive, position)
        valid = token_mask & (sequence >= 0) & (sequence < num_sequences)
    column = position // PAGE_SIZE
    valid = valid & (position >= 0) & (column < lookup_columns)
    entry = lookup_ptr + sequence * lookup_stride + column * ADDRESS_STRIDES[0]
    page = tl.load(entry, mask=valid, other=0).to(tl.int64)
    return page, position % PAGE_SIZE, valid


@triton.jit
def cache_places(
    tokens, token_mask, slots_ptr, sequences_ptr, positions_ptr,
    sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
    PAGE_SIZE: tl.constexpr, ADDRESSING: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    ADDRESS_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Returns (page, slot in the page, mask) of each token, 64-bit. Tokens that are out of range
    are masked.

    ADDRESSING determines the meaning of the three pointers:

    - "flat": slots_ptr has a slot for each token. The other pointers are not used.
    - "per_sequence": slots_ptr has a slot for each token of a sequence. The other pointers are not
      used.
    - "block_table": slots_ptr is a table [sequence, column] of pages. sequences_ptr and
      positions_ptr have a sequence and a position for each token.
    - "ragged": slots_ptr is a table as in "block_table". sequences_ptr has the offsets
      [num_sequences + 1] of the sequences' first tokens. positions_ptr has the number of tokens of
      each sequence in the cache.
    """
    if ADDRESSING == "block_table" or ADDRESSING == "ragged":
        page, slot, valid = table_places(
            tokens, token_mask, slots_ptr, sequences_ptr, positions_ptr,
            num_sequences, lookup_columns, lookup_stride,
            PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES, SEARCH_STEPS,
        )  # fmt: skip
        if WRAP_NEGATIVE:
            page = tl.where(page < 0, page + num_pages, page)
        valid = valid & (page >= 0) & (page < num_pages)
    else:
        if ADDRESSING == "per_sequence":
            page = (tokens // sequence_tokens).to(tl.int64)
            slot_tokens = tokens % sequence_tokens
            capacity = tl.full((1,), PAGE_SIZE, tl.int64)
        else:
            slot_tokens = tokens
            capacity = tl.full((1,), PAGE_SIZE, tl.int64) * num_pages
        slot = tl.load(slots_ptr + slot_tokens * ADDRESS_STRIDES[0], mask=token_mask, other=0).to(
            tl.int64
        )
        if WRAP_NEGATIVE:
            slot = tl.where(slot < 0, slot + capacity, slot)
        valid = token_mask & (slot >= 0) & (slot < capacity)
        if ADDRESSING == "flat":
            page = slot // PAGE_SIZE
            slot = slot % PAGE_SIZE
    return page, slot, valid


@triton.jit
def store_target(
    kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr,
    slots_ptr, sequences_ptr, positions_ptr,
    sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ADDRESSING: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    ADDRESS_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, ROW_UNIT: tl.constexpr,
):  # fmt: skip
    """Returns (pointer, row offsets, row mask, head stride, dim stride) of tokens of one `kind`.

    Selects combine the targets of q, k and v into one target. There are two reasons to have no
    branches: Triton 3.6 cannot flatten a loop over tiles that has branches, and three stores would
    be three times the code. If q and the caches differ in dtype, one pointer cannot serve both. The
    target is then the cache, and it is masked for q.
    """
    page, slot, row_mask = cache_places(
        tokens, token_mask & (kind != QUERY), slots_ptr, sequences_ptr, positions_ptr,
        sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
        PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES, SEARCH_STEPS,
    )  # fmt: skip
    pointer = k_cache_ptr
    # Select multiples of ROW_UNIT, which divides every stride of a row. A plain select would lose
    # the divisibility of the offsets, and each store would write only one element.
    units = page * (K_STRIDES[0] // ROW_UNIT) + slot * (K_STRIDES[1] // ROW_UNIT)
    head_stride = tl.where(kind == VALUE, V_STRIDES[2], K_STRIDES[2])
    if v_cache_ptr is not None:
        pointer = tl.where(kind == VALUE, v_cache_ptr, pointer)
        if K_STRIDES[0] != V_STRIDES[0] or K_STRIDES[1] != V_STRIDES[1]:
            v_units = page * (V_STRIDES[0] // ROW_UNIT) + slot * (V_STRIDES[1] // ROW_UNIT)
            units = tl.where(kind == VALUE, v_units, units)
    if q_out_ptr is not None and q_out_ptr.dtype.element_ty == k_cache_ptr.dtype.element_ty:
        pointer = tl.where(kind == QUERY, q_out_ptr, pointer)
        q_units = tokens.to(tl.int64) * (NUM_HEADS * HEAD_DIM // ROW_UNIT)
        units = tl.where(kind == QUERY, q_units, units)
        row_mask = row_mask | (token_mask & (kind == QUERY))
        head_stride = tl.where(kind == QUERY, HEAD_DIM, head_stride)
    row_offsets = units * ROW_UNIT
    if K_STRIDES[3] == 1 and V_STRIDES[3] == 1:
        dim_stride = 1
    else:
        dim_stride = tl.where(kind == VALUE, V_STRIDES[3], K_STRIDES[3])
        dim_stride = tl.where(kind == QUERY, 1, dim_stride)
    return pointer, row_offsets, row_mask, head_stride, dim_stride
