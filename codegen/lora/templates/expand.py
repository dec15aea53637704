"""Computes the expand of multi-LoRA: multiplies the result of the shrink by the adapters' B
matrices, and adds the products to q, k and v.

One launch computes all projections. A program computes columns of one projection for rows of one
adapter.
"""

import triton
import triton.language as tl

from tilewright.codegen.lora.templates.rows import tile_rows


@triton.jit
def part_of_delta(
    s_ptr, weight_ptr, scales_ptr, plane, adapter, rows, row_mask, columns, s_plane_stride,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, S_STRIDE: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Returns s [rows, RANK] times one adapter's weight [WIDTH, RANK], scaled, as fp32 [BLOCK_M,
    BLOCK_N].

    If BLOCK_M is 1, the result is computed by multiplications and a sum, without tensor cores.
    """
    s_rows = s_ptr + plane * s_plane_stride + rows.to(tl.int64) * S_STRIDE
    weight_rows = weight_ptr + adapter.to(tl.int64) * WEIGHT_STRIDES[0]
    weight_rows += columns * WEIGHT_STRIDES[1]
    column_mask = (columns < WIDTH)[:, None]
    delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Do not unroll the loop. On SM100, if two dots share an accumulator, Triton before 3.9 computes
    # wrong values.
    for first in range(0, RANK, BLOCK_R):
        ranks = first + tl.arange(0, BLOCK_R)
        rank_mask = (ranks < RANK)[None, :]
        s = tl.load(
            s_rows[:, None] + ranks[None, :],
            mask=row_mask[:, None] & rank_mask, other=0.0,
        )  # fmt: skip
        weight = tl.load(
            weight_rows[:, None] + ranks[None, :] * WEIGHT_STRIDES[2],
            mask=column_mask & rank_mask, other=0.0,
        )  # fmt: skip
        if BLOCK_M == 1:
            products = weight.to(tl.float32) * s.to(tl.float32)
            delta += tl.sum(products, axis=1)[None, :]
        else:
            delta = tl.dot(s, weight.T, delta, input_precision="ieee")
    if scales_ptr is not None:
        delta *= SCALE * tl.load(scales_ptr + adapter).to(tl.float32)
    elif SCALE != 1.0:
        delta *= SCALE
    return delta


@triton.jit
def expand_projection(
    block, s_ptr, base_ptr, weight_ptr, scales_ptr, out_ptr, plane, adapter, rows, row_mask,
    s_plane_stride,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr, S_STRIDE: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr, BASE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Computes and stores BLOCK_N columns of one projection, starting at column block * BLOCK_N,
    for the rows of one tile."""
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row_mask[:, None] & (columns < WIDTH)[None, :]
    wide = rows.to(tl.int64)[:, None]
    if base_ptr is None:
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        base = base_ptr + wide * BASE_STRIDE + columns[None, :]
        value = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:  # noqa: SIM102
        if adapter >= 0:
            value += part_of_delta(
                s_ptr, weight_ptr, scales_ptr, plane, adapter, rows, row_mask, columns,
                s_plane_stride, RANK, WIDTH, SCALE, S_STRIDE, WEIGHT_STRIDES,
                BLOCK_M, BLOCK_N, BLOCK_R,
            )  # fmt: skip
    out = out_ptr + wide * OUT_STRIDE + columns[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def lora_expand(
    s_ptr, q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr, scales_ptr,
    ids_ptr, offsets_ptr, order_ptr, q_out_ptr, k_out_ptr, v_out_ptr,
    num_rows, total_rows, num_groups, rows_per_id, s_plane_stride,
    WIDTHS: tl.constexpr, RANKS: tl.constexpr, SCALES: tl.constexpr,
    PLANES: tl.constexpr, S_STRIDE: tl.constexpr,
    Q_STRIDES: tl.constexpr, K_STRIDES: tl.constexpr, V_STRIDES: tl.constexpr,
    BASE_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the expand of multi-LoRA: for each of q, k and v [T, WIDTH], base + scale * s @
    B[adapter]^T. Here, s [P, num_rows, N] is the result of the shrink, B is [G, WIDTH, R], and
    every row has its own adapter.

    Grid (sum of cdiv(WIDTH, BLOCK_N), tiles). WIDTHS, RANKS, SCALES, PLANES (the plane of s) and
    strides have a value for each of q, k and v. A width of 0 means that there is no such output.

    S_STRIDE: the stride of the rows of s. Q_STRIDES, K_STRIDES, V_STRIDES: the strides (adapter,
    row, rank) of a weight. BLOCK_R: a power of two that is at least 16. If BLOCK_M is 1, a tile is
    one row.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    Q_BLOCKS: tl.constexpr = (WIDTHS[0] + BLOCK_N - 1) // BLOCK_N
    K_BLOCKS: tl.constexpr = (WIDTHS[1] + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    adapter, rows, row_mask = tile_rows(
        tl.program_id(1), ids_ptr, offsets_ptr, order_ptr, num_rows, total_rows, num_groups,
        rows_per_id, ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
    )  # fmt: skip
    if q_out_ptr is not None:  # noqa: SIM102
        if block < Q_BLOCKS:
            expand_projection(
                block, s_ptr, q_ptr, q_weight_ptr, scales_ptr, q_out_ptr, PLANES[0], adapter, rows,
                row_mask, s_plane_stride, RANKS[0], WIDTHS[0], SCALES[0], S_STRIDE, Q_STRIDES,
                BASE_STRIDES[0], OUT_STRIDES[0], BLOCK_M, BLOCK_N, BLOCK_R,
            )  # fmt: skip
    if k_out_ptr is not None:  # noqa: SIM102
        if (block >= Q_BLOCKS) & (block < Q_BLOCKS + K_BLOCKS):
            expand_projection(
                block - Q_BLOCKS, s_ptr, k_ptr, k_weight_ptr, scales_ptr, k_out_ptr, PLANES[1],
                adapter, rows, row_mask, s_plane_stride, RANKS[1], WIDTHS[1], SCALES[1], S_STRIDE,
                K_STRIDES, BASE_STRIDES[1], OUT_STRIDES[1], BLOCK_M, BLOCK_N, BLOCK_R,
            )  # fmt: skip
    if v_out_ptr is not None:  # noqa: SIM102
        if block >= Q_BLOCKS + K_BLOCKS:
            expand_projection(
                block - Q_BLOCKS - K_BLOCKS, s_ptr, v_ptr, v_weight_ptr, scales_ptr, v_out_ptr,
                PLANES[2], adapter, rows, row_mask, s_plane_stride, RANKS[2], WIDTHS[2], SCALES[2],
                S_STRIDE, V_STRIDES, BASE_STRIDES[2], OUT_STRIDES[2], BLOCK_M, BLOCK_N, BLOCK_R,
            )  # fmt: skip
