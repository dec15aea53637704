"""Computes `q, k, v = x @ [Wq; Wk; Wv]^T` and its epilogue, including the store to a paged cache,
in one kernel for few tokens.

As in `tiled`, every output tile belongs to only one of q, k and v. With few tokens, the kernel
takes as long as reading the weights takes, so it reads each weight once. Tokens are on the tensor
core's N side, which may be as small as 16. Weight rows are on its M side, which must be at least 64
for wgmma and tcgen05. A tile may be a slice of a head, but always has both members of a rotated
pair. K may be split, and the sums over its parts are then added in a fixed order.

The weights may also be 4- or 8-bit codes, which are read as they are stored:

    w[n, k] = (code[n, k] - zero[n // bn, k // bk]) * scale[n // bn, k // bk] * factor

bf16 and fp16 represent the codes exactly, so the tensor cores multiply the codes themselves. Scales
and zeros are applied to the fp32 sums of a group: sum(w x) = scale * (sum(code x) - zero * sum(x)).
The weight itself is never rounded.

In an operand of a tensor core, each thread holds pairs of columns that are adjacent along K. A
loaded word, however, gives a thread a longer run of columns. A dot product may go over K in any
order, as long as both operands have the same order. Therefore the codes of the weight stay in the
thread that loaded their word. x, which is the smaller tile, is permuted to the same order by this
kernel (`x_in_order`) or by an earlier kernel (`order_x`).

For one token, many small programs multiply the codes without tensor cores (`dotted_rows`).
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
    pair_dims,
    token_rows,
)
from tilewright.codegen.templates.codes import (
    add_scaled_groups,
    decoded,
    load_blocks,
    load_scales,
    number_unit,
    scaled_numbers,
    scaled_whole,
    x_in_order,
)
from tilewright.codegen.templates.dotted_rows import dotted_rows
from tilewright.codegen.templates.places import (
    KEY,
    QUERY,
    VALUE,
    head_of_tile,
    store_target,
    turned_kind,
)
from tilewright.codegen.templates.split_k import arrive, sum_of_parts
from tilewright.codegen.templates.streaming import (
    layer_step_of_x,
    places_of_norm,
    prefetch_rows,
    row_statistics,
    step_of_x,
)


@triton.jit
def reduce_partials(
    partial, square, workspace_ptr, counters_ptr, tile, part,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Returns (sum over the SPLIT_K parts of `tile`, sum of `square` [COLUMNS] or None, whether
    this program runs the epilogue).

    Every program stores its part. The last program to arrive adds the parts in a fixed order, so
    the sum does not depend on which program was last.
    """
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    NUMBERS: tl.constexpr = ROWS * COLUMNS + (0 if square is None else COLUMNS)
    parts = workspace_ptr + tile * (SPLIT_K * NUMBERS)
    tl.store(parts + part * (ROWS * COLUMNS) + offsets, partial)
    if square is not None:
        square_parts = parts + SPLIT_K * ROWS * COLUMNS
        own = tl.arange(0, COLUMNS)
        tl.store(square_parts + part * COLUMNS + own, square)
    is_last = arrive(counters_ptr + tile, SPLIT_K)
    total = partial
    total_square = square
    # Store every part whole, with masks (`>= 0`) that are always true.
    if square is None:
        if is_last:
            total = sum_of_parts(parts, offsets, offsets >= 0, ROWS * COLUMNS, SPLIT_K)
    else:
        if is_last:
            total = sum_of_parts(parts, offsets, offsets >= 0, ROWS * COLUMNS, SPLIT_K)
            total_square = sum_of_parts(square_parts, own, own >= 0, COLUMNS, SPLIT_K)
    return total, total_square, is_last


