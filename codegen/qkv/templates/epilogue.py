"""Computes the epilogue of a QKV projection: bias, clipping, QK norm, rotary embedding and store.

The projection kernels call these functions on their accumulators, and `qkv_epilogue` calls them on
the q, k and v that a library GEMM has computed. Each head is in two tiles, `low` and `high`, as the
module `loads` describes. `head_limit` is a number of heads, or None. If it is given, a norm is
computed over this many heads together. If not, a norm is computed over each head. All arithmetic is
fp32, and values are rounded only when they are stored.
"""

import triton
import triton.language as tl

from tilewright.codegen.qkv.templates.loads import (
    grouped,
    load_bias,
    load_cache_scale,
    load_delta,
    load_norm,
    load_norm_bias,
    load_partners,
    load_rope,
    pair_dims,
)
from tilewright.codegen.templates.places import (
    KEY,
    QUERY,
    VALUE,
    head_of_tile,
    store_target,
    turned_kind,
)
from tilewright.codegen.templates.rounding import rounded


@triton.jit
def sum_of_heads(low, high, head_limit):
    """Returns the sum of each head [tokens, heads] or, if head_limit is given, of all heads
    [tokens, 1]."""
    total = tl.sum(low + high, axis=2)
    if head_limit is not None:
        total = tl.sum(total, axis=1)[:, None]
    return total


