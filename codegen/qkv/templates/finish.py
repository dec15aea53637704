"""What happens to projected heads: bias, clipping, QK-norm, rotary embedding, the store.

The helpers here finish the accumulators of the projection kernels and the rows that a library GEMM
has left, in the two tiles of `qkv_loads`. With a `head_limit`, a norm spans all heads together.

All arithmetic is fp32; the only rounding is at the stores.
"""

import triton
import triton.language as tl

from tilewright.codegen.qkv.templates.loads import pair_dims
from tilewright.codegen.templates.places import KEY, QUERY


@triton.jit
def sum_of_heads(low, high, head_limit):
    """The sum of each head [tokens, heads, 1], or of all heads [tokens, 1, 1] (head_limit)."""
    total = tl.sum(low + high, axis=2)
    if head_limit is not None:
        total = tl.sum(total, axis=1)[:, None]
    return total


@triton.jit
def centred(
    low, high, width, head_limit,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """low and high less the mean of each head (of all heads); zeros stay where padding is."""
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
    low, high, kind, low_norm, high_norm, head_limit,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """RMSNorm ("rms") or LayerNorm ("layer") of whole heads, or of all of a kind (head_limit).

    NORMED: whether (q, k) are. Padded dims and heads hold zeros and do not count.
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
    if NORM == "rms":
        # What has no norm is multiplied by ones, exactly: selects of small tensors only.
        scale = tl.where(normed, scale, 1.0)
        low = low * scale * tl.where(normed, low_norm, 1.0)
        high = high * scale * tl.where(normed, high_norm, 1.0)
    else:
        low = tl.where(normed, low_part * scale * low_norm, low)
        high = tl.where(normed, high_part * scale * high_norm, high)
    return low, high


@triton.jit
def add_bias_and_norm(
    low, high, kind, low_bias, high_bias, low_norm, high_norm, head_limit,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr, CLIP: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """What comes before the rotation: bias, clipping, and a norm unless NORM is "none"."""
    if HAS_BIAS:
        low += low_bias
        high += high_bias
    if CLIP > 0.0:
        low = tl.clamp(low, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
        high = tl.clamp(high, -CLIP, CLIP, propagate_nan=tl.PropagateNan.ALL)
    if NORM != "none":
        low, high = norm_heads(
            low, high, kind, low_norm, high_norm, head_limit,
            HEAD_DIM, PAIR_HALF, INTERLEAVED, NORM, NORMED, NORM_EPS,
        )  # fmt: skip
    return low, high


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """fp32 values in DTYPE; 8-bit floats saturate, and NaN stays NaN."""
    if tl.float8e4nv == DTYPE:
        values = tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if tl.float8e5 == DTYPE:
        values = tl.clamp(values, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(DTYPE)


@triton.jit
def store_pairs(
    low, high, rows, mask, rotates, first_pair, dim_stride,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Writes both partners of pairs at `rows` [tokens, heads, 1] of pointers."""
    PAIRS: tl.constexpr = low.shape[2]
    pairs = first_pair + tl.arange(0, PAIRS)
    if INTERLEAVED:
        values = tl.reshape(tl.join(low, high), (low.shape[0], low.shape[1], 2 * PAIRS))
        dims = (2 * first_pair + tl.arange(0, 2 * PAIRS))[None, None, :]
        rest = mask & (dims < HEAD_DIM)
        if HALVES > 0:
            # Two stores and not one to selected dims: those would have an address per element.
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
    low, high, kind, tokens, token_mask, heads, head_limit, first_pair,
    low_cos, low_sin, high_cos, high_sin, rotates, low_norm, high_norm, cache_scale,
    q_out_ptr, pointer, row_offsets, row_mask, head_stride, dim_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr, NORMED: tl.constexpr, NORM_EPS: tl.constexpr,
    KV_REPEAT: tl.constexpr, SCALE_MULTIPLIES: tl.constexpr,
):  # fmt: skip
    """Rotates fp32 low, high [tokens, heads, pairs], norms them unless NORM is "none", writes.

    The target is that of `store_target`. A norm here needs whole heads. Each k and v head goes to
    KV_REPEAT heads of the cache.
    """
    if ROTARY_DIM > 0:
        new_low = low * low_cos.to(tl.float32) - high * low_sin.to(tl.float32)
        new_high = high * high_cos.to(tl.float32) + low * high_sin.to(tl.float32)
        # A select and not a rotation by zero: 0 * inf is NaN.
        low = tl.where(rotates, new_low, low)
        high = tl.where(rotates, new_high, high)
    if NORM != "none":
        low, high = norm_heads(
            low, high, kind, low_norm, high_norm, head_limit,
            HEAD_DIM, PAIR_HALF, INTERLEAVED, NORM, NORMED, NORM_EPS,
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
    low = rounded(low, pointer.dtype.element_ty)
    high = rounded(high, pointer.dtype.element_ty)
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
