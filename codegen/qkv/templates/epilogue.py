"""One kernel over q, k and v that a library GEMM (or anything else) has already computed.

All that follows a projection in one launch, by the helpers that finish the fused kernels too.
"""

import triton
import triton.language as tl

from tilewright.codegen.qkv.templates.finish import add_bias_and_norm, rotate_and_store
from tilewright.codegen.qkv.templates.loads import (
    grouped,
    load_bias,
    load_cache_scale,
    load_delta,
    load_norm,
    load_partners,
    load_rope,
    pair_dims,
)
from tilewright.codegen.templates.places import KEY, QUERY, VALUE, head_of_tile, store_target


@triton.jit
def load_heads(
    pointer, tokens, token_mask, heads, head_limit,
    GROUP: tl.constexpr, STRIDES: tl.constexpr,
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Both partners of pointer[tokens, heads] as fp32; zeros where there is none.

    STRIDES: (token, group, head, dim).
    """
    rows = pointer + tokens.to(tl.int64)[:, None, None] * STRIDES[0]
    if max(STRIDES[1], STRIDES[2]) > 2**23:
        # Heads outside of tokens: a few of them would pass 2 ** 31.
        rows += grouped(heads.to(tl.int64)[None, :, None], GROUP, STRIDES[1], STRIDES[2])
    else:
        rows += grouped(heads[None, :, None], GROUP, STRIDES[1], STRIDES[2])
    low_dims, high_dims = pair_dims(tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
    mask = token_mask[:, None, None]
    if head_limit is not None:
        mask = mask & (heads < head_limit)[None, :, None]
    low, high = load_partners(rows, 0, low_dims, high_dims, mask, STRIDES[3], HEAD_DIM, INTERLEAVED)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def qkv_epilogue(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr,
    slots_ptr, sequences_ptr, positions_ptr, k_cache_scale_ptr, v_cache_scale_ptr,
    q_bias_ptr, k_bias_ptr, v_bias_ptr, delta_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    num_tokens, sequence_tokens, rope_tokens, num_pages,
    num_sequences, lookup_columns, lookup_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr, KV_REPEAT: tl.constexpr,
    PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ROPE_FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
    Q_IN_STRIDES: tl.constexpr, K_IN_STRIDES: tl.constexpr, V_IN_STRIDES: tl.constexpr,
    BIAS_STRIDES: tl.constexpr, DELTA_STRIDE: tl.constexpr, CLIP: tl.constexpr,
    NORM_BEFORE: tl.constexpr, NORM_AFTER: tl.constexpr, NORMED: tl.constexpr,
    NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    NORM_HALVES: tl.constexpr, NORM_STRIDES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ADDRESSING: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    ADDRESS_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, ROW_UNIT: tl.constexpr,
    SCALE_STRIDES: tl.constexpr, SCALE_MULTIPLIES: tl.constexpr,
    BLOCK_T: tl.constexpr, HEADS_PER_TILE: tl.constexpr, BLOCK_P: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):  # fmt: skip
    """Finishes projected q [T, Hq, D], k and v [T, Hkv, D], of any strides, in one launch.

    Grid (cdiv(T, BLOCK_T), heads / HEADS_PER_TILE), heads counted over q, then k, then v;
    HEADS_PER_TILE divides each of the three. With WHOLE_ROWS, grid (cdiv(T, BLOCK_T), 3, or 2
    without q or v), and HEADS_PER_TILE is a power of two that covers the most heads. NUM_HEADS 0
    and q_ptr None: no q. v_ptr None: no v.
    q_out [T, Hq, D] is contiguous and may be q itself; the caches are windows of four strides
    (page, slot, head, dim), the pointers at their first elements; addresses as in `cache_places`.
    BLOCK_P is a power of two that covers the pairs of a head.
    """
    if WHOLE_ROWS:
        kind = tl.program_id(1)
        if NUM_HEADS == 0:
            kind += 1
        head = 0
        head_limit = tl.where(kind == QUERY, NUM_HEADS, NUM_KV_HEADS)
    else:
        kind, head = head_of_tile(tl.program_id(1) * HEADS_PER_TILE, NUM_HEADS, NUM_KV_HEADS)
        head_limit = None
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    heads = head + tl.arange(0, HEADS_PER_TILE)
    low, high = load_heads(
        k_ptr, tokens, token_mask & (kind == KEY), heads, head_limit,
        0, K_IN_STRIDES, BLOCK_P, HEAD_DIM, PAIR_HALF, INTERLEAVED,
    )  # fmt: skip
    if q_ptr is not None:
        q_low, q_high = load_heads(
            q_ptr, tokens, token_mask & (kind == QUERY), heads, head_limit,
            GROUP, Q_IN_STRIDES, BLOCK_P, HEAD_DIM, PAIR_HALF, INTERLEAVED,
        )  # fmt: skip
        low = tl.where(kind == QUERY, q_low, low)
        high = tl.where(kind == QUERY, q_high, high)
    if v_ptr is not None:
        v_low, v_high = load_heads(
            v_ptr, tokens, token_mask & (kind == VALUE), heads, head_limit,
            0, V_IN_STRIDES, BLOCK_P, HEAD_DIM, PAIR_HALF, INTERLEAVED,
        )  # fmt: skip
        low = tl.where(kind == VALUE, v_low, low)
        high = tl.where(kind == VALUE, v_high, high)
    low_bias, high_bias = load_bias(
        kind, heads, head_limit, 0, q_bias_ptr, k_bias_ptr, v_bias_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, GROUP, BIAS_STRIDES,
    )  # fmt: skip
    low_norm, high_norm = load_norm(
        kind, heads, head_limit, 0, q_norm_ptr, k_norm_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NORM_HALVES, NORM_STRIDES, NORM_OFFSET,
    )  # fmt: skip
    cache_scale = load_cache_scale(
        kind, heads, head_limit, k_cache_scale_ptr, v_cache_scale_ptr, SCALE_STRIDES
    )
    if delta_ptr is not None:
        low_delta, high_delta = load_delta(
            delta_ptr, kind, tokens, token_mask, heads, head_limit, 0,
            BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NUM_HEADS, NUM_KV_HEADS, DELTA_STRIDE,
        )  # fmt: skip
    if delta_ptr is not None:
        low += low_delta
        high += high_delta
    low, high = add_bias_and_norm(
        low, high, kind, low_bias, high_bias, low_norm, high_norm, head_limit,
        HEAD_DIM, PAIR_HALF, INTERLEAVED,
        q_bias_ptr is not None or k_bias_ptr is not None or v_bias_ptr is not None,
        CLIP, NORM_BEFORE, NORMED, NORM_EPS,
    )  # fmt: skip
    low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
        kind, tokens, token_mask, 0, cos_ptr, sin_ptr, rope_tokens,
        BLOCK_P, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM, ROPE_FULL_WIDTH,
        COS_STRIDE, SIN_STRIDE,
    )  # fmt: skip
    pointer, row_offsets, row_mask, head_stride, dim_stride = store_target(
        kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr,
        slots_ptr, sequences_ptr, positions_ptr,
        sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
        NUM_HEADS, HEAD_DIM, PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES, SEARCH_STEPS,
        K_STRIDES, V_STRIDES, ROW_UNIT,
    )  # fmt: skip
    rotate_and_store(
        low, high, kind, tokens, token_mask, heads, head_limit, 0,
        low_cos, low_sin, high_cos, high_sin, rotates, low_norm, high_norm, cache_scale,
        q_out_ptr, pointer, row_offsets, row_mask, head_stride, dim_stride,
        NUM_HEADS, HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM,
        NORM_AFTER, NORMED, NORM_EPS, KV_REPEAT, SCALE_MULTIPLIES,
    )  # fmt: skip
