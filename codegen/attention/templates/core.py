"""Computes the attention of a tile of queries to the keys of their sequence. The kernels for many
queries share these functions.

A score is q . k. If keys have rope columns, it is q . k + q_rope . k_rope. The softmax is computed
online over blocks of keys (FlashAttention, Dao et al. 2022), in the base-2 domain. A block is whole
if every query of the tile attends to all keys of the block. Whole blocks are not masked, unless one
loop handles all blocks.

Operands that belong together are passed as tuples:

- `k_pages`: the pages of the sequence or None, the number of pages in the pool, the page stride of
  keys, the page stride of values.
- `masks`: a pointer to the mask's row for the first query, the row stride, the column stride.
- `blocks`: the result of `blocks_to_visit`.
"""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.block_list import key_of_step
from tilewright.codegen.attention.templates.loads import converted, load_rows, places_of_keys
from tilewright.codegen.attention.templates.softmax import (
    add_values,
    capped,
    mask_scores,
    online_softmax_step,
)


@triton.jit
def block_scores(q, q_rope, k, k_rope, factor, CHAINED: tl.constexpr):
    """Returns q . k + q_rope . k_rope in fp32 [queries, keys]. If CHAINED, the result is not yet
    scaled.

    CHAINED: both products are summed in one accumulator. If not, each product has its own
    accumulator, and is scaled before the two products are added. If they were scaled after the
    addition, the compiler would sum both in one accumulator.
    """
    if q_rope is None:
        scores = tl.dot(q, k.T)
        if not CHAINED:
            scores *= factor
    elif CHAINED:
        scores = tl.dot(q, k.T, tl.dot(q_rope, k_rope.T))
    else:
        scores = tl.dot(q_rope, k_rope.T) * factor
        scores += tl.dot(q, k.T) * factor
    return scores


