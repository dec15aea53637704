"""Which queries a program of `mla_attention` takes, and which keys they see.

Tiles go by groups of heads whose keys and values stay in the L2 cache together; within a group the
tiles with the most keys come first, so that the last ones to start are short.
"""

import triton
import triton.language as tl


@triton.jit
def extents(offsets_ptr, sequences, num_sequences):
    """(first row, number of rows) of each sequence; none for numbers past the last."""
    real = sequences < num_sequences
    first = tl.load(offsets_ptr + sequences, mask=real, other=0).to(tl.int32)
    last = tl.load(offsets_ptr + sequences + 1, mask=real, other=0).to(tl.int32)
    return first, tl.maximum(last - first, 0)


@triton.jit
def ragged_place(
    tile, query_offsets_ptr, key_offsets_ptr, num_sequences,
    SEQUENCES: tl.constexpr, SORTED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(sequence, row block, whether there is such a tile) of a row tile's number.

    Row blocks of a sequence go from its last to its first. SORTED: sequences with more keys come
    first; SEQUENCES is a power of two not below num_sequences.
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
    query_offsets_ptr, key_offsets_ptr, num_sequences, row_tiles,
    NUM_HEADS: tl.constexpr, HEAD_GROUP: tl.constexpr, SEQUENCES: tl.constexpr,
    SORTED: tl.constexpr, RAGGED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(sequence, head, first row in the sequence, whether there is such a tile) of a program.

    row_tiles: of a dense sequence, or of all ragged ones together at most.
    """
    program = tl.program_id(0)
    if RAGGED:
        group = program // (row_tiles * HEAD_GROUP)
        within = program % (row_tiles * HEAD_GROUP)
        head = group * HEAD_GROUP + within % HEAD_GROUP
        sequence, block, real = ragged_place(
            within // HEAD_GROUP, query_offsets_ptr, key_offsets_ptr, num_sequences,
            SEQUENCES, SORTED, BLOCK_M,
        )  # fmt: skip
        if NUM_HEADS % HEAD_GROUP != 0:
            real = real & (head < NUM_HEADS)
    else:
        group = program // (row_tiles * HEAD_GROUP)
        within = program % (row_tiles * HEAD_GROUP)
        pair = group * HEAD_GROUP + within % HEAD_GROUP
        real = pair < num_sequences * NUM_HEADS
        pair = tl.where(real, pair, 0)
        sequence = pair // NUM_HEADS
        head = pair % NUM_HEADS
        block = row_tiles - 1 - within // HEAD_GROUP
    return sequence, head, block * BLOCK_M, real


@triton.jit
def query_positions(
    positions_ptr, query_starts_ptr, sequence, first_row, own_queries, own_keys, key_start,
    positions_sequence_stride, positions_stride, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(positions of a tile's queries, lowest, highest), i32; rows past own_queries do not count.

    By tensor, by the position of a sequence's first query, or as the last of the keys.
    """
    if positions_ptr is not None:
        own = positions_ptr + sequence.to(tl.int64) * positions_sequence_stride
        rows = first_row + tl.arange(0, BLOCK_M)
        real = rows < own_queries
        positions = tl.load(own + rows.to(tl.int64) * positions_stride, mask=real, other=0)
        positions = positions.to(tl.int32)
        lowest = tl.min(tl.where(real, positions, 2**31 - 1), axis=0)
        highest = tl.max(tl.where(real, positions, -1), axis=0)
    else:
        if query_starts_ptr is not None:
            start = tl.load(query_starts_ptr + sequence).to(tl.int32)
        else:
            start = key_start + own_keys - own_queries
        positions = start + first_row + tl.arange(0, BLOCK_M)
        lowest = start + first_row
        highest = start + tl.minimum(first_row + BLOCK_M, own_queries) - 1
    return positions, lowest, highest


@triton.jit
def block_range(
    lowest, highest, key_start, own_keys,
    MASK: tl.constexpr, WINDOW: tl.constexpr, ALL_CHECKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(first block, first whole block, whole blocks, all blocks) of keys for a tile of queries.

    A whole block is seen by every query; blocks before and after the whole ones need a mask.
    ALL_CHECKED: none counts as whole.
    """
    low = 0
    high = own_keys
    whole_low = 0
    whole_high = own_keys
    if MASK != "none":
        high = tl.minimum(own_keys, highest + 1 - key_start)
        whole_high = tl.minimum(own_keys, lowest + 1 - key_start)
    if MASK == "sliding_window":
        low = lowest - WINDOW + 1 - key_start
        whole_low = highest - WINDOW + 1 - key_start
    if MASK == "chunked":
        low = lowest // WINDOW * WINDOW - key_start
        whole_low = highest // WINDOW * WINDOW - key_start
    low = tl.maximum(low, 0)
    high = tl.maximum(high, low)
    first = low // BLOCK_N
    total = tl.maximum((high + BLOCK_N - 1) // BLOCK_N - first, 0)
    if ALL_CHECKED:
        whole = first
        num_whole = first - first
    else:
        whole = (tl.maximum(whole_low, 0) + BLOCK_N - 1) // BLOCK_N
        num_whole = tl.maximum(whole_high, 0) // BLOCK_N - whole
        # Where no block is whole, the masked ones start at the first.
        whole = tl.where(num_whole > 0, whole, first)
        num_whole = tl.maximum(num_whole, 0)
    return first, whole, num_whole, total


@triton.jit
def block_of_step(step, first, whole, num_whole):
    """The block of a step: whole ones come first, then those before them, then those after."""
    after = first + step - num_whole
    after = tl.where(after < whole, after, after + num_whole)
    return tl.where(step < num_whole, whole + step, after)


@triton.jit
def visible(
    positions, keys, key_start, own_keys, MASK: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """[queries, keys]: which keys exist and are seen; `keys` count from the sequence's first."""
    seen = (keys < own_keys)[None, :]
    if MASK != "none":
        key_positions = key_start + keys
        seen = seen & (key_positions[None, :] <= positions[:, None])
        if MASK == "sliding_window":
            seen = seen & (positions[:, None] - key_positions[None, :] < WINDOW)
        if MASK == "chunked":
            seen = seen & ((key_positions // WINDOW)[None, :] == (positions // WINDOW)[:, None])
    return seen
