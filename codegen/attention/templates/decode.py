"""Attention of few queries to the keys and values of a cache, where they lie.

The heads of q that share a head of keys, and the queries of a sequence, are the rows of one tile,
so a key is read once for all of them. Keys are on the M side of the tensor core, rows on its N
side: a tile of 64 keys fills the former with one row only. The blocks of keys that the rows see are
dealt out to SPLITS programs (Flash-Decoding, Dao et al. 2023); the last of them to arrive merges
their results in a fixed order, so the sum does not depend on which was last.
"""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import listed_key, listed_range, tile_list
from tilewright.codegen.attention.templates.softmax import LOG2E, LOWEST, capped
from tilewright.codegen.attention.templates.tiles import block_of_step, block_range


@triton.jit
def rows_of_tile(
    tile, row_offsets_ptr, positions_ptr, cache_lengths_ptr, sequence, kv_head, num_queries,
    positions_sequence_stride, positions_stride,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """(first token of the sequence, number of the query in it, head, position, whether there is
    such a row; lowest and highest position) of a tile's rows."""
    rows = tl.arange(0, ROWS)
    query = tile * TOKENS + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    if RAGGED:
        first = tl.load(row_offsets_ptr + sequence).to(tl.int64)
        own = (tl.load(row_offsets_ptr + sequence + 1).to(tl.int64) - first).to(tl.int32)
    else:
        first = sequence.to(tl.int64) * num_queries
        own = num_queries
    real = (rows < TOKENS * GROUP) & (query < own)
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
    mask_column_stride, num_keys,
    MASK: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr,
):  # fmt: skip
    """(scores [keys, rows] with the mask's numbers added, which of them are seen)."""
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
        given = tl.load(places, mask=seen, other=0)
        if MASK_KIND == "bool":
            seen = seen & (given != 0)
        else:
            wide = given.to(tl.float32)
            seen = seen & (wide != float("-inf"))
            scores += tl.maximum(wide * LOG2E, LOWEST)
    return scores, seen


