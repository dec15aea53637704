"""Computes the up-projection of MLA: keys and values [K, H, N + V] = latents [K, L] @ weight^T.

The kernel is one persistent GEMM. If there are scales, the operands are e4m3 codes. The product of
each block of columns is then scaled in fp32 and added to the sum. The epilogue stores keys and
values as the attention kernel reads them: rounded to 16 bits, or saturated to 8-bit floats. Keys
and values are stored side by side, in the order of the weight's rows, or in two tensors with
different layouts.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.fp4 import scale_value
from tilewright.codegen.templates.rounding import rounded


@triton.jit
def weight_scales(
    pointer, first_row, column, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, STRIDES: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Loads the scales of weight rows [first_row, first_row + BLOCK_N) in a block of columns.
    Returns one number if UNIFORM, else [1, BLOCK_N]."""
    place = pointer + column // SCALE_BLOCK[1] * STRIDES[1]
    if UNIFORM:
        scale = scale_value(tl.load(place + first_row // SCALE_BLOCK[0] * STRIDES[0]))
    else:
        rows = first_row + tl.arange(0, BLOCK_N)
        places = place + rows // SCALE_BLOCK[0] * STRIDES[0]
        scale = scale_value(tl.load(places, mask=rows < ROWS, other=0.0))[None, :]
    return scale


@triton.jit
def tile_rows(
    tile_n, HEAD_ROWS: tl.constexpr, NOPE: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """Returns (first row of the weight, head, whether the rows are values, first column in keys or
    values) of a column tile. If JOINT, a tile may span several heads, and only the first row has a
    meaning."""
    if JOINT:
        return tile_n * BLOCK_N, tile_n, tile_n < 0, tile_n
    else:
        K_TILES: tl.constexpr = (NOPE + BLOCK_N - 1) // BLOCK_N
        TILES: tl.constexpr = K_TILES + (V_DIM + BLOCK_N - 1) // BLOCK_N
        head = tile_n // TILES
        part = tile_n % TILES
        is_value = part >= K_TILES
        column = tl.where(is_value, part - K_TILES, part) * BLOCK_N
        first = head * HEAD_ROWS + tl.where(is_value, NOPE, 0) + column
        return first, head, is_value, column


@triton.jit
def mla_up_projection(
    latent_ptr, weight_ptr, latent_scale_ptr, weight_scale_ptr, k_ptr, v_ptr, limit_ptr,
    num_rows, run, scale_stride, v_head_stride, v_column_stride,
    RANK: tl.constexpr, LATENT_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, V_DIM: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, LATENT_SCALE_STRIDE: tl.constexpr,
    WEIGHT_SCALE_STRIDES: tl.constexpr,
    K_STRIDES: tl.constexpr, JOINT: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Computes the up-projection of MLA: keys k [K, H, NOPE] and values v [K, H, V_DIM] = latents
    [K, RANK] @ weight^T, where weight is [H * (NOPE + V_DIM), RANK].

    If limit_ptr is given, the grid has one program for each tile. If not, the grid may have any
    size.

    Args:
        latent_scale: fp32 with the strides scale_stride (between blocks of columns) and
            LATENT_SCALE_STRIDE (between rows); None if the operands are not quantised.
        weight_scale: fp32 with the strides WEIGHT_SCALE_STRIDES of (row block, column block); None
            if the operands are not quantised.
        JOINT: The values of a head follow its keys in memory, and K_STRIDES are the strides of
            (row, head) of both. A tile may then span several heads, unless heads are not
            contiguous. If not JOINT, K_STRIDES belong to k only, and v has the strides (1,
            v_head_stride, v_column_stride) of (row, head, column). Keys are then divided by K_SCALE
            and values by V_SCALE, and the rows of v are padded with zeros to a multiple of 16.
        limit: One int64. A tile is skipped if row % run >= limit for all of its rows.
    """
    HEAD_ROWS: tl.constexpr = NOPE + V_DIM
    ROWS: tl.constexpr = NUM_HEADS * HEAD_ROWS
    HEAD_TILES: tl.constexpr = (NOPE + BLOCK_N - 1) // BLOCK_N + (V_DIM + BLOCK_N - 1) // BLOCK_N
    TILES_N: tl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N if JOINT else NUM_HEADS * HEAD_TILES
    UNIFORM: tl.constexpr = SCALE_BLOCK[0] % BLOCK_N == 0 and (
        JOINT or (NOPE % BLOCK_N == 0 and V_DIM % BLOCK_N == 0)
    )
    latent_desc = tl.make_tensor_descriptor(
        latent_ptr, [num_rows, RANK], [LATENT_STRIDE, 1], [BLOCK_M, BLOCK_K]
    )
    weight_desc = tl.make_tensor_descriptor(
        weight_ptr, [ROWS, RANK], [WEIGHT_STRIDE, 1], [BLOCK_N, BLOCK_K]
    )
    if JOINT:
        LAST: tl.constexpr = (NUM_HEADS - 1) * K_STRIDES[1] + HEAD_ROWS
        out_desc = tl.make_tensor_descriptor(
            k_ptr, [num_rows, LAST], [K_STRIDES[0], 1], [BLOCK_M, BLOCK_N]
        )
    tiles_m = (num_rows + BLOCK_M - 1) // BLOCK_M
    num_tiles = tiles_m * TILES_N
    if limit_ptr is not None:
        # Here, each program has one tile. A program whose tile is skipped computes nothing.
        own = tl.program_id(0)
        group = own // (GROUP_M * TILES_N)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        own_row = (group * GROUP_M + own % (GROUP_M * TILES_N) % group_rows) * BLOCK_M
        limit = tl.load(limit_ptr)
        whole = own_row % run + BLOCK_M <= run
        if whole and own_row % run >= limit:
            num_tiles = 0
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0),
        flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        # Tiles of GROUP_M row blocks run at the same time, so that they find a weight tile in the
        # L2 cache.
        group = tile // (GROUP_M * TILES_N)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * TILES_N)
        first_row = (group * GROUP_M + within % group_rows) * BLOCK_M
        weight_row, head, is_value, column = tile_rows(
            within // group_rows, HEAD_ROWS, NOPE, V_DIM, BLOCK_N, JOINT
        )
        rows = first_row + tl.arange(0, BLOCK_M)
        row_mask = rows < num_rows
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(0, RANK, BLOCK_K):
            latent = latent_desc.load([first_row, step])
            weight = weight_desc.load([weight_row, step])
            if latent_scale_ptr is None:
                accumulator = tl.dot(latent, weight.T, accumulator)
            else:
                product = tl.dot(latent, weight.T)
                places = latent_scale_ptr + step // SCALE_BLOCK[1] * scale_stride
                own_scales = tl.load(
                    places + rows * LATENT_SCALE_STRIDE, mask=row_mask, other=0.0
                ).to(tl.float32)
                scales = weight_scales(
                    weight_scale_ptr, weight_row, step, ROWS, BLOCK_N, SCALE_BLOCK,
                    WEIGHT_SCALE_STRIDES, UNIFORM,
                )  # fmt: skip
                accumulator += product * (own_scales[:, None] * scales)
        if JOINT:
            place = weight_row
            if K_STRIDES[1] != HEAD_ROWS:
                place += weight_row // HEAD_ROWS * (K_STRIDES[1] - HEAD_ROWS)
            out_desc.store([first_row, place], accumulator.to(k_ptr.dtype.element_ty))
        else:
            columns = column + tl.arange(0, BLOCK_N)
            starts = rows.to(tl.int64)[:, None]
            if is_value:
                if V_SCALE != 1.0:
                    accumulator = accumulator / V_SCALE
                places = v_ptr + head.to(tl.int64) * v_head_stride + starts
                places += columns.to(tl.int64)[None, :] * v_column_stride
                # The rows of v are padded with zeros to a multiple of 16.
                row_mask = rows < (num_rows + 15) // 16 * 16
                inside = row_mask[:, None] & (columns < V_DIM)[None, :]
                tl.store(places, rounded(accumulator, v_ptr.dtype.element_ty), mask=inside)
            else:
                if K_SCALE != 1.0:
                    accumulator = accumulator / K_SCALE
                places = k_ptr + starts * K_STRIDES[0] + head * K_STRIDES[1] + columns[None, :]
                inside = row_mask[:, None] & (columns < NOPE)[None, :]
                tl.store(places, rounded(accumulator, k_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mla_weight_numbers(
    weight_ptr, weight_scale_ptr, out_ptr,
    ROWS: tl.constexpr, RANK: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, WEIGHT_SCALE_STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Dequantises an fp8 weight with block scales: out [ROWS, RANK] = codes * scales, rounded to
    the dtype of out.

    Grid (cdiv(ROWS, BLOCK_N), cdiv(RANK, BLOCK_K)).
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (rows < ROWS)[:, None] & (columns < RANK)[None, :]
    places = rows.to(tl.int64)[:, None] * WEIGHT_STRIDE + columns[None, :]
    codes = tl.load(weight_ptr + places, mask=mask, other=0.0).to(tl.float32)
    row_blocks = rows // SCALE_BLOCK[0] * WEIGHT_SCALE_STRIDES[0]
    column_blocks = columns // SCALE_BLOCK[1] * WEIGHT_SCALE_STRIDES[1]
    scale_places = row_blocks[:, None] + column_blocks[None, :]
    scales = scale_value(tl.load(weight_scale_ptr + scale_places, mask=mask, other=0.0))
    out = rows.to(tl.int64)[:, None] * RANK + columns[None, :]
    tl.store(out_ptr + out, (codes * scales).to(out_ptr.dtype.element_ty), mask=mask)
