"""Computes linears for few tokens. Such a linear takes as long as reading its weights takes, so
this kernel reads each weight once, in the form in which it is stored.

The rows of the weight are on the M side of the tensor core's product, and the tokens are on its N
side. If x has an RMS norm, the kernel multiplies each token's result by a factor, and computes the
sum of squares for this factor in the same pass over K. Quantised weights of 4 or 8 bits are
multiplied as in `qkv_projection_swapped`: the decoded weight is never rounded.
"""

import triton
import triton.language as tl

from tilewright.codegen.mlp.templates.finish import bias_column, finish_linear, residual_tile
from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.codes import (
    add_scaled_groups,
    decoded,
    load_scales,
    number_unit,
    scaled_numbers,
    scaled_whole,
    x_in_order,
)
from tilewright.codegen.templates.parts import part_of
from tilewright.codegen.templates.streaming import (
    layer_step_of_x,
    places_of_norm,
    prefetch_rows,
    row_statistics,
    step_of_x,
)


@triton.jit
def weight_tile(ptrs, row_mask, column_mask, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Loads a tile of a weight that no program reads again. EVEN_ROWS and EVEN_COLUMNS say that no
    tile extends past the last row or column. They are arguments because the emitter does not know
    the grid."""
    if EVEN_ROWS and EVEN_COLUMNS:
        tile = tl.load(ptrs, eviction_policy="evict_first")
    elif EVEN_COLUMNS:
        tile = tl.load(ptrs, mask=row_mask, other=0.0, eviction_policy="evict_first")
    else:
        mask = row_mask & column_mask
        tile = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def wait_for_kernel_before(
    weight_ptr, up_weight_ptr, row_tile, first,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, LETS_IN: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Prefetches weight rows, waits for the previous kernel, and lets the next kernel start.

    A tile has BLOCK rows of the ROWS rows. Each row has COLUMNS elements, and the tile starts at
    element `first`.

    Args:
        PREFETCH: How many 16-bit numbers of each row are prefetched.
        STRIDE, UP_STRIDE: The stride between rows of the weight and of the up weight.
        LETS_IN: Whether the next kernel may start early.
    """
    if LAUNCH_PDL:
        if PREFETCH > 0:
            last = (ROWS - 1 - row_tile * BLOCK).to(tl.int64)
            inside = tl.minimum(tl.arange(0, BLOCK), last) + row_tile * BLOCK
            LINES: tl.constexpr = PREFETCH // 64
            prefetch_rows(weight_ptr + inside * STRIDE, first, COLUMNS, LINES, LINE)
            if up_weight_ptr is not None:
                prefetch_rows(up_weight_ptr + inside * UP_STRIDE, first, COLUMNS, LINES, LINE)
        tl.extra.cuda.gdc_wait()
        if LETS_IN:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def second_operand(x, APART: tl.constexpr):
    """Returns x for a second product.

    APART: whether the result is a separate copy of x. On SM100, Triton 3.6 cannot pipeline two
    products that read the same tensor from registers.
    """
    if APART:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, True, 2)
    else:
        return x


@triton.jit
def scales_of_step(
    column, weight_scale_ptr, weight_zero_ptr, up_scale_ptr, up_zero_ptr, rows, row_mask,
    BLOCK_STRIDES: tl.constexpr, UP_BLOCK_STRIDES: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, BOUND: tl.constexpr, PACKED_ZEROS: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr,
):  # fmt: skip
    """Loads scales and zeros [rows, GROUPS] of a weight and of the up weight, starting at a
    column."""
    blocks = column // SCALE_COLUMNS + tl.arange(0, GROUPS)
    scale, zero = load_scales(
        weight_scale_ptr, weight_zero_ptr, rows, row_mask, blocks, BLOCK_STRIDES,
        weight_zero_ptr is not None, PACKED_ZEROS, INTERLEAVED_NIBBLES, BOUND,
    )  # fmt: skip
    up_scale = scale
    up_zero = zero
    if up_scale_ptr is not None:
        up_scale, up_zero = load_scales(
            up_scale_ptr, up_zero_ptr, rows, row_mask, blocks, UP_BLOCK_STRIDES,
            up_zero_ptr is not None, PACKED_ZEROS, INTERLEAVED_NIBBLES, BOUND,
        )  # fmt: skip
    return scale, zero, up_scale, up_zero


