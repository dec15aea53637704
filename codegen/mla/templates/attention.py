"""Attention of MLA prefill: keys in two parts, of which the second may be shared by all heads.

A score is q . k + q_rope . k_rope. Keys and values are read by stride from the output of the
up-projection, rope keys from rows or from the pages of the latent cache. Online softmax over blocks
of keys (FlashAttention, Dao et al. 2022), in the base-2 domain. Blocks that no query of a tile sees
are not visited; blocks that every query sees whole are not masked. Which these are follows from
positions; of a mask tensor a list says it.
"""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import (
    listed_key,
    listed_range,
    tile_list,
)
from tilewright.codegen.attention.templates.softmax import (
    add_values,
    mask_scores,
    online_softmax_step,
)
from tilewright.codegen.attention.templates.tiles import (
    base_of,
    block_of_step,
    block_range,
    own_rows,
    query_positions,
    tile_place,
)
from tilewright.codegen.mla.templates.loads import (
    load_queries,
    load_rotation,
    load_rows,
    rope_rows,
    rotated_queries,
)

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def block_scores(
    q, q_rope, k_source, rope_source, block_table_ptr, sequence, first_key, own_keys, key_start,
    table_stride, num_pages, factor,
    NOPE: tl.constexpr, NOPE_BLOCK: tl.constexpr, K_STRIDE: tl.constexpr,
    ROPE: tl.constexpr, ROPE_BLOCK: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    TMA: tl.constexpr, ROPE_TMA: tl.constexpr, CHAINED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """fp32 [queries, BLOCK_N]: q . k + q_rope . k_rope, not yet scaled where CHAINED.

    k_source, rope_source: descriptors where TMA (ROPE_TMA), else base pointers. CHAINED: both
    products share an accumulator; else each has one, and they are scaled before they are added,
    because the compiler turns a plain sum into a chain.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    if TMA:
        k = k_source.load([first_key, 0])
    else:
        k = load_rows(k_source + keys.to(tl.int64) * K_STRIDE, keys < own_keys, NOPE, NOPE_BLOCK)
    if ROPE > 0:
        if ROPE_TMA:
            k_rope = rope_source.load([first_key, 0])
        else:
            rows, real = rope_rows(
                rope_source, block_table_ptr, sequence, keys, own_keys, key_start,
                table_stride, num_pages, ROPE_STRIDE, PAGE_SIZE, PAGE_STRIDE,
            )  # fmt: skip
            k_rope = load_rows(rows, real, ROPE, ROPE_BLOCK).to(q_rope.dtype)
        scores = tl.dot(q_rope, k_rope.T)
        if not CHAINED:
            scores = scores * factor
            scores += tl.dot(q, k.T) * factor
        else:
            scores = tl.dot(q, k.T, scores)
    else:
        scores = tl.dot(q, k.T)
        if not CHAINED:
            scores *= factor
    return scores


@triton.jit
def load_values(
    v_source, first_key, own_keys, v_first, v_stride, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr,
    V_BY_KEY: tl.constexpr, V_COLUMN: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Values [BLOCK_N, V_BLOCK] of a block of keys. V_BY_KEY: the keys of a dim are contiguous, and
    v_first is the sequence's first. V_COLUMN: where the values start in a descriptor's rows."""
    if TMA:
        if V_BY_KEY:
            values = v_source.load([0, v_first + first_key]).T
        else:
            values = v_source.load([first_key, V_COLUMN])
    else:
        keys = first_key + tl.arange(0, BLOCK_N)
        if V_BY_KEY:
            dims = tl.arange(0, V_BLOCK)
            places = v_source + dims.to(tl.int64)[:, None] * v_stride + (v_first + keys)[None, :]
            mask = (dims < V_DIM)[:, None] & (keys < own_keys)[None, :]
            values = tl.load(places, mask=mask, other=0.0).T
        else:
            places = v_source + keys.to(tl.int64) * v_stride
            values = load_rows(places, keys < own_keys, V_DIM, V_BLOCK)
    return values


@triton.jit
def mla_attention(
    q_ptr, q_rope_ptr, k_ptr, v_ptr, rope_ptr, out_ptr, lse_ptr,
    query_offsets_ptr, key_offsets_ptr, query_starts_ptr, key_starts_ptr, key_lengths_ptr,
    positions_ptr, block_table_ptr, mask_ptr, mask_blocks_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr,
    num_sequences, num_queries, num_keys, row_tiles, head_group, num_pages, table_rows, factor,
    q_sequence_stride, q_head_stride, q_token_stride,
    q_rope_sequence_stride, q_rope_head_stride, q_rope_token_stride,
    k_sequence_stride, k_head_stride, v_sequence_stride, v_head_stride, v_stride,
    rope_sequence_stride, rope_head_stride, positions_sequence_stride, positions_stride,
    table_stride, mask_sequence_stride, mask_head_stride, mask_row_stride, mask_column_stride,
    blocks_sequence_stride, blocks_head_stride, blocks_tile_stride,
    NUM_HEADS: tl.constexpr, SEQUENCES: tl.constexpr, SORTED: tl.constexpr, RAGGED: tl.constexpr,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V_DIM: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    K_STRIDE: tl.constexpr, V_BY_KEY: tl.constexpr, V_ALIGNMENT: tl.constexpr,
    ROPE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    MASK: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr, COS_STRIDES: tl.constexpr,
    SIN_STRIDES: tl.constexpr, BY_POSITION: tl.constexpr,
    SHIFT: tl.constexpr, PROMOTE: tl.constexpr, CHAINED: tl.constexpr, ONE_LOOP: tl.constexpr,
    TMA: tl.constexpr, JOINT: tl.constexpr, ROPE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Attention of MLA prefill: out [rows, H, V_DIM] = softmax(q @ k^T + q_rope @ k_rope^T) @ v,
    scaled and masked, and its log-sum-exp lse [rows, H] if asked; ragged or dense sequences.

    Grid (tiles,). Strides count elements: K_STRIDE and ROPE_STRIDE from key to key, v_stride too,
    or from dim to dim where V_BY_KEY (a dim's keys are contiguous). factor: softmax scale times
    log2(e), positive. V_ALIGNMENT: elements in 16 bytes. MASK_KIND: "none", "bool" or "additive",
    of the mask tensor; mask_blocks: its list of blocks, of tiles of QUERIES queries and KEYS keys,
    which BLOCK_M and BLOCK_N divide: the blocks on it are visited, and no others. JOINT: one
    descriptor reads keys and values, which follow them. ONE_LOOP: masked and whole blocks share a
    loop; else whole blocks have a loop of their own. ROPE_STYLE: the rotation of q_rope, "none" if
    it is rotated already; table_rows: of cos and sin.
    """
    # A program without a tile goes on with no queries and no keys: Triton cannot specialise warps
    # where a program returns early.
    sequence, head, first_row, real = tile_place(
        query_offsets_ptr, key_offsets_ptr, num_sequences, row_tiles, head_group,
        NUM_HEADS, SEQUENCES, SORTED, RAGGED, BLOCK_M,
    )  # fmt: skip
    key_start = 0
    if key_starts_ptr is not None:
        key_start = tl.load(key_starts_ptr + sequence).to(tl.int32)
    query_base, own_queries, key_base, own_keys = own_rows(
        query_offsets_ptr, key_offsets_ptr, key_lengths_ptr, sequence, real, num_queries, num_keys,
        key_start, RAGGED,
    )  # fmt: skip
    # A descriptor starts at a multiple of 16 bytes: where keys are contiguous, it starts `lead`
    # keys before the sequence's first, and those are masked.
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
    q_rope = q
    rope_source = rope_ptr
    if ROPE > 0:
        if ROPE_STYLE != "none":
            if ROPE_STYLE == "half":
                # Else ptxas waits for these columns, the most of all, before it loads the others.
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
        if block_table_ptr is None:
            rope_source = base_of(
                rope_ptr, key_base, sequence, head, ROPE_STRIDE, rope_sequence_stride,
                rope_head_stride, RAGGED,
            )  # fmt: skip
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
    LISTED: tl.constexpr = MASK_KIND != "none"
    first, whole, num_whole, num_blocks = block_range(
        lowest, highest, key_start, own_keys, lead, MASK, WINDOW, KEYS if LISTED else BLOCK_N
    )
    whole_block = whole
    if LISTED:
        entries, count = tile_list(
            mask_blocks_ptr, sequence, head, first_row, blocks_sequence_stride,
            blocks_head_stride, blocks_tile_stride, QUERIES,
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
    if TMA:
        # A descriptor needs a row; without keys no block is read.
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
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, V_BLOCK), tl.float32)
    # The factors that take scores to the base-2 domain: in whole blocks, and in masked ones.
    steepness = factor if CHAINED else 1.0
    masked_steepness = 1.0 if MASK_KIND == "additive" else steepness
    if not ONE_LOOP:
        for step in tl.range(0, num_whole, warp_specialize=WARP_SPECIALIZE):
            key = (whole_block + step) * BLOCK_N
            scores = block_scores(
                q, q_rope, k_source, rope_source, block_table_ptr, sequence, key, own_keys,
                key_start, table_stride, num_pages, factor, NOPE, NOPE_BLOCK, K_STRIDE, ROPE,
                ROPE_BLOCK, ROPE_STRIDE, PAGE_SIZE, PAGE_STRIDE, TMA, ROPE_TMA, CHAINED, BLOCK_N,
            )  # fmt: skip
            weights, decay, top, total = online_softmax_step(scores, top, total, steepness, SHIFT)
            values = load_values(
                v_source, key, own_keys, v_first, v_stride, V_DIM, V_BLOCK, V_BY_KEY, V_COLUMN,
                TMA, BLOCK_N,
            )  # fmt: skip
            output = add_values(output, decay, weights, values, PROMOTE)
    masked = 0
    if not ONE_LOOP:
        masked = num_whole
    for step in tl.range(masked, num_blocks, warp_specialize=WARP_SPECIALIZE):
        if LISTED:
            place = first + step if ONE_LOOP else block_of_step(step, first, whole, num_whole)
            key = listed_key(entries, place, KEYS, BLOCK_N)
        elif ONE_LOOP:
            key = (first + step) * BLOCK_N
        else:
            key = block_of_step(step, first, whole, num_whole) * BLOCK_N
        scores = block_scores(
            q, q_rope, k_source, rope_source, block_table_ptr, sequence, key, own_keys,
            key_start, table_stride, num_pages, factor, NOPE, NOPE_BLOCK, K_STRIDE, ROPE,
            ROPE_BLOCK, ROPE_STRIDE, PAGE_SIZE, PAGE_STRIDE, TMA, ROPE_TMA, CHAINED, BLOCK_N,
        )  # fmt: skip
        scores, _ = mask_scores(
            scores, positions, first_row, key, own_queries, own_keys, key_start, lead, mask_base,
            mask_row_stride, mask_column_stride, steepness, MASK, WINDOW, MASK_KIND, LED,
            ONE_LOOP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        weights, decay, top, total = online_softmax_step(
            scores, top, total, masked_steepness, SHIFT
        )
        values = load_values(
            v_source, key, own_keys, v_first, v_stride, V_DIM, V_BLOCK, V_BY_KEY, V_COLUMN, TMA,
            BLOCK_N,
        )  # fmt: skip
        output = add_values(output, decay, weights, values, PROMOTE)

    # A row that sees no key gives zeros and a log-sum-exp of -inf.
    sees = total > 0.0
    total = tl.where(sees, total, 1.0)
    output *= (1.0 / total)[:, None]
    if v_scale_ptr is not None:
        output *= tl.load(v_scale_ptr)
    rows = first_row + tl.arange(0, BLOCK_M)
    row_mask = rows < own_queries
    out_rows = (query_base + rows) * NUM_HEADS + head
    dims = tl.arange(0, V_BLOCK)
    tl.store(
        out_ptr + out_rows[:, None] * V_DIM + dims[None, :],
        output.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (dims < V_DIM)[None, :],
    )
    if lse_ptr is not None:
        lse = tl.where(sees, (top - SHIFT + tl.log2(total)) * LN2, float("-inf"))
        tl.store(lse_ptr + out_rows, lse, mask=row_mask)
