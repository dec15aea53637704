"""The gate and up projections of a mixture of experts, and their activation, in one GEMM.

`moe_up` gathers rows of tokens, multiplies them by the gate and up weights of their expert, and
applies the activation to the accumulators. Its tiles have the order of `grouped_gemm`, which
computes the down projection.
"""

import triton
import triton.language as tl

from tilewright.codegen.grouped.templates.gemm import (
    add_decoded,
    expert_tiles,
    searched_place,
    store_tile,
    tile_of_zeros,
    tile_place,
    with_factor_and_bias,
)
from tilewright.codegen.templates.activation import activate
from tilewright.codegen.templates.expert_weights import block_scales, dequantize_tile


@triton.jit
def halves(accumulator, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Splits an accumulator [ROWS, 2 * COLUMNS] into (gate, up), each [ROWS, COLUMNS]."""
    if INTERLEAVED:
        gate, up = tl.split(tl.reshape(accumulator, (ROWS, COLUMNS, 2)))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(accumulator, (ROWS, 2, COLUMNS)), (0, 2, 1)))
    return gate, up


@triton.jit
def gate_up_scales(
    gate_scale_ptr, up_scale_ptr, expert, first_row, column,
    INNER: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, UP_FIRST: tl.constexpr,
    GATE_STRIDES: tl.constexpr, UP_STRIDES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Loads the scales of a tile's weight rows. The scales of gate and up have the same order as
    the rows."""
    rows = first_row + tl.arange(0, BLOCK_N)
    scales = block_scales(
        gate_scale_ptr + expert * GATE_STRIDES[0], rows, rows < INNER, column,
        HIDDEN, BLOCK_K, GATE_STRIDES, SCALE_BLOCK, FORMAT,
    )  # fmt: skip
    if GATED:
        up = block_scales(
            up_scale_ptr + expert * UP_STRIDES[0], rows, rows < INNER, column,
            HIDDEN, BLOCK_K, UP_STRIDES, SCALE_BLOCK, FORMAT,
        )  # fmt: skip
        GROUPS: tl.constexpr = scales.shape[1]
        both = tl.join(up, scales) if UP_FIRST else tl.join(scales, up)
        order: tl.constexpr = (0, 2, 1) if INTERLEAVED else (2, 0, 1)
        scales = tl.reshape(tl.permute(both, order), (2 * BLOCK_N, GROUPS))
    return scales


@triton.jit
def moe_up(
    x_ptr, order_ptr, ends_ptr, weight_ptr, gate_scale_ptr, up_scale_ptr,
    gate_factor_ptr, up_factor_ptr, gate_bias_ptr, up_bias_ptr, hidden_ptr, distance,
    NUM_SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, X_STRIDE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, UP_FIRST: tl.constexpr, N_MAJOR: tl.constexpr,
    FORMAT: tl.constexpr, PER_BYTE: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    GATE_SCALE_STRIDES: tl.constexpr, UP_SCALE_STRIDES: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BIAS_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAPPED: tl.constexpr,
    FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the gate and up projections of a mixture of experts: hidden [routes, INNER] =
    activation(x @ Wgate^T) * (x @ Wup^T). Rows of x are gathered by route, and each route is
    multiplied by the weights of its expert.

    The grid may have any size. A tile has BLOCK_M routes and BLOCK_N columns of hidden.

    Args:
        weight: The rows of gate and up. If they are INTERLEAVED, row 2i belongs to gate and row 2i
            + 1 to up. If not, up is `distance` elements after gate. There is no up if not GATED.
        UP_FIRST: Whether gate and up change places, in both layouts.
        ROW_STRIDE: The number of elements between rows or, if N_MAJOR, between columns of K.
        FORMAT: "dense", or a quantised format with PER_BYTE weights in each element, in which K is
            the contiguous dimension.
        SEARCH_STEPS: As in `searched_place`; not 0 if warps are specialised.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    WIDTH: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    ONE_BLOCK: tl.constexpr = INTERLEAVED or not GATED
    ROWS: tl.constexpr = 2 * INNER if INTERLEAVED else INNER
    if ONE_BLOCK:
        if N_MAJOR:
            weight_desc = tl.make_tensor_descriptor(
                weight_ptr, [NUM_EXPERTS, HIDDEN, ROWS], [EXPERT_STRIDE, ROW_STRIDE, 1],
                [1, BLOCK_K, WIDTH],
            )  # fmt: skip
        else:
            weight_desc = tl.make_tensor_descriptor(
                weight_ptr, [NUM_EXPERTS, ROWS, HIDDEN // PER_BYTE],
                [EXPERT_STRIDE, ROW_STRIDE, 1], [1, WIDTH, BLOCK_K // PER_BYTE],
            )  # fmt: skip
    elif not N_MAJOR:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_EXPERTS, 2, INNER, HIDDEN // PER_BYTE],
            [EXPERT_STRIDE, distance, ROW_STRIDE, 1], [1, 2, BLOCK_N, BLOCK_K // PER_BYTE],
        )  # fmt: skip
    else:
        weight_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_EXPERTS, 2, HIDDEN, INNER],
            [EXPERT_STRIDE, distance, ROW_STRIDE, 1], [1, 2, BLOCK_K, BLOCK_N],
        )  # fmt: skip
    TILES_N: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    start, end, blocks = expert_tiles(ends_ptr, NUM_EXPERTS, EXPERTS, BLOCK_M)
    num_tiles = tl.sum(blocks, axis=0) * TILES_N
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0),
        flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        if SEARCH_STEPS > 0:
            expert, first_row, last_row, tile_n = searched_place(
                tile, ends_ptr, NUM_EXPERTS, BLOCK_M, TILES_N, SEARCH_STEPS
            )
        else:
            expert, first_row, last_row, tile_n = tile_place(
                tile, start, end, blocks, EXPERTS, BLOCK_M, TILES_N
            )
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows < last_row
        routes = tl.load(order_ptr + rows, mask=row_mask, other=0)
        x_rows = x_ptr + (routes // NUM_SLOTS).to(tl.int64) * X_STRIDE
        accumulator = tile_of_zeros(BLOCK_M, WIDTH, SWAPPED)
        for column in range(0, HIDDEN, BLOCK_K):
            columns = column + tl.arange(0, BLOCK_K)
            x_mask = row_mask[:, None]
            if HIDDEN % BLOCK_K != 0:
                x_mask = x_mask & (columns < HIDDEN)[None, :]
            x = tl.load(x_rows[:, None] + columns[None, :], mask=x_mask, other=0.0)
            if ONE_BLOCK:
                if N_MAJOR:
                    weight = weight_desc.load([expert, column, tile_n * WIDTH])
                    weight = tl.reshape(weight, (BLOCK_K, WIDTH)).T
                else:
                    weight = weight_desc.load([expert, tile_n * WIDTH, column // PER_BYTE])
                    weight = tl.reshape(weight, (WIDTH, BLOCK_K // PER_BYTE))
            elif N_MAJOR:
                weight = weight_desc.load([expert, 0, column, tile_n * BLOCK_N])
                weight = tl.reshape(weight, (2, BLOCK_K, BLOCK_N))
                weight = tl.reshape(tl.permute(weight, (0, 2, 1)), (WIDTH, BLOCK_K))
            else:
                weight = weight_desc.load([expert, 0, tile_n * BLOCK_N, column // PER_BYTE])
                weight = tl.reshape(weight, (WIDTH, BLOCK_K // PER_BYTE))
            if FORMAT != "dense":
                scales = gate_up_scales(
                    gate_scale_ptr, up_scale_ptr, expert, tile_n * BLOCK_N, column,
                    INNER, HIDDEN, BLOCK_N, BLOCK_K, GATED, INTERLEAVED, UP_FIRST,
                    GATE_SCALE_STRIDES, UP_SCALE_STRIDES, SCALE_BLOCK, FORMAT,
                )  # fmt: skip
                weight = dequantize_tile(
                    weight, scales, WIDTH, BLOCK_K, FORMAT, x_ptr.dtype.element_ty
                )
            accumulator = add_decoded(accumulator, x, weight, SWAPPED)
        if SWAPPED:
            accumulator = tl.trans(accumulator)
        out_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = out_columns < INNER
        if GATED:
            gate, up = halves(accumulator, BLOCK_M, BLOCK_N, INTERLEAVED)
            if UP_FIRST:
                gate, up = up, gate
            up = with_factor_and_bias(
                up, up_factor_ptr, up_bias_ptr, expert, out_columns, column_mask,
                BIAS_STRIDES[2], BIAS_STRIDES[3],
            )  # fmt: skip
        else:
            gate = accumulator
            up = accumulator
        gate = with_factor_and_bias(
            gate, gate_factor_ptr, gate_bias_ptr, expert, out_columns, column_mask,
            BIAS_STRIDES[0], BIAS_STRIDES[1],
        )  # fmt: skip
        value = activate(gate, up, ACTIVATION, ALPHA, LIMIT, GATED)
        store_tile(value, hidden_ptr, rows, row_mask, out_columns, column_mask, INNER)
