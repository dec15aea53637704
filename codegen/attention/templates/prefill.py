"""Attention of many queries to the keys and values of a cache, where they lie.

A program has a tile of the queries of one head; heads that share keys run side by side, so that all
but the first find them in the L2 cache. Online softmax over blocks of keys (FlashAttention, Dao et
al. 2022): those that no query of the tile sees are not visited, those that all see are not masked.
"""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import listed_key, listed_range, tile_list
from tilewright.codegen.attention.templates.decode import load_block
from tilewright.codegen.attention.templates.softmax import (
    LOG2E,
    add_values,
    capped,
    mask_scores,
    online_softmax_step,
)
from tilewright.codegen.attention.templates.tiles import (
    block_of_step,
    block_range,
    query_positions,
    tile_place,
)


@triton.jit
def paged_rows(
    first_key, own_keys, k_base, v_base, table_ptr, num_pages, k_page_stride, v_page_stride,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(pointers to the keys, to the values, which of them exist) of a block. table_ptr: the pages
    of the sequence; None: its keys follow each other."""
    keys = first_key + tl.arange(0, BLOCK_N)
    exists = keys < own_keys
    if table_ptr is None:
        slots = keys.to(tl.int64)
        return k_base + slots * K_STRIDE, v_base + slots * V_STRIDE, exists
    else:
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=exists, other=-1).to(tl.int64)
        exists &= (pages >= 0) & (pages < num_pages)
        slots = (keys % PAGE_SIZE).to(tl.int64)
        k_rows = k_base + pages * k_page_stride + slots * K_STRIDE
        v_rows = v_base + pages * v_page_stride + slots * V_STRIDE
        return k_rows, v_rows, exists


@triton.jit
def attention_prefill(
    q_ptr, k_ptr, v_ptr, out_ptr, row_offsets_ptr, block_table_ptr, key_lengths_ptr, positions_ptr,
    cache_lengths_ptr, mask_ptr, mask_blocks_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, num_queries, num_keys, num_pages, row_tiles, head_group, factor, softcap,
    q_token_stride, q_head_stride, k_page_stride, k_head_stride, v_page_stride, v_head_stride,
    positions_sequence_stride, positions_stride, table_stride, mask_sequence_stride,
    mask_head_stride, mask_row_stride, mask_column_stride, blocks_sequence_stride,
    blocks_head_stride, blocks_tile_stride, k_scale_stride, v_scale_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, SEQUENCES: tl.constexpr, HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, CAPPED: tl.constexpr, KEYS: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """out [T, Hq, V_DIM] = softmax(factor * q @ k^T, capped, masked) @ v, ragged or equal runs.

    Grid (tiles,), tiles by tile_place. Strides count elements; K_STRIDE and V_STRIDE from key to
    key of a page; without a block table a sequence is a page. factor, softcap: as in
    `attention_decode`. MASK_KIND: "none", "bool" or "additive", of the mask tensor, whose list of
    blocks mask_blocks is, blocks of KEYS keys for tiles of QUERIES queries. TMA: descriptors reach
    keys and values.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence, head, first_row, real = tile_place(
        row_offsets_ptr, row_offsets_ptr, num_sequences, row_tiles, head_group, NUM_HEADS,
        SEQUENCES, False, RAGGED, BLOCK_M,
    )  # fmt: skip
    kv_head = (head // GROUP).to(tl.int64)
    if RAGGED:
        query_base = tl.load(row_offsets_ptr + sequence).to(tl.int64)
        query_end = tl.load(row_offsets_ptr + sequence + 1).to(tl.int64)
        own_queries = tl.where(real, (query_end - query_base).to(tl.int32), 0)
    else:
        query_base = sequence.to(tl.int64) * num_queries
        own_queries = tl.where(real, num_queries, 0)
    own_keys = tl.where(real, num_keys, 0)
    if key_lengths_ptr is not None:
        own_keys = tl.minimum(own_keys, tl.load(key_lengths_ptr + sequence).to(tl.int32))
    positions, lowest, highest = query_positions(
        positions_ptr, cache_lengths_ptr, sequence, query_base, first_row, own_queries,
        positions_sequence_stride, positions_stride, RAGGED, BLOCK_M,
    )  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    row_real = rows < own_queries
    q_base = q_ptr + query_base * q_token_stride + head.to(tl.int64) * q_head_stride
    q_rows = q_base + rows.to(tl.int64) * q_token_stride
    q = load_block(q_rows, row_real, HEAD_DIM, HEAD_BLOCK, True)
    k_base = k_ptr + kv_head * k_head_stride
    v_base = v_ptr + kv_head * v_head_stride
    table = block_table_ptr
    if block_table_ptr is None:
        k_base += sequence.to(tl.int64) * k_page_stride
        v_base += sequence.to(tl.int64) * v_page_stride
    else:
        table = block_table_ptr + sequence.to(tl.int64) * table_stride
    mask_base = mask_ptr
    if MASK_KIND != "none":
        mask_base = mask_ptr + sequence.to(tl.int64) * mask_sequence_stride
        mask_base += head.to(tl.int64) * mask_head_stride
    if k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr + kv_head * k_scale_stride)
    LISTED: tl.constexpr = MASK_KIND != "none"
    first, whole, num_whole, num_blocks = block_range(
        lowest, highest, 0, own_keys, 0, MASK, WINDOW, KEYS if LISTED else BLOCK_N
    )
    whole_block = whole
    entries = mask_blocks_ptr
    if LISTED:
        entries, count = tile_list(
            mask_blocks_ptr, sequence, head, first_row, blocks_sequence_stride, blocks_head_stride,
            blocks_tile_stride, QUERIES,
        )  # fmt: skip
        # From here on these are places on the list, and of parts of its blocks.
        first, whole, num_whole, num_blocks, whole_block = listed_range(
            entries, count, first, whole, num_whole, num_blocks
        )
        PARTS: tl.constexpr = KEYS // BLOCK_N
        first *= PARTS
        whole *= PARTS
        num_whole *= PARTS
        num_blocks *= PARTS
        whole_block *= PARTS
    k_source = k_base
    v_source = v_base
    if TMA:
        # A descriptor needs a row; without keys no block is read.
        tma_keys = tl.maximum(own_keys, 1)
        k_source = tl.make_tensor_descriptor(
            k_base, [tma_keys, HEAD_DIM], [K_STRIDE, 1], [BLOCK_N, HEAD_BLOCK]
        )
        v_source = tl.make_tensor_descriptor(
            v_base, [tma_keys, V_DIM], [V_STRIDE, 1], [BLOCK_N, V_BLOCK]
        )
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, V_BLOCK), tl.float32)
    PAGED: tl.constexpr = block_table_ptr is not None
    steepness = 1.0 if CAPPED else factor
    for step in tl.range(0, num_whole):
        key = (whole_block + step) * BLOCK_N
        if TMA:
            k = k_source.load([key, 0])
        else:
            k_rows, v_rows, exists = paged_rows(
                key, own_keys, k_base, v_base, table, num_pages, k_page_stride, v_page_stride,
                K_STRIDE, V_STRIDE, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
            k = load_block(k_rows, exists, HEAD_DIM, HEAD_BLOCK, PAGED)
        scores = tl.dot(q, k.to(q.dtype).T)
        if CAPPED:
            scores = capped(scores, factor, softcap)
        if PAGED:
            scores = tl.where(exists[None, :], scores, float("-inf"))
        weights, decay, top, total = online_softmax_step(scores, top, total, steepness, 0.0)
        v = v_source.load([key, 0]) if TMA else load_block(v_rows, exists, V_DIM, V_BLOCK, PAGED)
        output = add_values(output, decay, weights, v.to(q.dtype), False)
    masked_steepness = 1.0 if CAPPED or MASK_KIND == "additive" else factor
    for step in tl.range(num_whole, num_blocks):
        place = block_of_step(step, first, whole, num_whole)
        key = place * BLOCK_N
        if LISTED:
            key = listed_key(entries, place, KEYS, BLOCK_N)
        if TMA:
            k = k_source.load([key, 0])
        else:
            k_rows, v_rows, exists = paged_rows(
                key, own_keys, k_base, v_base, table, num_pages, k_page_stride, v_page_stride,
                K_STRIDE, V_STRIDE, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
            k = load_block(k_rows, exists, HEAD_DIM, HEAD_BLOCK, True)
        scores = tl.dot(q, k.to(q.dtype).T)
        if CAPPED:
            scores = capped(scores, factor, softcap)
        scores, seen = mask_scores(
            scores, positions, first_row, key, own_queries, own_keys, 0, 0, mask_base,
            mask_row_stride, mask_column_stride, steepness, MASK, WINDOW, MASK_KIND, False, False,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if PAGED:
            scores = tl.where(exists[None, :], scores, float("-inf"))
        weights, decay, top, total = online_softmax_step(scores, top, total, masked_steepness, 0.0)
        # NaN times a weight of zero is NaN: values that no query sees count as zeros.
        needed = tl.max(seen.to(tl.int32), axis=0) > 0
        if TMA:
            v = v_source.load([key, 0])
            v = tl.where(needed[:, None], v, 0.0)
        else:
            v = load_block(v_rows, needed, V_DIM, V_BLOCK, True)
        output = add_values(output, decay, weights, v.to(q.dtype), False)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        scale = tl.exp2(top - new_top)
        output *= scale[:, None]
        total = total * scale + tl.exp2(sink - new_top)
    output /= tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale_ptr is not None:
        output *= tl.load(v_scale_ptr + kv_head * v_scale_stride)
    dims = tl.arange(0, V_BLOCK)
    places = ((query_base + rows) * NUM_HEADS + head) * V_DIM
    tl.store(
        out_ptr + places[:, None] + dims[None, :], output.to(out_ptr.dtype.element_ty),
        mask=row_real[:, None] & (dims < V_DIM)[None, :],
    )  # fmt: skip