@triton.jit
def load_values(
    source, rows, real, first_key, v_first, v_stride, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr,
    V_BY_KEY: tl.constexpr, V_COLUMN: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Loads the values [BLOCK_N, V_BLOCK] of a block of keys.

    If TMA, the values are loaded through the descriptor `source`, whose rows hold them from column
    V_COLUMN on. If not TMA, they are loaded at the pointers `rows`. If V_BY_KEY, the keys of each
    dimension are contiguous in memory, and v_first is the sequence's first key.
    """
    if TMA:
        if V_BY_KEY:
            values = source.load([0, v_first + first_key]).T
        else:
            values = source.load([first_key, V_COLUMN])
    elif V_BY_KEY:
        dims = tl.arange(0, V_BLOCK)
        keys = v_first + first_key + tl.arange(0, BLOCK_N)
        places = source + dims.to(tl.int64)[:, None] * v_stride + keys[None, :]
        inside = (dims < V_DIM)[:, None]
        if real is not None:
            inside = inside & real[None, :]
        values = tl.load(places, mask=inside, other=0.0).T
    else:
        values = load_rows(rows, real, V_DIM, V_BLOCK)
    return values


@triton.jit
def attend_keys(
    key, output, top, total, q, q_rope, k_source, v_source, rope_source, k_pages, v_first,
    v_stride, positions, first_row, own_queries, own_keys, key_start, lead, masks, factor,
    softcap,
    DIMS: tl.constexpr, BLOCKS: tl.constexpr, K_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, V_BY_KEY: tl.constexpr, V_COLUMN: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
    PROMOTE: tl.constexpr, CHAINED: tl.constexpr, TMA: tl.constexpr, ROPE_TMA: tl.constexpr,
    LED: tl.constexpr, GUARDED: tl.constexpr, MASKED: tl.constexpr, EVERY_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the BLOCK_N keys that start at `key` to the online softmax, and returns the new (output,
    top, total). MASKED: the mask hides at least one of the keys from at least one query.
    EVERY_BLOCK: all blocks are handled as masked blocks."""
    table, num_pages, k_page_stride, v_page_stride = k_pages
    pages, slots, exists = places_of_keys(
        key, own_keys, key_start, table, num_pages, PAGE_SIZE, PAGE_SIZE % BLOCK_N == 0, BLOCK_N
    )
    # All keys of a block that is not masked exist, unless the page of the block does not exist.
    real = exists if MASKED or table is not None else None
    if TMA:
        k = k_source.load([key, 0])
    else:
        k_rows = k_source + pages * k_page_stride + slots * K_STRIDE
        k = load_rows(k_rows, real, DIMS[0], BLOCKS[0])
    k_rope = None
    if q_rope is not None:
        if ROPE_TMA:
            k_rope = rope_source.load([key, 0])
        else:
            # Here, the rope columns are never paged.
            rope_rows = rope_source + slots * ROPE_STRIDE
            k_rope = converted(load_rows(rope_rows, real, DIMS[1], BLOCKS[1]), q.dtype)
    scores = block_scores(q, q_rope, converted(k, q.dtype), k_rope, factor, CHAINED)
    # This factor converts scores to the base-2 domain.
    steepness = factor if CHAINED else 1.0
    if CAPPED:
        scores = capped(scores, factor, softcap)
        steepness = 1.0
    if MASKED:
        scores, seen = mask_scores(
            scores, positions, first_row, key, own_queries, own_keys, key_start, lead, masks,
            steepness, MASK, WINDOW, MASK_KIND, LED, EVERY_BLOCK, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if MASK_KIND == "additive":
            steepness = 1.0
    if table is not None:
        scores = tl.where(exists[None, :], scores, float("-inf"))
    weights, decay, top, total = online_softmax_step(scores, top, total, steepness, SHIFT)
    if GUARDED and MASKED:
        # Replace values that no query attends to by zeros: a NaN times a weight of zero would be
        # NaN.
        needed = tl.max(seen.to(tl.int32), axis=0) > 0
        real = exists & needed
    v_rows = None
    if not TMA:
        v_rows = v_source + pages * v_page_stride + slots * v_stride
    values = load_values(
        v_source, v_rows, real, key, v_first, v_stride, DIMS[2], BLOCKS[2], V_BY_KEY, V_COLUMN, TMA,
        BLOCK_N,
    )  # fmt: skip
    if TMA and GUARDED and MASKED:
        values = tl.where(needed[:, None], values, 0.0)
    output = add_values(output, decay, weights, converted(values, q.dtype), PROMOTE)
    return output, top, total


@triton.jit
def attend(
    q, q_rope, k_source, v_source, rope_source, k_pages, v_first, v_stride, positions,
    first_row, own_queries, own_keys, key_start, lead, masks, blocks, factor, softcap,
    DIMS: tl.constexpr, BLOCKS: tl.constexpr, K_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, V_BY_KEY: tl.constexpr, V_COLUMN: tl.constexpr, MASK: tl.constexpr,
    WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    SHIFT: tl.constexpr, PROMOTE: tl.constexpr, CHAINED: tl.constexpr, TMA: tl.constexpr,
    ROPE_TMA: tl.constexpr, LED: tl.constexpr, GUARDED: tl.constexpr, ONE_LOOP: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns (output [BLOCK_M, V], top, total) of a tile of queries. `top` has the largest score
    of each query, and `total` has the sum of its weights. The output is not yet divided by `total`.

    Args:
        k_source, v_source: Tensor descriptors if TMA, else pointers to the sequence's first key and
            value.
        rope_source: A descriptor of the keys' rope columns if ROPE_TMA, else a pointer.
        DIMS: The width of the first part of a query, the width of its rope columns, and the width
            of a value.
        BLOCKS: The three widths of DIMS, padded to the widths of tiles.
        factor, softcap, CAPPED: As in `attention_decode`. The factor is positive.
        SHIFT: As in `online_softmax_step`.
        GUARDED: Whether there may be keys between visible keys that no query attends to. The values
            of such keys may be NaN.
        ONE_LOOP: Whether the same loop handles masked blocks and whole blocks. If not, whole blocks
            have their own loop.
    """
    entries, first, whole, num_whole, num_blocks, whole_block = blocks
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    output = tl.zeros((BLOCK_M, BLOCKS[2]), tl.float32)
    masked = 0
    if not ONE_LOOP:
        masked = num_whole
        for step in tl.range(0, num_whole, warp_specialize=WARP_SPECIALIZE):
            output, top, total = attend_keys(
                (whole_block + step) * BLOCK_N, output, top, total, q, q_rope, k_source, v_source,
                rope_source, k_pages, v_first, v_stride, positions, first_row,
                own_queries, own_keys, key_start, lead, masks, factor, softcap, DIMS, BLOCKS,
                K_STRIDE, ROPE_STRIDE, PAGE_SIZE, V_BY_KEY, V_COLUMN, MASK, WINDOW, MASK_KIND,
                CAPPED, SHIFT, PROMOTE, CHAINED, TMA, ROPE_TMA, LED, GUARDED, False, False, BLOCK_M,
                BLOCK_N,
            )  # fmt: skip
    for step in tl.range(masked, num_blocks, warp_specialize=WARP_SPECIALIZE):
        key = key_of_step(step, entries, first, whole, num_whole, ONE_LOOP, KEYS, BLOCK_N)
        output, top, total = attend_keys(
            key, output, top, total, q, q_rope, k_source, v_source, rope_source, k_pages,
            v_first, v_stride, positions, first_row, own_queries, own_keys, key_start,
            lead, masks, factor, softcap, DIMS, BLOCKS, K_STRIDE, ROPE_STRIDE, PAGE_SIZE, V_BY_KEY,
            V_COLUMN, MASK, WINDOW, MASK_KIND, CAPPED, SHIFT, PROMOTE, CHAINED, TMA, ROPE_TMA, LED,
            GUARDED, True, ONE_LOOP, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    return output, top, total
