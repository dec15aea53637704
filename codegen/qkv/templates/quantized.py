"""QKV projection for few tokens with weights of 4- or 8-bit codes, read as they are stored.

    w[n, k] = (code[n, k] - zero[n // bn, k // bk]) * scale[n // bn, k // bk]

Codes are exact in bf16 and fp16, so the tensor cores multiply the codes; scales and zeros are
applied to the fp32 sums of a group: sum(w x) = scale * (sum(code x) - zero * sum(x)). The weight
itself is never rounded.

In a tensor core's operand each thread holds pairs of neighbours along K, while a loaded word gives
a thread a run of K. A dot product may take K in any order, as long as both operands take the same:
the weight's codes stay in the thread that loaded their word, and x, the smaller tile, is permuted
to match (`x_in_order`).
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
    load_rope,
    pair_dims,
    token_rows,
)
from tilewright.codegen.qkv.templates.projection import reduce_partials, stride_of
from tilewright.codegen.templates.codes import (
    add_scaled_groups,
    code_unit,
    decoded,
    load_blocks,
    load_scales,
    scaled_whole,
    x_in_order,
)
from tilewright.codegen.templates.places import KEY, QUERY, head_of_tile, store_target


@triton.jit
def order_x(
    x_ptr, ordered_ptr, num_tokens,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr, PER: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x [tokens, HIDDEN] with its columns permuted to the order in which `qkv_quantized` takes K.

    Each step of BLOCK_K columns by itself, the last one padded with zeros; qkv_quantized reads the
    result with X_IN_ORDER. Grid (steps, cdiv(tokens, BLOCK_T)).
    """
    STEPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    tokens = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    mask = tokens < num_tokens
    x = tl.load(
        x_ptr + tokens.to(tl.int64) * X_STRIDE + columns[None, :],
        mask=mask & (columns < HIDDEN)[None, :],
        other=0.0,
    )
    x = x_in_order(x, PER, INTERLEAVED_NIBBLES, GROUPS)
    ordered = ordered_ptr + tokens.to(tl.int64) * (STEPS * BLOCK_K) + columns[None, :]
    tl.store(ordered, x, mask=mask)