@triton.jit
def stride_of(kind, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Returns the stride of q, k or v, selected by `kind`. If the three strides are equal, the
    result is a constant."""
    stride = Q
    if K != Q:
        stride += (kind == KEY) * (K - Q)
    if V != Q:
        stride += (kind == VALUE) * (V - Q)
    return stride


@triton.jit
def load_x_scale(
    x_scale_ptr, tokens, token_mask, column,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Loads the scales [1, tokens] of x at a column. BLOCK columns share a scale."""
    BOUND: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    return tl.trans(load_blocks(
        x_scale_ptr, tokens, token_mask, column // BLOCK + tl.arange(0, 1),
        STRIDES[0], STRIDES[1], False, False, BOUND,
    ))  # fmt: skip


@triton.jit
def qkv_projection_swapped(
    x_ptr, x_scale_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, q_zero_ptr, k_zero_ptr, v_zero_ptr,
    q_out_ptr, k_cache_ptr, v_cache_ptr,
    slots_ptr, sequences_ptr, positions_ptr, k_cache_scale_ptr, v_cache_scale_ptr,
    q_bias_ptr, k_bias_ptr, v_bias_ptr, delta_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    workspace_ptr, counters_ptr,
    num_tokens, sequence_tokens, rope_tokens, num_pages,
    num_sequences, lookup_columns, lookup_stride,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr,
    Q_WEIGHT_STRIDES: tl.constexpr, K_WEIGHT_STRIDES: tl.constexpr,
    V_WEIGHT_STRIDES: tl.constexpr,
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
    BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, LAUNCH_PDL: tl.constexpr = False,
    X_SCALE_STRIDES: tl.constexpr = (0, 0), X_SCALE_BLOCK: tl.constexpr = 1,
    X_IN_ORDER: tl.constexpr = False,
    Q_BLOCK_STRIDES: tl.constexpr = (0, 0, 0, 0), K_BLOCK_STRIDES: tl.constexpr = (0, 0, 0, 0),
    V_BLOCK_STRIDES: tl.constexpr = (0, 0, 0, 0),
    PER: tl.constexpr = 1, PACKED_ROWS: tl.constexpr = False,
    INTERLEAVED_NIBBLES: tl.constexpr = False, REVERSED: tl.constexpr = False,
    SCALE_ROWS: tl.constexpr = 1, SCALE_COLUMNS: tl.constexpr = 1,
    PACKED_ZEROS: tl.constexpr = False, CODE_OFFSET: tl.constexpr = 0,
    ZERO_OFFSET: tl.constexpr = 0, NUMBER: tl.constexpr = "",
    input_norm_weight_ptr=None, INPUT_NORM: tl.constexpr = False,
    INPUT_NORM_EPS: tl.constexpr = 0.0, INPUT_NORM_OFFSET: tl.constexpr = 0.0,
    INPUT_NORM_STRIDE: tl.constexpr = 0,
    PREFETCH: tl.constexpr = 0, LETS_IN: tl.constexpr = False,
    GATE_RUN: tl.constexpr = 0, V_NORMED: tl.constexpr = False,
    q_norm_bias_ptr=None, k_norm_bias_ptr=None, NORM_BIAS_STRIDES: tl.constexpr = None,
    input_norm_bias_ptr=None, INPUT_NORM_BIAS_STRIDE: tl.constexpr = 0,
    INPUT_LAYER_ROW: tl.constexpr = 0, SATURATES: tl.constexpr = True,
    ADDED_ZEROS: tl.constexpr = False, SCALED: tl.constexpr = False, factors_ptr=None,
    RUN: tl.constexpr = 0, LINE: tl.constexpr = 64, ZERO: tl.constexpr = 0,
    FLOATS: tl.constexpr = False, SIGNED: tl.constexpr = False, BYTES: tl.constexpr = (),
):  # fmt: skip
    """Computes a QKV projection for few tokens, q, k, v = x @ [Wq; Wk; Wv]^T. Applies bias, QK norm
    and rotary embedding. Stores q to the result, and k and v to a paged cache.

    Grid ((Hq + 2 Hkv) * TILES_PER_HEAD * SPLIT_K, cdiv(T, BLOCK_T)). A program computes 2 * BLOCK_P
    weight rows for BLOCK_T tokens. BLOCK_P is a power of two that is at least 8, and TILES_PER_HEAD
    * BLOCK_P covers the pairs of a head. A norm requires that TILES_PER_HEAD is 1. If SPLIT_K > 1,
    workspace has fp32 [tiles, SPLIT_K, (2 * BLOCK_P + INPUT_NORM) * BLOCK_T], and counters has an
    int32 zero for each tile; no other launch uses these counters.

    The weights may have any strides (group, head, row, column of K); the first of K_WEIGHT_STRIDES
    and of V_WEIGHT_STRIDES is not used. `qkv_epilogue` explains the arguments that are not
    explained here.

    These arguments describe a norm of x. A norm of x requires weights that are not quantised, or
    quantised weights with RUN:
        INPUT_NORM: x is divided by its rms and multiplied by INPUT_NORM_OFFSET + input_norm_weight.
            The normalised x is rounded before the product.
        INPUT_LAYER_ROW: If it is not 0, x has a layer norm: the mean of x is subtracted first, and
            input_norm_bias is added last. INPUT_LAYER_ROW is a power of two that is at least
            HIDDEN.
        PREFETCH: How many columns of each weight row the kernel prefetches, LINE elements at a
            time, before it waits for the previous kernel.
        LETS_IN: Whether the next kernel may start early.

    These arguments describe quantised weights. The weights are quantised if there are scales. A
    code then has 8 bits (PER is 1), or PER codes share a word, and the strides of weights count
    words:
        PACKED_ROWS: Whether the codes of a word belong to PER rows. If not, they belong to PER
            columns.
        NUMBER: The kind of numbers that codes stand for: "e2m1", or a table
            (`formats.table_words`).
        Q_BLOCK_STRIDES: The strides of (scale row, scale column, zero row, zero column).
        SCALE_ROWS, SCALE_COLUMNS: How many rows and columns share a scale. SCALE_COLUMNS is BLOCK_K
            / 4, BLOCK_K / 2, a multiple of BLOCK_K, or at least HIDDEN.
        CODE_OFFSET, ZERO_OFFSET: The zero of a code is CODE_OFFSET + ZERO_OFFSET + the value of the
            zero tensor.
        PACKED_ZEROS: A word of the zero tensor holds the zeros of eight rows.
        ADDED_ZEROS: The value of the zero tensor is added after the multiplication by the scale.
        SCALED: Codes are multiplied by their scales before the product (`scaled_numbers`).
        X_SCALE_BLOCK: x is 16-bit. If the weight is fp8, x may also be fp8, with one scale for
            X_SCALE_BLOCK columns of a token.
        X_IN_ORDER: x is the output of `order_x`.
        RUN: If it is not 0, BLOCK_T is 1, and codes are packed along a contiguous K. Rows are then
            multiplied by x without tensor cores, as in `dotted_rows`, and the zero of an integer is
            ZERO + the value of the zero tensor.
    """
    row_tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    kind, head = head_of_tile(row_tile // TILES_PER_HEAD, NUM_HEADS, NUM_KV_HEADS)
    turned = turned_kind(kind, head, GATE_RUN)
    first_pair = row_tile % TILES_PER_HEAD * BLOCK_P
    # Rows alternate by eight: the low members of 8 pairs, then their high members. In the layouts
    # of mma and wgmma, one thread holds rows r and r + 8, so the split below moves no data. If
    # IN_ORDER, rows keep their order in memory. There are two such cases. In the first case, pairs
    # are interleaved, so their members are already adjacent or in one word. In the second case,
    # rows are packed and the tile has whole heads, so alternation would separate adjacent words.
    ROWS: tl.constexpr = 2 * BLOCK_P
    rows = tl.arange(0, ROWS)
    CODES: tl.constexpr = q_scale_ptr is not None
    WHOLE: tl.constexpr = TILES_PER_HEAD == 1 and PAIR_HALF == BLOCK_P
    BY_MEMORY: tl.constexpr = PACKED_ROWS if CODES else Q_WEIGHT_STRIDES[3] != 1
    IN_ORDER: tl.constexpr = BY_MEMORY and (INTERLEAVED or (CODES and WHOLE))
    if IN_ORDER:
        dims = 2 * first_pair + rows
    else:
        low_dims, high_dims = pair_dims(
            first_pair + rows // 16 * 8 + rows % 8, PAIR_HALF, INTERLEAVED
        )
        dims = tl.where(rows // 8 % 2 == 0, low_dims, high_dims)
    row_mask = dims < HEAD_DIM
    # Branch on scalar pointers, because a select of tensors of pointers would lose the known
    # alignment.
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
            # Triton recognises contiguous rows only if products are not divided.
            word_offsets = (2 * first_pair // PER + word_rows) * row_stride
        else:
            low_words, high_words = pair_dims(
                first_pair + word_rows * PER // 16 * 8 + word_rows * PER % 8,
                PAIR_HALF, INTERLEAVED,
            )  # fmt: skip
            word_dims = tl.where(word_rows // (8 // PER) % 2 == 0, low_words, high_words)
            word_offsets = word_dims // PER * row_stride
        word_row_mask = word_dims < HEAD_DIM
    else:
        word_row_mask = row_mask
        word_offsets = dims * row_stride
    word_columns = first_column // STEP + tl.arange(0, BLOCK_K // STEP)
    word_ptrs = (weight_ptr + word_offsets)[:, None] + word_columns[None, :] * column_stride
    x_ptrs = x_ptr + token_rows(tokens, X_STRIDE) + columns[None, :]
    norm_ptrs = places_of_norm(input_norm_weight_ptr, tokens, columns, INPUT_NORM_STRIDE)
    if LAUNCH_PDL:
        if PREFETCH > 0:
            lines = weight_ptr + tl.minimum(dims, HEAD_DIM - 1) * row_stride
            LINES: tl.constexpr = PREFETCH // (STEP * LINE)
            prefetch_rows(lines, first_column // STEP, HIDDEN // STEP, LINES, LINE)
        tl.extra.cuda.gdc_wait()
        if LETS_IN:
            tl.extra.cuda.gdc_launch_dependents()
    # Load these values before the loop. After the loop, nothing would hide the latency of the
    # loads.
    if factors_ptr is not None:
        factor = tl.load(factors_ptr + kind)
    heads = head + tl.arange(0, 1)
    low_bias, high_bias = load_bias(
        kind, heads, None, first_pair, q_bias_ptr, k_bias_ptr, v_bias_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, GROUP, BIAS_STRIDES,
    )  # fmt: skip
    low_norm, high_norm = load_norm(
        turned, heads, None, first_pair, q_norm_ptr, k_norm_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED,
        NORM_HALVES, NORM_STRIDES, NORM_OFFSET, V_NORMED,
    )  # fmt: skip
    low_shift, high_shift = load_norm_bias(
        turned, heads, None, first_pair, q_norm_bias_ptr, k_norm_bias_ptr,
        BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NORM_HALVES, NORM_BIAS_STRIDES,
    )  # fmt: skip
    cache_scale = load_cache_scale(
        kind, heads, None, k_cache_scale_ptr, v_cache_scale_ptr, SCALE_STRIDES
    )
    # With quantised weights and many tokens, the rotary tables would take registers that the loop
    # needs.
    ROPE_FIRST: tl.constexpr = not CODES or BLOCK_T < 64
    if ROPE_FIRST:
        low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
            turned, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
            BLOCK_P, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM, ROPE_FULL_WIDTH,
            COS_STRIDE, SIN_STRIDE,
        )  # fmt: skip
    if delta_ptr is not None and not CODES:
        low_delta, high_delta = load_delta(
            delta_ptr, kind, tokens, token_mask, heads, None, first_pair,
            BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NUM_HEADS, NUM_KV_HEADS, DELTA_STRIDE,
        )  # fmt: skip
    pointer, row_offsets, target_mask, head_stride, dim_stride = store_target(
        kind, tokens, token_mask, q_out_ptr, k_cache_ptr, v_cache_ptr,
        slots_ptr, sequences_ptr, positions_ptr,
        sequence_tokens, num_pages, num_sequences, lookup_columns, lookup_stride,
        NUM_HEADS, HEAD_DIM, PAGE_SIZE, ADDRESSING, WRAP_NEGATIVE, ADDRESS_STRIDES,
        SEARCH_STEPS, K_STRIDES, V_STRIDES, ROW_UNIT,
    )  # fmt: skip
    UNIT: tl.constexpr = number_unit(x_ptr.dtype.element_ty, PER, PACKED_ROWS, NUMBER, SCALED)
    # If SCALED, scales multiply the decoded numbers in registers. Otherwise, the scales of groups
    # multiply the sums of each step, and the scales of whole rows multiply the final sums.
    HAS_ZEROS: tl.constexpr = q_zero_ptr is not None or ZERO_OFFSET != 0
    WHOLE_ROWS: tl.constexpr = SCALE_COLUMNS >= HIDDEN and (
        x_scale_ptr is None or X_SCALE_BLOCK >= HIDDEN
    )
    GROUPS: tl.constexpr = max(BLOCK_K // SCALE_COLUMNS, 1)
    BLOCKS: tl.constexpr = (HIDDEN + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    if CODES:
        block_rows = (head * HEAD_DIM + dims) // SCALE_ROWS
    if CODES and RUN == 0:
        groups = tl.arange(0, GROUPS)
    if SCALED:
        blocks = first_column // SCALE_COLUMNS + groups
        scale_ptrs = (scale_ptr + block_rows * scale_row_stride)[:, None]
        scale_ptrs += blocks[None, :] * scale_stride
    elif CODES and RUN == 0:
        scale, zero = load_scales(
            scale_ptr, zero_ptr, block_rows, row_mask, first_column // SCALE_COLUMNS + groups,
            (scale_row_stride, scale_stride, zero_row_stride, zero_stride), q_zero_ptr is not None,
            PACKED_ZEROS, INTERLEAVED_NIBBLES, BLOCKS,
        )  # fmt: skip
        x_scale = tokens.to(tl.float32)[None, :]
        if x_scale_ptr is not None:
            x_scale = load_x_scale(
                x_scale_ptr,
                tokens,
                token_mask,
                first_column,
                HIDDEN,
                X_SCALE_BLOCK,
                X_SCALE_STRIDES,
            )
    if INPUT_LAYER_ROW > 0:
        shift_ptrs = places_of_norm(input_norm_bias_ptr, tokens, columns, INPUT_NORM_BIAS_STRIDE)
        x_mean, x_inverse = row_statistics(
            x_ptr, tl.program_id(1) * BLOCK_T, num_tokens,
            BLOCK_T, HIDDEN, X_STRIDE, INPUT_NORM_EPS, INPUT_LAYER_ROW,
        )  # fmt: skip
    if RUN > 0:
        lines = weight_ptr + tl.minimum(dims, HEAD_DIM - 1) * row_stride
        x_scale_row = x_scale_ptr
        if x_scale_ptr is not None:
            x_scale_row = x_scale_ptr + tl.program_id(1) * X_SCALE_STRIDES[0]
        accumulator, _up, squares = dotted_rows(
            x_ptr + tl.program_id(1).to(tl.int64) * X_STRIDE, x_scale_row, input_norm_weight_ptr,
            lines, None, scale_ptr, None, zero_ptr, None, block_rows, row_mask, first_column,
            (scale_row_stride, scale_stride, zero_row_stride, zero_stride), None, 1, 1,
            HIDDEN, PART, BLOCK_K, RUN, INPUT_NORM, INPUT_NORM_STRIDE, INPUT_NORM_OFFSET,
            q_zero_ptr is not None, PER, SCALE_COLUMNS, INTERLEAVED_NIBBLES, REVERSED,
            PACKED_ZEROS, ZERO, NUMBER, BYTES, FLOATS, SIGNED, ADDED_ZEROS,
            X_SCALE_BLOCK, X_SCALE_STRIDES[1],
        )  # fmt: skip
    else:
        accumulator = tl.zeros((ROWS, BLOCK_T), tl.float32)
        sums = tl.zeros((ROWS, BLOCK_T), tl.float32)
        squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        for step in range(0, PART, BLOCK_K):
            if EVEN:
                word_mask = word_row_mask[:, None]
                x_mask = token_mask[:, None]
            else:
                WORD_BOUND: tl.constexpr = HIDDEN // STEP
                X_BOUND: tl.constexpr = X_STRIDE if X_IN_ORDER else HIDDEN
                word_mask = (
                    word_row_mask[:, None] & (word_columns + step // STEP < WORD_BOUND)[None, :]
                )
                x_mask = token_mask[:, None] & (columns + step < X_BOUND)[None, :]
            words = tl.load(
                word_ptrs + step // STEP * column_stride,
                mask=word_mask, other=0.0, eviction_policy="evict_first",
            )  # fmt: skip
            if INPUT_NORM:
                x, squares = step_of_x(
                    x_ptrs, norm_ptrs, squares, step, x_mask,
                    True, INPUT_NORM_STRIDE, INPUT_NORM_OFFSET,
                )  # fmt: skip
            elif INPUT_LAYER_ROW > 0:
                x = layer_step_of_x(
                    x_ptrs, norm_ptrs, shift_ptrs, x_mean, x_inverse, step, x_mask,
                    INPUT_NORM_STRIDE, INPUT_NORM_OFFSET, INPUT_NORM_BIAS_STRIDE,
                )  # fmt: skip
            else:
                x = tl.load(x_ptrs + step, mask=x_mask, other=0.0)
            if SCALED:
                if not X_IN_ORDER:
                    x = x_in_order(x, PER, INTERLEAVED_NIBBLES, 1)
                scale_mask = row_mask[:, None]
                if not EVEN:
                    scale_mask = scale_mask & (blocks + step // SCALE_COLUMNS < BLOCKS)[None, :]
                scale = tl.load(
                    scale_ptrs + step // SCALE_COLUMNS * scale_stride,
                    mask=scale_mask, other=0.0, eviction_policy="evict_first",
                )  # fmt: skip
                numbers = scaled_numbers(words, scale, x_ptr.dtype.element_ty)
                accumulator = tl.dot(numbers, x.T, accumulator)
            elif CODES:
                # Load the scales one step ahead, because Triton does not pipeline them through
                # shared memory.
                next_scale = scale
                next_zero = zero
                next_x_scale = x_scale
                if not WHOLE_ROWS:
                    next_column = first_column + step + BLOCK_K
                    next_scale, next_zero = load_scales(
                        scale_ptr, zero_ptr, block_rows, row_mask,
                        next_column // SCALE_COLUMNS + groups,
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
                        words, x_ptr.dtype.element_ty, PER, PACKED_ROWS, INTERLEAVED_NIBBLES,
                        REVERSED, CODE_OFFSET, GROUPS, NUMBER,
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
                        PER, GROUPS, HAS_ZEROS, q_zero_ptr is not None, ZERO_OFFSET,
                        x_scale_ptr is not None, UNIT, ADDED_ZEROS,
                    )  # fmt: skip
                scale = next_scale
                zero = next_zero
                x_scale = next_x_scale
            else:
                accumulator = tl.dot(words, x.T, accumulator)
        if CODES and WHOLE_ROWS:
            accumulator = scaled_whole(
                accumulator, sums, scale, zero, x_scale, q_zero_ptr is not None, ZERO_OFFSET,
                x_scale_ptr is not None, UNIT, ADDED_ZEROS,
            )  # fmt: skip
    if SCALED:
        accumulator *= UNIT
    if factors_ptr is not None:
        accumulator *= factor
    square = None
    if INPUT_NORM:
        square = tl.sum(squares, axis=1)
    is_finisher = True
    if SPLIT_K > 1:
        tile = tl.program_id(1) * (tl.num_programs(0) // SPLIT_K) + row_tile
        accumulator, square, is_finisher = reduce_partials(
            accumulator, square, workspace_ptr, counters_ptr, tile, part, ROWS, BLOCK_T, SPLIT_K
        )
    if is_finisher:
        if INPUT_NORM:
            accumulator *= tl.rsqrt(square / HIDDEN + INPUT_NORM_EPS)[None, :]
        if not ROPE_FIRST:
            low_cos, low_sin, high_cos, high_sin, rotates = load_rope(
                turned, tokens, token_mask, first_pair, cos_ptr, sin_ptr, rope_tokens,
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
            if CODES:
                low_delta, high_delta = load_delta(
                    delta_ptr, kind, tokens, token_mask, heads, None, first_pair,
                    BLOCK_P, PAIR_HALF, HEAD_DIM, INTERLEAVED, NUM_HEADS, NUM_KV_HEADS,
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
        rotate_and_store(
            low, high, kind, turned, tokens, token_mask, heads, None, first_pair,
            low_cos, low_sin, high_cos, high_sin, rotates,
            low_norm, high_norm, low_shift, high_shift, cache_scale,
            q_out_ptr, pointer, row_offsets, target_mask, head_stride, dim_stride,
            NUM_HEADS, HEAD_DIM, PAIR_HALF, INTERLEAVED, HALVES, ROTARY_DIM,
            NORM_AFTER, NORMED, V_NORMED, NORM_EPS, KV_REPEAT, SCALE_MULTIPLIES, SATURATES,
        )  # fmt: skip