@triton.jit
def centred(
    low, high, width, head_limit,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Subtracts the mean of each head from low and high or, if head_limit is given, the mean of all
    heads. The padding stays zero."""
    PAIRS: tl.constexpr = low.shape[2]
    HEADS: tl.constexpr = low.shape[1]
    mean = (sum_of_heads(low, high, head_limit) / width)[:, :, None]
    low -= mean
    high -= mean
    if 2 * PAIRS != HEAD_DIM or head_limit is not None:
        low_dims, high_dims = pair_dims(tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
        low_real = (low_dims < HEAD_DIM)[None, None, :]
        high_real = (high_dims < HEAD_DIM)[None, None, :]
        if head_limit is not None:
            head_real = (tl.arange(0, HEADS) < head_limit)[None, :, None]
            low_real = low_real & head_real
            high_real = high_real & head_real
        low = tl.where(low_real, low, 0.0)
        high = tl.where(high_real, high, 0.0)
    return low, high


@triton.jit
def norm_heads(
    low, high, kind, low_norm, high_norm, low_shift, high_shift, head_limit,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, V_NORMED: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Applies RMSNorm ("rms") or LayerNorm ("layer") to each head. If head_limit is given, applies
    the norm to all heads of a kind together.

    NORMED: whether (q, k) have a norm. V_NORMED: whether v has a norm. low_shift, high_shift: the
    norm's bias, which is added last, or None. Dims and heads that are padding are zero and are not
    counted.
    """
    width = HEAD_DIM
    if head_limit is not None:
        width = HEAD_DIM * head_limit
    if NORM == "layer":
        low_part, high_part = centred(
            low, high, width, head_limit, HEAD_DIM, PAIR_HALF, INTERLEAVED
        )
    else:
        low_part = low
        high_part = high
    square_sum = sum_of_heads(low_part * low_part, high_part * high_part, head_limit)
    scale = tl.rsqrt(square_sum / width + NORM_EPS)[:, :, None]
    normed = ((kind == QUERY) & NORMED[0]) | ((kind == KEY) & NORMED[1])
    if V_NORMED:
        normed = normed | (kind == VALUE)
    if NORM == "rms":
        # Multiply heads that have no norm by 1, which is exact. Then only the scales need a select,
        # and scales are small tensors.
        scale = tl.where(normed, scale, 1.0)
        low = low * scale * tl.where(normed, low_norm, 1.0)
        high = high * scale * tl.where(normed, high_norm, 1.0)
    else:
        low = tl.where(normed, low_part * scale * low_norm, low)
        high = tl.where(normed, high_part * scale * high_norm, high)
    if low_shift is not None:
        low += low_shift
        high += high_shift
    return low, high


@triton.jit
def add_bias_and_norm(
    low, high, turned, low_bias, high_bias, low_norm, high_norm, low_shift, high_shift, head_limit,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr, CLIP: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, V_NORMED: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """Applies the steps before the rotation: bias, clipping, and a norm unless NORM is "none"."""
    if HAS_BIAS:
        low += low_bias
        high += high_bias
    if CLIP > 0.0:
        low = tl.clamp(low, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
        high = tl.clamp(high, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
    if NORM != "none":
        low, high = norm_heads(
            low, high, turned, low_norm, high_norm, low_shift, high_shift, head_limit,
            HEAD_DIM, PAIR_HALF, INTERLEAVED, NORM, NORMED, V_NORMED, NORM_EPS,
        )  # fmt: skip
    return low, high


@triton.jit
def store_pairs(
    low, high, rows, mask, rotates, first_pair, dim_stride,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Stores both members of pairs. rows: pointers [tokens, heads, 1]."""
    PAIRS: tl.constexpr = low.shape[2]
    pairs = first_pair + tl.arange(0, PAIRS)
    if INTERLEAVED:
        values = tl.reshape(tl.join(low, high), (low.shape[0], low.shape[1], 2 * PAIRS))
        dims = (2 * first_pair + tl.arange(0, 2 * PAIRS))[None, None, :]
        rest = mask & (dims < HEAD_DIM)
        if HALVES > 0:
            # Use two stores. A single store to selected dims would need an address for each
            # element.
            halves = rows + pairs[None, None, :] * dim_stride
            tl.store(halves, low, mask=mask & rotates)
            tl.store(halves + HALVES * dim_stride, high, mask=mask & rotates)
            stays = tl.reshape(tl.join(rotates, rotates), (1, 1, 2 * PAIRS)) == 0
            rest = rest & stays
        tl.store(rows + dims * dim_stride, values, mask=rest)
    else:
        low_dims, high_dims = pair_dims(pairs, PAIR_HALF, INTERLEAVED)
        low_dims = low_dims[None, None, :]
        high_dims = high_dims[None, None, :]
        tl.store(rows + low_dims * dim_stride, low, mask=mask & (low_dims < HEAD_DIM))
        tl.store(rows + high_dims * dim_stride, high, mask=mask & (high_dims < HEAD_DIM))


@triton.jit
def rotate_and_store(
    low, high, kind, turned, tokens, token_mask, heads, head_limit, first_pair,
    low_cos, low_sin, high_cos, high_sin, rotates, low_norm, high_norm, low_shift, high_shift,
    cache_scale, q_out_ptr, pointer, row_offsets, row_mask, head_stride, dim_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, V_NORMED: tl.constexpr, NORM_EPS: tl.constexpr,
    KV_REPEAT: tl.constexpr, SCALE_MULTIPLIES: tl.constexpr, SATURATES: tl.constexpr,
):  # fmt: skip
    """Rotates low and high, fp32 [tokens, heads, pairs]. Applies a norm unless NORM is "none", and
    stores the result to the target of `store_target`.

    If this function applies a norm, the tiles must have whole heads. Each head of k and v is stored
    to KV_REPEAT heads of the cache.
    """
    if ROTARY_DIM > 0:
        new_low = low * low_cos.to(tl.float32) - high * low_sin.to(tl.float32)
        new_high = high * high_cos.to(tl.float32) + low * high_sin.to(tl.float32)
        # Select the result instead of rotating by zero, because 0 * inf is NaN.
        low = tl.where(rotates, new_low, low)
        high = tl.where(rotates, new_high, high)
    if NORM != "none":
        low, high = norm_heads(
            low, high, turned, low_norm, high_norm, low_shift, high_shift, head_limit,
            HEAD_DIM, PAIR_HALF, INTERLEAVED, NORM, NORMED, V_NORMED, NORM_EPS,
        )  # fmt: skip
    if q_out_ptr is not None and q_out_ptr.dtype.element_ty != pointer.dtype.element_ty:
        q_rows = q_out_ptr + tokens.to(tl.int64)[:, None, None] * (NUM_HEADS * HEAD_DIM)
        q_rows += heads[None, :, None] * HEAD_DIM
        q_mask = (token_mask & (kind == QUERY))[:, None, None]
        if head_limit is not None:
            q_mask = q_mask & (heads < head_limit)[None, :, None]
        store_pairs(
            low.to(q_out_ptr.dtype.element_ty), high.to(q_out_ptr.dtype.element_ty),
            q_rows, q_mask, rotates, first_pair, 1, HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES,
        )  # fmt: skip
    if cache_scale is not None:
        if SCALE_MULTIPLIES:
            low = low * cache_scale
            high = high * cache_scale
        else:
            low = low / cache_scale
            high = high / cache_scale
    low = rounded(low, pointer.dtype.element_ty, SATURATES)
    high = rounded(high, pointer.dtype.element_ty, SATURATES)
    rows = pointer + row_offsets[:, None, None]
    if KV_REPEAT == 1:
        rows += heads[None, :, None].to(tl.int64) * head_stride
    else:
        cache_heads = tl.where(kind == QUERY, heads, heads * KV_REPEAT)
        rows += cache_heads[None, :, None].to(tl.int64) * head_stride
    mask = row_mask[:, None, None]
    if head_limit is not None:
        mask = mask & (heads < head_limit)[None, :, None]
    store_pairs(
        low, high, rows, mask, rotates, first_pair, dim_stride,
        HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES,
    )  # fmt: skip
    for repeat in tl.static_range(1, KV_REPEAT):
        store_pairs(
            low, high, rows + repeat * head_stride, mask & (kind != QUERY), rotates, first_pair,
            dim_stride, HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES,
        )  # fmt: skip


@triton.jit
def load_heads(
    pointer, tokens, token_mask, heads, head_limit,
    GROUP: tl.constexpr, STRIDES: tl.constexpr,
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Loads both members of the pairs of heads as fp32 [tokens, heads, pairs]. Masked heads are
    zeros.

    STRIDES: the strides of (token, group, head, dim).
    """
    rows = pointer + tokens.to(tl.int64)[:, None, None] * STRIDES[0]
    if max(STRIDES[1], STRIDES[2]) > 2**23:
        # The heads are so far apart that offsets of a few heads exceed 2 ** 31.
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
    WHOLE_ROWS: tl.constexpr, GATE_RUN: tl.constexpr = 0,
    V_NORMED: tl.constexpr = False, q_norm_bias_ptr=None, k_norm_bias_ptr=None,
    NORM_BIAS_STRIDES: tl.constexpr = None, SATURATES: tl.constexpr = True,
):  # fmt: skip
    """Computes the epilogue of a QKV projection: applies bias, clipping, QK norm and rotary
    embedding to q [T, Hq, D] and to k and v [T, Hkv, D], which may have any strides. Stores q to
    q_out, and k and v to a paged cache.

    Grid (cdiv(T, BLOCK_T), heads / HEADS_PER_TILE). Heads are counted over q, then k, then v, and
    HEADS_PER_TILE divides each of the three numbers of heads. If WHOLE_ROWS, the grid is (cdiv(T,
    BLOCK_T), how many of q, k and v there are), and HEADS_PER_TILE is a power of two that is at
    least the largest of the three numbers of heads.

    q_out [T, Hq, D] is contiguous, and may be q itself. The caches are windows with strides (page,
    slot, head, dim), and the pointers point to the first elements of the windows.

    Args:
        NUM_HEADS, q_ptr: If there is no q, NUM_HEADS is 0 and q_ptr is None.
        v_ptr: If there is no v, it is None.
        GATE_RUN: As in `turned_kind`. It is a multiple of HEADS_PER_TILE, and 0 if WHOLE_ROWS.
        BLOCK_P: A power of two that is at least the number of pairs of a head.

    `cache_places` explains the arguments that address the cache.
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
    turned = turned_kind(kind, head, GATE_RUN)
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
        turned, heads, head_limit, 0, q_norm_ptr, k_norm_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED,
        NORM_HALVES, NORM_STRIDES, NORM_OFFSET, V_NORMED,
    )  # fmt: skip
    low_shift, high_shift = load_norm_bias(
        turned, heads, head_limit, 0, q_norm_bias_ptr, k_norm_bias_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NORM_HALVES, NORM_BIAS_STRIDES,
    )  # fmt: skip
    cache_scale = load_cache_scale(
        kind, heads, head_limit, k_cache_scale_ptr, v_cache_scale_ptr, SCALE_STRIDES
    )
    if delta_ptr is not None:
        low_delta, high_delta = load_delta(
            delta_ptr, kind, tokens, token_mask, heads, head_limit, 0,
            BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NUM_HEADS, NUM_KV_HEADS, DELTA_STRIDE,
        )  # fmt: skip
        low += low_delta
        high += high_delta
    low, high = add_bias_and_norm(
        low, high, turned, low_bias, high_bias, low_norm, high_norm, low_shift, high_shift,
        head_limit,
        HEAD_DIM, PAIR_HALF, INTERLEAVED,
        q_bias_ptr is not None or k_bias_ptr is not None or v_bias_ptr is not None,
        CLIP, NORM_BEFORE, NORMED, V_NORMED, NORM_EPS,
    )  # fmt: skip
    low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
        turned, tokens, token_mask, 0, cos_ptr, sin_ptr, rope_tokens,
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
        low, high, kind, turned, tokens, token_mask, heads, head_limit, 0,
        low_cos, low_sin, high_cos, high_sin, rotates,
        low_norm, high_norm, low_shift, high_shift, cache_scale,
        q_out_ptr, pointer, row_offsets, row_mask, head_stride, dim_stride,
        NUM_HEADS, HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM,
        NORM_AFTER, NORMED, V_NORMED, NORM_EPS, KV_REPEAT, SCALE_MULTIPLIES, SATURATES,
    )  # fmt: skip
