"""Computes a grouped GEMM of two NVFP4 operands, whose scales are in the tensor core's own layout.

On SM100, the tensor core multiplies packed codes and applies both scales itself (BLOCK_SCALED). On
SM90, the tiles are dequantised to bf16, which is exact. If SWAPPED, 128 weight rows are on the M
side, which is faster for few rows in a group.

The kernel is persistent. A tile finds its group as in `grouped_gemm`. A group may start at any row,
but its scales start a new block of 128 rows. Tiles of 128 rows are counted from the start of the
group, so each tile has whole blocks of scales.
"""

import triton
import triton.language as tl

from tilewright.codegen.grouped.templates.gemm import add_product, store_tile, tile_place
from tilewright.codegen.templates.fp4 import dequantize_nvfp4, scale_rows, scale_tile


@triton.jit
def first_scale_block(group, offsets_ptr, deltas_ptr, num_groups):
    """Returns the number of the first block of a group's scales, where a block has 128 rows. For
    groups past the last one, returns 2**31 - 1."""
    real = group < num_groups
    start = tl.load(offsets_ptr + group, mask=real, other=0).to(tl.int32)
    delta = tl.load(deltas_ptr + group, mask=real, other=0).to(tl.int32)
    return tl.where(real, start // 128 + delta, 2**31 - 1)


@triton.jit
def searched_place(tile, offsets_ptr, deltas_ptr, num_rows, num_groups, TILES_N: tl.constexpr,
                   SEARCH_STEPS: tl.constexpr):  # fmt: skip
    """Returns the place of a tile of 128 rows, as (group, first row of the group, first row of the
    tile, end of the group's rows, column tile).

    The function searches the scale blocks of the groups by bisection. `tile_place` uses a reduction
    instead, and Triton before 3.9 cannot specialise warps in a loop that has a reduction. 2 **
    SEARCH_STEPS is at least num_groups.
    """
    block = tile // TILES_N
    group = tile * 0
    for step in tl.static_range(SEARCH_STEPS):
        later = group + 2 ** (SEARCH_STEPS - 1 - step)
        first = first_scale_block(later, offsets_ptr, deltas_ptr, num_groups)
        group = tl.where(first <= block, later, group)
    start = tl.maximum(tl.load(offsets_ptr + group).to(tl.int32), 0)
    end = tl.minimum(tl.load(offsets_ptr + group + 1).to(tl.int32), num_rows)
    own_blocks = tl.maximum((end - start + 127) // 128, 1)
    within = tile - first_scale_block(group, offsets_ptr, deltas_ptr, num_groups) * TILES_N
    return group, start, start + within % own_blocks * 128, end, within // own_blocks


@triton.jit
def grouped_nvfp4(
    a_ptr, b_ptr, a_scales_ptr, b_scales_ptr, offsets_ptr, deltas_ptr, expert_ids_ptr,
    expert_scales_ptr, out_ptr, num_rows, num_scale_blocks, num_groups,
    GROUPS: tl.constexpr, NUM_EXPERTS: tl.constexpr, ROWS_OUT: tl.constexpr, INNER: tl.constexpr,
    A_STRIDE: tl.constexpr, B_EXPERT_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAPPED: tl.constexpr, BLOCK_SCALED: tl.constexpr,
    FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Grouped GEMM in NVFP4: out [T, ROWS_OUT] is a [T, INNER] @ b[expert]^T, multiplied by the
    expert's fp32 scale. Rows of a group with expert -1 are set to zero.

    The kernel is persistent, so the grid may have any size. A tile has BLOCK_M rows (128 if not
    SWAPPED), BLOCK_N weight rows (a multiple of 128) and steps of BLOCK_K inner elements (a
    multiple of 64). GROUPS: a power of two that is at least num_groups. SEARCH_STEPS: as in
    `searched_place`; 0 unless warps are specialised, which requires tiles of 128 rows.
    """
    COLUMN_BLOCKS: tl.constexpr = (INNER + 63) // 64
    K_BLOCKS: tl.constexpr = BLOCK_K // 64
    B_BLOCKS: tl.constexpr = BLOCK_N // 128
    a_desc = tl.make_tensor_descriptor(
        a_ptr, [num_rows, INNER // 2], [A_STRIDE, 1], [BLOCK_M, BLOCK_K // 2]
    )
    b_desc = tl.make_tensor_descriptor(
        b_ptr, [NUM_EXPERTS, ROWS_OUT, INNER // 2], [B_EXPERT_STRIDE, B_STRIDE, 1],
        [1, BLOCK_N, BLOCK_K // 2],
    )  # fmt: skip
    N_BLOCKS: tl.constexpr = (ROWS_OUT + 127) // 128
    b_scale_desc = tl.make_tensor_descriptor(
        b_scales_ptr, [NUM_EXPERTS, N_BLOCKS, COLUMN_BLOCKS, 2, 256],
        [N_BLOCKS * COLUMN_BLOCKS * 512, COLUMN_BLOCKS * 512, 512, 256, 1],
        [1, B_BLOCKS, K_BLOCKS, 2, 256],
    )  # fmt: skip
    if not SWAPPED:
        a_scale_desc = tl.make_tensor_descriptor(
            a_scales_ptr, [1, num_scale_blocks, COLUMN_BLOCKS, 2, 256],
            [num_scale_blocks * COLUMN_BLOCKS * 512, COLUMN_BLOCKS * 512, 512, 256, 1],
            [1, BLOCK_M // 128, K_BLOCKS, 2, 256],
        )  # fmt: skip
    groups = tl.arange(0, GROUPS)
    real = groups < num_groups
    # Offsets, experts and deltas were not checked, so they are clamped to the sizes of the tensors.
    start = tl.maximum(tl.load(offsets_ptr + groups, mask=real, other=0).to(tl.int32), 0)
    end = tl.load(offsets_ptr + groups + 1, mask=real, other=0).to(tl.int32)
    end = tl.minimum(end, num_rows)
    blocks = tl.where(real, tl.maximum(end - start + BLOCK_M - 1, 0) // BLOCK_M, 0)
    TILES_N: tl.constexpr = (ROWS_OUT + BLOCK_N - 1) // BLOCK_N
    num_tiles = tl.sum(blocks, axis=0) * TILES_N
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0),
        flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        if SEARCH_STEPS > 0:
            group, group_start, first_row, last_row, tile_n = searched_place(
                tile, offsets_ptr, deltas_ptr, num_rows, num_groups, TILES_N, SEARCH_STEPS
            )
        else:
            group, first_row, last_row, tile_n = tile_place(
                tile, start, end, blocks, GROUPS, BLOCK_M, TILES_N
            )
            group_start = tl.sum(tl.where(groups == group, start, 0), axis=0)
        expert = tl.load(expert_ids_ptr + group).to(tl.int32)
        delta = tl.load(deltas_ptr + group).to(tl.int32)
        known = (expert >= 0) & (expert < NUM_EXPERTS)
        weight_expert = tl.where(known, expert, 0)
        in_group = first_row - group_start
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = (rows >= group_start) & (rows < last_row)
        first_scale_row = (group_start // 128 + delta) * 128 + in_group
        if SWAPPED:
            last_place = num_scale_blocks * 128 - BLOCK_M
            first_scale_row = tl.maximum(tl.minimum(first_scale_row, last_place), 0)
            places = first_scale_row + tl.arange(0, BLOCK_M)
            accumulator = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        else:
            accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range((INNER + BLOCK_K - 1) // BLOCK_K):
            a = a_desc.load([first_row, step * (BLOCK_K // 2)])
            b = b_desc.load([weight_expert, tile_n * BLOCK_N, step * (BLOCK_K // 2)])
            b = tl.reshape(b, (BLOCK_N, BLOCK_K // 2))
            b_scales = scale_tile(
                b_scale_desc, weight_expert, tile_n * B_BLOCKS, step * K_BLOCKS, B_BLOCKS, K_BLOCKS
            )
            if SWAPPED:
                a_scales = scale_rows(
                    a_scales_ptr, places, row_mask,
                    step * (BLOCK_K // 16), COLUMN_BLOCKS, BLOCK_K // 16,
                )  # fmt: skip
            else:
                a_scales = scale_tile(
                    a_scale_desc, 0, first_scale_row // 128, step * K_BLOCKS,
                    BLOCK_M // 128, K_BLOCKS,
                )  # fmt: skip
            if BLOCK_SCALED:
                if SWAPPED:
                    accumulator = tl.dot_scaled(
                        b, b_scales, "e2m1", a.T, a_scales, "e2m1", accumulator
                    )
                else:
                    accumulator = tl.dot_scaled(
                        a, a_scales, "e2m1", b.T, b_scales, "e2m1", accumulator
                    )
            else:
                a = dequantize_nvfp4(a, a_scales, BLOCK_M, BLOCK_K)
                b = dequantize_nvfp4(b, b_scales, BLOCK_N, BLOCK_K)
                accumulator = add_product(accumulator, a, b, SWAPPED)
        if SWAPPED:
            accumulator = tl.trans(accumulator)
        factor = tl.load(expert_scales_ptr + weight_expert)
        # The products of rows without an expert are undefined.
        value = tl.where(known, accumulator * factor, 0.0)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        store_tile(value, out_ptr, rows, row_mask, columns, columns < ROWS_OUT, ROWS_OUT)