@triton.jit
def load_x_scale(
    x_scale_ptr, tokens, token_mask, column,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """The scales [1, tokens] of x from a column on, one for BLOCK columns."""
    BOUND: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    return tl.trans(load_blocks(
        x_scale_ptr, tokens, token_mask, column // BLOCK + tl.arange(0, 1),
        STRIDES[0], STRIDES[1], False, False, BOUND,
    ))  # fmt: skip


@triton.jit
def qkv_quantized(
    x_ptr, x_scale_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, q_zero_ptr, k_zero_ptr, v_zero_ptr,
    q_out_ptr, k_cache_ptr, v_cache_ptr,
    slots_ptr, sequences_ptr, positions_ptr, k_cache_scale_ptr, v_cache_scale_ptr,
    q_bias_ptr, k_bias_ptr, v_bias_ptr, delta_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    workspace_ptr, counters_ptr,
    num_tokens, sequence_tokens, rope_tokens, num_pages,
    num_sequences, lookup_columns, lookup_stride,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr, X_SCALE_STRIDES: tl.constexpr,
    X_SCALE_BLOCK: tl.constexpr,
    Q_WEIGHT_STRIDES: tl.constexpr, K_WEIGHT_STRIDES: tl.constexpr,
    V_WEIGHT_STRIDES: tl.constexpr,
    Q_BLOCK_STRIDES: tl.constexpr, K_BLOCK_STRIDES: tl.constexpr, V_BLOCK_STRIDES: tl.constexpr,
    PER: tl.constexpr, PACKED_ROWS: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr, REVERSED: tl.constexpr, X_IN_ORDER: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED_ZEROS: tl.constexpr,
    CODE_OFFSET: tl.constexpr, ZERO_OFFSET: tl.constexpr,
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
    BLOCK_P: tl.constexpr, TILES_PER_HEAD: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """QKV projection, few tokens, weights of 4- or 8-bit codes: q, k, v = x @ [Wq; Wk; Wv]^T with
    bias, QK norm, rotary embedding, and the store to q and to a paged cache.

    Grid, tiles, workspace and counters are those of `qkv_projection_swapped`. A weight is 8-bit
    (PER 1), or words of PER codes along K or, with PACKED_ROWS, along the rows. Its strides (group,
    head, row, column) count words; Q_BLOCK_STRIDES are those of scales and zeros: (scale row, scale
    column, zero row, zero column). One of them is for SCALE_ROWS rows by SCALE_COLUMNS columns, a
    multiple of BLOCK_K, a half, a quarter or all of it, or at least HIDDEN. The zero of a code is
    CODE_OFFSET + ZERO_OFFSET + the zero tensor's value; PACKED_ZEROS: words of eight rows. x is
    16-bit, or fp8 like the weight with a scale for each token and X_SCALE_BLOCK columns.
    X_IN_ORDER: x is the result of `order_x`.
    """
    row_tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    kind, head = head_of_tile(row_tile // TILES_PER_HEAD, NUM_HEADS, NUM_KV_HEADS)
    first_pair = row_tile % TILES_PER_HEAD * BLOCK_P
    # The order of rows is that of `qkv_projection_swapped`, but the order of memory where a word
    # holds both members of a pair, or where neighbouring words would be separated.
    ROWS: tl.constexpr = 2 * BLOCK_P
    rows = tl.arange(0, ROWS)
    WHOLE: tl.constexpr = TILES_PER_HEAD == 1 and PAIR_HALF == BLOCK_P
    IN_ORDER: tl.constexpr = PACKED_ROWS and (INTERLEAVED or WHOLE)
    if IN_ORDER:
        dims = 2 * first_pair + rows
    else:
        low_dims, high_dims = pair_dims(
            first_pair + rows // 16 * 8 + rows % 8, PAIR_HALF, INTERLEAVED
        )
        dims = tl.where(rows // 8 % 2 == 0, low_dims, high_dims)
    row_mask = dims < HEAD_DIM
    if kind == QUERY:
        weight_ptr = q_weight_ptr + grouped(head, GROUP, Q_WEIGHT_STRIDES[0], Q_WEIGHT_STRIDES[1])
        scale_ptr = q_scale_ptr
        zero_ptr = q_zero_ptr
    elif v_weight_ptr is None or kind == KEY:
        weight_ptr = k_weight_ptr + head * K_WEIGHT_STRIDES[1]
        scale_ptr = k_scale_ptr
        zero_ptr = k_zero_ptr
    else:
        weight_ptr = v_weight_ptr + head * V_WEIGHT_STRIDES[1]
        scale_ptr = v_scale_ptr
        zero_ptr = v_zero_ptr
    row_stride = stride_of(kind, Q_WEIGHT_STRIDES[2], K_WEIGHT_STRIDES[2], V_WEIGHT_STRIDES[2])
    column_stride = stride_of(kind, Q_WEIGHT_STRIDES[3], K_WEIGHT_STRIDES[3], V_WEIGHT_STRIDES[3])
    scale_row_stride = stride_of(kind, Q_BLOCK_STRIDES[0], K_BLOCK_STRIDES[0], V_BLOCK_STRIDES[0])
    scale_stride = stride_of(kind, Q_BLOCK_STRIDES[1], K_BLOCK_STRIDES[1], V_BLOCK_STRIDES[1])
    zero_row_stride = stride_of(kind, Q_BLOCK_STRIDES[2], K_BLOCK_STRIDES[2], V_BLOCK_STRIDES[2])
    zero_stride = stride_of(kind, Q_BLOCK_STRIDES[3], K_BLOCK_STRIDES[3], V_BLOCK_STRIDES[3])
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    PART: tl.constexpr = (HIDDEN + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    EVEN: tl.constexpr = HIDDEN % (BLOCK_K * SPLIT_K) == 0
    first_column = part * PART
    columns = first_column + tl.arange(0, BLOCK_K)
    STEP: tl.constexpr = 1 if PACKED_ROWS else PER
    if PACKED_ROWS:
        WORD_ROWS: tl.constexpr = ROWS // PER
        word_rows = tl.arange(0, WORD_ROWS)
        if IN_ORDER:
            word_dims = 2 * first_pair + word_rows * PER
        else:
            low_words, high_words = pair_dims(
                first_pair + word_rows * PER // 16 * 8 + word_rows * PER % 8,
                PAIR_HALF, INTERLEAVED,
            )  # fmt: skip
            word_dims = tl.where(word_rows * PER // 8 % 2 == 0, low_words, high_words)
        word_row_mask = word_dims < HEAD_DIM
        word_offsets = word_dims // PER * row_stride
    else:
        word_row_mask = row_mask
        word_offsets = dims * row_stride
    word_columns = first_column // STEP + tl.arange(0, BLOCK_K // STEP)
    word_ptrs = weight_ptr + word_offsets[:, None] + word_columns[None, :] * column_stride
    x_ptrs = x_ptr + token_rows(tokens, X_STRIDE) + columns[None, :]
    # Before the loop: after it nothing would hide the latency of these loads.
    heads = head + tl.arange(0, 1)
    low_bias, high_bias = load_bias(
        kind, heads, None, first_pair, q_bias_ptr, k_bias_ptr, v_bias_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, GROUP, BIAS_STRIDES,
    )  # fmt: skip
    low_norm, high_norm = load_norm(
        kind, heads, None, first_pair, q_norm_ptr, k_norm_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NORM_HALVES, NORM_STRIDES, NORM_OFFSET,
    )  # fmt: skip
    cache_scale = load_cache_scale(
        kind, heads, None, k_cache_scale_ptr, v_cache_scale_ptr, SCALE_STRIDES
    )
    # With many tokens the rotary tables would take the registers that the loop needs.
    ROPE_FIRST: tl.constexpr = BLOCK_T < 64
    if ROPE_FIRST:
        low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
            kind, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
            BLOCK_P, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM, ROPE_FULL_WIDTH,
            COS_STRIDE, SIN_STRIDE,
        )  # fmt: skip
    pointer, row_offsets, target_mask, head_stride, dim_stride = store_target(
        kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr,
        slots_ptr, sequences_ptr, positions_ptr,
        sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
        NUM_HEADS, HEAD_DIM, PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES,
        SEARCH_STEPS, K_STRIDES, V_STRIDES, ROW_UNIT,
    )  # fmt: skip
    UNIT: tl.constexpr = code_unit(x_ptr.dtype.element_ty) if PER == 8 and not PACKED_ROWS else 1.0
    # Scales of groups are applied to each step's sums, scales of whole rows to the final sum.
    HAS_ZEROS: tl.constexpr = q_zero_ptr is not None or ZERO_OFFSET != 0
    WHOLE_ROWS: tl.constexpr = SCALE_COLUMNS >= HIDDEN and (
        x_scale_ptr is None or X_SCALE_BLOCK >= HIDDEN
    )
    GROUPS: tl.constexpr = max(BLOCK_K // SCALE_COLUMNS, 1)
    BLOCKS: tl.constexpr = (HIDDEN + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    block_rows = (head * HEAD_DIM + dims) // SCALE_ROWS
    groups = tl.arange(0, GROUPS)
    scale, zero = load_scales(
        scale_ptr, zero_ptr, block_rows, row_mask, first_column // SCALE_COLUMNS + groups,
        (scale_row_stride, scale_stride, zero_row_stride, zero_stride), q_zero_ptr is not None,
        PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
    )  # fmt: skip
    x_scale = tokens.to(tl.float32)[None, :]
    if x_scale_ptr is not None:
        x_scale = load_x_scale(
            x_scale_ptr, tokens, token_mask, first_column, HIDDEN, X_SCALE_BLOCK, X_SCALE_STRIDES
        )
    accumulator = tl.zeros((ROWS, BLOCK_T), tl.float32)
    sums = tl.zeros((ROWS, BLOCK_T), tl.float32)
    for step in range(0, PART, BLOCK_K):
        if EVEN:
            word_mask = word_row_mask[:, None]
            x_mask = token_mask[:, None]
        else:
            WORD_BOUND: tl.constexpr = HIDDEN // STEP
            X_BOUND: tl.constexpr = X_STRIDE if X_IN_ORDER else HIDDEN
            word_mask = word_row_mask[:, None] & (word_columns + step // STEP < WORD_BOUND)[None, :]
            x_mask = token_mask[:, None] & (columns + step < X_BOUND)[None, :]
        words = tl.load(
            word_ptrs + step // STEP * column_stride,
            mask=word_mask, other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        x = tl.load(x_ptrs + step, mask=x_mask, other=0.0)
        # A step ahead: Triton does not pipeline these loads through shared memory.
        next_scale = scale
        next_zero = zero
        next_x_scale = x_scale
        if not WHOLE_ROWS:
            next_column = first_column + step + BLOCK_K
            next_scale, next_zero = load_scales(
                scale_ptr, zero_ptr, block_rows, row_mask, next_column // SCALE_COLUMNS + groups,
                (scale_row_stride, scale_stride, zero_row_stride, zero_stride),
                q_zero_ptr is not None, PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
            )  # fmt: skip
            if x_scale_ptr is not None:
                next_x_scale = load_x_scale(
                    x_scale_ptr, tokens, token_mask, next_column, HIDDEN, X_SCALE_BLOCK,
                    X_SCALE_STRIDES,
                )  # fmt: skip
        if x_ptr.dtype.element_ty == tl.float8e4nv:
            codes = words
        else:
            codes = decoded(
                words, x_ptr.dtype.element_ty, PER, PACKED_ROWS, INTERLEAVED_NIBBLES, REVERSED,
                CODE_OFFSET, GROUPS,
            )  # fmt: skip
            if not PACKED_ROWS and not X_IN_ORDER:
                x = x_in_order(x, PER, INTERLEAVED_NIBBLES, GROUPS)
        if WHOLE_ROWS:
            if x_ptr.dtype.element_ty == tl.float8e4nv:
                SHORT: tl.constexpr = min(BLOCK_K, 128)
                accumulator = tl.dot(codes, x.T, accumulator, max_num_imprecise_acc=SHORT)
            else:
                accumulator = tl.dot(codes, x.T, accumulator)
            if HAS_ZEROS:
                ones = tl.full((ROWS, BLOCK_K), 1.0, x_ptr.dtype.element_ty)
                sums = tl.dot(ones, x.T, sums)
        else:
            accumulator = add_scaled_groups(
                accumulator, codes, x, scale, zero, x_scale,
                GROUPS, HAS_ZEROS, q_zero_ptr is not None, ZERO_OFFSET, x_scale_ptr is not None,
                UNIT,
            )  # fmt: skip
        scale = next_scale
        zero = next_zero
        x_scale = next_x_scale
    if WHOLE_ROWS:
        accumulator = scaled_whole(
            accumulator, sums, scale, zero, x_scale, HAS_ZEROS, q_zero_ptr is not None, ZERO_OFFSET,
            x_scale_ptr is not None, UNIT,
        )  # fmt: skip
    is_finisher = True
    if SPLIT_K > 1:
        tile = tl.program_id(1) * (tl.num_programs(0) // SPLIT_K) + row_tile
        accumulator, is_finisher = reduce_partials(
            accumulator, workspace_ptr, counters_ptr, tile, part, ROWS, BLOCK_T, SPLIT_K
        )
    if is_finisher:
        if not ROPE_FIRST:
            low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
                kind, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
                BLOCK_P, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM, ROPE_FULL_WIDTH,
                COS_STRIDE, SIN_STRIDE,
            )  # fmt: skip
        if IN_ORDER and INTERLEAVED:
            halves = tl.reshape(accumulator, (BLOCK_P, 2, BLOCK_T))
            low, high = tl.split(tl.permute(halves, (0, 2, 1)))
        elif IN_ORDER:
            halves = tl.reshape(accumulator, (2, BLOCK_P, BLOCK_T))
            low, high = tl.split(tl.permute(halves, (1, 2, 0)))
        else:
            halves = tl.reshape(accumulator, (BLOCK_P // 8, 2, 8, BLOCK_T))
            low, high = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        low = tl.reshape(tl.trans(tl.reshape(low, (BLOCK_P, BLOCK_T))), (BLOCK_T, 1, BLOCK_P))
        high = tl.reshape(tl.trans(tl.reshape(high, (BLOCK_P, BLOCK_T))), (BLOCK_T, 1, BLOCK_P))
        if delta_ptr is not None:
            low_delta, high_delta = load_delta(
                delta_ptr, kind, tokens, token_mask, heads, None, first_pair,
                BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NUM_HEADS, NUM_KV_HEADS, DELTA_STRIDE,
            )  # fmt: skip
            low += low_delta
            high += high_delta
        low, high = add_bias_and_norm(
            low, high, kind, low_bias, high_bias, low_norm, high_norm, None,
            HEAD_DIM, PAIR_HALF, INTERLEAVED,
            q_bias_ptr is not None or k_bias_ptr is not None or v_bias_ptr is not None,
            CLIP, NORM_BEFORE, NORMED, NORM_EPS,
        )  # fmt: skip
        rotate_and_store(
            low, high, kind, tokens, token_mask, heads, None, first_pair,
            low_cos, low_sin, high_cos, high_sin, rotates, low_norm, high_norm, cache_scale,
            q_out_ptr, pointer, row_offsets, target_mask, head_stride, dim_stride,
            NUM_HEADS, HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM,
            NORM_AFTER, NORMED, NORM_EPS, KV_REPEAT, SCALE_MULTIPLIES,
        )  # fmt: skip
