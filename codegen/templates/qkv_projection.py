"""One kernel for `q, k, v = x @ [Wq; Wk; Wv]^T` with everything that follows, into a paged cache.

The weights stay three tensors. Every output tile lies wholly in q, k or v, so the epilogue of
`qkv_epilogue` runs on the accumulator: bias, QK-norm, rotary embedding, the one rounding, and the
store to q or to the token's place in the cache. Nothing between the GEMM and the cache touches
memory.

`qkv_projection` puts tokens on the tensor core's M side and loads both operands by TMA: for many
tokens. One descriptor reaches all three weights: its two outer dims have extent 2, and their
strides are the distances from the lowest of the three addresses to the other two.

`qkv_projection_swapped` puts weight rows on the M side, which must be at least 64 for wgmma and
tcgen05, and tokens on the N side, which may be as small as 16: for few tokens, where the time is
that of streaming the weights once. Its tiles may be a slice of a head, always with both partners
of a rotation, and K may be split with a reduction of fixed order.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.qkv_epilogue import (
    KEY,
    QUERY,
    VALUE,
    add_bias_and_norm,
    head_of_tile,
    load_bias,
    load_norm,
    load_rope,
    pair_dims,
    rotate_and_store,
    store_target,
)


@triton.jit
def split_pairs(
    values, ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """[rows, heads * head_dim] into the two partner tiles [rows, heads, head_dim / 2]."""
    if INTERLEAVED:
        low, high = tl.split(tl.reshape(values, (ROWS, HEADS, HEAD_DIM // 2, 2)))
    else:
        chunks = tl.reshape(values, (ROWS, HEADS, HEAD_DIM // (2 * PAIR_HALF), 2, PAIR_HALF))
        low, high = tl.split(tl.permute(chunks, (0, 1, 2, 4, 3)))
        low = tl.reshape(low, (ROWS, HEADS, HEAD_DIM // 2))
        high = tl.reshape(high, (ROWS, HEADS, HEAD_DIM // 2))
    return low, high


@triton.jit
def part_of(values, part: tl.constexpr, PARTS: tl.constexpr):
    """Columns of the part-th of PARTS (1, 2 or 4) equal parts of [rows, columns]."""
    if PARTS > 1:
        ROWS: tl.constexpr = values.shape[0]
        WIDTH: tl.constexpr = values.shape[1] // 2
        first, second = tl.split(tl.permute(tl.reshape(values, (ROWS, 2, WIDTH)), (0, 2, 1)))
        values = first if part < PARTS // 2 else second
        if PARTS == 4:
            halves = tl.permute(tl.reshape(values, (ROWS, 2, WIDTH // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            values = first if part % 2 == 0 else second
    return values


@triton.jit
def pairs_part(values, part: tl.constexpr, PARTS: tl.constexpr):
    """The part-th of PARTS (1, 2 or 4) slices of the pairs of [tokens, heads, pairs]."""
    if PARTS > 1:
        TOKENS: tl.constexpr = values.shape[0]
        HEADS: tl.constexpr = values.shape[1]
        PAIRS: tl.constexpr = values.shape[2] // PARTS
        flat = tl.reshape(values, (TOKENS * HEADS, PAIRS * PARTS))
        values = tl.reshape(part_of(flat, part, PARTS), (TOKENS, HEADS, PAIRS))
    return values


@triton.jit
def qkv_projection(
    x_ptr, weight_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    num_tokens, sequence_tokens, rope_tokens, num_pages,
    second_distance, third_distance, q_place, k_place, v_place,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr,
    WEIGHT_HEAD_STRIDE: tl.constexpr, WEIGHT_ROW_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROTARY_DIM: tl.constexpr, ROPE_FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
    Q_BIAS_STRIDE: tl.constexpr, K_BIAS_STRIDE: tl.constexpr, V_BIAS_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOTS_STRIDE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    K_PAGE_STRIDE: tl.constexpr, K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr, K_DIM_STRIDE: tl.constexpr,
    V_PAGE_STRIDE: tl.constexpr, V_SLOT_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr, V_DIM_STRIDE: tl.constexpr, ROW_UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS_PER_TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EPILOGUE_PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """x [T, HIDDEN] by weights [H, D, HIDDEN] of one pair of strides; grid of any size, persistent.

    weight_ptr is the lowest address of the three weights; second_distance and third_distance, in
    elements, lead to the other two, and q_place, k_place, v_place (0, 1, 2) say who lies where.
    HEAD_DIM is a power of two and a multiple of 2 * PAIR_HALF; HEADS_PER_TILE divides both head
    counts. The other arguments are those of `qkv_epilogue`.
    """
    x_desc = tl.make_tensor_descriptor(
        x_ptr, [num_tokens, HIDDEN], [X_STRIDE, 1], [BLOCK_M, BLOCK_K]
    )
    weight_desc = tl.make_tensor_descriptor(
        weight_ptr,
        [2, 2, NUM_HEADS, HEAD_DIM, HIDDEN],
        [third_distance, second_distance, WEIGHT_HEAD_STRIDE, WEIGHT_ROW_STRIDE, 1],
        [1, 1, HEADS_PER_TILE, HEAD_DIM, BLOCK_K],
    )
    TILES_N: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) // HEADS_PER_TILE
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    for tile in tl.range(
        tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0),
        flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        # Tiles of GROUP_M token blocks run side by side, so that a weight tile is read while in L2.
        group = tile // (GROUP_M * TILES_N)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        in_group = tile % (GROUP_M * TILES_N)
        first_token = (group * GROUP_M + in_group % group_rows) * BLOCK_M
        kind, head = head_of_tile(in_group // group_rows * HEADS_PER_TILE, NUM_HEADS, NUM_KV_HEADS)
        place = tl.where(kind == QUERY, q_place, tl.where(kind == KEY, k_place, v_place))
        second = (place == 1).to(tl.int32)
        third = (place == 2).to(tl.int32)
        accumulator = tl.zeros((BLOCK_M, HEADS_PER_TILE * HEAD_DIM), tl.float32)
        for column in range(0, HIDDEN, BLOCK_K):
            x = x_desc.load([first_token, column])
            weight = weight_desc.load([third, second, head, 0, column])
            weight = tl.reshape(weight, (HEADS_PER_TILE * HEAD_DIM, BLOCK_K))
            accumulator = tl.dot(x, weight.T, accumulator)
        tokens = first_token + tl.arange(0, BLOCK_M)
        token_mask = tokens < num_tokens
        pointer, row_offsets, row_mask, head_stride, dim_stride = store_target(
            kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
            sequence_tokens, num_pages, NUM_HEADS, HEAD_DIM,
            PAGE_SIZE, SLOTS_STRIDE, PER_SEQUENCE, WRAP_NEGATIVE,
            K_PAGE_STRIDE, K_SLOT_STRIDE, K_HEAD_STRIDE, K_DIM_STRIDE,
            V_PAGE_STRIDE, V_SLOT_STRIDE, V_HEAD_STRIDE, V_DIM_STRIDE, ROW_UNIT,
        )  # fmt: skip
        # A tile is finished in parts where the whole would not fit the registers: head by head,
        # then by slices of the pairs.
        HEAD_PARTS: tl.constexpr = min(EPILOGUE_PARTS, HEADS_PER_TILE)
        PAIR_PARTS: tl.constexpr = EPILOGUE_PARTS // HEAD_PARTS
        HEADS: tl.constexpr = HEADS_PER_TILE // HEAD_PARTS
        PAIRS: tl.constexpr = HEAD_DIM // 2 // PAIR_PARTS
        for head_part in tl.static_range(HEAD_PARTS):
            values = part_of(accumulator, head_part, HEAD_PARTS)
            low, high = split_pairs(values, BLOCK_M, HEADS, HEAD_DIM, PAIR_HALF, INTERLEAVED)
            heads = head + head_part * HEADS + tl.arange(0, HEADS)
            low_bias, high_bias = load_bias(
                kind, heads, 0, q_bias_ptr, k_bias_ptr, v_bias_ptr,
                HEAD_DIM // 2, PAIR_HALF, HEAD_DIM, INTERLEAVED,
                Q_BIAS_STRIDE, K_BIAS_STRIDE, V_BIAS_STRIDE,
            )  # fmt: skip
            low_norm, high_norm = load_norm(
                kind, 0, q_norm_ptr, k_norm_ptr, HEAD_DIM // 2, PAIR_HALF, HEAD_DIM, INTERLEAVED
            )
            low, high = add_bias_and_norm(
                low, high, kind, low_bias, high_bias, low_norm, high_norm, HEAD_DIM, NORM_EPS,
                q_bias_ptr is not None or k_bias_ptr is not None or v_bias_ptr is not None,
                q_norm_ptr is not None, k_norm_ptr is not None,
            )  # fmt: skip
            for pair_part in tl.static_range(PAIR_PARTS):
                low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
                    kind, tokens, token_mask, pair_part * PAIRS, cos_ptr, sin_ptr, rope_tokens,
                    PAIRS, PAIR_HALF, INTERLEAVED, ROTARY_DIM, ROPE_FULL_WIDTH,
                    COS_STRIDE, SIN_STRIDE,
                )  # fmt: skip
                rotate_and_store(
                    pairs_part(low, pair_part, PAIR_PARTS),
                    pairs_part(high, pair_part, PAIR_PARTS),
                    heads, pair_part * PAIRS,
                    low_cos, low_sin, high_cos, high_sin, rotates,
                    pointer, row_offsets, row_mask, head_stride, dim_stride,
                    HEAD_DIM, PAIR_HALF, INTERLEAVED, ROTARY_DIM,
                )  # fmt: skip


@triton.jit
def reduce_partials(
    partial, workspace_ptr, counters_ptr, tile, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """(sum over the SPLIT_K parts of `tile`, whether this program is the one that finishes it).

    Every program writes its part; the last to arrive adds them in the order of the parts, so the
    sum does not depend on who was last. It also leaves the counter at zero for the next launch.
    """
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    parts = workspace_ptr + tile * (SPLIT_K * ROWS * COLUMNS)
    tl.store(parts + part * (ROWS * COLUMNS) + offsets, partial)
    # All threads' stores come before the one thread's atomic.
    tl.debug_barrier()
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if is_last:
        for index in tl.static_range(SPLIT_K):
            total += tl.load(parts + index * (ROWS * COLUMNS) + offsets, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return total, is_last


@triton.jit
def qkv_projection_swapped(
    x_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
    q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    workspace_ptr, counters_ptr,
    num_tokens, sequence_tokens, rope_tokens, num_pages,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr,
    Q_WEIGHT_HEAD_STRIDE: tl.constexpr, Q_WEIGHT_ROW_STRIDE: tl.constexpr,
    K_WEIGHT_HEAD_STRIDE: tl.constexpr, K_WEIGHT_ROW_STRIDE: tl.constexpr,
    V_WEIGHT_HEAD_STRIDE: tl.constexpr, V_WEIGHT_ROW_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIR_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROTARY_DIM: tl.constexpr, ROPE_FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
    Q_BIAS_STRIDE: tl.constexpr, K_BIAS_STRIDE: tl.constexpr, V_BIAS_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SLOTS_STRIDE: tl.constexpr,
    PER_SEQUENCE: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    K_PAGE_STRIDE: tl.constexpr, K_SLOT_STRIDE: tl.constexpr,
    K_HEAD_STRIDE: tl.constexpr, K_DIM_STRIDE: tl.constexpr,
    V_PAGE_STRIDE: tl.constexpr, V_SLOT_STRIDE: tl.constexpr,
    V_HEAD_STRIDE: tl.constexpr, V_DIM_STRIDE: tl.constexpr, ROW_UNIT: tl.constexpr,
    BLOCK_P: tl.constexpr, TILES_PER_HEAD: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """The same for few tokens: 2 * BLOCK_P weight rows by BLOCK_T tokens per program.

    Grid ((Hq + 2 Hkv) * TILES_PER_HEAD * SPLIT_K, cdiv(T, BLOCK_T)). BLOCK_P is a power of two, at
    least 8, and TILES_PER_HEAD * BLOCK_P covers the pairs of a head; a norm needs TILES_PER_HEAD 1.
    With SPLIT_K > 1, workspace holds fp32 [tiles, SPLIT_K, 2 * BLOCK_P, BLOCK_T] and counters one
    zeroed int32 per tile, both for this launch alone. The weights may have any strides.
    """
    row_tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    kind, head = head_of_tile(row_tile // TILES_PER_HEAD, NUM_HEADS, NUM_KV_HEADS)
    first_pair = row_tile % TILES_PER_HEAD * BLOCK_P
    # Rows go by eight: 8 low partners, then their 8 high ones. In the layouts of mma and wgmma
    # rows r and r + 8 belong to one thread, so that the split below moves nothing.
    rows = tl.arange(0, 2 * BLOCK_P)
    low_dims, high_dims = pair_dims(first_pair + rows // 16 * 8 + rows % 8, PAIR_HALF, INTERLEAVED)
    dims = tl.where(rows // 8 % 2 == 0, low_dims, high_dims)
    row_mask = dims < HEAD_DIM
    # A branch over whole tensors of pointers would lose what is known of their alignment.
    if kind == QUERY:
        weight_ptr = q_weight_ptr + head * Q_WEIGHT_HEAD_STRIDE
    elif kind == KEY:
        weight_ptr = k_weight_ptr + head * K_WEIGHT_HEAD_STRIDE
    else:
        weight_ptr = v_weight_ptr + head * V_WEIGHT_HEAD_STRIDE
    row_stride = Q_WEIGHT_ROW_STRIDE
    if K_WEIGHT_ROW_STRIDE != Q_WEIGHT_ROW_STRIDE:
        row_stride += (kind == KEY) * (K_WEIGHT_ROW_STRIDE - Q_WEIGHT_ROW_STRIDE)
    if V_WEIGHT_ROW_STRIDE != Q_WEIGHT_ROW_STRIDE:
        row_stride += (kind == VALUE) * (V_WEIGHT_ROW_STRIDE - Q_WEIGHT_ROW_STRIDE)
    weight_rows = weight_ptr + dims * row_stride
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    PART: tl.constexpr = (HIDDEN + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    columns = part * PART + tl.arange(0, BLOCK_K)
    weight_ptrs = weight_rows[:, None] + columns[None, :]
    x_ptrs = x_ptr + tokens[:, None] * X_STRIDE + columns[None, :]
    # Before the loop: after it nothing would hide the time these loads take.
    heads = head + tl.arange(0, 1)
    low_bias, high_bias = load_bias(
        kind, heads, first_pair, q_bias_ptr, k_bias_ptr, v_bias_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, Q_BIAS_STRIDE, K_BIAS_STRIDE, V_BIAS_STRIDE,
    )  # fmt: skip
    low_norm, high_norm = load_norm(
        kind, first_pair, q_norm_ptr, k_norm_ptr, BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED
    )
    low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
        kind, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
        BLOCK_P, PAIR_HALF, INTERLEAVED, ROTARY_DIM, ROPE_FULL_WIDTH, COS_STRIDE, SIN_STRIDE,
    )  # fmt: skip
    pointer, row_offsets, target_mask, head_stride, dim_stride = store_target(
        kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr,
        sequence_tokens, num_pages, NUM_HEADS, HEAD_DIM,
        PAGE_SIZE, SLOTS_STRIDE, PER_SEQUENCE, WRAP_NEGATIVE,
        K_PAGE_STRIDE, K_SLOT_STRIDE, K_HEAD_STRIDE, K_DIM_STRIDE,
        V_PAGE_STRIDE, V_SLOT_STRIDE, V_HEAD_STRIDE, V_DIM_STRIDE, ROW_UNIT,
    )  # fmt: skip
    accumulator = tl.zeros((2 * BLOCK_P, BLOCK_T), tl.float32)
    for step in range(0, PART, BLOCK_K):
        if HIDDEN % (BLOCK_K * SPLIT_K) == 0:
            weight_mask = row_mask[:, None]
            x_mask = token_mask[:, None]
        else:
            column_mask = (columns + step < HIDDEN)[None, :]
            weight_mask = row_mask[:, None] & column_mask
            x_mask = token_mask[:, None] & column_mask
        weight = tl.load(
            weight_ptrs + step, mask=weight_mask, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_ptrs + step, mask=x_mask, other=0.0)
        accumulator = tl.dot(weight, x.T, accumulator)
    is_finisher = True
    if SPLIT_K > 1:
        tile = tl.program_id(1) * (tl.num_programs(0) // SPLIT_K) + row_tile
        accumulator, is_finisher = reduce_partials(
            accumulator, workspace_ptr, counters_ptr, tile, part, 2 * BLOCK_P, BLOCK_T, SPLIT_K
        )
    if is_finisher:
        groups = tl.reshape(accumulator, (BLOCK_P // 8, 2, 8, BLOCK_T))
        low, high = tl.split(tl.permute(groups, (0, 2, 3, 1)))
        low = tl.reshape(tl.trans(tl.reshape(low, (BLOCK_P, BLOCK_T))), (BLOCK_T, 1, BLOCK_P))
        high = tl.reshape(tl.trans(tl.reshape(high, (BLOCK_P, BLOCK_T))), (BLOCK_T, 1, BLOCK_P))
        low, high = add_bias_and_norm(
            low, high, kind, low_bias, high_bias, low_norm, high_norm, HEAD_DIM, NORM_EPS,
            q_bias_ptr is not None or k_bias_ptr is not None or v_bias_ptr is not None,
            q_norm_ptr is not None, k_norm_ptr is not None,
        )  # fmt: skip
        rotate_and_store(
            low, high, heads, first_pair,
            low_cos, low_sin, high_cos, high_sin, rotates,
            pointer, row_offsets, target_mask, head_stride, dim_stride,
            HEAD_DIM, PAIR_HALF, INTERLEAVED, ROTARY_DIM,
        )  # fmt: skip
