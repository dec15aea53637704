"""Computes the attention of MLA prefill. A key has two parts, and all heads may share the second
part.

A score is q . k + q_rope . k_rope. Keys and values are read by stride from the output of the
up-projection. The softmax is computed online over blocks of keys (FlashAttention, Dao et al. 2022),
in the base-2 domain. Blocks that no query of a tile attends to are skipped. Blocks in which every
query attends to all keys are not masked. The kernel finds both kinds of blocks by the positions of
queries and keys or, if there is a mask tensor, in a list of blocks.
"""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import blocks_to_visit
from tilewright.codegen.attention.templates.core import attend
from tilewright.codegen.attention.templates.loads import load_queries
from tilewright.codegen.attention.templates.softmax import finish
from tilewright.codegen.attention.templates.tiles import (
    base_of,
    keys_in_sight,
    query_positions,
    run_of,
    tile_place,
)
from tilewright.codegen.mla.templates.rotation import load_rotation, rotated_queries


@triton.jit
def mla_attention(
    q_ptr, q_rope_ptr, k_ptr, v_ptr, rope_ptr, out_ptr, lse_ptr,
    query_offsets_ptr, key_offsets_ptr, query_starts_ptr, key_starts_ptr, key_lengths_ptr,
    positions_ptr, mask_ptr, mask_blocks_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, cos_ptr,
    sin_ptr, num_sequences, num_queries, num_keys, row_tiles, head_group, table_rows, factor,
    q_sequence_stride, q_head_stride, q_token_stride,
    q_rope_sequence_stride, q_rope_head_stride, q_rope_token_stride,
    k_sequence_stride, k_head_stride, v_sequence_stride, v_head_stride, v_stride,
    rope_sequence_stride, positions_sequence_stride, positions_stride, mask_sequence_stride,
    mask_head_stride, mask_row_stride, mask_column_stride, blocks_sequence_stride,
    blocks_head_stride, blocks_tile_stride,
    NUM_HEADS: tl.constexpr, SEQUENCES: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V_DIM: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_STRIDE: tl.constexpr, V_BY_KEY: tl.constexpr, V_ALIGNMENT: tl.constexpr,
    ROPE_STRIDE: tl.constexpr, MASK: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr, COS_STRIDES: tl.constexpr,
    SIN_STRIDES: tl.constexpr, BY_POSITION: tl.constexpr,
    SHIFT: tl.constexpr, PROMOTE: tl.constexpr, CHAINED: tl.constexpr, ONE_LOOP: tl.constexpr,
    TMA: tl.constexpr, JOINT: tl.constexpr, ROPE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Computes the attention of MLA prefill for ragged or dense sequences: out [rows, H, V_DIM] =
    softmax(q @ k^T + q_rope @ k_rope^T) @ v, scaled and masked.

    If lse_ptr is given, the kernel also stores the log-sum-exp lse [rows, H]. Grid (tiles,).
    Strides count elements.

    Args:
        K_STRIDE, ROPE_STRIDE: The strides between keys.
        V_BY_KEY: Whether the keys of a value's dim are contiguous. v_stride is then the stride
            between dims. If not, v_stride is the stride between keys.
        factor: The softmax scale times log2(e). It is positive.
        V_ALIGNMENT: The number of elements in 16 bytes.
        MASK_KIND: The kind of the mask tensor: "none", "bool" or "additive".
        mask_blocks: The mask's list of blocks, for tiles of QUERIES queries and KEYS keys. BLOCK_M
            divides QUERIES, and BLOCK_N divides KEYS. Only blocks on the list are visited.
        JOINT: Whether one descriptor loads keys and the values that follow them in memory.
        CHAINED, ONE_LOOP: As in `attend`.
        ROPE_STYLE: The rotation of q_rope; "none" if q_rope is already rotated.
        table_rows: The number of rows of cos and sin.
    """
    # A program without a tile runs to the end with no queries and no keys, because Triton cannot
    # specialise warps if a program returns early.
    sequence, head, first_row, real = tile_place(
        query_offsets_ptr, key_offsets_ptr, num_sequences, row_tiles, head_group,
        NUM_HEADS, SEQUENCES, SORTED, RAGGED, BLOCK_M,
    )  # fmt: skip
    key_start = 0
    if key_starts_ptr is not None:
        key_start = tl.load(key_starts_ptr + sequence).to(tl.int32)
    query_base, own_queries = run_of(query_offsets_ptr, sequence, num_queries)
    own_queries = tl.where(real, own_queries, 0)
    key_base, own_keys = run_of(key_offsets_ptr, sequence, num_keys)
    own_keys = tl.where(real, own_keys, 0)
    if key_lengths_ptr is not None:
        length = tl.load(key_lengths_ptr + sequence).to(tl.int32)
        own_keys = tl.minimum(own_keys, length - key_start)
    # A descriptor has to start at a multiple of 16 bytes. If the keys of a dim are contiguous, the
    # descriptor starts `lead` keys before the sequence's first key, and these keys are masked.
    LED: tl.constexpr = RAGGED and V_BY_KEY and TMA
    lead = 0
    if LED:
        lead = (key_base % V_ALIGNMENT).to(tl.int32)
        key_base -= lead
        key_start -= lead
        own_keys = tl.where(own_keys > 0, own_keys + lead, 0)
    positions, lowest, highest = query_positions(
        positions_ptr, query_starts_ptr, sequence, query_base, first_row, own_queries,
        positions_sequence_stride, positions_stride, RAGGED, BLOCK_M,
    )  # fmt: skip
    own_keys = keys_in_sight(own_keys, highest, key_start, MASK)
    if ROPE > 0:
        q_rope_base = base_of(
            q_rope_ptr, query_base, sequence, head, q_rope_token_stride, q_rope_sequence_stride,
            q_rope_head_stride, RAGGED,
        )  # fmt: skip
    if ROPE_STYLE != "none":
        low, high, low_cos, high_cos, low_sin, high_sin = load_rotation(
            q_rope_base, cos_ptr, sin_ptr, first_row, own_queries, q_rope_token_stride,
            positions, query_base, table_rows, ROPE, ROPE_STYLE, FULL_WIDTH, COS_STRIDES,
            SIN_STRIDES, BY_POSITION, BLOCK_M,
        )  # fmt: skip
    q_base = base_of(
        q_ptr, query_base, sequence, head, q_token_stride, q_sequence_stride, q_head_stride, RAGGED
    )
    q = load_queries(q_base, first_row, own_queries, q_token_stride, NOPE, NOPE_BLOCK, BLOCK_M, TMA)
    q_rope = None
    rope_source = rope_ptr
    if ROPE > 0:
        if ROPE_STYLE != "none":
            if ROPE_STYLE == "half":
                # Without the barrier, ptxas would wait for the columns of q, the largest load,
                # before it issues the other loads.
                tl.debug_barrier()
            q_rope = rotated_queries(
                low, high, low_cos, high_cos, low_sin, high_sin, q_rope_base, first_row,
                q_rope_token_stride, ROPE, ROPE_STYLE, BLOCK_M,
            )  # fmt: skip
        else:
            q_rope = load_queries(
                q_rope_base, first_row, own_queries, q_rope_token_stride, ROPE, ROPE_BLOCK,
                BLOCK_M, TMA,
            )  # fmt: skip
        rope_source = base_of(
            rope_ptr, key_base, sequence, head, ROPE_STRIDE, rope_sequence_stride, 0, RAGGED
        )
    k_source = base_of(
        k_ptr, key_base, sequence, head, K_STRIDE, k_sequence_stride, k_head_stride, RAGGED
    )
    v_first = 0
    if V_BY_KEY:
        v_source = base_of(v_ptr, 0, sequence, head, 0, v_sequence_stride, v_head_stride, RAGGED)
        if RAGGED:
            v_first = key_base.to(tl.int32)
    else:
        v_source = base_of(
            v_ptr, key_base, sequence, head, v_stride, v_sequence_stride, v_head_stride, RAGGED
        )
    mask_base = mask_ptr
    if MASK_KIND != "none":
        mask_base = mask_ptr + sequence.to(tl.int64) * mask_sequence_stride
        mask_base += head.to(tl.int64) * mask_head_stride
    if q_scale_ptr is not None:
        factor *= tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        factor *= tl.load(k_scale_ptr)
    entries, first, whole, num_whole, num_blocks, whole_block = blocks_to_visit(
        mask_blocks_ptr, blocks_sequence_stride, blocks_head_stride, blocks_tile_stride, sequence,
        head, first_row, lowest, highest, key_start, own_keys, lead, MASK, WINDOW, QUERIES, KEYS,
        BLOCK_N,
    )  # fmt: skip
    if TMA:
        # A descriptor needs at least one row. If there are no keys, nothing is read through it.
        tma_keys = tl.maximum(own_keys, 1)
        k_source = tl.make_tensor_descriptor(
            k_source, [tma_keys, NOPE + V_DIM if JOINT else NOPE], [K_STRIDE, 1],
            [BLOCK_N, NOPE_BLOCK],
        )  # fmt: skip
        if JOINT:
            v_source = k_source
        elif V_BY_KEY:
            v_source = tl.make_tensor_descriptor(
                v_source, [V_DIM, v_first + tma_keys], [v_stride, 1], [V_BLOCK, BLOCK_N]
            )
        else:
            v_source = tl.make_tensor_descriptor(
                v_source, [tma_keys, V_DIM], [v_stride, 1], [BLOCK_N, V_BLOCK]
            )
        if ROPE_TMA:
            rope_source = tl.make_tensor_descriptor(
                rope_source, [tma_keys, ROPE], [ROPE_STRIDE, 1], [BLOCK_N, ROPE_BLOCK]
            )

    V_COLUMN: tl.constexpr = NOPE if JOINT else 0
    output, top, total = attend(
        q, q_rope, k_source, v_source, rope_source, (None, 0, 0, 0), v_first, v_stride, positions,
        first_row, own_queries, own_keys, key_start, lead,
        (mask_base, mask_row_stride, mask_column_stride),
        (entries, first, whole, num_whole, num_blocks, whole_block), factor, 0.0,
        (NOPE, ROPE, V_DIM), (NOPE_BLOCK, ROPE_BLOCK, V_BLOCK), K_STRIDE, ROPE_STRIDE, 1, V_BY_KEY,
        V_COLUMN, MASK, WINDOW, MASK_KIND, KEYS, False, SHIFT, PROMOTE, CHAINED, TMA, ROPE_TMA, LED,
        False, ONE_LOOP, WARP_SPECIALIZE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    rows = first_row + tl.arange(0, BLOCK_M)
    finish(
        output, top, total, out_ptr, lse_ptr, None, v_scale_ptr, 0, query_base, rows, head,
        rows < own_queries, NUM_HEADS, V_DIM, V_BLOCK, SHIFT,
    )  # fmt: skip