@triton.jit
def load_block(rows, needed, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """[keys, BLOCK] of keys or values at `rows`, zeros where CHECKED and not needed."""
    columns = tl.arange(0, BLOCK)
    real = (columns < WIDTH)[None, :]
    if CHECKED:
        real = real & needed[:, None]
    return tl.load(rows[:, None] + columns[None, :], mask=real, other=0.0)


@triton.jit
def attend_block(
    first_key, q, output, top, total, k_base, v_base, table_ptr, own_keys, num_pages, num_keys,
    k_page_stride, v_page_stride, positions, query, head, mask_base, mask_head_stride,
    mask_row_stride, mask_column_stride, factor, softcap,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(output [V, rows], top, total) after a block of keys. MASKED: some row may not see some key
    of it."""
    keys = first_key + tl.arange(0, BLOCK_N)
    exists = keys < own_keys
    if table_ptr is None:
        slots = keys.to(tl.int64)
        k_rows = k_base + slots * K_STRIDE
        v_rows = v_base + slots * V_STRIDE
    else:
        if PAGE_SIZE % BLOCK_N == 0:
            pages = tl.load(table_ptr + first_key // PAGE_SIZE).to(tl.int64)
        else:
            pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=exists, other=-1).to(tl.int64)
        exists &= (pages >= 0) & (pages < num_pages)
        slots = (keys % PAGE_SIZE).to(tl.int64)
        k_rows = k_base + pages * k_page_stride + slots * K_STRIDE
        v_rows = v_base + pages * v_page_stride + slots * V_STRIDE
    # All keys of a whole block exist, unless their page does not.
    CHECKED: tl.constexpr = MASKED or table_ptr is not None
    k = load_block(k_rows, exists, HEAD_DIM, HEAD_BLOCK, CHECKED)
    scores = tl.dot(k.to(q.dtype), q)
    if CAPPED:
        scores = capped(scores, factor, softcap)
    elif MASK_KIND == "additive":
        scores *= factor
    needed = exists
    if MASKED:
        scores, seen = seen_keys(
            scores, keys, exists, positions, query, head, mask_base, mask_head_stride,
            mask_row_stride, mask_column_stride, num_keys, MASK, WINDOW, MASK_KIND,
        )  # fmt: skip
        scores = tl.where(seen, scores, float("-inf"))
        # Values that no row sees are not read: NaN times zero is NaN.
        needed = tl.max(seen.to(tl.int32), axis=1) > 0
    elif CHECKED:
        scores = tl.where(exists[:, None], scores, float("-inf"))
    v = load_block(v_rows, needed, V_DIM, V_BLOCK, CHECKED)
    steepness = 1.0 if CAPPED or MASK_KIND == "additive" else factor
    new_top = tl.maximum(top, tl.max(scores, axis=0) * steepness)
    # A row that has seen no key yet.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * steepness - base[None, :])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, axis=0)
    output = tl.dot(v.to(q.dtype).T, weights.to(q.dtype), output * decay[None, :])
    return output, new_top, total


@triton.jit
def hand_over(
    output, top, total, parts, counter_ptr, split, real,
    V_BLOCK: tl.constexpr, ROWS: tl.constexpr, REAL: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes one program's result to `parts`: values [SPLITS, REAL, V_BLOCK], then the largest
    logits and the sums of weights, [SPLITS, REAL] each. Whether it is the last of SPLITS to do so;
    the counter is left at zero for the next launch."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, V_BLOCK)
    # A program whose rows saw no key has nothing to hand over but that.
    places = (split * REAL + rows)[None, :] * V_BLOCK + dims[:, None]
    tl.store(parts + places, output, mask=(real & (top > float("-inf")))[None, :])
    numbers = parts + SPLITS * REAL * V_BLOCK + split * REAL + rows
    tl.store(numbers, top, mask=rows < REAL)
    tl.store(numbers + SPLITS * REAL, total, mask=rows < REAL)
    # All threads' stores come before the one thread's atomic.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def merged(
    parts, V_BLOCK: tl.constexpr, REAL: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr
):
    """(output [REAL, V_BLOCK], top, total) of SPLITS parts, CHUNK of them loaded at once."""
    rows = tl.arange(0, REAL)
    dims = tl.arange(0, V_BLOCK)
    numbers = parts + SPLITS * REAL * V_BLOCK
    top = tl.full((REAL,), float("-inf"), tl.float32)
    total = tl.zeros((REAL,), tl.float32)
    output = tl.zeros((REAL, V_BLOCK), tl.float32)
    for first in tl.static_range(0, SPLITS, CHUNK):
        splits = first + tl.arange(0, CHUNK)
        own = splits[:, None] * REAL + rows[None, :]
        there = (splits < SPLITS)[:, None]
        tops = tl.load(numbers + own, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(numbers + SPLITS * REAL + own, mask=there, other=0.0, cache_modifier=".cg")
        # What was not handed over is not yet known to be so: all are loaded, some for nothing.
        values = tl.load(
            parts + own[:, :, None] * V_BLOCK + dims[None, None, :], mask=there[:, :, None],
            other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        # Else the largest logits are waited for before the values are asked for.
        tl.debug_barrier()
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops - base[None, :])
        values = tl.where((tops > float("-inf"))[:, :, None], values * weights[:, :, None], 0.0)
        decay = tl.exp2(top - base)
        output = output * decay[:, None] + tl.sum(values, axis=0)
        total = total * decay + tl.sum(totals * weights, axis=0)
        top = new_top
    return output, top, total


@triton.jit
def finish(
    output, top, total, out_ptr, sinks_ptr, v_scale_ptr, first_token, query, head, real,
    kv_head, scale_stride,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes rows of output [rows, V_BLOCK], divided by their sums of weights."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        scale = tl.exp2(top - new_top)
        output *= scale[:, None]
        total = total * scale + tl.exp2(sink - new_top)
    output /= tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale_ptr is not None:
        output *= tl.load(v_scale_ptr + kv_head * scale_stride)
    dims = tl.arange(0, V_BLOCK)
    places = ((first_token + query) * HEADS + head) * V_DIM
    tl.store(
        out_ptr + places[:, None] + dims[None, :], output.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (dims < V_DIM)[None, :],
    )  # fmt: skip


@triton.jit
def attention_decode(
    q_ptr, k_ptr, v_ptr, out_ptr, workspace_ptr, counters_ptr, row_offsets_ptr, block_table_ptr,
    key_lengths_ptr, positions_ptr, cache_lengths_ptr, mask_ptr, mask_blocks_ptr, sinks_ptr,
    k_scale_ptr, v_scale_ptr,
    num_queries, num_keys, num_pages, row_tiles, factor, softcap,
    q_token_stride, q_head_stride, k_page_stride, k_head_stride, v_page_stride, v_head_stride,
    positions_sequence_stride, positions_stride, table_stride, mask_sequence_stride,
    mask_head_stride, mask_row_stride, mask_column_stride, blocks_sequence_stride,
    blocks_tile_stride, scale_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, CAPPED: tl.constexpr,
    LISTED: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    REAL: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, V_DIM] = softmax(factor * q @ k^T, capped, masked) @ v, ragged or equal runs.

    Grid (B * row_tiles * NUM_KV_HEADS * SPLITS,). A tile has TOKENS queries of GROUP heads in ROWS
    rows. Strides count elements; K_STRIDE and V_STRIDE from key to key of a page; without a block
    table a sequence is a page. factor takes products to the base-2 domain; where CAPPED to twice
    what tanh is taken of there, and softcap takes its result to the base-2 domain. MASK_KIND:
    "none", "bool" or "additive", of the mask tensor. LISTED: mask_blocks
    has the mask's list of blocks (codegen/attention/blocks.py), a row for each QUERIES queries.
    REAL: the first rows, a power of two, that hold all queries. With SPLITS > 1, workspace has
    SPLITS * REAL * (V_BLOCK + 2) numbers for each tile, and counters one zero; CHUNK parts are
    merged at once.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        # The next kernel waits for this one's end, but its programs may take their places now.
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    kv_head = tile % NUM_KV_HEADS
    row_tile = tile // NUM_KV_HEADS % row_tiles
    sequence = tile // NUM_KV_HEADS // row_tiles
    first_token, query, head, positions, real, lowest, highest = rows_of_tile(
        row_tile, row_offsets_ptr, positions_ptr, cache_lengths_ptr, sequence, kv_head,
        num_queries, positions_sequence_stride, positions_stride, GROUP, TOKENS, RAGGED, MASK, ROWS,
    )  # fmt: skip
    query = tl.where(real, query, -1)
    token = first_token + tl.where(real, query, 0)
    dims = tl.arange(0, HEAD_BLOCK)
    q_places = token * q_token_stride + head.to(tl.int64) * q_head_stride
    q = tl.load(
        q_ptr + q_places[None, :] + dims[:, None], mask=real[None, :] & (dims < HEAD_DIM)[:, None],
        other=0.0,
    )  # fmt: skip
    own_keys = num_keys
    if key_lengths_ptr is not None:
        own_keys = tl.minimum(num_keys, tl.load(key_lengths_ptr + sequence).to(tl.int32))
    k_base = k_ptr + kv_head.to(tl.int64) * k_head_stride
    v_base = v_ptr + kv_head.to(tl.int64) * v_head_stride
    table = block_table_ptr
    if block_table_ptr is None:
        k_base += sequence.to(tl.int64) * k_page_stride
        v_base += sequence.to(tl.int64) * v_page_stride
    else:
        table = block_table_ptr + sequence.to(tl.int64) * table_stride
    mask_base = mask_ptr
    if MASK_KIND != "none":
        mask_base = mask_ptr + sequence.to(tl.int64) * mask_sequence_stride
    if k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr + kv_head * scale_stride)
    # The blocks of the tile; with a list from here on places on it. Whole ones come first, and this
    # program takes those from `begin` to `end`.
    first, whole, num_whole, num_blocks = block_range(
        lowest, highest, 0, own_keys, 0, MASK, WINDOW, BLOCK_N
    )
    whole_block = whole
    entries = mask_blocks_ptr
    if LISTED:
        entries, count = tile_list(
            mask_blocks_ptr, sequence, kv_head, row_tile * TOKENS, blocks_sequence_stride, 0,
            blocks_tile_stride, QUERIES,
        )  # fmt: skip
        first, whole, num_whole, num_blocks, whole_block = listed_range(
            entries, count, first, whole, num_whole, num_blocks
        )
    elif MASK_KIND != "none":
        # Nobody has said which blocks the mask lets all rows see whole.
        whole = first
        num_whole = 0
    each = (num_blocks + SPLITS - 1) // SPLITS
    begin = tl.minimum(split * each, num_blocks)
    end = tl.minimum(begin + each, num_blocks)
    middle = tl.minimum(tl.maximum(num_whole, begin), end)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((V_BLOCK, ROWS), tl.float32)
    for step in tl.range(begin, middle, num_stages=STAGES):
        first_key = (whole_block + step) * BLOCK_N
        output, top, total = attend_block(
            first_key, q, output, top, total, k_base, v_base, table, own_keys, num_pages,
            num_keys, k_page_stride, v_page_stride, positions, query, head, mask_base,
            mask_head_stride, mask_row_stride, mask_column_stride, factor, softcap, HEAD_DIM,
            V_DIM, HEAD_BLOCK, V_BLOCK, K_STRIDE, V_STRIDE, PAGE_SIZE, MASK, WINDOW, MASK_KIND,
            CAPPED, False, BLOCK_N,
        )  # fmt: skip
    for step in tl.range(middle, end, num_stages=STAGES):
        block = block_of_step(step, first, whole, num_whole)
        first_key = block * BLOCK_N
        if LISTED:
            first_key = listed_key(entries, block, BLOCK_N, BLOCK_N)
        output, top, total = attend_block(
            first_key, q, output, top, total, k_base, v_base, table, own_keys, num_pages,
            num_keys, k_page_stride, v_page_stride, positions, query, head, mask_base,
            mask_head_stride, mask_row_stride, mask_column_stride, factor, softcap, HEAD_DIM,
            V_DIM, HEAD_BLOCK, V_BLOCK, K_STRIDE, V_STRIDE, PAGE_SIZE, MASK, WINDOW, MASK_KIND,
            CAPPED, True, BLOCK_N,
        )  # fmt: skip
    if SPLITS == 1:
        finish(
            tl.trans(output), top, total, out_ptr, sinks_ptr, v_scale_ptr, first_token, query, head,
            real, kv_head, scale_stride, NUM_KV_HEADS * GROUP, V_DIM, V_BLOCK,
        )  # fmt: skip
    else:
        parts = workspace_ptr + tile.to(tl.int64) * (SPLITS * REAL * (V_BLOCK + 2))
        is_last = hand_over(
            output, top, total, parts, counters_ptr + tile, split, real, V_BLOCK, ROWS, REAL, SPLITS
        )
        if is_last:
            _, m_query, m_head, _, m_real, _, _ = rows_of_tile(
                row_tile, row_offsets_ptr, positions_ptr, cache_lengths_ptr, sequence, kv_head,
                num_queries, positions_sequence_stride, positions_stride, GROUP, TOKENS, RAGGED,
                "none", REAL,
            )  # fmt: skip
            m_output, m_top, m_total = merged(parts, V_BLOCK, REAL, SPLITS, CHUNK)
            finish(
                m_output, m_top, m_total, out_ptr, sinks_ptr, v_scale_ptr, first_token, m_query,
                m_head, m_real, kv_head, scale_stride, NUM_KV_HEADS * GROUP, V_DIM, V_BLOCK,
            )  # fmt: skip
