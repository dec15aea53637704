"""What follows a query/key/value projection: bias, QK-norm, rotary embedding, paged cache write.

The helpers are the epilogue of the projection kernels; `qkv_epilogue` runs them over tensors that
a library GEMM (or anything else) has already computed, in one launch for q, k and v.

Values travel as two tiles, `low` and `high`, of shape [tokens, heads, pairs]: the two partners of
every rotation. So the rotation is elementwise and needs no exchange between threads. Which head
dims a pair stands for is the rotation style's own affair (`pair_dims`); dims that do not rotate
are paired the same way, so every dim is in exactly one tile.

All arithmetic is fp32; the only rounding is at the stores.
"""

import triton
import triton.language as tl

QUERY = tl.constexpr(0)
KEY = tl.constexpr(1)
VALUE = tl.constexpr(2)


@triton.jit
def head_of_tile(tile_head, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr):
    """(kind, head within q, k or v) of a head counted over q, then k, then v."""
    # Selects and not branches: Triton 3.6 cannot flatten a loop over tiles that branches here.
    is_kv = (tile_head >= NUM_HEADS).to(tl.int32)
    is_value = (tile_head >= NUM_HEADS + NUM_KV_HEADS).to(tl.int32)
    kind = is_kv + is_value
    head = tile_head - is_kv * NUM_HEADS - is_value * NUM_KV_HEADS
    return kind, head


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
def load_vectors(
    pointer, kind_mask, heads, first_pair, low_dims, high_dims,
    HEAD_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """pointer[heads, dims] of both partners as fp32 [1, heads, pairs]; zeros unless kind_mask."""
    rows = pointer + heads[None, :, None] * HEAD_STRIDE
    low, high = load_partners(
        rows, first_pair, low_dims, high_dims, kind_mask, 1, HEAD_DIM, INTERLEAVED
    )
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def load_bias(
    kind, heads, first_pair, q_bias_ptr, k_bias_ptr, v_bias_ptr,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_BIAS_STRIDE: tl.constexpr, K_BIAS_STRIDE: tl.constexpr, V_BIAS_STRIDE: tl.constexpr,
):  # fmt: skip
    """The bias of heads of one `kind`, both partners: fp32 [1, heads, pairs]."""
    low_dims, high_dims = pair_dims(first_pair + tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
    low_bias = tl.zeros((1, 1, PAIRS), tl.float32)
    high_bias = tl.zeros((1, 1, PAIRS), tl.float32)
    if q_bias_ptr is not None:
        low, high = load_vectors(
            q_bias_ptr, kind == QUERY, heads, first_pair, low_dims, high_dims,
            Q_BIAS_STRIDE, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
        low_bias += low
        high_bias += high
    if k_bias_ptr is not None:
        low, high = load_vectors(
            k_bias_ptr, kind == KEY, heads, first_pair, low_dims, high_dims,
            K_BIAS_STRIDE, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
        low_bias += low
        high_bias += high
    if v_bias_ptr is not None:
        low, high = load_vectors(
            v_bias_ptr, kind == VALUE, heads, first_pair, low_dims, high_dims,
            V_BIAS_STRIDE, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
        low_bias += low
        high_bias += high
    return low_bias, high_bias


@triton.jit
def load_norm(
    kind, first_pair, q_norm_ptr, k_norm_ptr,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The norm weight of one `kind`, both partners: fp32 [1, 1, pairs]."""
    low_dims, high_dims = pair_dims(first_pair + tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
    low_norm = tl.zeros((1, 1, PAIRS), tl.float32)
    high_norm = tl.zeros((1, 1, PAIRS), tl.float32)
    no_heads = tl.zeros((1,), tl.int32)
    if q_norm_ptr is not None:
        low, high = load_vectors(
            q_norm_ptr, kind == QUERY, no_heads, first_pair, low_dims, high_dims,
            0, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
        low_norm += low
        high_norm += high
    if k_norm_ptr is not None:
        low, high = load_vectors(
            k_norm_ptr, kind == KEY, no_heads, first_pair, low_dims, high_dims,
            0, HEAD_DIM, INTERLEAVED,
        )  # fmt: skip
        low_norm += low
        high_norm += high
    return low_norm, high_norm


@triton.jit
def add_bias_and_norm(
    low, high, kind, low_bias, high_bias, low_norm, high_norm,
    HEAD_DIM: tl.constexpr, NORM_EPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
):  # fmt: skip
    """Bias, then RMSNorm of each whole head; padded dims hold zeros and do not count."""
    if HAS_BIAS:
        low += low_bias
        high += high_bias
    if NORM_Q or NORM_K:
        square_sum = tl.sum(low * low, axis=2) + tl.sum(high * high, axis=2)
        scale = tl.rsqrt(square_sum / HEAD_DIM + NORM_EPS)[:, :, None]
        normed = ((kind == QUERY) & NORM_Q) | ((kind == KEY) & NORM_K)
        low = tl.where(normed, low * scale * low_norm, low)
        high = tl.where(normed, high * scale * high_norm, high)
    return low, high


@triton.jit
def load_rope(
    kind, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
    PAIRS: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROTARY_DIM: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
):  # fmt: skip
    """(cos and sin of the low partners, of the high ones, which pairs rotate): [tokens, 1, pairs].

    The tables have a column per dim (FULL_WIDTH) or a column per pair. They keep their dtype here:
    Triton moves a change of layout up to the widening, and so would wait for the loads there.
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
            low_dims, high_dims = pair_dims(pairs, PAIR_HALF, INTERLEAVED)
            low_cos, high_cos = load_partners(
                cos_rows, first_pair, low_dims, high_dims, mask, 1, ROTARY_DIM, INTERLEAVED
            )
            low_sin, high_sin = load_partners(
                sin_rows, first_pair, low_dims, high_dims, mask, 1, ROTARY_DIM, INTERLEAVED
            )
        else:
            low_cos = tl.load(cos_rows + pairs[None, None, :], mask=mask & rotates, other=0.0)
            low_sin = tl.load(sin_rows + pairs[None, None, :], mask=mask & rotates, other=0.0)
            high_cos = low_cos
            high_sin = low_sin
    return low_cos, low_sin, high_cos, high_sin, rotates


@triton.jit
def cache_places(
    tokens, token_mask, slots_ptr, sequence_tokens, num_pages,
    PAGE_SIZE: tl.constexpr, SLOTS_STRIDE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
):  # fmt: skip
    """(page, slot in the page, mask) of each token, 64-bit; out-of-range tokens are masked."""
    if PER_SEQUENCE:
        page = (tokens // sequence_tokens).to(tl.int64)
        slot_tokens = tokens % sequence_tokens
        capacity = tl.full((1,), PAGE_SIZE, tl.int64)
    else:
        slot_tokens = tokens
        capacity = tl.full((1,), PAGE_SIZE, tl.int64) * num_pages
    slot = tl.load(slots_ptr + slot_tokens * SLOTS_STRIDE, mask=token_mask, other=0).to(tl.int64)
    if WRAP_NEGATIVE:
        slot = tl.where(slot < 0, slot + capacity, slot)
    valid = token_mask & (slot >= 0) & (slot < capacity)
    if not PER_SEQUENCE:
        page = slot // PAGE_SIZE
        slot = slot % PAGE_SIZE
    return page, slot, valid


@triton.jit
def store_target(
    kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    sequence_tokens, num_pages,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOTS_STRIDE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    K_PAGE_STRIDE: tl.constexpr, K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr, K_DIM_STRIDE: tl.constexpr,
    V_PAGE_STRIDE: tl.constexpr, V_SLOT_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr, V_DIM_STRIDE: tl.constexpr, ROW_UNIT: tl.constexpr,
):  # fmt: skip
    """(pointer, row offsets, row mask, head stride, dim stride) of tokens of one `kind`.

    One target for q, k and v, selected and not branched to: Triton 3.6 cannot flatten a loop over
    tiles that branches, and three stores are three times the code.
    """
    page, slot, row_mask = cache_places(
        tokens, token_mask & (kind != QUERY), slots_ptr, sequence_tokens, num_pages,
        PAGE_SIZE, SLOTS_STRIDE, PER_SEQUENCE, WRAP_NEGATIVE,
    )  # fmt: skip
    pointer = k_cache_ptr
    # Counted in ROW_UNIT, which divides every stride of a row: a select alone would lose that the
    # offsets are multiples of anything, and stores would shrink to single elements.
    units = page * (K_PAGE_STRIDE // ROW_UNIT) + slot * (K_SLOT_STRIDE // ROW_UNIT)
    head_stride = tl.where(kind == VALUE, V_HEAD_STRIDE, K_HEAD_STRIDE)
    if v_cache_ptr is not None:
        pointer = tl.where(kind == VALUE, v_cache_ptr, pointer)
        if K_PAGE_STRIDE != V_PAGE_STRIDE or K_SLOT_STRIDE != V_SLOT_STRIDE:
            v_units = page * (V_PAGE_STRIDE // ROW_UNIT) + slot * (V_SLOT_STRIDE // ROW_UNIT)
            units = tl.where(kind == VALUE, v_units, units)
    if q_out_ptr is not None:
        pointer = tl.where(kind == QUERY, q_out_ptr, pointer)
        q_units = tokens.to(tl.int64) * (NUM_HEADS * HEAD_DIM // ROW_UNIT)
        units = tl.where(kind == QUERY, q_units, units)
        row_mask = row_mask | (token_mask & (kind == QUERY))
        head_stride = tl.where(kind == QUERY, HEAD_DIM, head_stride)
    row_offsets = units * ROW_UNIT
    if K_DIM_STRIDE == 1 and V_DIM_STRIDE == 1:
        dim_stride = 1
    else:
        dim_stride = tl.where(kind == VALUE, V_DIM_STRIDE, K_DIM_STRIDE)
        dim_stride = tl.where(kind == QUERY, 1, dim_stride)
    return pointer, row_offsets, row_mask, head_stride, dim_stride


@triton.jit
def rotate_and_store(
    low, high, heads, first_pair,
    low_cos, low_sin, high_cos, high_sin, rotates,
    pointer, row_offsets, row_mask, head_stride, dim_stride,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):  # fmt: skip
    """Rotates fp32 low, high [tokens, heads, pairs], rounds to the pointer's dtype, writes."""
    if ROTARY_DIM > 0:
        new_low = low * low_cos.to(tl.float32) - high * low_sin.to(tl.float32)
        new_high = high * high_cos.to(tl.float32) + low * high_sin.to(tl.float32)
        # A select and not a rotation by zero: 0 * inf is NaN.
        low = tl.where(rotates, new_low, low)
        high = tl.where(rotates, new_high, high)
    low = low.to(pointer.dtype.element_ty)
    high = high.to(pointer.dtype.element_ty)
    PAIRS: tl.constexpr = low.shape[2]
    rows = pointer + row_offsets[:, None, None]
    rows += heads[None, :, None].to(tl.int64) * head_stride
    mask = row_mask[:, None, None]
    if INTERLEAVED:
        values = tl.reshape(tl.join(low, high), (low.shape[0], low.shape[1], 2 * PAIRS))
        dims = (2 * first_pair + tl.arange(0, 2 * PAIRS))[None, None, :]
        tl.store(rows + dims * dim_stride, values, mask=mask & (dims < HEAD_DIM))
    else:
        low_dims, high_dims = pair_dims(first_pair + tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
        low_dims = low_dims[None, None, :]
        high_dims = high_dims[None, None, :]
        tl.store(rows + low_dims * dim_stride, low, mask=mask & (low_dims < HEAD_DIM))
        tl.store(rows + high_dims * dim_stride, high, mask=mask & (high_dims < HEAD_DIM))


@triton.jit
def load_heads(
    pointer, tokens, token_mask, heads,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, DIM_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr, HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Both partners of pointer[tokens, heads] as fp32; zeros where there is none."""
    rows = pointer + tokens.to(tl.int64)[:, None, None] * TOKEN_STRIDE
    rows += heads[None, :, None] * HEAD_STRIDE
    low_dims, high_dims = pair_dims(tl.arange(0, PAIRS), PAIR_HALF, INTERLEAVED)
    low, high = load_partners(
        rows, 0, low_dims, high_dims, token_mask[:, None, None], DIM_STRIDE, HEAD_DIM, INTERLEAVED
    )
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def qkv_epilogue(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    num_tokens, sequence_tokens, rope_tokens, num_pages,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROTARY_DIM: tl.constexpr, ROPE_FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
    Q_TOKEN_STRIDE: tl.constexpr, Q_IN_HEAD_STRIDE: tl.constexpr, Q_IN_DIM_STRIDE: tl.constexpr,
    K_TOKEN_STRIDE: tl.constexpr, K_IN_HEAD_STRIDE: tl.constexpr, K_IN_DIM_STRIDE: tl.constexpr,
    V_TOKEN_STRIDE: tl.constexpr, V_IN_HEAD_STRIDE: tl.constexpr, V_IN_DIM_STRIDE: tl.constexpr,
    Q_BIAS_STRIDE: tl.constexpr, K_BIAS_STRIDE: tl.constexpr, V_BIAS_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOTS_STRIDE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    K_PAGE_STRIDE: tl.constexpr, K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr, K_DIM_STRIDE: tl.constexpr,
    V_PAGE_STRIDE: tl.constexpr, V_SLOT_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr, V_DIM_STRIDE: tl.constexpr, ROW_UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr, HEADS_PER_TILE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Finishes projected q [T, Hq, D], k and v [T, Hkv, D], of any strides, in one launch.

    Grid (cdiv(T, BLOCK_T), heads / HEADS_PER_TILE), heads counted over q, then k, then v;
    HEADS_PER_TILE divides each of the three. NUM_HEADS 0 and q_ptr None: no q. v_ptr None: no v.
    q_out [T, Hq, D] is contiguous and may be q itself; the caches are windows of four strides
    (page, slot, head, dim), the pointers at their first elements. BLOCK_P is a power of two that
    covers the pairs of a head.
    """
    kind, head = head_of_tile(tl.program_id(1) * HEADS_PER_TILE, NUM_HEADS, NUM_KV_HEADS)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    heads = head + tl.arange(0, HEADS_PER_TILE)
    low, high = load_heads(
        k_ptr, tokens, token_mask & (kind == KEY), heads,
        K_TOKEN_STRIDE, K_IN_HEAD_STRIDE, K_IN_DIM_STRIDE,
        BLOCK_P, HEAD_DIM, PAIR_HALF, INTERLEAVED,
    )  # fmt: skip
    if q_ptr is not None:
        q_low, q_high = load_heads(
            q_ptr, tokens, token_mask & (kind == QUERY), heads,
            Q_TOKEN_STRIDE, Q_IN_HEAD_STRIDE, Q_IN_DIM_STRIDE,
            BLOCK_P, HEAD_DIM, PAIR_HALF, INTERLEAVED,
        )  # fmt: skip
        low = tl.where(kind == QUERY, q_low, low)
        high = tl.where(kind == QUERY, q_high, high)
    if v_ptr is not None:
        v_low, v_high = load_heads(
            v_ptr, tokens, token_mask & (kind == VALUE), heads,
            V_TOKEN_STRIDE, V_IN_HEAD_STRIDE, V_IN_DIM_STRIDE,
            BLOCK_P, HEAD_DIM, PAIR_HALF, INTERLEAVED,
        )  # fmt: skip
        low = tl.where(kind == VALUE, v_low, low)
        high = tl.where(kind == VALUE, v_high, high)
    low_bias, high_bias = load_bias(
        kind, heads, 0, q_bias_ptr, k_bias_ptr, v_bias_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, Q_BIAS_STRIDE, K_BIAS_STRIDE, V_BIAS_STRIDE,
    )  # fmt: skip
    low_norm, high_norm = load_norm(
        kind, 0, q_norm_ptr, k_norm_ptr, BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED
    )
    low, high = add_bias_and_norm(
        low, high, kind, low_bias, high_bias, low_norm, high_norm, HEAD_DIM, NORM_EPS,
        q_bias_ptr is not None or k_bias_ptr is not None or v_bias_ptr is not None,
        q_norm_ptr is not None, k_norm_ptr is not None,
    )  # fmt: skip
    low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
        kind, tokens, token_mask, 0, cos_ptr, sin_ptr, rope_tokens,
        BLOCK_P, PAIR_HALF, INTERLEAVED, ROTARY_DIM, ROPE_FULL_WIDTH, COS_STRIDE, SIN_STRIDE,
    )  # fmt: skip
    pointer, row_offsets, row_mask, head_stride, dim_stride = store_target(
        kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
        sequence_tokens, num_pages, NUM_HEADS, HEAD_DIM,
        PAGE_SIZE, SLOTS_STRIDE, PER_SEQUENCE, WRAP_NEGATIVE,
        K_PAGE_STRIDE, K_SLOT_STRIDE, K_HEAD_STRIDE, K_DIM_STRIDE,
        V_PAGE_STRIDE, V_SLOT_STRIDE, V_HEAD_STRIDE, V_DIM_STRIDE, ROW_UNIT,
    )  # fmt: skip
    rotate_and_store(
        low, high, heads, 0,
        low_cos, low_sin, high_cos, high_sin, rotates,
        pointer, row_offsets, row_mask, head_stride, dim_stride,
        HEAD_DIM, PAIR_HALF, INTERLEAVED, ROTARY_DIM,
    )  # fmt: skip
