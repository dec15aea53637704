"""Grouped GEMMs of e4m3 rows with e4m3 weights. Both have scales for blocks of 128 columns.

Each step of 128 columns is a separate product, which is exact except for the tensor core's own
rounding. The product is multiplied by the scales of its rows and of its weight block in fp32, and
then added to the accumulator. A wide tile is computed in two parts of columns, so that only one
product takes registers at a time: while the tensor core multiplies one part, the other part is
scaled. The schedule of tiles is the same as in `grouped_gemm`.
"""

import triton
import triton.language as tl

from tilewright.codegen.grouped.templates.gemm import (
    clear_rows,
    expert_tiles,
    group_tiles,
    store_part,
    store_tile,
    tile_of_zeros,
    tile_place,
    with_factor_and_bias,
)
from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.expert_weights import block_scales
from tilewright.codegen.templates.fp4 import scale_value
from tilewright.codegen.templates.fp8_groups import quantized_groups


@triton.jit
def quantize_rows(
    x_ptr, codes_ptr, scale_ptr, num_rows,
    COLUMNS: tl.constexpr, X_STRIDE: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Quantises rows of x [num_rows, COLUMNS] to e4m3: codes [num_rows, BLOCKS * GROUP] and fp32
    scales [num_rows, BLOCKS]. There is one scale for each row and GROUP columns.

    The arithmetic is the same as in ops/formats/fp8_block.py. Codes past the columns are zero. Grid
    (cdiv(num_rows, BLOCK_M), cdiv(BLOCKS * GROUP, BLOCK_K)).
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row_mask = rows < num_rows
    starts = rows.to(tl.int64)
    x = tl.load(
        x_ptr + starts[:, None] * X_STRIDE + columns[None, :],
        mask=row_mask[:, None] & (columns < COLUMNS)[None, :], other=0.0,
    )  # fmt: skip
    codes, scales = quantized_groups(x, 0.0, GROUP, BLOCK_K)
    tl.store(
        codes_ptr + starts[:, None] * (BLOCKS * GROUP) + columns[None, :], codes,
        mask=row_mask[:, None] & (columns < BLOCKS * GROUP)[None, :],
    )  # fmt: skip
    blocks = tl.program_id(1) * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP)
    tl.store(
        scale_ptr + starts[:, None] * BLOCKS + blocks[None, :], scales,
        mask=row_mask[:, None] & (blocks < BLOCKS)[None, :],
    )  # fmt: skip


