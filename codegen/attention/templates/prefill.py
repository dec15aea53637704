"""Computes the attention of many queries to the keys and values of a cache, which are read in
place.

A program computes a tile of queries for one head. Heads that share keys run at the same time: the
first head loads the keys, and the other heads find the keys in the L2 cache. The softmax is
computed online over blocks of keys (FlashAttention, Dao et al. 2022). Blocks that no query of the
tile attends to are skipped. Blocks that all queries attend to are not masked.
"""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import blocks_to_visit
from tilewright.codegen.attention.templates.core import attend
from tilewright.codegen.attention.templates.loads import load_queries
from tilewright.codegen.attention.templates.softmax import finish
from tilewright.codegen.attention.templates.tiles import (
    keys_in_sight,
    query_positions,
    run_of,
    tile_place,
)


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
    QUERIES: tl.constexpr, TMA: tl.constexpr, ONE_LOOP: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [T, Hq, V_DIM] = softmax(factor * q @ k^T, capped, masked) @ v, for sequences
    that are ragged or have equal lengths.

    Grid (tiles,), in the order of `tile_place`. Strides count elements.

    Args:
        K_STRIDE, V_STRIDE: The strides between the keys of a page. Without a block table, a
            sequence is one page.
        factor, softcap: As in `attention_decode`.
        MASK_KIND: The kind of the mask tensor: "none", "bool" or "additive".
        mask_blocks: The mask's list of blocks of KEYS keys, for tiles of QUERIES queries.
        TMA: Whether tensor descriptors load queries, keys and values.
        ONE_LOOP: As in `attend`.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sequence, head, first_row, real = tile_place(
        row_offsets_ptr, row_offsets_ptr, num_sequences, row_tiles, head_group, NUM_HEADS,
        SEQUENCES, False, RAGGED, BLOCK_M,
    )  # fmt: skip
    kv_head = (head // GROUP).to(tl.int64)
    query_base, own_queries = run_of(row_offsets_ptr, sequence, num_queries)
    own_queries = tl.where(real, own_queries, 0)
    own_keys = tl.where(real, num_keys, 0)
    if key_lengths_ptr is not None:
        own_keys = tl.minimum(own_keys, tl.load(key_lengths_ptr + sequence).to(tl.int32))
    positions, lowest, highest = query_positions(
        positions_ptr, cache_lengths_ptr, sequence, query_base, first_row, own_queries,
        positions_sequence_stride, positions_stride, RAGGED, BLOCK_M,
    )  # fmt: skip
    # Do not read keys after the last visible key: that memory may hold anything, even NaN.
    own_keys = keys_in_sight(own_keys, highest, 0, MASK)
    q_base = q_ptr + query_base * q_token_stride + head.to(tl.int64) * q_head_stride
    q = load_queries(
        q_base, first_row, own_queries, q_token_stride, HEAD_DIM, HEAD_BLOCK, BLOCK_M, TMA
    )
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
    entries, first, whole, num_whole, num_blocks, whole_block = blocks_to_visit(
        mask_blocks_ptr, blocks_sequence_stride, blocks_head_stride, blocks_tile_stride, sequence,
        head, first_row, lowest, highest, 0, own_keys, 0, MASK, WINDOW, QUERIES, KEYS, BLOCK_N,
    )  # fmt: skip
    k_source = k_base
    v_source = v_base
    if TMA:
        # A descriptor needs at least one row. If there are no keys, nothing is read through it.
        tma_keys = tl.maximum(own_keys, 1)
        k_source = tl.make_tensor_descriptor(
            k_base, [tma_keys, HEAD_DIM], [K_STRIDE, 1], [BLOCK_N, HEAD_BLOCK]
        )
        v_source = tl.make_tensor_descriptor(
            v_base, [tma_keys, V_DIM], [V_STRIDE, 1], [BLOCK_N, V_BLOCK]
        )
    # With these masks, hidden keys may lie between visible ones.
    GUARDED: tl.constexpr = MASK_KIND != "none" or MASK == "sliding_window" or MASK == "chunked"
    output, top, total = attend(
        q, None, k_source, v_source, None, (table, num_pages, k_page_stride, v_page_stride), 0,
        V_STRIDE, positions, first_row, own_queries, own_keys, 0, 0,
        (mask_base, mask_row_stride, mask_column_stride),
        (entries, first, whole, num_whole, num_blocks, whole_block), factor, softcap,
        (HEAD_DIM, 0, V_DIM), (HEAD_BLOCK, 0, V_BLOCK), K_STRIDE, 0, PAGE_SIZE, False, 0, MASK,
        WINDOW, MASK_KIND, KEYS, CAPPED, 0.0, False, True, TMA, False, False, GUARDED, ONE_LOOP,
        WARP_SPECIALIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    heads = head + tl.zeros((BLOCK_M,), tl.int32)
    finish(
        output, top, total, out_ptr, None, sinks_ptr, v_scale_ptr, kv_head * v_scale_stride,
        query_base, rows, heads, rows < own_queries, NUM_HEADS, V_DIM, V_BLOCK, 0.0,
    )  # fmt: skip
