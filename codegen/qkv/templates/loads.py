"""Loads the operands of the epilogue of projected heads: bias, norm weights, rotary tables and
cache scales.

Heads are represented by two tiles, `low` and `high`, of shape [tokens, heads, pairs]. Each tile has
one member of every rotated pair. Therefore the rotation is elementwise and needs no exchange
between threads. `pair_dims` returns which head dims form a pair in each rotation style. Dims that
are not rotated are paired in the same way, so every dim is in exactly one tile.

`kind` is QUERY, KEY or VALUE. If `head_limit` is not None, the tile has all heads of its kind,
padded, and only the first head_limit heads exist.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.places import KEY, QUERY, VALUE


@triton.jit
def pair_dims(pairs, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Returns the head dims (low, high) of `pairs`. If INTERLEAVED, the dims of pair p are (2p, 2p
    + 1). If not, the two dims of a pair are PAIR_HALF apart, inside a chunk of 2 * PAIR_HALF
    dims."""
    if INTERLEAVED:
        low = 2 * pairs
        high = 2 * pairs + 1
    else:
        low = pairs // PAIR_HALF * (2 * PAIR_HALF) + pairs % PAIR_HALF
        high = pairs // PAIR_HALF * (2 * PAIR_HALF) + pairs % PAIR_HALF + PAIR_HALF
    return low, high


@triton.jit
def output_dims(pairs, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr):
    """Returns the head dims to which rotated pairs are stored. If HALVES is not 0, the two dims of
    a pair are HALVES apart."""
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
    """Loads both members of pairs, as two tiles [tokens, heads, pairs].

    rows: pointers [tokens, heads, 1]. mask broadcasts over rows. Dims from BOUND on are zero.
    """
    if INTERLEAVED:
        # The members are adjacent in memory, so one contiguous load replaces two strided loads.
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
    """Returns the offsets of heads that are stored in groups of GROUP heads. If GROUP is 0, all
    heads have the same stride."""
    if GROUP > 0 and GROUP_STRIDE != GROUP * HEAD_STRIDE:
        return heads // GROUP * GROUP_STRIDE + heads % GROUP * HEAD_STRIDE
    else:
        return heads * HEAD_STRIDE


@triton.jit
def token_rows(tokens, STRIDE: tl.constexpr):
    """Returns the offsets [tokens, 1] of the tokens' rows. The offsets have 64 bits if rows are so
    long that the offsets of a few tokens exceed 2 ** 31."""
    if STRIDE > 2**15:
        return tokens[:, None].to(tl.int64) * STRIDE
    else:
        return tokens[:, None] * STRIDE


