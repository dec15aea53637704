"""Computes the list of blocks of a mask: for each tile of queries, the blocks of keys that at least
one query attends to."""

import triton
import triton.language as tl

# A tile and a block have at most 2 ** 13 pairs of a query and a key. The marks of all these pairs
# are summed. In the sum, the bits below WHOLE_BIT count the visible pairs, and the other bits count
# the pairs to whose score the mask adds nothing.
WHOLE_BIT: tl.constexpr = tl.constexpr(14)
# The flag of a block in which all visible keys have numbers up to LOWEST.
LOWEST_FLAG: tl.constexpr = tl.constexpr(0.5)


@triton.jit
def pair_marks(values, KIND: tl.constexpr):
    """Returns the mark of each pair of query and key. The mark is 1 if the query attends to the
    key, plus 2 ** WHOLE_BIT if the mask also adds nothing to the score."""
    if KIND == "bool":
        marks = (values != 0).to(tl.int32) * ((1 << WHOLE_BIT) + 1)
    else:
        seen = (values != float("-inf")).to(tl.int32)
        marks = seen + ((values == 0).to(tl.int32) << WHOLE_BIT)
    return marks


@triton.jit
def block_flags(values, pairs, KIND: tl.constexpr):
    """Returns the flags of blocks [BLOCKS] from the mask's values [ROWS, BLOCKS, KEYS].

    The flag is 2 if all queries attend to all keys of the block. If not, the flag is 1 if at least
    one query attends to at least one key, and 0 otherwise. pairs: the number of existing pairs of
    query and key in a block.
    """
    sums = tl.sum(tl.sum(pair_marks(values, KIND), axis=2), axis=0)
    seen = (sums & ((1 << WHOLE_BIT) - 1)) > 0
    whole = (sums >> WHOLE_BIT) == pairs
    return seen.to(tl.float32) + whole.to(tl.float32)


@triton.jit
def lowest_flags(
    values, num_rows, LOWEST: tl.constexpr, ORDINARY: tl.constexpr, KEYS: tl.constexpr
):
    """Returns (flags of blocks [BLOCKS], whether each row [ROWS] has a number of at least ORDINARY)
    from the mask's values [ROWS, BLOCKS, KEYS].

    The flags are the flags of `block_flags`, except for one case: a block has LOWEST_FLAG if all
    its visible keys have numbers up to LOWEST. num_rows: the number of existing rows.
    """
    numbers = values.to(tl.float32)
    # Count four kinds of numbers that a row has in a block, each in one byte of an integer: numbers
    # that are not -inf, numbers above LOWEST, zeros, and numbers of at least ORDINARY.
    marks = tl.where(numbers != float("-inf"), 1, 0)
    marks = tl.where(numbers <= LOWEST, marks, 0x101)
    marks = tl.where(numbers >= ORDINARY, 0x1000101, marks)
    marks = tl.where(numbers == 0, 0x1010101, marks)
    counts = tl.sum(marks, axis=2)
    ordinary = tl.max(((counts >> 24) > 0).to(tl.int32), axis=1)
    # Count three kinds of rows, each in one byte of an integer: rows that attend to a key, rows
    # that have a number above LOWEST, and rows that attend to all keys.
    marks = ((counts & 255) > 0).to(tl.int32)
    marks += (((counts >> 8) & 255) > 0).to(tl.int32) << 8
    marks += (((counts >> 16) & 255) == KEYS).to(tl.int32) << 16
    counts = tl.sum(marks, axis=0)
    lowest = tl.where((counts & 255) > 0, LOWEST_FLAG, 0.0)
    seen = 1.0 + ((counts >> 16) == num_rows).to(tl.float32)
    return tl.where(((counts >> 8) & 255) > 0, seen, lowest), ordinary


@triton.jit
def write_list(list_ptr, flags_ptr, key_blocks, hidden, LISTED: tl.constexpr):
    """Writes the list of a tile from the flags of its blocks.

    A flag above `hidden` means that at least one query attends to a key. The flag 2 means that all
    queries attend to all keys. Visible blocks come first, in ascending order. Zeros fill the rest.
    """
    count = 0
    for first in range(0, key_blocks, LISTED):
        blocks = first + tl.arange(0, LISTED)
        real = blocks < key_blocks
        flags = tl.load(flags_ptr + blocks, mask=real, other=0.0, cache_modifier=".cg")
        seen = (flags > hidden).to(tl.int32)
        before = count + tl.cumsum(seen, axis=0) - seen
        places = tl.where(seen > 0, before, key_blocks - 1 - (blocks - before))
        entries = tl.where(seen > 0, 2 * blocks + (flags > 1.0).to(tl.int32), 0)
        tl.store(list_ptr + 1 + places, entries, mask=real)
        count += tl.sum(seen, axis=0)
    tl.store(list_ptr, count)


