"""Computes the schedule of attention kernels: which queries each program computes, and which keys
these queries attend to.

Tiles are ordered by groups of heads. The keys and values of a group fit the L2 cache together.
Within a group, the tiles with the most keys run first, so that the tiles that start last are short.
"""

import triton
import triton.language as tl


@triton.jit
def extents(offsets_ptr, sequences, num_sequences):
    """Returns (first row, number of rows) of each sequence. Sequences past the last one have 0
    rows."""
    real = sequences < num_sequences
    first = tl.load(offsets_ptr + sequences, mask=real, other=0).to(tl.int32)
    last = tl.load(offsets_ptr + sequences + 1, mask=real, other=0).to(tl.int32)
    return first, tl.maximum(last - first, 0)


@triton.jit
def ragged_place(
    tile, query_offsets_ptr, key_offsets_ptr, num_sequences,
    SEQUENCES: tl.constexpr, SORTED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns (sequence, row block, whether the tile exists) for the row tile with the given
    number.

    The row blocks of a sequence come in descending order. SORTED: sequences with more keys come
    first. SEQUENCES: a power of two that is at least num_sequences.
    """
    sequences = tl.arange(0, SEQUENCES)
    _, queries = extents(query_offsets_ptr, sequences, num_sequences)
    blocks = (queries + BLOCK_M - 1) // BLOCK_M
    if SORTED:
        _, keys = extents(key_offsets_ptr, sequences, num_sequences)
        before = (keys[None, :] > keys[:, None]) | (
            (keys[None, :] == keys[:, None]) & (sequences[None, :] < sequences[:, None])
        )
        first = tl.sum(tl.where(before, blocks[None, :], 0), axis=1)
    else:
        first = tl.cumsum(blocks, axis=0) - blocks
    chosen = (first <= tile) & (tile < first + blocks)
    sequence = tl.sum(tl.where(chosen, sequences, 0), axis=0)
    block = tl.sum(tl.where(chosen, first + blocks - 1 - tile, 0), axis=0)
    return sequence, block, tl.sum(chosen.to(tl.int32), axis=0) > 0


@triton.jit
def tile_place(
    query_offsets_ptr, key_offsets_ptr, num_sequences, row_tiles, head_group,
    NUM_HEADS: tl.constexpr, SEQUENCES: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns (sequence, head, first row in the sequence, whether the tile exists) for this
    program.

    In a dense batch, a group consists of pairs (sequence, head), and row_tiles is the number of row
    tiles of one sequence. In a ragged batch, a group consists of heads, and row_tiles is at least
    the number of row tiles of all sequences together.
    """
    program = tl.program_id(0)
    group = program // (row_tiles * head_group)
    within = program % (row_tiles * head_group)
    pair = group * head_group + within % head_group
    tile = within // head_group
    if RAGGED:
        sequence, block, real = ragged_place(
            tile, query_offsets_ptr, key_offsets_ptr, num_sequences, SEQUENCES, SORTED, BLOCK_M
        )
        real = real & (pair < NUM_HEADS)
    else:
        real = pair < num_sequences * NUM_HEADS
        sequence = tl.where(real, pair // NUM_HEADS, 0)
        block = row_tiles - 1 - tile
    head = pair % NUM_HEADS
    return sequence, head, block * BLOCK_M, real


@triton.jit
def run_of(offsets_ptr, sequence, length):
    """Returns (first row, number of rows) of a sequence. If there are offsets, they give the rows
    of the sequence. If not, each sequence has `length` rows."""
    if offsets_ptr is None:
        return sequence.to(tl.int64) * length, length
    else:
        first = tl.load(offsets_ptr + sequence).to(tl.int64)
        return first, (tl.load(offsets_ptr + sequence + 1).to(tl.int64) - first).to(tl.int32)


@triton.jit
def base_of(
    pointer, first_row, sequence, head, row_stride, sequence_stride, head_stride,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Returns the pointer to the first row of a sequence and head."""
    start = first_row * row_stride if RAGGED else sequence.to(tl.int64) * sequence_stride
    return pointer + start + head.to(tl.int64) * head_stride


@triton.jit
def query_positions(
    positions_ptr, query_starts_ptr, sequence, query_base, first_row, own_queries,
    positions_sequence_stride, positions_stride, RAGGED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns (positions of a tile's queries, lowest position, highest position) in i32. Rows past
    own_queries are ignored for the lowest and highest position.

    Positions are read from a tensor. If there is none, they count up from query_starts, or from 0
    if query_starts is None too.
    """
    if positions_ptr is not None:
        rows = first_row + tl.arange(0, BLOCK_M)
        real = rows < own_queries
        if RAGGED:
            own = positions_ptr + query_base * positions_stride
        else:
            own = positions_ptr + sequence.to(tl.int64) * positions_sequence_stride
        positions = tl.load(own + rows.to(tl.int64) * positions_stride, mask=real, other=0)
        positions = positions.to(tl.int32)
        lowest = tl.min(tl.where(real, positions, 2**30), axis=0)
        highest = tl.max(tl.where(real, positions, -1), axis=0)
    else:
        start = 0
        if query_starts_ptr is not None:
            start = tl.load(query_starts_ptr + sequence).to(tl.int32)
        positions = start + first_row + tl.arange(0, BLOCK_M)
        lowest = start + first_row
        highest = start + tl.minimum(first_row + BLOCK_M, own_queries) - 1
    return positions, lowest, highest


@triton.jit
def keys_in_sight(own_keys, highest, key_start, MASK: tl.constexpr):
    """Returns the number of keys up to the last one that a query at position `highest` attends to.
    The result is at most own_keys."""
    if MASK != "none":
        own_keys = tl.minimum(own_keys, highest + 1 - key_start)
    return tl.maximum(own_keys, 0)


@triton.jit
def block_range(
    lowest, highest, key_start, own_keys, lead,
    MASK: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns the blocks of keys that a tile of queries visits: (first block, first whole block,
    number of whole blocks, number of all blocks).

    In a whole block, every query attends to all keys. The blocks before and after the whole blocks
    need a mask. own_keys: the result of `keys_in_sight`. lead: the number of keys at the start that
    do not belong to the sequence.
    """
    low = 0
    whole_low = lead
    whole_high = own_keys
    if MASK != "none":
        whole_high = tl.minimum(own_keys, lowest + 1 - key_start)
    # A window may begin after the last key. In this case, no block is read.
    if MASK == "sliding_window":
        low = tl.minimum(lowest - WINDOW + 1 - key_start, own_keys)
        whole_low = highest - WINDOW + 1 - key_start
    if MASK == "chunked":
        low = tl.minimum(lowest // WINDOW * WINDOW - key_start, own_keys)
        whole_low = highest // WINDOW * WINDOW - key_start
    low = tl.maximum(low, 0)
    first = low // BLOCK_N
    total = (own_keys + BLOCK_N - 1) // BLOCK_N - first
    whole = (tl.maximum(whole_low, lead) + BLOCK_N - 1) // BLOCK_N
    num_whole = tl.maximum(whole_high, 0) // BLOCK_N - whole
    # If no block is whole, the masked blocks start at the first block.
    whole = tl.where(num_whole > 0, whole, first)
    num_whole = tl.maximum(num_whole, 0)
    return first, whole, num_whole, total


@triton.jit
def block_of_step(step, first, whole, num_whole):
    """Returns the block that a step reads. The whole blocks come first, then the blocks before
    them, then the blocks after them."""
    after = first + step - num_whole
    after = tl.where(after < whole, after, after + num_whole)
    return tl.where(step < num_whole, whole + step, after)


@triton.jit
def visible(
    positions, keys, base, key_start, own_keys, lead,
    MASK: tl.constexpr, WINDOW: tl.constexpr, LED: tl.constexpr,
):  # fmt: skip
    """Returns whether each query attends to each key [queries, keys]. This is False for keys that
    do not exist.

    `keys` count from `base`, and `base` counts from the sequence's first key. LED: whether the
    first `lead` keys do not belong to the sequence.
    """
    here = key_start + base
    if MASK == "none":
        seen = (keys < own_keys - base)[None, :]
        if LED:
            seen = seen & (keys >= lead - base)[None, :]
        return seen
    else:
        last = tl.minimum(positions - here, own_keys - 1 - base)
        seen = keys[None, :] <= last[:, None]
        if LED:
            seen = seen & (keys >= lead - base)[None, :]
        if MASK == "sliding_window":
            seen = seen & (keys[None, :] > (positions - here - WINDOW)[:, None])
        if MASK == "chunked":
            chunk = positions // WINDOW * WINDOW - here
            seen = seen & (keys[None, :] >= chunk[:, None])
        return seen