@triton.jit
def load_vectors(
    pointer, kind_mask, heads, head_limit, first_pair, low_dims, high_dims,
    GROUP: tl.constexpr, GROUP_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Loads pointer[heads, dims] for both members, fp32 [1, heads, pairs]. Returns zeros unless
    kind_mask."""
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
    """Loads the bias of heads of one `kind` for both members of pairs, as fp32 [1, heads, pairs].

    BIAS_STRIDES: the strides of (q's groups, q's heads, k's heads, v's heads).
    """
    low_dims, high_dims = pair_dims(first_pair + tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
    if (
        q_bias_ptr is not None and k_bias_ptr is not None and v_bias_ptr is not None
        and (GROUP == 0 or BIAS_STRIDES[0] == GROUP * BIAS_STRIDES[1])
        and BIAS_STRIDES[1] == BIAS_STRIDES[2] and BIAS_STRIDES[1] == BIAS_STRIDES[3]
        and q_bias_ptr.dtype.element_ty == k_bias_ptr.dtype.element_ty
        and q_bias_ptr.dtype.element_ty == v_bias_ptr.dtype.element_ty
    ):  # fmt: skip
        # One load replaces three loads that would be masked and added.
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
def load_delta(
    delta_ptr, kind, tokens, token_mask, heads, head_limit, first_pair,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    DELTA_STRIDE: tl.constexpr,
):  # fmt: skip
    """Loads the LoRA delta of heads of one `kind` for both members, as fp32 [tokens, heads, pairs].

    delta [T, heads * HEAD_DIM] has the heads of q, then k, then v. DELTA_STRIDE: the stride between
    its rows.
    """
    before = (kind == KEY) * NUM_HEADS + (kind == VALUE) * (NUM_HEADS + NUM_KV_HEADS)
    rows = delta_ptr + tokens.to(tl.int64)[:, None, None] * DELTA_STRIDE
    rows += (before + heads)[None, :, None] * HEAD_DIM
    low_dims, high_dims = pair_dims(first_pair + tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
    mask = token_mask[:, None, None]
    if head_limit is not None:
        mask = mask & (heads < head_limit)[None, :, None]
    low, high = load_partners(rows, first_pair, low_dims, high_dims, mask, 1, HEAD_DIM, INTERLEAVED)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def norm_vectors(
    pointer, is_kind, heads, head_limit, first_pair, low_dims, high_dims,
    HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """Loads NORM_OFFSET + pointer[heads, dims] for both members. Returns zeros unless is_kind."""
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
    NORM_STRIDES: tl.constexpr, NORM_OFFSET: tl.constexpr, V_NORMED: tl.constexpr,
):  # fmt: skip
    """Loads the norm weight of one `kind` for both members, as fp32 [1, heads or 1, pairs]. Returns
    1 if this kind has no weight.

    NORM_STRIDES: the strides between heads of the weights of q and k; 0 if all heads share one
    vector. NORM_HALVES: the HALVES of `output_dims` if the norm comes after the rotation, else 0.
    V_NORMED: whether v has a norm, which has no weight.
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
    if V_NORMED:
        low_norm += tl.where(kind == VALUE, 1.0, 0.0)
        high_norm += tl.where(kind == VALUE, 1.0, 0.0)
    return low_norm, high_norm


@triton.jit
def load_norm_bias(
    kind, heads, head_limit, first_pair, q_bias_ptr, k_bias_ptr,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM_HALVES: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Loads the norm bias of one `kind` for both members, as fp32 [1, heads or 1, pairs]. Returns
    zeros if this kind has no bias, and None if no kind has one.

    STRIDES, NORM_HALVES: as in `load_norm`.
    """
    low_shift = None
    high_shift = None
    if q_bias_ptr is not None or k_bias_ptr is not None:
        DENSE: tl.constexpr = INTERLEAVED and NORM_HALVES == 0
        pairs = first_pair + tl.arange(0, PAIRS)
        low_dims, high_dims = output_dims(pairs, PAIR_HALF, INTERLEAVED, NORM_HALVES)
        low_shift = tl.zeros((1, 1, PAIRS), tl.float32)
        high_shift = tl.zeros((1, 1, PAIRS), tl.float32)
        if q_bias_ptr is not None:
            low, high = norm_vectors(
                q_bias_ptr, kind == QUERY, heads, head_limit, first_pair, low_dims, high_dims,
                STRIDES[0], HEAD_DIM, DENSE, 0.0,
            )  # fmt: skip
            low_shift += low
            high_shift += high
        if k_bias_ptr is not None:
            low, high = norm_vectors(
                k_bias_ptr, kind == KEY, heads, head_limit, first_pair, low_dims, high_dims,
                STRIDES[1], HEAD_DIM, DENSE, 0.0,
            )  # fmt: skip
            low_shift += low
            high_shift += high
    return low_shift, high_shift


@triton.jit
def load_rope(
    kind, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr, ROTARY_DIM: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
):  # fmt: skip
    """Loads (cos of the low members, sin of the low members, cos of the high members, sin of the
    high members, whether each pair rotates), each [tokens, 1, pairs].

    FULL_WIDTH: whether the tables have a column for each stored dim. If not, they have a column for
    each pair. The values keep the dtype of the tables. If they were converted to fp32 here, Triton
    would also change their layout here, and this change would wait for the loads.
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
    """Loads pointer[heads] as [1, heads, 1]. Returns 1 unless is_kind."""
    mask = is_kind
    if head_limit is not None:
        mask = is_kind & (heads < head_limit)[None, :, None]
    return tl.load(pointer + heads[None, :, None] * STRIDE, mask=mask, other=1.0)


@triton.jit
def load_cache_scale(
    kind, heads, head_limit, k_scale_ptr, v_scale_ptr, SCALE_STRIDES: tl.constexpr
):  # fmt: skip
    """Loads the scales that the cache has for some heads of one `kind`, as fp32 [1, heads, 1].
    Returns 1 for q, and None if there are no scales.

    SCALE_STRIDES: the strides between heads of the scales of k and v; 0 if all heads share one
    scale.
    """
    scale = None
    if k_scale_ptr is not None or v_scale_ptr is not None:
        scale = tl.full((1, 1, 1), 1.0, tl.float32)
        if k_scale_ptr is not None:
            scale *= head_scales(k_scale_ptr, kind == KEY, heads, head_limit, SCALE_STRIDES[0])
        if v_scale_ptr is not None:
            scale *= head_scales(v_scale_ptr, kind == VALUE, heads, head_limit, SCALE_STRIDES[1])
    return scale