@triton.jit
def mask_blocks(
    mask_ptr, out_ptr, flags_ptr, counters_ptr, num_heads, num_queries, num_keys, query_tiles,
    key_blocks, blocks_per_part, parts, sequence_stride, head_stride, row_stride, column_stride,
    KIND: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, LISTED: tl.constexpr, SPLIT: tl.constexpr, LAUNCH_PDL: tl.constexpr,
    LOWEST: tl.constexpr = 0.0, ORDINARY: tl.constexpr = 0.0,
):  # fmt: skip
    """Writes the list of blocks, out [.., query_tiles, 1 + key_blocks], of a mask [.., num_queries,
    num_keys] (codegen/attention/blocks.py).

    Grid (tiles, parts). A program reads blocks_per_part blocks of a tile, BLOCKS at a time.
    blocks_per_part is a multiple of BLOCKS. A tile has QUERIES rows. If the mask has fewer rows,
    the program reads only the first ROWS rows of the tile.

    Args:
        SPLIT: Whether there are several parts. If so, the program that ends last among the programs
            of a tile writes the tile's list.
        counters: int32, one zero for each tile.
        KIND: "bool" or "additive".
        LOWEST: If LOWEST is negative, numbers up to LOWEST also hide keys in tiles in which every
            query has a number of at least ORDINARY (codegen/attention/blocks.py).
        flags: fp32 [tiles, key_blocks]. With both LOWEST and SPLIT, fp32 [tiles, key_blocks + parts
            * ROWS].
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    pair = tile // query_tiles
    first_row = tile % query_tiles * QUERIES
    rows = first_row + tl.arange(0, ROWS)
    mask_rows = mask_ptr + (
        (pair // num_heads).to(tl.int64) * sequence_stride
        + (pair % num_heads).to(tl.int64) * head_stride
        + rows.to(tl.int64) * row_stride
    )
    num_rows = tl.minimum(num_queries - first_row, QUERIES)
    numbers = key_blocks
    if LOWEST < 0:
        ordinary = tl.zeros((ROWS,), tl.int32)
        if SPLIT:
            numbers += parts * ROWS
    own_flags = flags_ptr + tile.to(tl.int64) * numbers
    rows_flags = own_flags + key_blocks + tl.arange(0, ROWS)
    last = tl.minimum((part + 1) * blocks_per_part, key_blocks)
    for first in range(part * blocks_per_part, last, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        keys = blocks[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
        places = mask_rows[:, None, None] + keys.to(tl.int64)[None, :, :] * column_stride
        inside = (rows < num_queries)[:, None, None] & (keys < num_keys)[None, :, :]
        # Keys and queries that do not exist are treated as hidden.
        other = 0 if KIND == "bool" else float("-inf")
        values = tl.load(places, mask=inside, other=other)
        if LOWEST < 0:
            flags, here = lowest_flags(values, num_rows, LOWEST, ORDINARY, KEYS)
            ordinary = tl.maximum(ordinary, here)
        else:
            flags = block_flags(values, num_rows * KEYS, KIND)
        tl.store(own_flags + blocks, flags, mask=blocks < last)
    if LOWEST < 0 and SPLIT:
        tl.store(rows_flags + part * ROWS, ordinary.to(tl.float32))
    # The stores of all threads must be done before the reads below and before the atomic of one
    # thread.
    tl.debug_barrier()
    complete = part == 0
    if SPLIT:
        complete = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == parts - 1
    if complete:
        hidden = 0.0
        if LOWEST < 0:
            if SPLIT:
                for other_part in range(parts):
                    flags = tl.load(rows_flags + other_part * ROWS, cache_modifier=".cg")
                    ordinary = tl.maximum(ordinary, flags.to(tl.int32))
            every = tl.min(tl.where(rows < num_queries, ordinary, 1), axis=0)
            hidden = LOWEST_FLAG * every.to(tl.float32)
        own_list = out_ptr + tile.to(tl.int64) * (key_blocks + 1)
        write_list(own_list, own_flags, key_blocks, hidden, LISTED)
        if SPLIT:
            # Reset the counter for the next launch.
            tl.store(counters_ptr + tile, 0)
