"""What happens to projected heads: bias, clipping, QK-norm, rotary embedding, the store.

The helpers here finish the accumulators of the projection kernels and the rows that a library GEMM
has left. Values travel as two tiles, `low` and `high`, of shape [tokens, heads, pairs]: the two
partners of every rotation. So the rotation is elementwise and needs no exchange between threads.
Which head dims a pair stands for is the rotation style's own affair (`pair_dims`); dims that do not
rotate are paired the same way, so every dim is in exactly one tile.

`head_limit` is None, or the tile holds all heads of its kind, the first head_limit are real, and a
norm spans them together.

All arithmetic is fp32; the only rounding is at the stores.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.qkv_places import KEY, QUERY, VALUE


@triton.jit
def pair_dims(pairs, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The head dims (low, high) of `pairs`: (2p, 2p + 1), or PAIR_HALF apart inside each chunk."""
    if INTERLEAVED:
        low = 2 * pairs
        high = 2 * pairs + 1
    else:
        low = pairs // PAIR_HALF * (2 * PAIR_HALF) + pairs % PAIR_HALF
        high = pairs // PAIR_HALF * (2 * PAIR_HALF) + pairs % PAIR_HALF + PAIR_HALF
    return low, high


@triton.jit
def output_dims(pairs, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr):
    """The head dims that rotated pairs are stored to: HALVES apart where that is not 0."""
    low, high = pair_dims(pairs, PAIR_HALF, INTERLEAVED)
    if HALVES > 0:
        low = tl.where(pairs < HALVES, pairs, low)
        high = tl.where(pairs < HALVES, pairs + HALVES, high)
    return low, high


