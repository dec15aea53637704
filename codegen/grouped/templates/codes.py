"""Computes the two GEMMs of experts that have 4-bit weights and few rows each. The weights are read
as they are stored.

These GEMMs work like `moe_up` and `grouped_gemm` with SWAPPED, with one difference: the thread that
loads a part of a weight keeps this part until the tensor core reads it. Therefore the product goes
over K in the order in which threads hold the words of eight codes. The columns of x, which is the
smaller tile, are permuted to the same order (`rows_in_order`). E2M1 codes are multiplied by their
scales before the product with x, and this multiplication is exact. int4 codes are multiplied by x
without their scales. The sum over each group is then multiplied by the group's scale.
"""

import triton
import triton.language as tl

from tilewright.codegen.grouped.templates.gemm import (
    add_row_bias,
    clear_rows,
    expert_tiles,
    group_tiles,
    store_tile,
    tile_place,
)
from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.codes import code_unit
from tilewright.codegen.templates.expert_weights import (
    e2m1_codes,
    e2m1_unit,
    int4_codes,
    place_in_order,
    rows_in_order,
)
from tilewright.codegen.templates.parts import part_of


@triton.jit
def multiply_codes(
    words, x, scales, accumulator, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    RUN: tl.constexpr, SWAPPED: tl.constexpr, SPLIT: tl.constexpr, X_IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Returns accumulator + x [tokens, K] times the weights in words [rows, K / 8].

    accumulator: [rows, tokens] if SWAPPED, else [tokens, rows]. scales: the result of
    `load_scales`. If SPLIT > 1, the operands of SPLIT products follow one another along the rows
    and along the tokens, and the accumulator is [SPLIT, rows, tokens].
    """
    if not X_IN_ORDER:
        x = rows_in_order(x, RUN)
    if SPLIT > 1:
        TOKENS: tl.constexpr = x.shape[0] // SPLIT
        ROWS: tl.constexpr = words.shape[0] // SPLIT
        K: tl.constexpr = x.shape[1]
        x = tl.permute(tl.reshape(x, (SPLIT, TOKENS, K)), (0, 2, 1))
    if FORMAT == "int4":
        codes = int4_codes(words, DTYPE, RUN, SWAPPED)
        scale = scales * code_unit(DTYPE)
        if SPLIT > 1:
            product = tl.dot(tl.reshape(codes, (SPLIT, ROWS, K)), x)
            accumulator += product * tl.reshape(scale, (SPLIT, ROWS, 1))
        elif SWAPPED:
            accumulator += tl.dot(codes, x.T) * scale
        else:
            accumulator += tl.dot(x, codes) * scale.T
    else:
        codes = e2m1_codes(words, scales, DTYPE, FORMAT, RUN, SWAPPED)
        if SPLIT > 1:
            accumulator = tl.dot(tl.reshape(codes, (SPLIT, ROWS, K)), x, accumulator)
        elif SWAPPED:
            accumulator = tl.dot(codes, x.T, accumulator)
        else:
            accumulator = tl.dot(x, codes, accumulator)
    return accumulator


@triton.jit
def load_scales(
    row_ptrs, row_mask, first, K: tl.constexpr, PART_K: tl.constexpr, FORMAT: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Loads the scales for one part of each row. A part has PART_K columns.

    For E2M1, the scales are integers [rows, 4], and each integer holds the scales of a quarter of
    the columns. For int4, where a part is a group, the scales are fp32 [rows, 1].

    first: the number of the part, for each row. FULL: whether no row and no column needs a mask.
    """
    WIDTH: tl.constexpr = 1 if FORMAT == "int4" else 4
    places = (first * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    if FULL:
        values = tl.load(row_ptrs[:, None] + places)
    else:
        mask = row_mask[:, None] & (places < WIDTH * K // PART_K)
        values = tl.load(row_ptrs[:, None] + places, mask=mask, other=0)
    if FORMAT == "int4":
        values = values.to(tl.float32)
    return values


@triton.jit
def multiply_tile(
    x_rows, row_mask, word_rows, scale_rows, weight_mask,
    K: tl.constexpr, FULL_ROWS: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_K: tl.constexpr, PART_K: tl.constexpr, RUN: tl.constexpr, SWAPPED: tl.constexpr,
    SPLIT: tl.constexpr, X_IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Returns rows of x times rows of weights, fp32 [rows of x, rows of weights]. The result is
    transposed if SWAPPED.

    Args:
        x_rows, word_rows, scale_rows: Pointers to the rows.
        SPLIT: If it is more than 1, each of SPLIT warps multiplies its own columns of a step, and
            all rows are repeated SPLIT times, once for each warp.
        BLOCK_K: The number of columns that are loaded together.
        PART_K: The number of columns that are unpacked and multiplied together.
        RUN: `rows_in_order` explains it.
        FULL_ROWS: Whether weight_mask is true everywhere.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0
    # A load of int4 scales takes 40 fewer registers if it has a mask.
    FULL_SCALES: tl.constexpr = EVEN and FULL_ROWS and (SPLIT > 1 or FORMAT != "int4")
    OWN_K: tl.constexpr = BLOCK_K // SPLIT
    PARTS: tl.constexpr = OWN_K // PART_K
    WIDTH: tl.constexpr = word_rows.shape[0] // SPLIT
    ROWS: tl.constexpr = x_rows.shape[0] // SPLIT
    if SPLIT > 1:
        accumulator = tl.zeros((SPLIT, WIDTH, ROWS), tl.float32)
    elif SWAPPED:
        accumulator = tl.zeros((WIDTH, ROWS), tl.float32)
    else:
        accumulator = tl.zeros((ROWS, WIDTH), tl.float32)
    weight_first = tl.arange(0, SPLIT * WIDTH) // WIDTH * OWN_K
    x_first = tl.arange(0, SPLIT * ROWS) // ROWS * OWN_K
    for step in range(STEPS):
        word_columns = tl.arange(0, OWN_K // 8)[None, :]
        word_columns += (step * BLOCK_K + weight_first)[:, None] // 8
        x_columns = (step * BLOCK_K + x_first)[:, None] + tl.arange(0, OWN_K)[None, :]
        x_mask = row_mask[:, None]
        if EVEN and FULL_ROWS:
            words = tl.load(word_rows[:, None] + word_columns, eviction_policy="evict_first")
        else:
            word_mask = weight_mask[:, None]
            if not EVEN:
                word_mask = word_mask & (word_columns < K // 8)
            words = tl.load(
                word_rows[:, None] + word_columns, mask=word_mask, other=0,
                eviction_policy="evict_first",
            )  # fmt: skip
        if not EVEN:
            x_mask = x_mask & (x_columns < K)
        # Place each load directly before its use: Triton does not pipeline these loads through
        # shared memory.
        for part in tl.static_range(PARTS):
            first = (step * BLOCK_K + weight_first) // PART_K + part
            scales = load_scales(scale_rows, weight_mask, first, K, PART_K, FORMAT, FULL_SCALES)
            if part == 0:
                x = tl.load(x_rows[:, None] + x_columns, mask=x_mask, other=0.0)
            accumulator = multiply_codes(
                part_of(words, part, PARTS), part_of(x, part, PARTS), scales, accumulator,
                FORMAT, DTYPE, RUN, SWAPPED, SPLIT, X_IN_ORDER,
            )  # fmt: skip
    if SPLIT > 1:
        accumulator = tl.sum(accumulator, axis=0)
    if FORMAT != "int4":
        accumulator *= e2m1_unit(DTYPE, FORMAT)
    return accumulator


@triton.jit
def route_place(tile, ids_ptr, NUM_EXPERTS: tl.constexpr, TILES_N: tl.constexpr):
    """Returns the values that `tile_place` returns, for routes that are not sorted. Each route is
    then a block of one row."""
    route = tile // TILES_N
    expert = tl.load(ids_ptr + route).to(tl.int32)
    placed = (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.where(placed, expert, 0), route, route + placed.to(tl.int32), tile % TILES_N


@triton.jit
def moe_up_codes(
    x_ptr, ids_ptr, order_ptr, ends_ptr, weight_ptr, gate_scale_ptr, up_scale_ptr,
    gate_factor_ptr, up_factor_ptr, gate_bias_ptr, up_bias_ptr, hidden_ptr, distance,
    num_routes, NUM_SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, UP_FIRST: tl.constexpr,
    FORMAT: tl.constexpr, PART_K: tl.constexpr,
    GATE_SCALE_STRIDES: tl.constexpr, UP_SCALE_STRIDES: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BIAS_STRIDES: tl.constexpr, HIDDEN_STEP: tl.constexpr, HIDDEN_RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    SWAPPED: tl.constexpr, SPLIT: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the gate and up projections of a mixture of experts with 4-bit weights and few rows
    per expert: hidden [routes, INNER] = activation(x @ Wgate^T) * (x @ Wup^T). Rows of x are
    gathered by route.

    The grid may have any size. `moe_up` explains the arguments that are not explained here.

    Args:
        weight: Words of eight codes. Its strides and `distance` count words.
        GATE_SCALE_STRIDES, UP_SCALE_STRIDES: Strides (expert, row, column) in elements. For E2M1,
            an element is an integer that holds the scales of PART_K / 4 columns.
        BLOCK_K: The number of columns that are loaded together.
        PART_K: The number of columns that are unpacked and multiplied together.
        RUN: `rows_in_order` explains it.
        HIDDEN_STEP: If it is not 0, the columns of hidden are permuted to the order of the next
            GEMM. The steps of that GEMM have HIDDEN_STEP columns, and its RUN is HIDDEN_RUN.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TILES_N: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile_rows = tl.arange(0, SPLIT * WIDTH) % WIDTH
    if GATED:
        # In the tensor core's layout, a thread holds rows r and r + 8 of the product. Row r is a
        # row of gate, and row r + 8 is the same row of up.
        within = tile_rows // 16 * 8 + tile_rows % 8
        is_upper = tile_rows // 8 % 2 == 1
    else:
        within = tile_rows
        is_upper = tile_rows < 0
    if ids_ptr is None:
        start, end, blocks = expert_tiles(ends_ptr, NUM_EXPERTS, EXPERTS, BLOCK_M)
        num_tiles = tl.sum(blocks, axis=0) * TILES_N
    else:
        num_tiles = num_routes * TILES_N
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        if ids_ptr is None:
            expert, first_row, last_row, tile_n = tile_place(
                tile, start, end, blocks, EXPERTS, BLOCK_M, TILES_N
            )
        else:
            expert, first_row, last_row, tile_n = route_place(tile, ids_ptr, NUM_EXPERTS, TILES_N)
        x_places = first_row + tl.arange(0, SPLIT * BLOCK_M) % BLOCK_M
        routes = x_places
        if order_ptr is not None:
            routes = tl.load(order_ptr + x_places, mask=x_places < last_row, other=0)
        x_rows = x_ptr + (routes // NUM_SLOTS).to(tl.int64) * X_STRIDE
        columns = tile_n * BLOCK_N + within
        weight_mask = columns < INNER
        if INTERLEAVED:
            offsets = (2 * columns + is_upper.to(tl.int32)) * ROW_STRIDE
        else:
            offsets = columns * ROW_STRIDE + tl.where(is_upper, distance, 0)
        word_rows = weight_ptr + expert.to(tl.int64) * EXPERT_STRIDE + offsets
        # The scales of gate and up may be in different tensors.
        scale_rows = (
            gate_scale_ptr + expert * GATE_SCALE_STRIDES[0] + columns * GATE_SCALE_STRIDES[1]
        )
        if GATED:
            upper = up_scale_ptr + expert * UP_SCALE_STRIDES[0] + columns * UP_SCALE_STRIDES[1]
            if UP_FIRST:
                scale_rows = tl.where(is_upper, scale_rows, upper)
            else:
                scale_rows = tl.where(is_upper, upper, scale_rows)
        # Load the factors before the product. After the product, nothing would hide the latency of
        # this load.
        if gate_factor_ptr is not None:
            gate_factor = tl.load(gate_factor_ptr + expert)
        if up_factor_ptr is not None:
            up_factor = tl.load(up_factor_ptr + expert)
        accumulator = multiply_tile(
            x_rows, x_places < last_row, word_rows, scale_rows, weight_mask,
            HIDDEN, INNER % BLOCK_N == 0, FORMAT, DTYPE, BLOCK_K, PART_K, RUN, SWAPPED, SPLIT,
            False,
        )  # fmt: skip
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows < last_row
        out_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = out_columns < INNER
        if GATED:
            if SWAPPED:
                accumulator = tl.trans(accumulator)
            both = tl.reshape(accumulator, (BLOCK_M, BLOCK_N // 8, 2, 8))
            gate, up = tl.split(tl.permute(both, (0, 1, 3, 2)))
            gate = tl.reshape(gate, (BLOCK_M, BLOCK_N))
            up = tl.reshape(up, (BLOCK_M, BLOCK_N))
            if UP_FIRST:
                gate, up = up, gate
            if up_factor_ptr is not None:
                up *= up_factor
            up = add_row_bias(
                up, up_bias_ptr, expert, out_columns, column_mask, BIAS_STRIDES[2], BIAS_STRIDES[3]
            )
        else:
            if SWAPPED:
                accumulator = tl.trans(accumulator)
            gate = accumulator
            up = accumulator
        if gate_factor_ptr is not None:
            gate *= gate_factor
        gate = add_row_bias(
            gate, gate_bias_ptr, expert, out_columns, column_mask, BIAS_STRIDES[0], BIAS_STRIDES[1]
        )
        value = activate(gate, up, ACTIVATION, ALPHA, LIMIT, GATED)
        places = out_columns
        if HIDDEN_STEP > 0:
            places = place_in_order(out_columns, HIDDEN_STEP, HIDDEN_RUN)
        store_tile(value, hidden_ptr, rows, row_mask, places, column_mask, INNER)


@triton.jit
def moe_down_codes(
    x_ptr, ids_ptr, order_ptr, ends_ptr, weight_ptr, scale_ptr, factor_ptr, bias_ptr, y_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    FORMAT: tl.constexpr, PART_K: tl.constexpr,
    SCALE_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr, X_IN_ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    SWAPPED: tl.constexpr, SPLIT: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the down projection of a mixture of experts, or a grouped GEMM, with 4-bit weights
    and few rows per expert: y [num_rows, HIDDEN] = x [num_rows, INNER] @ weight[expert]^T. Rows are
    sorted by expert.

    The grid may have any size. order_ptr: as in `grouped_gemm`. Strides: as in `moe_up_codes`.
    X_IN_ORDER: whether `moe_up_codes` has already permuted the columns of x.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TILES_N: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    if ids_ptr is not None:
        num_tiles = num_rows * TILES_N
    elif order_ptr is None:
        start, end, blocks, idle, _ = group_tiles(
            ends_ptr, None, num_rows, NUM_EXPERTS, EXPERTS, NUM_EXPERTS, BLOCK_M
        )
        num_tiles = tl.sum(blocks, axis=0) * TILES_N
    else:
        start, end, blocks = expert_tiles(ends_ptr, NUM_EXPERTS, EXPERTS, BLOCK_M)
        num_tiles = tl.sum(blocks, axis=0) * TILES_N
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        if ids_ptr is None:
            expert, first_row, last_row, tile_n = tile_place(
                tile, start, end, blocks, EXPERTS, BLOCK_M, TILES_N
            )
        else:
            expert, first_row, last_row, tile_n = route_place(tile, ids_ptr, NUM_EXPERTS, TILES_N)
        x_places = first_row + tl.arange(0, SPLIT * BLOCK_M) % BLOCK_M
        x_rows = x_ptr + x_places.to(tl.int64) * X_STRIDE
        weight_rows = tile_n * BLOCK_N + tl.arange(0, SPLIT * BLOCK_N) % BLOCK_N
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows < last_row
        # Load these values before the product. After the product, nothing would hide the latency of
        # the loads.
        places = rows
        if order_ptr is not None:
            places = tl.load(order_ptr + rows, mask=row_mask, other=0)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr + expert)
        accumulator = multiply_tile(
            x_rows, x_places < last_row,
            weight_ptr + expert.to(tl.int64) * EXPERT_STRIDE + weight_rows * ROW_STRIDE,
            scale_ptr + expert * SCALE_STRIDES[0] + weight_rows * SCALE_STRIDES[1],
            weight_rows < HIDDEN, INNER, HIDDEN % BLOCK_N == 0, FORMAT, DTYPE, BLOCK_K, PART_K, RUN,
            SWAPPED, SPLIT, X_IN_ORDER,
        )  # fmt: skip
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < HIDDEN
        if SWAPPED:
            accumulator = tl.trans(accumulator)
        if factor_ptr is not None:
            accumulator *= factor
        value = add_row_bias(
            accumulator, bias_ptr, expert, columns, column_mask, BIAS_STRIDES[0], BIAS_STRIDES[1]
        )
        store_tile(value, y_ptr, places, row_mask, columns, column_mask, HIDDEN)
    if order_ptr is None and ids_ptr is None:
        clear_rows(y_ptr, start, end, idle, EXPERTS, HIDDEN, BLOCK_M, BLOCK_N)