@triton.jit
def streamed_linear(
    x_ptr, norm_weight_ptr, weight_ptr, up_weight_ptr,
    weight_scale_ptr, up_scale_ptr, weight_zero_ptr, up_zero_ptr,
    bias_ptr, up_bias_ptr, residual_ptr, out_ptr, workspace_ptr, counters_ptr,
    num_tokens,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr, UP_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr, LINE: tl.constexpr, LETS_IN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
    BLOCK_STRIDES: tl.constexpr = (0, 0, 0, 0), UP_BLOCK_STRIDES: tl.constexpr = (0, 0, 0, 0),
    PER: tl.constexpr = 1, PACKED_ROWS: tl.constexpr = False,
    INTERLEAVED_NIBBLES: tl.constexpr = False, REVERSED: tl.constexpr = False,
    SCALE_ROWS: tl.constexpr = 1, SCALE_COLUMNS: tl.constexpr = 1,
    PACKED_ZEROS: tl.constexpr = False, CODE_OFFSET: tl.constexpr = 0,
    ZERO_OFFSET: tl.constexpr = 0, NUMBER: tl.constexpr = "", APART: tl.constexpr = False,
    ADDED_ZEROS: tl.constexpr = False,
    norm_bias_ptr=None, NORM_BIAS_STRIDE: tl.constexpr = 0, LAYER_ROW: tl.constexpr = 0,
    SCALED: tl.constexpr = False, weight_factor_ptr=None, up_factor_ptr=None,
    X_IN_ORDER: tl.constexpr = False,
):  # fmt: skip
    """Computes out [T, N] = residual + SCALE * activation(norm(x) @ weight^T + bias) * (norm(x) @
    up_weight^T + up_bias) in fp32, and rounds once. Only the first product is required.

    Grid (cdiv(N, BLOCK_N) * SPLIT_K, cdiv(T, BLOCK_T)). Weight strides are (row, column). If
    SPLIT_K > 1, workspace is fp32 [tiles, SPLIT_K, weights * BLOCK_N * BLOCK_T + NORM * BLOCK_T],
    and counters has one zero for each tile.

    If there are scales, the weights are quantised: an element of a weight is (code - zero) * scale.
    A code has 8 bits (PER is 1), or PER codes share a word. The strides of weights then count
    words. A factor is one number that multiplies a whole weight.

    Args:
        NORM: x is divided by its rms and multiplied by NORM_OFFSET + norm_weight. The normalised x
            is rounded before the product.
        LAYER_ROW: If it is not 0, x has a layer norm: the mean of x is subtracted first, and
            norm_bias is added last. LAYER_ROW is a power of two that is at least K.
        ACTIVATION: The name of the activation; "" for none.
        PREFETCH: How many 16-bit numbers of each row the kernel prefetches before it waits for the
            previous kernel.
        LINE: The number of elements in 128 bytes.
        LETS_IN: Whether the next kernel may start early.
        APART: As in `second_operand`.
        PACKED_ROWS: Whether the codes of a word belong to PER rows. If not, they belong to PER
            columns.
        NUMBER: The kind of numbers that codes stand for: "e2m1", or the name of a table
            (`formats.table_words`).
        BLOCK_STRIDES: Strides of (scale row, scale column, zero row, zero column).
        SCALE_ROWS, SCALE_COLUMNS: How many rows and columns share a scale. SCALE_COLUMNS is a
            multiple of BLOCK_K, equal to BLOCK_K / 2 or BLOCK_K / 4, or at least K.
        CODE_OFFSET, ZERO_OFFSET: The zero of a code is CODE_OFFSET + ZERO_OFFSET + the value of the
            zero tensor.
        PACKED_ZEROS: A word of the zero tensor holds the zeros of eight rows.
        ADDED_ZEROS: The value of the zero tensor is added after the multiplication by the scale.
        SCALED: Codes are multiplied by their scales before the product (`scaled_numbers`).
        X_IN_ORDER: x is the output of `order_x` or `norm_x`, padded to whole steps.
    """
    row_tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    PART: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    EVEN: tl.constexpr = K % (BLOCK_K * SPLIT_K) == 0
    # Each load reads the words of columns that share one scale. The words then stay in the
    # registers of the thread that decodes them.
    TILE: tl.constexpr = 128 if SCALED else min(SCALE_COLUMNS, 128)
    TILES: tl.constexpr = max(BLOCK_K // TILE, 1) if PER == 8 and not PACKED_ROWS else 1
    WIDTH: tl.constexpr = BLOCK_K // TILES
    first = part * PART
    columns = first + tl.arange(0, WIDTH)
    # A word holds the codes of PER rows if PACKED_ROWS, else the codes of PER columns.
    ROWS: tl.constexpr = PER if PACKED_ROWS else 1
    STEP: tl.constexpr = 1 if PACKED_ROWS else PER
    word_rows = row_tile * (BLOCK_N // ROWS) + tl.arange(0, BLOCK_N // ROWS)
    word_row_mask = (word_rows < N // ROWS)[:, None]
    word_columns = first // STEP + tl.arange(0, WIDTH // STEP)
    word_lines = weight_ptr + word_rows.to(tl.int64) * WEIGHT_STRIDES[0]
    if up_weight_ptr is not None:
        up_lines = up_weight_ptr + word_rows.to(tl.int64) * UP_STRIDES[0]
    wait_for_kernel_before(
        weight_ptr, up_weight_ptr, row_tile, first // STEP, N // ROWS, K // STEP,
        WEIGHT_STRIDES[0], UP_STRIDES[0], BLOCK_N // ROWS, PREFETCH, LINE, LETS_IN, LAUNCH_PDL,
    )  # fmt: skip
    places = tokens.to(tl.int64)[None, :]
    there = row_mask[:, None] & token_mask[None, :]
    # Load the residual before the loop. After the loop, nothing would hide the latency of this
    # load.
    residual = residual_tile(residual_ptr, places, rows, there, RESIDUAL_STRIDE)
    bias = bias_column(bias_ptr, rows, row_mask, BIAS_STRIDES[0])
    up_bias = bias_column(up_bias_ptr, rows, row_mask, BIAS_STRIDES[1])
    if weight_factor_ptr is not None:
        factor = tl.load(weight_factor_ptr)
    if up_factor_ptr is not None:
        up_factor = tl.load(up_factor_ptr)
    word_ptrs = word_lines[:, None] + word_columns[None, :] * WEIGHT_STRIDES[1]
    if up_weight_ptr is not None:
        up_ptrs = up_lines[:, None] + word_columns[None, :] * UP_STRIDES[1]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * X_STRIDE + columns[None, :]
    norm_ptrs = places_of_norm(norm_weight_ptr, tokens, columns, NORM_STRIDE)
    if LAYER_ROW > 0:
        shift_ptrs = places_of_norm(norm_bias_ptr, tokens, columns, NORM_BIAS_STRIDE)
        x_mean, x_inverse = row_statistics(
            x_ptr, tl.program_id(1) * BLOCK_T, num_tokens, BLOCK_T, K, X_STRIDE, NORM_EPS, LAYER_ROW
        )
    squares = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    product = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    sums = product
    up = product
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    UNIT: tl.constexpr = number_unit(DTYPE, PER, PACKED_ROWS, NUMBER, SCALED)
    # If SCALED, scales multiply the decoded numbers in registers. Otherwise, the scales of groups
    # multiply the sums of each step, and the scales of whole rows multiply the final sums.
    CODES: tl.constexpr = weight_scale_ptr is not None
    WHOLE_ROWS: tl.constexpr = SCALE_COLUMNS >= K
    ZERO_TENSOR: tl.constexpr = weight_zero_ptr is not None
    HAS_ZEROS: tl.constexpr = ZERO_TENSOR or ZERO_OFFSET != 0
    GROUPS: tl.constexpr = max(WIDTH // SCALE_COLUMNS, 1)
    SCALES: tl.constexpr = max(BLOCK_K // SCALE_COLUMNS, 1)
    BLOCKS: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    if CODES:
        block_rows = rows // SCALE_ROWS
    if SCALED:
        # The scales of a tile have the layout of its words, so a thread holds both.
        blocks = first // SCALE_COLUMNS + tl.arange(0, GROUPS)
        scale_lines = weight_scale_ptr + block_rows.to(tl.int64) * BLOCK_STRIDES[0]
        scale_ptrs = scale_lines[:, None] + blocks[None, :] * BLOCK_STRIDES[1]
        if up_weight_ptr is not None:
            up_scale_lines = up_scale_ptr + block_rows.to(tl.int64) * UP_BLOCK_STRIDES[0]
            up_scale_ptrs = up_scale_lines[:, None] + blocks[None, :] * UP_BLOCK_STRIDES[1]
    elif CODES:
        scale, zero, up_scale, up_zero = scales_of_step(
            first, weight_scale_ptr, weight_zero_ptr, up_scale_ptr, up_zero_ptr, block_rows,
            row_mask, BLOCK_STRIDES, UP_BLOCK_STRIDES, SCALE_COLUMNS, SCALES, BLOCKS,
            PACKED_ZEROS, INTERLEAVED_NIBBLES,
        )  # fmt: skip
    for start in range(0, PART, BLOCK_K):
        if CODES and not SCALED:
            # Load the scales one step ahead, because Triton does not pipeline them through shared
            # memory.
            next_scale = scale
            next_zero = zero
            next_up_scale = up_scale
            next_up_zero = up_zero
            if not WHOLE_ROWS:
                next_scale, next_zero, next_up_scale, next_up_zero = scales_of_step(
                    first + start + BLOCK_K, weight_scale_ptr, weight_zero_ptr, up_scale_ptr,
                    up_zero_ptr, block_rows, row_mask, BLOCK_STRIDES, UP_BLOCK_STRIDES,
                    SCALE_COLUMNS, SCALES, BLOCKS, PACKED_ZEROS, INTERLEAVED_NIBBLES,
                )  # fmt: skip
        for tile in tl.static_range(TILES):
            step = start + tile * WIDTH
            x_mask = token_mask[:, None]
            word_mask = (word_columns + step // STEP < K // STEP)[None, :]
            if not EVEN:
                X_BOUND: tl.constexpr = X_STRIDE if X_IN_ORDER else K
                x_mask = x_mask & (columns + step < X_BOUND)[None, :]
            if LAYER_ROW > 0:
                x = layer_step_of_x(
                    x_ptrs, norm_ptrs, shift_ptrs, x_mean, x_inverse, step, x_mask,
                    NORM_STRIDE, NORM_OFFSET, NORM_BIAS_STRIDE,
                )  # fmt: skip
            else:
                x, squares = step_of_x(
                    x_ptrs, norm_ptrs, squares, step, x_mask, NORM, NORM_STRIDE, NORM_OFFSET
                )
            words = weight_tile(
                word_ptrs + step // STEP * WEIGHT_STRIDES[1], word_row_mask, word_mask,
                N % BLOCK_N == 0, EVEN,
            )  # fmt: skip
            if up_weight_ptr is not None:
                up_words = weight_tile(
                    up_ptrs + step // STEP * UP_STRIDES[1], word_row_mask, word_mask,
                    N % BLOCK_N == 0, EVEN,
                )  # fmt: skip
            if SCALED:
                if not X_IN_ORDER:
                    x = x_in_order(x, PER, INTERLEAVED_NIBBLES, 1)
                scale_mask = (blocks + step // SCALE_COLUMNS < BLOCKS)[None, :]
                scale = weight_tile(
                    scale_ptrs + step // SCALE_COLUMNS * BLOCK_STRIDES[1], row_mask[:, None],
                    scale_mask, N % BLOCK_N == 0, EVEN,
                )  # fmt: skip
                product = tl.dot(scaled_numbers(words, scale, DTYPE), x.T, product)
                if up_weight_ptr is not None:
                    scale = weight_tile(
                        up_scale_ptrs + step // SCALE_COLUMNS * UP_BLOCK_STRIDES[1],
                        row_mask[:, None], scale_mask, N % BLOCK_N == 0, EVEN,
                    )  # fmt: skip
                    numbers = scaled_numbers(up_words, scale, DTYPE)
                    up = tl.dot(numbers, second_operand(x, APART).T, up)
            elif CODES:
                if not PACKED_ROWS and not X_IN_ORDER:
                    x = x_in_order(x, PER, INTERLEAVED_NIBBLES, GROUPS)
                codes = decoded(
                    words, DTYPE, PER, PACKED_ROWS, INTERLEAVED_NIBBLES, REVERSED, CODE_OFFSET,
                    GROUPS, NUMBER,
                )  # fmt: skip
                if WHOLE_ROWS:
                    product = tl.dot(codes, x.T, product)
                    if HAS_ZEROS:
                        ones = tl.full((BLOCK_N, WIDTH), 1.0, DTYPE)
                        sums = tl.dot(ones, second_operand(x, APART).T, sums)
                else:
                    own: tl.constexpr = tile * SCALES // TILES
                    PARTS: tl.constexpr = SCALES // GROUPS
                    product = add_scaled_groups(
                        product, codes, x, part_of(scale, own, PARTS), part_of(zero, own, PARTS),
                        None, PER, GROUPS, HAS_ZEROS, ZERO_TENSOR, ZERO_OFFSET, False, UNIT,
                        ADDED_ZEROS,
                    )  # fmt: skip
                if up_weight_ptr is not None:
                    codes = decoded(
                        up_words, DTYPE, PER, PACKED_ROWS, INTERLEAVED_NIBBLES, REVERSED,
                        CODE_OFFSET, GROUPS, NUMBER,
                    )  # fmt: skip
                    if WHOLE_ROWS:
                        up = tl.dot(codes, second_operand(x, APART).T, up)
                    else:
                        up = add_scaled_groups(
                            up, codes, x, part_of(up_scale, own, PARTS),
                            part_of(up_zero, own, PARTS), None,
                            PER, GROUPS, HAS_ZEROS, ZERO_TENSOR, ZERO_OFFSET, False, UNIT,
                            ADDED_ZEROS,
                        )  # fmt: skip
            else:
                product = tl.dot(words, x.T, product)
                if up_weight_ptr is not None:
                    up = tl.dot(up_words, second_operand(x, APART).T, up)
        if CODES and not SCALED:
            scale = next_scale
            zero = next_zero
            up_scale = next_up_scale
            up_zero = next_up_zero
    if CODES and WHOLE_ROWS:
        product = scaled_whole(
            product, sums, scale, zero, None, ZERO_TENSOR, ZERO_OFFSET, False, UNIT, ADDED_ZEROS
        )
        if up_weight_ptr is not None:
            up = scaled_whole(
                up, sums, up_scale, up_zero, None, ZERO_TENSOR, ZERO_OFFSET, False, UNIT,
                ADDED_ZEROS,
            )  # fmt: skip
    if SCALED:
        product *= UNIT
        if up_weight_ptr is not None:
            up *= UNIT
    if weight_factor_ptr is not None:
        product *= factor
    if up_factor_ptr is not None:
        up *= up_factor
    finish_linear(
        product, up, squares, bias, up_bias, residual,
        up_weight_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, workspace_ptr, counters_ptr,
        row_tile, part, rows, places, there, token_mask,
        N, K, NORM, NORM_EPS, ACTIVATION, SCALE, BLOCK_N, BLOCK_T, SPLIT_K,
    )  # fmt: skip


@triton.jit
def activate_products(
    gate_ptr, up_ptr, out_ptr, num_elements, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes out = activation(gate) * up, or activation(gate) if up_ptr is None. out_ptr may be
    gate_ptr.

    Grid (cdiv(num_elements, BLOCK),).
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    gate = tl.load(gate_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if up_ptr is None:
        value = activate(gate, gate, ACTIVATION, 1.0, 0.0, False)
    else:
        up = tl.load(up_ptr + places, mask=mask, other=0.0).to(tl.float32)
        value = activate(gate, up, ACTIVATION, 1.0, 0.0, True)
    tl.store(out_ptr + places, value.to(out_ptr.dtype.element_ty), mask=mask)
