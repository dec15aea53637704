"""Computes `q, k, v = x @ [Wq; Wk; Wv]^T` and its epilogue, including the store to a paged cache,
in one kernel for many tokens.

The weights remain three tensors. Every output tile belongs to only one of q, k and v. Therefore the
functions of `epilogue` can process the accumulator: they apply bias, QK norm and rotary embedding,
round once, and store the values to q or to the token's slot of the cache. No intermediate result is
written to global memory. The contiguous dimension of the weights may be K (k-major) or the head dim
(n-major).

Tokens are on the tensor core's M side, and TMA loads both operands. One descriptor covers all three
weights. Its two outer dimensions have extent 2, and their strides are the distances from the lowest
of the three addresses to the other two addresses.
"""

import triton
import triton.language as tl

from tilewright.codegen.qkv.templates.epilogue import add_bias_and_norm, rotate_and_store
from tilewright.codegen.qkv.templates.loads import (
    grouped,
    load_bias,
    load_cache_scale,
    load_delta,
    load_norm,
    load_norm_bias,
    load_rope,
)
from tilewright.codegen.templates.parts import part_of
from tilewright.codegen.templates.places import (
    KEY,
    QUERY,
    head_of_tile,
    store_target,
    turned_kind,
)


@triton.jit
def split_pairs(
    values, ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Splits [rows, heads * head_dim] into two tiles [rows, heads, head_dim / 2], one for each
    member of the pairs."""
    if INTERLEAVED:
        low, high = tl.split(tl.reshape(values, (ROWS, HEADS, HEAD_DIM // 2, 2)))
    else:
        chunks = tl.reshape(values, (ROWS, HEADS, HEAD_DIM // (2 * PAIR_HALF), 2, PAIR_HALF))
        low, high = tl.split(tl.permute(chunks, (0, 1, 2, 4, 3)))
        low = tl.reshape(low, (ROWS, HEADS, HEAD_DIM // 2))
        high = tl.reshape(high, (ROWS, HEADS, HEAD_DIM // 2))
    return low, high


@triton.jit
def pairs_part(values, part: tl.constexpr, PARTS: tl.constexpr):
    """Divides the pairs of [tokens, heads, pairs] into PARTS (1, 2 or 4) slices, and returns the
    slice with the number `part`."""
    if PARTS > 1:
        TOKENS: tl.constexpr = values.shape[0]
        HEADS: tl.constexpr = values.shape[1]
        PAIRS: tl.constexpr = values.shape[2] // PARTS
        flat = tl.reshape(values, (TOKENS * HEADS, PAIRS * PARTS))
        values = tl.reshape(part_of(flat, part, PARTS), (TOKENS, HEADS, PAIRS))
    return values


@triton.jit
def place_in_weight(kind, head, GROUP: tl.constexpr, HEAD_STEPS: tl.constexpr):
    """Returns where a head of one `kind` begins in the weight. HEAD_STEPS: four numbers, the steps
    between groups of q, between heads of q, between heads of k, and between heads of v."""
    IN_ROW: tl.constexpr = GROUP == 0 or HEAD_STEPS[0] == GROUP * HEAD_STEPS[1]
    if IN_ROW and HEAD_STEPS[1] == HEAD_STEPS[2] and HEAD_STEPS[1] == HEAD_STEPS[3]:
        return head * HEAD_STEPS[1]
    else:
        q_head = grouped(head, GROUP, HEAD_STEPS[0], HEAD_STEPS[1])
        kv_head = head * tl.where(kind == KEY, HEAD_STEPS[2], HEAD_STEPS[3])
        return tl.where(kind == QUERY, q_head, kv_head)


@triton.jit
def qkv_projection(
    x_ptr, weight_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr,
    slots_ptr, sequences_ptr, positions_ptr, k_cache_scale_ptr, v_cache_scale_ptr,
    q_bias_ptr, k_bias_ptr, v_bias_ptr, delta_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    num_tokens, sequence_tokens, rope_tokens, num_pages,
    num_sequences, lookup_columns, lookup_stride,
    second_distance, third_distance, q_place, k_place, v_place,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr, N_MAJOR: tl.constexpr,
    WEIGHT_EXTENT: tl.constexpr, WEIGHT_STRIDES: tl.constexpr, HEAD_STEPS: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr, KV_REPEAT: tl.constexpr,
    PAIR_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ROPE_FULL_WIDTH: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
    BIAS_STRIDES: tl.constexpr, DELTA_STRIDE: tl.constexpr, CLIP: tl.constexpr,
    NORM_BEFORE: tl.constexpr, NORM_AFTER: tl.constexpr, NORMED: tl.constexpr,
    NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    NORM_HALVES: tl.constexpr, NORM_STRIDES: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ADDRESSING: tl.constexpr, WRAP_NEGATIVE: tl.constexpr,
    ADDRESS_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr, ROW_UNIT: tl.constexpr,
    SCALE_STRIDES: tl.constexpr, SCALE_MULTIPLIES: tl.constexpr,
    BLOCK_M: tl.constexpr, HEADS_PER_TILE: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EPILOGUE_PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
    PAIRS_FIRST: tl.constexpr, LAUNCH_PDL: tl.constexpr, GATE_RUN: tl.constexpr = 0,
    V_NORMED: tl.constexpr = False, q_norm_bias_ptr=None, k_norm_bias_ptr=None,
    NORM_BIAS_STRIDES: tl.constexpr = None, SATURATES: tl.constexpr = True,
):  # fmt: skip
    """Computes a QKV projection for many tokens, q, k, v = x @ [Wq; Wk; Wv]^T. Applies bias, QK
    norm and rotary embedding. Stores q to the result, and k and v to a paged cache.

    x is [T, HIDDEN], and weights are [H, D, HIDDEN]. The kernel is persistent, so the grid may have
    any size. `qkv_epilogue` explains the arguments that are not explained here.

    Args:
        weight_ptr: The lowest address of the three weights.
        second_distance, third_distance: The distances in elements to the other two weights.
        q_place, k_place, v_place: The index (0, 1, 2) of each weight in the order of addresses.
        WEIGHT_STRIDES: If the weights are k-major, (unit, row), and heads begin at multiples of
            `unit`. If they are N_MAJOR, (column of K,).
        HEAD_STEPS, WEIGHT_EXTENT: The steps between heads (`place_in_weight`), and the extent of
            all heads. Both count units, or elements if the weights are N_MAJOR.
        HEAD_DIM: A power of two and a multiple of 2 * PAIR_HALF.
        HEADS_PER_TILE: A divisor of the numbers of q and k heads, of GROUP and of GATE_RUN. If it
            is more than 1, adjacent heads must be one unit apart.
    """
    # Wait before making descriptors: the previous kernel may still be reading the memory in which
    # they are made.
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    x_desc = tl.make_tensor_descriptor(
        x_ptr, [num_tokens, HIDDEN], [X_STRIDE, 1], [BLOCK_M, BLOCK_K]
    )
    if N_MAJOR:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr,
            [2, 2, HIDDEN, WEIGHT_EXTENT],
            [third_distance, second_distance, WEIGHT_STRIDES[0], 1],
            [1, 1, BLOCK_K, HEADS_PER_TILE * HEAD_DIM],
        )
    else:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr,
            [2, 2, WEIGHT_EXTENT, HEAD_DIM, HIDDEN],
            [third_distance, second_distance, WEIGHT_STRIDES[0], WEIGHT_STRIDES[1], 1],
            [1, 1, HEADS_PER_TILE, HEAD_DIM, BLOCK_K],
        )
    KV_TENSORS: tl.constexpr = 1 if v_cache_ptr is None else 2
    TILES_N: tl.constexpr = (NUM_HEADS + KV_TENSORS * NUM_KV_HEADS) // HEADS_PER_TILE
    tiles_m = tl.cdiv(num_tokens, BLOCK_M)
    for tile in tl.range(
        tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0),
        flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        # Tiles of GROUP_M token blocks run at the same time, so that they find a weight tile in the
        # L2 cache.
        group = tile // (GROUP_M * TILES_N)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        in_group = tile % (GROUP_M * TILES_N)
        first_token = (group * GROUP_M + in_group % group_rows) * BLOCK_M
        kind, head = head_of_tile(in_group // group_rows * HEADS_PER_TILE, NUM_HEADS, NUM_KV_HEADS)
        turned = turned_kind(kind, head, GATE_RUN)
        place = tl.where(kind == QUERY, q_place, tl.where(kind == KEY, k_place, v_place))
        second = (place == 1).to(tl.int32)
        third = (place == 2).to(tl.int32)
        weight_head = place_in_weight(kind, head, GROUP, HEAD_STEPS)
        accumulator = tl.zeros((BLOCK_M, HEADS_PER_TILE * HEAD_DIM), tl.float32)
        for column in range(0, HIDDEN, BLOCK_K):
            x = x_desc.load([first_token, column])
            if N_MAJOR:
                weight = weight_desc.load([third, second, column, weight_head])
                weight = tl.reshape(weight, (BLOCK_K, HEADS_PER_TILE * HEAD_DIM))
                accumulator = tl.dot(x, weight, accumulator)
            else:
                weight = weight_desc.load([third, second, weight_head, 0, column])
                weight = tl.reshape(weight, (HEADS_PER_TILE * HEAD_DIM, BLOCK_K))
                accumulator = tl.dot(x, weight.T, accumulator)
        tokens = first_token + tl.arange(0, BLOCK_M)
        token_mask = tokens < num_tokens
        pointer, row_offsets, row_mask, head_stride, dim_stride = store_target(
            kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr,
            slots_ptr, sequences_ptr, positions_ptr,
            sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
            NUM_HEADS, HEAD_DIM, PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES,
            SEARCH_STEPS, K_STRIDES, V_STRIDES, ROW_UNIT,
        )  # fmt: skip
        # If the registers cannot hold a whole tile, the epilogue processes it in parts: first by
        # heads, then by slices of the pairs.
        HEAD_PARTS: tl.constexpr = 1 if PAIRS_FIRST else min(EPILOGUE_PARTS, HEADS_PER_TILE)
        PAIR_PARTS: tl.constexpr = EPILOGUE_PARTS // HEAD_PARTS
        HEADS: tl.constexpr = HEADS_PER_TILE // HEAD_PARTS
        PAIRS: tl.constexpr = HEAD_DIM // 2 // PAIR_PARTS
        for head_part in tl.static_range(HEAD_PARTS):
            values = part_of(accumulator, head_part, HEAD_PARTS)
            low, high = split_pairs(values, BLOCK_M, HEADS, HEAD_DIM, PAIR_HALF, INTERLEAVED)
            heads = head + head_part * HEADS + tl.arange(0, HEADS)
            low_bias, high_bias = load_bias(
                kind, heads, None, 0, q_bias_ptr, k_bias_ptr, v_bias_ptr,
                HEAD_DIM // 2, PAIR_HALF, HEAD_DIM, INTERLEAVED, GROUP, BIAS_STRIDES,
            )  # fmt: skip
            low_norm, high_norm = load_norm(
                turned, heads, None, 0, q_norm_ptr, k_norm_ptr,
                HEAD_DIM // 2, PAIR_HALF, HEAD_DIM, INTERLEAVED,
                NORM_HALVES, NORM_STRIDES, NORM_OFFSET, V_NORMED,
            )  # fmt: skip
            low_shift, high_shift = load_norm_bias(
                turned, heads, None, 0, q_norm_bias_ptr, k_norm_bias_ptr,
                HEAD_DIM // 2, PAIR_HALF, HEAD_DIM, INTERLEAVED, NORM_HALVES, NORM_BIAS_STRIDES,
            )  # fmt: skip
            cache_scale = load_cache_scale(
                kind, heads, None, k_cache_scale_ptr, v_cache_scale_ptr, SCALE_STRIDES
            )
            if delta_ptr is not None:
                low_delta, high_delta = load_delta(
                    delta_ptr, kind, tokens, token_mask, heads, None, 0,
                    HEAD_DIM // 2, PAIR_HALF, HEAD_DIM, INTERLEAVED, NUM_HEADS, NUM_KV_HEADS,
                    DELTA_STRIDE,
                )  # fmt: skip
                low += low_delta
                high += high_delta
            low, high = add_bias_and_norm(
                low, high, turned, low_bias, high_bias, low_norm, high_norm, low_shift, high_shift,
                None,
                HEAD_DIM, PAIR_HALF, INTERLEAVED,
                q_bias_ptr is not None or k_bias_ptr is not None or v_bias_ptr is not None,
                CLIP, NORM_BEFORE, NORMED, V_NORMED, NORM_EPS,
            )  # fmt: skip
            for pair_part in tl.static_range(PAIR_PARTS):
                low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
                    turned, tokens, token_mask, pair_part * PAIRS, cos_ptr, sin_ptr, rope_tokens,
                    PAIRS, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM, ROPE_FULL_WIDTH,
                    COS_STRIDE, SIN_STRIDE,
                )  # fmt: skip
                rotate_and_store(
                    pairs_part(low, pair_part, PAIR_PARTS),
                    pairs_part(high, pair_part, PAIR_PARTS),
                    kind, turned, tokens, token_mask, heads, None, pair_part * PAIRS,
                    low_cos, low_sin, high_cos, high_sin, rotates,
                    low_norm, high_norm, low_shift, high_shift, cache_scale,
                    q_out_ptr, pointer, row_offsets, row_mask, head_stride, dim_stride,
                    NUM_HEADS, HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM,
                    NORM_AFTER, NORMED, V_NORMED, NORM_EPS, KV_REPEAT, SCALE_MULTIPLIES, SATURATES,
                )  # fmt: skip
