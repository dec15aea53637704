"""Multiplies each head by its own weight, for few tokens. Almost all of the time is taken by
reading the weights once."""

import triton
import triton.language as tl

from tilewright.codegen.templates.codes import widened
from tilewright.codegen.templates.dequantize import tile_numbers, tile_scales, word_places
from tilewright.codegen.templates.fp4 import scale_value


@triton.jit
def column_scales(
    scale_ptr, first_row, columns, column_mask, start, K_IS_ROW: tl.constexpr,
    BLOCK: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Loads the scale of each column of a step that starts at `start` of K, as fp32 [columns].

    Args:
        first_row: The row of the scaled weight in which the head begins.
        K_IS_ROW: Whether K counts rows of the scaled weight, and columns count its columns. If not,
            it is the other way round.
        BLOCK: How many (rows, columns) of the scaled weight share a scale.
        STRIDES: The strides of (scale row, scale column).
    """
    if K_IS_ROW:
        places = (first_row + start) // BLOCK[0] * STRIDES[0] + columns // BLOCK[1] * STRIDES[1]
    else:
        places = (first_row + columns) // BLOCK[0] * STRIDES[0] + start // BLOCK[1] * STRIDES[1]
    return scale_value(tl.load(scale_ptr + places, mask=column_mask, other=0.0))


@triton.jit
def head_products(
    x_ptr, weights_ptr, out_ptr, num_tokens,
    NUM_HEADS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDES: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
    scale_ptr=None, HEAD_ROWS: tl.constexpr = 0, FIRST_ROW: tl.constexpr = 0,
    K_IS_ROW: tl.constexpr = False, SCALE_BLOCK: tl.constexpr = (1, 1),
    SCALE_STRIDES: tl.constexpr = (0, 0),
):  # fmt: skip
    """Computes out [T, H, WIDTH] = x [T, H, K] @ weights[h] [K, WIDTH], summed in fp32.

    Grid (H * cdiv(WIDTH, BLOCK_W), cdiv(T, BLOCK_T)). Columns of the weights are on the tensor
    core's M side and tokens on its N side. X_STRIDES: (token, head). WEIGHT_STRIDES: (head, k,
    column).

    If scale_ptr is given, the weights are float8 (e4m3) codes. The codes are multiplied exactly.
    BLOCK_K codes share a scale, and the sum over them is multiplied by this scale. Row FIRST_ROW +
    h * HEAD_ROWS of the scaled weight is the first row of head h (`column_scales`).
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    head = (tl.program_id(0) // TILES).to(tl.int64)
    columns = tl.program_id(0) % TILES * BLOCK_W + tl.arange(0, BLOCK_W)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    column_mask = columns < WIDTH
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + head * X_STRIDES[1] + tokens.to(tl.int64) * X_STRIDES[0]
    weight_columns = weights_ptr + head * WEIGHT_STRIDES[0] + columns * WEIGHT_STRIDES[2]
    product = tl.zeros((BLOCK_W, BLOCK_T), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        x = tl.load(
            x_rows[:, None] + (start + k)[None, :], mask=token_mask[:, None] & inside[None, :],
            other=0.0,
        )  # fmt: skip
        weight = tl.load(
            weight_columns[:, None] + (start + k)[None, :] * WEIGHT_STRIDES[1],
            mask=column_mask[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        if scale_ptr is None:
            product = tl.dot(weight, x.T, product)
        else:
            codes = widened(weight, 0, x_ptr.dtype.element_ty)
            scales = column_scales(
                scale_ptr, FIRST_ROW + head * HEAD_ROWS, columns, column_mask, start, K_IS_ROW,
                SCALE_BLOCK, SCALE_STRIDES,
            )  # fmt: skip
            product += tl.dot(codes, x.T) * scales[:, None]
    places = (tokens.to(tl.int64) * NUM_HEADS + head)[None, :] * WIDTH + columns[:, None]
    tl.store(
        out_ptr + places, product.to(out_ptr.dtype.element_ty),
        mask=column_mask[:, None] & token_mask[None, :],
    )  # fmt: skip


@triton.jit
def coded_head_products(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, factor_ptr, out_ptr, num_tokens,
    NUM_HEADS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDES: tl.constexpr,
    HEAD_ROWS: tl.constexpr, FIRST_ROW: tl.constexpr, K_IS_ROW: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr, BLOCK_STRIDES: tl.constexpr,
    PER: tl.constexpr, PACKED_ROWS: tl.constexpr, ORDER: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, PACKED_ZEROS: tl.constexpr,
    ZERO_ORDER: tl.constexpr, ZERO_POINT: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
    NUMBER: tl.constexpr = "", ADDED_ZEROS: tl.constexpr = False,
):  # fmt: skip
    """Computes out [T, H, WIDTH] = x [T, H, K] @ weights[h] [K, WIDTH], summed in fp32. The weights
    are parts of one weight of codes. Each tile is decoded in registers and rounded to x's dtype.

    Grid (H * cdiv(WIDTH, BLOCK_W), cdiv(T, BLOCK_T)). Columns of the result are on the tensor
    core's M side and tokens on its N side. X_STRIDES: (token, head).

    Args:
        HEAD_ROWS, FIRST_ROW: Row FIRST_ROW + h * HEAD_ROWS of the coded weight is the first row of
            head h.
        K_IS_ROW: Whether K counts rows of the coded weight, and columns of the result count its
            columns. If not, it is the other way round.
        WEIGHT_STRIDES: (row, column), in words.

    `dequantize_weight` explains the other arguments. UNIT divides BLOCK_W if K_IS_ROW, and BLOCK_K
    if not. If PACKED_ROWS, PER divides HEAD_ROWS, FIRST_ROW and the number of a head's rows.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    head = tl.program_id(0) // TILES
    first_column = tl.program_id(0) % TILES * BLOCK_W
    columns = first_column + tl.arange(0, BLOCK_W)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + head.to(tl.int64) * X_STRIDES[1] + tokens.to(tl.int64) * X_STRIDES[0]
    # The tile of the coded weight, and the rows and columns of the coded weight that the head has.
    ROWS: tl.constexpr = BLOCK_K if K_IS_ROW else BLOCK_W
    COLUMNS: tl.constexpr = BLOCK_W if K_IS_ROW else BLOCK_K
    ROWS_IN_ALL: tl.constexpr = K if K_IS_ROW else WIDTH
    COLUMNS_IN_ALL: tl.constexpr = WIDTH if K_IS_ROW else K
    head_row = FIRST_ROW + head * HEAD_ROWS
    first_row = 0 if K_IS_ROW else first_column
    rows = first_row + tl.arange(0, ROWS)
    start_column = first_column if K_IS_ROW else 0
    scale, zero = tile_scales(
        scale_ptr, zero_ptr, head_row + rows, rows < ROWS_IN_ALL, start_column, COLUMNS_IN_ALL,
        COLUMNS, UNIT, BLOCK_STRIDES, SCALE_ROWS, SCALE_COLUMNS, PACKED_ZEROS, ZERO_ORDER,
    )  # fmt: skip
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    word_rows, word_columns = word_places(first_row, start_column, ROWS, COLUMNS, PER, PACKED_ROWS)
    ROW_UNIT: tl.constexpr = PER if PACKED_ROWS else 1
    COLUMN_UNIT: tl.constexpr = 1 if PACKED_ROWS else PER
    lines = (head_row + word_rows).to(tl.int64) // ROW_UNIT * WEIGHT_STRIDES[0]
    words_ptr = weight_ptr + lines[:, None] + (word_columns * WEIGHT_STRIDES[1])[None, :]
    product = tl.zeros((BLOCK_W, BLOCK_T), tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(
            x_rows[:, None] + (start + k)[None, :],
            mask=token_mask[:, None] & (start + k < K)[None, :],
            other=0.0,
        )  # fmt: skip
        if K_IS_ROW:
            ptrs = words_ptr + start // ROW_UNIT * WEIGHT_STRIDES[0]
            row_mask = word_rows + start < ROWS_IN_ALL
            column_mask = word_columns < COLUMNS_IN_ALL // COLUMN_UNIT
        else:
            ptrs = words_ptr + start // COLUMN_UNIT * WEIGHT_STRIDES[1]
            row_mask = word_rows < ROWS_IN_ALL
            column_mask = word_columns + start // COLUMN_UNIT < COLUMNS_IN_ALL // COLUMN_UNIT
        words = tl.load(
            ptrs, mask=row_mask[:, None] & column_mask[None, :], other=0.0,
            eviction_policy="evict_first",
        )  # fmt: skip
        # Load the scales one step ahead.
        next_scale = scale
        next_zero = zero
        if K_IS_ROW:
            next_rows = rows + (start + BLOCK_K)
            next_scale, next_zero = tile_scales(
                scale_ptr, zero_ptr, head_row + next_rows, next_rows < ROWS_IN_ALL, start_column,
                COLUMNS_IN_ALL, COLUMNS, UNIT, BLOCK_STRIDES, SCALE_ROWS, SCALE_COLUMNS,
                PACKED_ZEROS, ZERO_ORDER,
            )  # fmt: skip
        elif SCALE_COLUMNS < K:
            next_scale, next_zero = tile_scales(
                scale_ptr, zero_ptr, head_row + rows, rows < ROWS_IN_ALL, start + BLOCK_K,
                COLUMNS_IN_ALL, COLUMNS, UNIT, BLOCK_STRIDES, SCALE_ROWS, SCALE_COLUMNS,
                PACKED_ZEROS, ZERO_ORDER,
            )  # fmt: skip
        numbers = tile_numbers(
            words, scale, zero, zero_ptr is not None, PER, PACKED_ROWS, ORDER, ZERO_POINT, NUMBER,
            ADDED_ZEROS,
        )  # fmt: skip
        if factor_ptr is not None:
            numbers *= factor
        weight = numbers.to(x_ptr.dtype.element_ty)
        if K_IS_ROW:
            weight = weight.T
        product = tl.dot(weight, x.T, product)
        scale = next_scale
        zero = next_zero
    places = (tokens.to(tl.int64) * NUM_HEADS + head)[None, :] * WIDTH + columns[:, None]
    tl.store(
        out_ptr + places, product.to(out_ptr.dtype.element_ty),
        mask=(columns < WIDTH)[:, None] & token_mask[None, :],
    )  # fmt: skip