@triton.jit
def part_scales(
    scale_ptr, expert, first_row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr, STRIDES: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Loads the scales of PART weight rows for one step of columns. Returns one number if the rows
    share a scale, else [PART]."""
    start = scale_ptr + expert * STRIDES[0]
    if SCALE_BLOCK[0] % PART == 0:
        place = first_row // SCALE_BLOCK[0] * STRIDES[1] + column // SCALE_BLOCK[1] * STRIDES[2]
        scales = tl.load(start + place, mask=first_row < ROWS, other=0.0)
        scales = scale_value(scales)
    else:
        rows = first_row + tl.arange(0, PART)
        scales = tl.reshape(
            block_scales(
                start, rows, rows < ROWS, column, COLUMNS, SCALE_BLOCK[1], STRIDES,
                SCALE_BLOCK, "fp8",
            ), (PART,),
        )  # fmt: skip
    return scales


@triton.jit
def add_scaled(accumulator, x, weight, x_scales, scales, ONE: tl.constexpr, SWAPPED: tl.constexpr):
    """Returns accumulator + x @ weight^T, where the product is multiplied by the scales of x's rows
    and of the weight's rows. ONE: whether the weight rows share one scale. SWAPPED: whether
    accumulator and result are transposed."""
    if SWAPPED:
        product = tl.dot(weight, x.T)
        if ONE:
            accumulator += product * (x_scales * scales)[None, :]
        else:
            accumulator += product * (scales[:, None] * x_scales[None, :])
    else:
        product = tl.dot(x, weight.T)
        if ONE:
            accumulator += product * (x_scales * scales)[:, None]
        else:
            accumulator += product * (x_scales[:, None] * scales[None, :])
    return accumulator


@triton.jit
def moe_up_scaled(
    x_ptr, x_scale_ptr, order_ptr, ends_ptr, weight_ptr, gate_scale_ptr, up_scale_ptr,
    gate_factor_ptr, up_factor_ptr, gate_bias_ptr, up_bias_ptr, hidden_ptr, distance,
    hidden_scale_ptr, tile_ptr,
    NUM_SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, UP_FIRST: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, GATE_SCALE_STRIDES: tl.constexpr, UP_SCALE_STRIDES: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BIAS_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the gate and up projections of a mixture of experts, in e4m3 with block scales:
    hidden [routes, INNER] = activation(x @ Wgate^T) * (x @ Wup^T). Rows of x are gathered by route.

    x [tokens, cdiv(HIDDEN, BLOCK_K) * BLOCK_K] has a scale for each BLOCK_K columns. Weights have
    the same layout as in `moe_up`.

    Args:
        hidden_scale_ptr: If it is given, hidden is rounded to tile_ptr's type and then quantised
            like x, with a scale for each BLOCK_N columns. If it is None, hidden is not quantised.
        tile_ptr: [programs, BLOCK_M, BLOCK_N], scratch memory that stays in the L2 cache.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    STEPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    TILES_N: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    ONE: tl.constexpr = SCALE_BLOCK[0] % BLOCK_N == 0
    if not GATED:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_EXPERTS, INNER, HIDDEN], [EXPERT_STRIDE, ROW_STRIDE, 1],
            [1, BLOCK_N, BLOCK_K],
        )  # fmt: skip
    elif INTERLEAVED:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_EXPERTS, 2, INNER, HIDDEN],
            [EXPERT_STRIDE, ROW_STRIDE, 2 * ROW_STRIDE, 1], [1, 1, BLOCK_N, BLOCK_K],
        )  # fmt: skip
    else:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_EXPERTS, 2, INNER, HIDDEN],
            [EXPERT_STRIDE, distance, ROW_STRIDE, 1], [1, 1, BLOCK_N, BLOCK_K],
        )  # fmt: skip
    start, end, blocks = expert_tiles(ends_ptr, NUM_EXPERTS, EXPERTS, BLOCK_M)
    num_tiles = tl.sum(blocks, axis=0) * TILES_N
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, first_row, last_row, tile_n = tile_place(
            tile, start, end, blocks, EXPERTS, BLOCK_M, TILES_N
        )
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows < last_row
        first_n = tile_n * BLOCK_N
        # Rows past the last row load token 0. They are not stored.
        tokens = tl.load(order_ptr + rows, mask=row_mask, other=0) // NUM_SLOTS
        blocks_before = tokens * STEPS
        gate = tile_of_zeros(BLOCK_M, BLOCK_N, SWAPPED)
        up = gate
        for step in range(STEPS):
            column = step * BLOCK_K
            # Use offsets that count blocks: they take half the registers of pointers.
            x_blocks = blocks_before + step
            x_rows = x_ptr + x_blocks.to(tl.int64)[:, None] * BLOCK_K
            x = tl.load(x_rows + tl.arange(0, BLOCK_K)[None, :])
            x_scales = tl.load(x_scale_ptr + x_blocks)
            gate_scales = part_scales(
                gate_scale_ptr, expert, first_n, column, INNER, HIDDEN, BLOCK_N,
                GATE_SCALE_STRIDES, SCALE_BLOCK,
            )  # fmt: skip
            if GATED:
                weight = weight_desc.load([expert, 1 if UP_FIRST else 0, first_n, column])
            else:
                weight = weight_desc.load([expert, first_n, column])
            weight = tl.reshape(weight, (BLOCK_N, BLOCK_K))
            gate = add_scaled(gate, x, weight, x_scales, gate_scales, ONE, SWAPPED)
            if GATED:
                up_scales = part_scales(
                    up_scale_ptr, expert, first_n, column, INNER, HIDDEN, BLOCK_N,
                    UP_SCALE_STRIDES, SCALE_BLOCK,
                )  # fmt: skip
                up_weight = weight_desc.load([expert, 0 if UP_FIRST else 1, first_n, column])
                up_weight = tl.reshape(up_weight, (BLOCK_N, BLOCK_K))
                up = add_scaled(up, x, up_weight, x_scales, up_scales, ONE, SWAPPED)
        out_columns = first_n + tl.arange(0, BLOCK_N)
        column_mask = out_columns < INNER
        if SWAPPED:
            gate = tl.trans(gate)
        gate = with_factor_and_bias(
            gate, gate_factor_ptr, gate_bias_ptr, expert, out_columns, column_mask,
            BIAS_STRIDES[0], BIAS_STRIDES[1],
        )  # fmt: skip
        if GATED:
            if SWAPPED:
                up = tl.trans(up)
            up = with_factor_and_bias(
                up, up_factor_ptr, up_bias_ptr, expert, out_columns, column_mask,
                BIAS_STRIDES[2], BIAS_STRIDES[3],
            )  # fmt: skip
        value = activate(gate, up, ACTIVATION, ALPHA, LIMIT, GATED)
        places = rows.to(tl.int64)
        if hidden_scale_ptr is None:
            store_tile(value, hidden_ptr, places, row_mask, out_columns, column_mask, INNER)
        else:
            # Store the tile to memory and load it again. If the reduction and the division (which
            # is a call) read the accumulators from registers, ptxas would spill the accumulators in
            # the whole loop. Columns past the last one are set to zero, because a bias makes them
            # nonzero.
            within = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            own = tile_ptr + tl.program_id(0) * (BLOCK_M * BLOCK_N) + within
            value = tl.where(column_mask[None, :], value, 0.0)
            tl.store(own, value.to(tile_ptr.dtype.element_ty))
            tl.debug_barrier()
            value = tl.load(own)
            codes, scales = quantized_groups(value, 0.0, BLOCK_N, BLOCK_N)
            tl.store(
                hidden_ptr + places[:, None] * (TILES_N * BLOCK_N) + out_columns[None, :], codes,
                mask=row_mask[:, None],
            )  # fmt: skip
            tl.store(
                hidden_scale_ptr + places * TILES_N + tile_n, tl.reshape(scales, (BLOCK_M,)),
                mask=row_mask,
            )  # fmt: skip


@triton.jit
def grouped_scaled(
    x_ptr, x_scale_ptr, order_ptr, ends_ptr, expert_ids_ptr, weight_ptr, scale_ptr, factor_ptr,
    bias_ptr, y_ptr, num_rows,
    NUM_GROUPS: tl.constexpr, GROUPS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    SCALE_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr, X_SCALE_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    SWAPPED: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Grouped GEMM in e4m3 with block scales: y [num_rows, HIDDEN] = x [num_rows, INNER] @
    weight[expert]^T. Rows of x are sorted by group.

    x has a scale for each row and BLOCK_K columns. PARTS: the number of parts, 1 or 2, in which the
    columns of a tile are computed. `grouped_gemm` explains the other arguments.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    PART: tl.constexpr = BLOCK_N // PARTS
    TILES_N: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    ONE: tl.constexpr = SCALE_BLOCK[0] % PART == 0
    x_desc = tl.make_tensor_descriptor(x_ptr, [num_rows, INNER], [X_STRIDE, 1], [BLOCK_M, BLOCK_K])
    weight_desc = tl.make_tensor_descriptor(
        weight_ptr, [NUM_EXPERTS, HIDDEN, INNER], [EXPERT_STRIDE, ROW_STRIDE, 1],
        [1, PART, BLOCK_K],
    )  # fmt: skip
    if order_ptr is None:
        start, end, blocks, idle, experts = group_tiles(
            ends_ptr, expert_ids_ptr, num_rows, NUM_GROUPS, GROUPS, NUM_EXPERTS, BLOCK_M
        )
    else:
        start, end, blocks = expert_tiles(ends_ptr, NUM_GROUPS, GROUPS, BLOCK_M)
    num_tiles = tl.sum(blocks, axis=0) * TILES_N
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        expert, first_row, last_row, tile_n = tile_place(
            tile, start, end, blocks, GROUPS, BLOCK_M, TILES_N
        )
        if expert_ids_ptr is not None:
            expert = tl.sum(tl.where(tl.arange(0, GROUPS) == expert, experts, 0), axis=0)
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows < last_row
        first_n = tile_n * BLOCK_N
        x_scale_rows = x_scale_ptr + rows.to(tl.int64) * X_SCALE_STRIDES[0]
        accumulator = tile_of_zeros(BLOCK_M, PART, SWAPPED)
        second = accumulator
        for column in range(0, INNER, BLOCK_K):
            # Rows after the expert's last row belong to the next expert. They are not stored.
            x = x_desc.load([first_row, column])
            x_scales = tl.load(
                x_scale_rows + column // BLOCK_K * X_SCALE_STRIDES[1], mask=row_mask, other=0.0
            )
            weight = weight_desc.load([expert, first_n, column])
            scales = part_scales(
                scale_ptr, expert, first_n, column, HIDDEN, INNER, PART, SCALE_STRIDES, SCALE_BLOCK
            )
            accumulator = add_scaled(
                accumulator, x, tl.reshape(weight, (PART, BLOCK_K)), x_scales, scales, ONE, SWAPPED
            )
            if PARTS == 2:
                weight = weight_desc.load([expert, first_n + PART, column])
                scales = part_scales(
                    scale_ptr, expert, first_n + PART, column, HIDDEN, INNER, PART, SCALE_STRIDES,
                    SCALE_BLOCK,
                )  # fmt: skip
                second = add_scaled(
                    second, x, tl.reshape(weight, (PART, BLOCK_K)), x_scales, scales, ONE, SWAPPED
                )
        places = rows
        if order_ptr is not None:
            places = tl.load(order_ptr + rows, mask=row_mask, other=0)
        store_part(
            accumulator, y_ptr, places, row_mask, factor_ptr, bias_ptr, expert, first_n, HIDDEN,
            PART, BIAS_STRIDES, SWAPPED,
        )  # fmt: skip
        if PARTS == 2:
            store_part(
                second, y_ptr, places, row_mask, factor_ptr, bias_ptr, expert, first_n + PART,
                HIDDEN, PART, BIAS_STRIDES, SWAPPED,
            )  # fmt: skip
    if order_ptr is None:
        clear_rows(y_ptr, start, end, idle, GROUPS, HIDDEN, BLOCK_M, BLOCK_N)
