"""Computes the attention of few queries to the keys and values of a cache, which are read in place.

A tile has one row for each query of a sequence in each of the query heads that share a head of
keys. Therefore each key is read once for all these rows. The keys are on the M side of the tensor
core's product, and the rows are on its N side. In this way, 64 keys fill the M side even if there
is only one row. A key may have two parts: a latent, and rope columns (MLA with absorbed weights).
The latent may also be the value. In this case, it is loaded once for both products.

The visible blocks of keys are divided among SPLITS programs (Flash-Decoding, Dao et al. 2023). A
second kernel merges the results of these programs in a fixed order.
"""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import blocks_to_visit, key_of_step
from tilewright.codegen.attention.templates.loads import converted, load_rows, places_of_keys
from tilewright.codegen.attention.templates.softmax import LOG2E, LOWEST, capped, finish
from tilewright.codegen.attention.templates.tiles import keys_in_sight, ragged_place, run_of
from tilewright.codegen.templates.rounding import numbers_of_codes


@triton.jit
def row_tile_of(
    number, row_offsets_ptr, num_sequences, row_tiles,
    SEQUENCES: tl.constexpr, TOKENS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Returns (sequence, tile within the sequence, whether the tile exists) for the row tile with
    the given number.

    Sequences of equal length have row_tiles tiles each. If the sequences are ragged, the tiles that
    exist come first in the numbering.
    """
    if RAGGED:
        sequence, tile, there = ragged_place(
            number, row_offsets_ptr, row_offsets_ptr, num_sequences, SEQUENCES, False, TOKENS
        )
    else:
        sequence = number // row_tiles
        tile = number % row_tiles
        there = True
    return sequence, tile, there


@triton.jit
def rows_of_tile(
    tile, there, row_offsets_ptr, positions_ptr, cache_lengths_ptr, sequence, kv_head, first_head,
    num_queries, positions_sequence_stride, positions_stride,
    GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, TOKENS: tl.constexpr, RAGGED: tl.constexpr,
    MASK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Returns facts about the rows of a tile: (first token of the sequence, query within the
    sequence, head, position, whether the row exists, lowest position of all rows, highest position
    of all rows)."""
    rows = tl.arange(0, ROWS)
    query = tile * TOKENS + rows // TILE_HEADS
    head = kv_head * GROUP + rows % TILE_HEADS
    first, own = run_of(row_offsets_ptr, sequence, num_queries)
    if RAGGED:
        own = tl.where(there, own, 0)
    real = (rows < TOKENS * TILE_HEADS) & (query < own)
    if TILE_HEADS < GROUP:
        head += first_head
        real = real & (first_head + rows % TILE_HEADS < GROUP)
    positions = query
    lowest = 0
    highest = 0
    if MASK != "none":
        if positions_ptr is not None:
            base = positions_ptr + sequence.to(tl.int64) * positions_sequence_stride
            if RAGGED:
                base = positions_ptr + first * positions_stride
            positions = tl.load(base + query.to(tl.int64) * positions_stride, mask=real, other=0)
            positions = positions.to(tl.int32)
        elif cache_lengths_ptr is not None:
            positions = query + tl.load(cache_lengths_ptr + sequence).to(tl.int32)
        lowest = tl.min(tl.where(real, positions, 2**30), axis=0)
        highest = tl.max(tl.where(real, positions, -1), axis=0)
    return first, query, head, positions, real, lowest, highest


@triton.jit
def seen_keys(
    scores, keys, exists, positions, query, head, mask_base, mask_head_stride, mask_row_stride,
    mask_column_stride, is_whole,
    MASK: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """Returns (scores [keys, rows] after an additive mask, whether each row attends to each key).

    is_whole: whether the mask tensor hides nothing in this block. If so, the mask tensor is not
    read. This argument is used only if LISTED.
    """
    seen = exists[:, None] & (query >= 0)[None, :]
    if MASK != "none":
        seen = seen & (keys[:, None] <= positions[None, :])
        if MASK == "sliding_window":
            seen = seen & (keys[:, None] > (positions - WINDOW)[None, :])
        if MASK == "chunked":
            seen = seen & (keys[:, None] >= (positions // WINDOW * WINDOW)[None, :])
    if MASK_KIND != "none":
        columns = head.to(tl.int64) * mask_head_stride + query.to(tl.int64) * mask_row_stride
        places = mask_base + keys.to(tl.int64)[:, None] * mask_column_stride + columns[None, :]
        if LISTED:
            given = tl.load(places, mask=seen & (is_whole == 0), other=0)
        else:
            given = tl.load(places, mask=seen, other=0)
        if MASK_KIND == "bool":
            if LISTED:
                given |= is_whole.to(given.dtype)
            seen = seen & (given != 0)
        else:
            wide = given.to(tl.float32)
            seen = seen & (wide != float("-inf"))
            scores += tl.maximum(wide * LOG2E, LOWEST)
    return scores, seen


@triton.jit
def rows_from(base, page, page_stride, slot, STRIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns pointers to BLOCK_N rows of a page, starting at a slot."""
    start = base + page * page_stride + tl.cast(slot, tl.int64) * STRIDE
    return start + tl.arange(0, BLOCK_N) * STRIDE


@triton.jit
def attend_block(
    first_key, step, num_whole, q, q_rope, output, top, total, k_base, v_base, rope_base, table_ptr,
    own_keys, num_pages, k_page_stride, v_page_stride, rope_page_stride, positions, query,
    head, mask_base, mask_head_stride, mask_row_stride, mask_column_stride, factor, softcap,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    LISTED: tl.constexpr, CHAINED: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    ROUND_GROUP: tl.constexpr, ZERO_SCALE: tl.constexpr, LEAST: tl.constexpr,
    LEAST_DIVISOR: tl.constexpr,
):  # fmt: skip
    """Adds a block of keys to the online softmax, and returns the new (output [V, rows], top,
    total). total [BLOCK_N, rows] still has a row for each key of a block; these rows are summed
    after the last block.

    MASKED: the mask hides at least one key of the block from at least one row. LISTED: in the first
    num_whole steps, the mask tensor hides nothing. If v_base is None, the keys are the values. If
    ROUND_GROUP > 0, keys are rounded to the numbers that e4m3 codes stand for.
    """
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    keys = first_key + tl.arange(0, BLOCK_N)
    pages, slots, exists = places_of_keys(
        first_key, own_keys, 0, table_ptr, num_pages, PAGE_SIZE, ONE_PAGE, BLOCK_N
    )
    k_rows = k_base + pages * k_page_stride + slots * K_STRIDE
    if v_base is not None:
        v_rows = v_base + pages * v_page_stride + slots * V_STRIDE
    if rope_base is not None:
        rope_rows = rope_base + pages * rope_page_stride + slots * ROPE_STRIDE
    first_slot = first_key if table_ptr is None else first_key % PAGE_SIZE
    if v_base is None and (table_ptr is None or ONE_PAGE):
        # The block is contiguous in memory, so its rows lie at constant offsets from one address.
        # If each of these many wide rows had its own address, a thread would run out of registers.
        k_rows = rows_from(k_base, pages, k_page_stride, first_slot, K_STRIDE, BLOCK_N)
        if rope_base is not None:
            rope_rows = rows_from(
                rope_base, pages, rope_page_stride, first_slot, ROPE_STRIDE, BLOCK_N
            )
    # All keys of a whole block exist, unless the page of the block does not exist.
    CHECKED: tl.constexpr = MASKED or table_ptr is not None
    if v_base is None and MASKED:
        # Do not read keys that no row attends to. If such a key contained NaN, the result would be
        # NaN too, because the keys are also the values, and NaN times a weight of zero is NaN.
        added, seen = seen_keys(
            tl.zeros((BLOCK_N, ROWS), tl.float32), keys, exists, positions, query, head, mask_base,
            mask_head_stride, mask_row_stride, mask_column_stride,
            step < num_whole, MASK, WINDOW, MASK_KIND, LISTED,
        )  # fmt: skip
        exists = tl.max(seen.to(tl.int32), axis=1) > 0
    k = load_rows(k_rows, exists if CHECKED else None, HEAD_DIM, HEAD_BLOCK)
    if ROUND_GROUP > 0:
        k = numbers_of_codes(k, ROUND_GROUP, ZERO_SCALE, LEAST, LEAST_DIVISOR)
        # Keys and columns that do not exist were loaded as zeros. Their scale is zero, so the
        # division may have made them NaN.
        there = (tl.arange(0, HEAD_BLOCK) < HEAD_DIM)[None, :]
        if CHECKED:
            there = there & exists[:, None]
        if CHECKED or HEAD_DIM < HEAD_BLOCK:
            k = tl.where(there, k, 0.0)
    scores = tl.dot(converted(k, q.dtype), q)
    if rope_base is not None:
        k_rope = load_rows(rope_rows, exists if CHECKED else None, ROPE_DIM, ROPE_BLOCK)
        if CHAINED:
            scores = tl.dot(converted(k_rope, q.dtype), q_rope, scores)
        else:
            scores += tl.dot(converted(k_rope, q.dtype), q_rope)
    if CAPPED:
        scores = capped(scores, factor, softcap)
    elif MASK_KIND == "additive":
        scores *= factor
    needed = exists
    if MASKED and v_base is None:
        if MASK_KIND == "additive":
            scores += added
        scores = tl.where(seen, scores, float("-inf"))
    elif MASKED:
        scores, seen = seen_keys(
            scores, keys, exists, positions, query, head, mask_base, mask_head_stride,
            mask_row_stride, mask_column_stride, False, MASK, WINDOW, MASK_KIND, False,
        )  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))
        # Do not read values that no row attends to: NaN times zero is NaN.
        needed = tl.max(seen.to(tl.int32), axis=1) > 0
    elif CHECKED:
        scores = tl.where(exists[:, None], scores, float("-inf"))
    v = k
    if v_base is not None:
        v = load_rows(v_rows, needed if CHECKED else None, V_DIM, V_BLOCK)
    steepness = 1.0 if CAPPED or MASK_KIND == "additive" else factor
    new_top = tl.maximum(top, tl.max(scores, axis=0) * steepness)
    # Rows that have not attended to any key yet use the base 0 in place of -inf.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * steepness - base[None, :])
    decay = tl.exp2(top - base)
    total = total * decay[None, :] + weights
    output = tl.dot(converted(v, q.dtype).T, weights.to(q.dtype), output * decay[None, :])
    return output, new_top, total


@triton.jit
def store_part(
    output, top, total, parts, split, real,
    V_BLOCK: tl.constexpr, ROWS: tl.constexpr, REAL: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Stores the result of one program to `parts`. `parts` holds the values [SPLITS, REAL,
    V_BLOCK], then the largest logits [SPLITS, REAL], then the sums of weights [SPLITS, REAL]."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, V_BLOCK)
    # Do not store the values of rows that attended to no key. The largest logit of such a row is
    # -inf, which tells the merging kernel to ignore the row.
    places = (split * REAL + rows)[None, :] * V_BLOCK + dims[:, None]
    tl.store(parts + places, output, mask=(real & (top > float("-inf")))[None, :])
    numbers = parts + SPLITS * REAL * V_BLOCK + split * REAL + rows
    tl.store(numbers, top, mask=rows < REAL)
    tl.store(numbers + SPLITS * REAL, total, mask=rows < REAL)


@triton.jit
def attention_decode(
    q_ptr, q_rope_ptr, k_ptr, v_ptr, k_rope_ptr, out_ptr, workspace_ptr,
    row_offsets_ptr, block_table_ptr, key_lengths_ptr, positions_ptr, cache_lengths_ptr, mask_ptr,
    mask_blocks_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, num_queries, num_keys, num_pages, row_tiles, factor, softcap,
    q_token_stride, q_head_stride, k_page_stride, k_head_stride, v_page_stride, v_head_stride,
    positions_sequence_stride, positions_stride, table_stride, mask_sequence_stride,
    mask_head_stride, mask_row_stride, mask_column_stride, blocks_sequence_stride,
    blocks_tile_stride, k_scale_stride, v_scale_stride, q_rope_token_stride, q_rope_head_stride,
    rope_page_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RAGGED: tl.constexpr, SEQUENCES: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, CAPPED: tl.constexpr,
    LISTED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, REAL: tl.constexpr, CHAINED: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, LAUNCH_PDL: tl.constexpr,
    ROUND_GROUP: tl.constexpr = 0, ZERO_SCALE: tl.constexpr = 0.0, LEAST: tl.constexpr = 0.0,
    LEAST_DIVISOR: tl.constexpr = 0.0,
):  # fmt: skip
    """Computes out [T, Hq, V_DIM] = softmax(factor * q @ k^T, capped, masked) @ v, for sequences
    that are ragged or have equal lengths.

    Grid (row tiles * NUM_KV_HEADS * head tiles * SPLITS,). Strides count elements. If SPLITS > 1,
    programs store their results to workspace, SPLITS * REAL * (V_BLOCK + 2) numbers for each tile,
    and `attention_merge` merges them.

    Args:
        row_tiles: The number of row tiles of each sequence. If sequences are ragged, the grid has
            at least as many row tiles as all sequences together.
        k_rope: ROPE_DIM more columns of each key, which all heads share. q_rope has the same
            columns of the queries.
        v: If v is None, the value of a key is the key without its rope columns.
        factor: Converts products to the base-2 domain.
        softcap: If CAPPED, factor * product is twice the argument of tanh in the base-2 domain, and
            softcap converts the result of tanh to that domain.
        TOKENS, TILE_HEADS, ROWS: A tile has TOKENS queries of TILE_HEADS heads, padded to ROWS
            rows. The TILE_HEADS heads are among the GROUP heads that share a head of keys.
        REAL: The number of rows that hold all queries; a power of two.
        K_STRIDE, V_STRIDE: The strides between the keys of a page. Without a block table, a
            sequence is one page.
        CHAINED: The products of both parts of a key are summed in one accumulator.
        MASK_KIND: The kind of the mask tensor: "none", "bool" or "additive".
        LISTED: mask_blocks has the mask's list of blocks of KEYS keys
            (codegen/attention/blocks.py), with a row for each QUERIES queries.
        ROUND_GROUP: If ROUND_GROUP is greater than 0, the columns of a key that are also its value
            are first rounded, as by `round_rows`, to the numbers that e4m3 codes stand for.
            ROUND_GROUP columns share a scale.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        # Allow the next kernel's programs to start now. They then wait until this kernel ends.
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tile // HEAD_TILES % NUM_KV_HEADS
    sequence, row_tile, there = row_tile_of(
        tile // (HEAD_TILES * NUM_KV_HEADS), row_offsets_ptr, num_sequences, row_tiles, SEQUENCES,
        TOKENS, RAGGED,
    )  # fmt: skip
    first_head = tile % HEAD_TILES * TILE_HEADS
    first_token, query, head, positions, real, lowest, highest = rows_of_tile(
        row_tile, there, row_offsets_ptr, positions_ptr, cache_lengths_ptr, sequence, kv_head,
        first_head, num_queries, positions_sequence_stride, positions_stride, GROUP, TILE_HEADS,
        TOKENS, RAGGED, MASK, ROWS,
    )  # fmt: skip
    query = tl.where(real, query, -1)
    token = first_token + tl.where(real, query, 0)
    dims = tl.arange(0, HEAD_BLOCK)
    q_places = token * q_token_stride + head.to(tl.int64) * q_head_stride
    q = tl.load(
        q_ptr + q_places[None, :] + dims[:, None], mask=real[None, :] & (dims < HEAD_DIM)[:, None],
        other=0.0,
    )  # fmt: skip
    q_rope = None
    rope_base = None
    if k_rope_ptr is not None:
        rope_dims = tl.arange(0, ROPE_BLOCK)
        rope_places = token * q_rope_token_stride + head.to(tl.int64) * q_rope_head_stride
        q_rope = tl.load(
            q_rope_ptr + rope_places[None, :] + rope_dims[:, None],
            mask=real[None, :] & (rope_dims < ROPE_DIM)[:, None], other=0.0,
        )  # fmt: skip
        rope_base = k_rope_ptr
        if block_table_ptr is None:
            rope_base += sequence.to(tl.int64) * rope_page_stride
    own_keys = num_keys
    if key_lengths_ptr is not None:
        own_keys = tl.minimum(num_keys, tl.load(key_lengths_ptr + sequence).to(tl.int32))
    if RAGGED:
        own_keys = tl.where(there, own_keys, 0)
    own_keys = keys_in_sight(own_keys, highest, 0, MASK)
    k_base = k_ptr + kv_head.to(tl.int64) * k_head_stride
    v_base = None
    if v_ptr is not None:
        v_base = v_ptr + kv_head.to(tl.int64) * v_head_stride
    table = block_table_ptr
    if block_table_ptr is None:
        k_base += sequence.to(tl.int64) * k_page_stride
        if v_ptr is not None:
            v_base += sequence.to(tl.int64) * v_page_stride
    else:
        table = block_table_ptr + sequence.to(tl.int64) * table_stride
    mask_base = mask_ptr
    if MASK_KIND != "none":
        mask_base = mask_ptr + sequence.to(tl.int64) * mask_sequence_stride
    if k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr + kv_head * k_scale_stride)
    # Find the blocks of the tile. If there is a list, `first` and `whole` are indices into it.
    # Whole blocks come first. This program does the steps from `begin` to `end`.
    entries, first, whole, num_whole, num_blocks, whole_block = blocks_to_visit(
        mask_blocks_ptr, blocks_sequence_stride, 0, blocks_tile_stride, sequence, kv_head,
        row_tile * TOKENS, lowest, highest, 0, own_keys, 0, MASK, WINDOW, QUERIES, KEYS, BLOCK_N,
    )  # fmt: skip
    if MASK_KIND != "none" and not LISTED:
        # Without a list, the mask may hide keys of any block.
        whole = first
        num_whole = 0
    each = (num_blocks + SPLITS - 1) // SPLITS
    begin = tl.minimum(split * each, num_blocks)
    end = tl.minimum(begin + each, num_blocks)
    middle = tl.minimum(tl.maximum(num_whole, begin), end)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    output = tl.zeros((V_BLOCK, ROWS), tl.float32)
    for masked in tl.static_range(2):
        for step in tl.range(
            middle if masked else begin, end if masked else middle, num_stages=STAGES
        ):
            first_key = (whole_block + step) * BLOCK_N
            if masked:
                first_key = key_of_step(
                    step, entries, first, whole, num_whole, False, KEYS, BLOCK_N
                )
            output, top, total = attend_block(
                first_key, step, num_whole, q, q_rope, output, top, total, k_base, v_base,
                rope_base, table, own_keys, num_pages, k_page_stride, v_page_stride,
                rope_page_stride, positions, query, head, mask_base, mask_head_stride,
                mask_row_stride, mask_column_stride, factor, softcap, HEAD_DIM, V_DIM, ROPE_DIM,
                HEAD_BLOCK, V_BLOCK, ROPE_BLOCK, K_STRIDE, V_STRIDE, ROPE_STRIDE, PAGE_SIZE, MASK,
                WINDOW, MASK_KIND, CAPPED, masked == 1, LISTED, CHAINED, BLOCK_N, ROWS, ROUND_GROUP,
                ZERO_SCALE, LEAST, LEAST_DIVISOR,
            )  # fmt: skip
    total = tl.sum(total, axis=0)
    if SPLITS == 1:
        finish(
            tl.trans(output), top, total, out_ptr, None, sinks_ptr, v_scale_ptr,
            kv_head * v_scale_stride, first_token, query, head, real, NUM_KV_HEADS * GROUP, V_DIM,
            V_BLOCK, 0.0,
        )  # fmt: skip
    else:
        parts = workspace_ptr + tile.to(tl.int64) * (SPLITS * REAL * (V_BLOCK + 2))
        store_part(output, top, total, parts, split, real, V_BLOCK, ROWS, REAL, SPLITS)


@triton.jit
def attention_merge(
    workspace_ptr, out_ptr, row_offsets_ptr, sinks_ptr, v_scale_ptr,
    num_sequences, num_queries, row_tiles, v_scale_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr, TOKENS: tl.constexpr, REAL: tl.constexpr, RAGGED: tl.constexpr,
    SEQUENCES: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Merges the parts that `attention_decode` stored, and writes them to out [T, Hq, V_DIM].

    Grid (tiles * REAL, cdiv(V_DIM, COLUMNS)). A program merges COLUMNS columns of one row of a
    tile. SPLIT_BLOCK: a power of two that is at least SPLITS.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) % REAL
    tile = tl.program_id(0) // REAL
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tile // HEAD_TILES % NUM_KV_HEADS
    sequence, row_tile, there = row_tile_of(
        tile // (HEAD_TILES * NUM_KV_HEADS), row_offsets_ptr, num_sequences, row_tiles, SEQUENCES,
        TOKENS, RAGGED,
    )  # fmt: skip
    within = tile % HEAD_TILES * TILE_HEADS + row % TILE_HEADS
    query = row_tile * TOKENS + row // TILE_HEADS
    first, own = run_of(row_offsets_ptr, sequence, num_queries)
    if RAGGED:
        own = tl.where(there, own, 0)
    if (row < TOKENS * TILE_HEADS) & (query < own) & (within < GROUP):
        splits = tl.arange(0, SPLIT_BLOCK)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_part = splits < SPLITS
        parts = workspace_ptr + tile.to(tl.int64) * (SPLITS * REAL * (V_BLOCK + 2))
        own_rows = splits * REAL + row
        numbers = parts + SPLITS * REAL * V_BLOCK + own_rows
        tops = tl.load(numbers, mask=is_part, other=float("-inf"))
        totals = tl.load(numbers + SPLITS * REAL, mask=is_part, other=0.0)
        # Load all values: it is not yet known which parts were stored.
        values = tl.load(
            parts + own_rows[:, None] * V_BLOCK + columns[None, :], mask=is_part[:, None], other=0.0
        )
        top = tl.max(tops, axis=0)
        weights = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
        values = tl.where((tops > float("-inf"))[:, None], values * weights[:, None], 0.0)
        total = tl.sum(totals * weights, axis=0)
        output = tl.sum(values, axis=0)
        head = kv_head * GROUP + within
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            output *= tl.exp2(top - new_top)
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        output /= tl.where(total == 0.0, 1.0, total)
        if v_scale_ptr is not None:
            output *= tl.load(v_scale_ptr + kv_head * v_scale_stride)
        places = ((first + query) * (NUM_KV_HEADS * GROUP) + head) * V_DIM + columns
        tl.store(out_ptr + places, output.to(out_ptr.dtype.element_ty), mask=columns < V_DIM)