@triton.jit
def load_partners(
    rows, first_pair, low_dims, high_dims, mask, dim_stride,
    BOUND: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Both partners of pairs at `rows` [tokens, heads, 1] of pointers: two [tokens, heads, pairs].

    mask broadcasts over rows; dims from BOUND on give zeros.
    """
    if INTERLEAVED:
        # Partners are neighbours in memory: one dense load in place of two strided ones.
        PAIRS: tl.constexpr = low_dims.shape[0]
        dims = (2 * first_pair + tl.arange(0, 2 * PAIRS))[None, None, :]
        values = tl.load(rows + dims * dim_stride, mask=mask & (dims < BOUND), other=0.0)
        low, high = tl.split(tl.reshape(values, (values.shape[0], values.shape[1], PAIRS, 2)))
    else:
        low_dims = low_dims[None, None, :]
        high_dims = high_dims[None, None, :]
        low = tl.load(rows + low_dims * dim_stride, mask=mask & (low_dims < BOUND), other=0.0)
        high = tl.load(rows + high_dims * dim_stride, mask=mask & (high_dims < BOUND), other=0.0)
    return low, high


@triton.jit
def grouped(
    heads, GROUP: tl.constexpr, GROUP_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr
):  # fmt: skip
    """Offsets of heads that lie GROUP to a group; GROUP 0: all in a row."""
    if GROUP > 0 and GROUP_STRIDE != GROUP * HEAD_STRIDE:
        return heads // GROUP * GROUP_STRIDE + heads % GROUP * HEAD_STRIDE
    else:
        return heads * HEAD_STRIDE


@triton.jit
def load_vectors(
    pointer, kind_mask, heads, head_limit, first_pair, low_dims, high_dims,
    GROUP: tl.constexpr, GROUP_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """pointer[heads, dims] of both partners as fp32 [1, heads, pairs]; zeros unless kind_mask."""
    rows = pointer + grouped(heads[None, :, None], GROUP, GROUP_STRIDE, HEAD_STRIDE)
    mask = kind_mask
    if head_limit is not None:
        mask = kind_mask & (heads < head_limit)[None, :, None]
    low, high = load_partners(rows, first_pair, low_dims, high_dims, mask, 1, HEAD_DIM, INTERLEAVED)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_bias(
    kind, heads, head_limit, first_pair, q_bias_ptr, k_bias_ptr, v_bias_ptr,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, GROUP: tl.constexpr, BIAS_STRIDES: tl.constexpr,
):  # fmt: skip
    """The bias of heads of one `kind`, both partners: fp32 [1, heads, pairs].

    BIAS_STRIDES: (q's group, q's head, k's head, v's head).
    """
    low_dims, high_dims = pair_dims(first_pair + tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
    if (
        q_bias_ptr is not None and k_bias_ptr is not None and v_bias_ptr is not None
        and (GROUP == 0 or BIAS_STRIDES[0] == GROUP * BIAS_STRIDES[1])
        and BIAS_STRIDES[1] == BIAS_STRIDES[2] and BIAS_STRIDES[1] == BIAS_STRIDES[3]
        and q_bias_ptr.dtype.element_ty == k_bias_ptr.dtype.element_ty
        and q_bias_ptr.dtype.element_ty == v_bias_ptr.dtype.element_ty
    ):  # fmt: skip
        # One load in place of three that are masked and added.
        pointer = tl.where(kind == VALUE, v_bias_ptr, k_bias_ptr)
        low_bias, high_bias = load_vectors(
            tl.where(kind == QUERY, q_bias_ptr, pointer), kind >= 0, heads, head_limit,
            first_pair, low_dims, high_dims, 0, 0, BIAS_STRIDES[1], HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
    else:
        low_bias = tl.zeros((1, 1, PAIRS), tl.float32)
        high_bias = tl.zeros((1, 1, PAIRS), tl.float32)
        if q_bias_ptr is not None:
            low, high = load_vectors(
                q_bias_ptr, kind == QUERY, heads, head_limit, first_pair, low_dims, high_dims,
                GROUP, BIAS_STRIDES[0], BIAS_STRIDES[1], HEAD_DIM, INTERLEAVED,
            )  # fmt: skip
            low_bias += low
            high_bias += high
        if k_bias_ptr is not None:
            low, high = load_vectors(
                k_bias_ptr, kind == KEY, heads, head_limit, first_pair, low_dims, high_dims,
                0, 0, BIAS_STRIDES[2], HEAD_DIM, INTERLEAVED,
            )  # fmt: skip
            low_bias += low
            high_bias += high
        if v_bias_ptr is not None:
            low, high = load_vectors(
                v_bias_ptr, kind == VALUE, heads, head_limit, first_pair, low_dims, high_dims,
                0, 0, BIAS_STRIDES[3], HEAD_DIM, INTERLEAVED,
            )  # fmt: skip
            low_bias += low
            high_bias += high
    return low_bias, high_bias


@triton.jit
def norm_vectors(
    pointer, is_kind, heads, head_limit, first_pair, low_dims, high_dims,
    HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """NORM_OFFSET + pointer[heads, dims], both partners; zeros unless is_kind."""
    if HEAD_STRIDE == 0:
        low, high = load_vectors(
            pointer, is_kind, tl.zeros((1,), tl.int32), None, first_pair, low_dims, high_dims,
            0, 0, 0, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
    else:
        low, high = load_vectors(
            pointer, is_kind, heads, head_limit, first_pair, low_dims, high_dims,
            0, 0, HEAD_STRIDE, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
    if NORM_OFFSET != 0.0:
        low += tl.where(is_kind, NORM_OFFSET, 0.0)
        high += tl.where(is_kind, NORM_OFFSET, 0.0)
    return low, high


@triton.jit
def load_norm(
    kind, heads, head_limit, first_pair, q_norm_ptr, k_norm_ptr,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_HALVES: tl.constexpr,
    NORM_STRIDES: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """The norm weight of one `kind`, both partners: fp32 [1, heads or 1, pairs]; 1 without one.

    NORM_STRIDES: head strides of q's and k's; 0: all heads share one vector. NORM_HALVES: that of
    `output_dims` where the norm follows the rotation, else 0.
    """
    DENSE: tl.constexpr = INTERLEAVED and NORM_HALVES == 0
    pairs = first_pair + tl.arange(0, PAIRS)
    low_dims, high_dims = output_dims(pairs, PAIR_HALF, INTERLEAVED, NORM_HALVES)
    if (
        q_norm_ptr is not None and k_norm_ptr is not None
        and NORM_STRIDES[0] == NORM_STRIDES[1]
        and q_norm_ptr.dtype.element_ty == k_norm_ptr.dtype.element_ty
    ):  # fmt: skip
        low_norm, high_norm = norm_vectors(
            tl.where(kind == QUERY, q_norm_ptr, k_norm_ptr), kind != VALUE, heads, head_limit,
            first_pair, low_dims, high_dims, NORM_STRIDES[0], HEAD_DIM, DENSE, NORM_OFFSET,
        )  # fmt: skip
    else:
        low_norm = tl.zeros((1, 1, PAIRS), tl.float32)
        high_norm = tl.zeros((1, 1, PAIRS), tl.float32)
        if q_norm_ptr is not None:
            low, high = norm_vectors(
                q_norm_ptr, kind == QUERY, heads, head_limit, first_pair, low_dims, high_dims,
                NORM_STRIDES[0], HEAD_DIM, DENSE, NORM_OFFSET,
            )  # fmt: skip
            low_norm += low
            high_norm += high
        else:
            low_norm += tl.where(kind == QUERY, 1.0, 0.0)
            high_norm += tl.where(kind == QUERY, 1.0, 0.0)
        if k_norm_ptr is not None:
            low, high = norm_vectors(
                k_norm_ptr, kind == KEY, heads, head_limit, first_pair, low_dims, high_dims,
                NORM_STRIDES[1], HEAD_DIM, DENSE, NORM_OFFSET,
            )  # fmt: skip
            low_norm += low
            high_norm += high
        else:
            low_norm += tl.where(kind == KEY, 1.0, 0.0)
            high_norm += tl.where(kind == KEY, 1.0, 0.0)
    return low_norm, high_norm


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
def load_rope(
    kind, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr, ROTARY_DIM: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
):  # fmt: skip
    """(cos and sin of the low partners, of the high ones, which pairs rotate): [tokens, 1, pairs].

    The tables have a column per dim that is stored (FULL_WIDTH) or a column per pair. They keep
    their dtype here: Triton moves a change of layout up to the widening, and so would wait for the
    loads there.
    """
    pairs = first_pair + tl.arange(0, PAIRS)
    rotates = (pairs < ROTARY_DIM // 2)[None, None, :] & (kind != VALUE)
    low_cos = 0.0
    low_sin = 0.0
    high_cos = 0.0
    high_sin = 0.0
    if ROTARY_DIM > 0:
        rows = (tokens % rope_tokens)[:, None, None]
        cos_rows = cos_ptr + rows * COS_STRIDE
        sin_rows = sin_ptr + rows * SIN_STRIDE
        mask = token_mask[:, None, None] & (kind != VALUE)
        if FULL_WIDTH:
            DENSE: tl.constexpr = INTERLEAVED and HALVES == 0
            if HALVES > 0:
                low_dims = pairs
                high_dims = pairs + HALVES
                mask = mask & rotates
            else:
                low_dims, high_dims = pair_dims(pairs, PAIR_HALF, INTERLEAVED)
            low_cos, high_cos = load_partners(
                cos_rows, first_pair, low_dims, high_dims, mask, 1, ROTARY_DIM, DENSE
            )
            low_sin, high_sin = load_partners(
                sin_rows, first_pair, low_dims, high_dims, mask, 1, ROTARY_DIM, DENSE
            )
        else:
            low_cos = tl.load(cos_rows + pairs[None, None, :], mask=mask & rotates, other=0.0)
            low_sin = tl.load(sin_rows + pairs[None, None, :], mask=mask & rotates, other=0.0)
            high_cos = low_cos
            high_sin = low_sin
    return low_cos, low_sin, high_cos, high_sin, rotates


@triton.jit
def head_scales(pointer, is_kind, heads, head_limit, STRIDE: tl.constexpr):
    """pointer[heads] [1, heads, 1]; 1 unless is_kind."""
    mask = is_kind
    if head_limit is not None:
        mask = is_kind & (heads < head_limit)[None, :, None]
    return tl.load(pointer + heads[None, :, None] * STRIDE, mask=mask, other=1.0)


@triton.jit
def load_cache_scale(
    kind, heads, head_limit, k_scale_ptr, v_scale_ptr, SCALE_STRIDES: tl.constexpr
):  # fmt: skip
    """The scale of heads of one `kind` in the cache: fp32 [1, heads, 1], or None; 1 for q.

    SCALE_STRIDES: from one head to the next in k's and v's; 0: one scale for all.
    """
    scale = None
    if k_scale_ptr is not None or v_scale_ptr is not None:
        scale = tl.full((1, 1, 1), 1.0, tl.float32)
        if k_scale_ptr is not None:
            scale *= head_scales(k_scale_ptr, kind == KEY, heads, head_limit, SCALE_STRIDES[0])
        if v_scale_ptr is not None:
            scale *= head_scales(v_scale_ptr, kind == VALUE, heads, head_limit, SCALE_STRIDES[1])
    return scale


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
