"""Computes the shrink of multi-LoRA: multiplies rows by their adapters' A matrices. The result has
a plane for each of q, k and v.

Columns are counted over all planes: column c is column c % N of plane c // N. Therefore one GEMM
computes q, k and v, and reads each row once, even if the three weights are different tensors.

`lora_shrink` is for many rows. It can split K over several programs. The last program of a tile to
arrive then adds the parts in a fixed order. `lora_shrink_few` is for a few rows of an adapter. It
splits K over the warps of a program, and needs no exchange through global memory. `lora_shrink_row`
is for one or two rows, where the latency of the first loads takes all the time. It does not use
tensor cores.
"""

import triton
import triton.language as tl

from tilewright.codegen.lora.templates.rows import of_plane, tile_rows
from tilewright.codegen.templates.split_k import arrive


@triton.jit
def weight_rows(
    columns, adapter, weight_ptr, second_distance, third_distance,
    N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr, ADAPTER_STRIDES: tl.constexpr,
    ROW_STRIDES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
):  # fmt: skip
    """Returns (pointers to the weight rows of `columns`, the stride of these rows along K, whether
    each row exists).

    The weight of the second plane begins second_distance elements after the first weight, and the
    weight of the third plane begins third_distance elements after the first weight.
    """
    plane = columns // N
    rank = columns % N
    places = adapter.to(tl.int64) * of_plane(plane, ADAPTER_STRIDES)
    places += rank.to(tl.int64) * of_plane(plane, ROW_STRIDES)
    if PLANES > 1:
        places += (plane == 1).to(tl.int64) * second_distance
    if PLANES > 2:
        places += (plane == 2).to(tl.int64) * third_distance
    real = (plane < PLANES) & (rank < of_plane(plane, RANKS))
    return weight_ptr + places, of_plane(plane, COLUMN_STRIDES), real


@triton.jit
def store_columns(
    values, out_ptr, columns, rows, row_mask, num_rows, N: tl.constexpr, PLANES: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Stores values [rows, columns] to their planes of out [PLANES, num_rows, N]."""
    plane = columns // N
    rank = columns % N
    if RANKS[0] != N or RANKS[1] != N or RANKS[2] != N:
        # Masked weights are zeros, but zero times an infinity in x is NaN.
        values = tl.where((rank < of_plane(plane, RANKS))[None, :], values, 0.0)
    places = (plane * num_rows)[None, :] + rows[:, None]
    tl.store(
        out_ptr + places.to(tl.int64) * N + rank[None, :],
        values.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (plane < PLANES)[None, :],
    )


@triton.jit
def weight_tile(
    columns, ks, in_part, adapter, weight_ptr, second_distance, third_distance,
    N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr,
    ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
):  # fmt: skip
    """Loads the weights [columns, ks] of `columns` at the places `ks` along K. in_part: whether
    each of `ks` exists; None if all of them exist."""
    weights, column_stride, real = weight_rows(
        columns, adapter, weight_ptr, second_distance, third_distance,
        N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
    )  # fmt: skip
    pointers = weights[:, None] + ks[None, :] * column_stride
    if COLUMN_STRIDES[0] != COLUMN_STRIDES[1] or COLUMN_STRIDES[0] != COLUMN_STRIDES[2]:
        pointers = weights[:, None] + ks[None, :] * column_stride[:, None]
    mask = real[:, None]
    if in_part is not None:
        mask = mask & in_part[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def part_places(first_column, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the offsets [BLOCK_M, WIDTH] at which WIDTH columns, starting at first_column, are
    stored in the workspace of one part of a tile."""
    columns = first_column + tl.arange(0, WIDTH)
    return tl.arange(0, BLOCK_M)[:, None] * COLUMNS + columns[None, :]


@triton.jit
def add_parts(
    own, part, parts_ptr, first_column, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns the sum of all parts of a tile's columns, added in a fixed order. `own` is the part
    with the number `part`."""
    places = part_places(first_column, BLOCK_M, COLUMNS, WIDTH)
    if SPLIT_K == 2:
        # The sum of two parts does not depend on their order.
        other = parts_ptr + (1 - part) * (BLOCK_M * COLUMNS)
        total = own + tl.load(other + places, cache_modifier=".cg")
    else:
        total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for index in tl.static_range(SPLIT_K):
            other = tl.load(
                parts_ptr + index * (BLOCK_M * COLUMNS) + places, mask=index != part, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            total += tl.where(index == part, own, other)
    return total


@triton.jit
def lora_shrink(
    a_ptr, weight_ptr, ids_ptr, offsets_ptr, order_ptr, out_ptr, workspace_ptr, counters_ptr,
    second_distance, third_distance, num_rows, num_groups, rows_per_id,
    HIDDEN: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr,
    A_STRIDE: tl.constexpr, ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr,
    COLUMN_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, WIDTHS: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Multi-LoRA shrink for many rows: out [PLANES, num_rows, N] = a [num_rows, HIDDEN] @
    A[adapter]^T for q, k and v. A is [G, R, HIDDEN], and every row has its own adapter.

    Grid (SPLIT_K, tiles, cdiv(PLANES * N, COLUMNS)). WIDTHS: the number of columns of a tile in
    each of up to three accumulators. COLUMNS: the sum of WIDTHS. If SPLIT_K > 1, workspace is fp32
    [tiles, column blocks, SPLIT_K, BLOCK_M, COLUMNS], and counters has an int32 zero for each pair
    of tile and column block.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    tile = tl.program_id(1)
    COLUMN_BLOCKS: tl.constexpr = (PLANES * N + COLUMNS - 1) // COLUMNS
    first_column = 0
    if COLUMN_BLOCKS > 1:
        first_column = tl.program_id(2) * COLUMNS
    adapter, rows, row_mask = tile_rows(
        tile, ids_ptr, offsets_ptr, order_ptr, num_rows, num_rows, num_groups, rows_per_id,
        ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
    )  # fmt: skip
    PART: tl.constexpr = (HIDDEN + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    x_rows = a_ptr + rows.to(tl.int64) * A_STRIDE
    first_columns = first_column + tl.arange(0, WIDTHS[0])
    first_sum = tl.zeros((BLOCK_M, WIDTHS[0]), tl.float32)
    if WIDTHS[1] > 0:
        second_columns = first_column + WIDTHS[0] + tl.arange(0, WIDTHS[1])
        second_sum = tl.zeros((BLOCK_M, WIDTHS[1]), tl.float32)
    if WIDTHS[2] > 0:
        third_columns = first_column + WIDTHS[0] + WIDTHS[1] + tl.arange(0, WIDTHS[2])
        third_sum = tl.zeros((BLOCK_M, WIDTHS[2]), tl.float32)
    # If a tile has no adapter, the loop has no steps.
    for step in range(0, tl.where(adapter >= 0, PART, 0), BLOCK_K):
        ks = part * PART + step + tl.arange(0, BLOCK_K)
        x_mask = row_mask[:, None]
        in_part = None
        if HIDDEN % (BLOCK_K * SPLIT_K) != 0:
            in_part = ks < HIDDEN
            x_mask = x_mask & in_part[None, :]
        x = tl.load(x_rows[:, None] + ks[None, :], mask=x_mask, other=0.0)
        first_weight = weight_tile(
            first_columns, ks, in_part, adapter, weight_ptr, second_distance, third_distance,
            N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
        )  # fmt: skip
        first_sum = tl.dot(x, first_weight.T, first_sum, input_precision="ieee")
        if WIDTHS[1] > 0:
            second_weight = weight_tile(
                second_columns, ks, in_part, adapter, weight_ptr, second_distance, third_distance,
                N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
            )  # fmt: skip
            second_sum = tl.dot(x, second_weight.T, second_sum, input_precision="ieee")
        if WIDTHS[2] > 0:
            third_weight = weight_tile(
                third_columns, ks, in_part, adapter, weight_ptr, second_distance, third_distance,
                N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
            )  # fmt: skip
            third_sum = tl.dot(x, third_weight.T, third_sum, input_precision="ieee")
    complete = part == 0
    if SPLIT_K > 1:  # noqa: SIM102
        if adapter >= 0:
            if COLUMN_BLOCKS > 1:
                tile = tile * COLUMN_BLOCKS + tl.program_id(2)
            parts = workspace_ptr + tile * (SPLIT_K * BLOCK_M * COLUMNS)
            own = parts + part * (BLOCK_M * COLUMNS)
            tl.store(own + part_places(0, BLOCK_M, COLUMNS, WIDTHS[0]), first_sum)
            if WIDTHS[1] > 0:
                tl.store(own + part_places(WIDTHS[0], BLOCK_M, COLUMNS, WIDTHS[1]), second_sum)
            if WIDTHS[2] > 0:
                places = part_places(WIDTHS[0] + WIDTHS[1], BLOCK_M, COLUMNS, WIDTHS[2])
                tl.store(own + places, third_sum)
            complete = arrive(counters_ptr + tile, SPLIT_K)
            if complete:
                first_sum = add_parts(
                    first_sum, part, parts, 0, SPLIT_K, BLOCK_M, COLUMNS, WIDTHS[0]
                )
                if WIDTHS[1] > 0:
                    second_sum = add_parts(
                        second_sum, part, parts, WIDTHS[0], SPLIT_K, BLOCK_M, COLUMNS, WIDTHS[1]
                    )
                if WIDTHS[2] > 0:
                    third_sum = add_parts(
                        third_sum, part, parts, WIDTHS[0] + WIDTHS[1], SPLIT_K, BLOCK_M, COLUMNS,
                        WIDTHS[2],
                    )  # fmt: skip
    if complete:
        store_columns(first_sum, out_ptr, first_columns, rows, row_mask, num_rows, N, PLANES, RANKS)
        if WIDTHS[1] > 0:
            store_columns(
                second_sum, out_ptr, second_columns, rows, row_mask, num_rows, N, PLANES, RANKS
            )
        if WIDTHS[2] > 0:
            store_columns(
                third_sum, out_ptr, third_columns, rows, row_mask, num_rows, N, PLANES, RANKS
            )


@triton.jit
def lora_shrink_few(
    a_ptr, weight_ptr, ids_ptr, offsets_ptr, order_ptr, out_ptr,
    second_distance, third_distance, num_rows, num_groups, rows_per_id,
    HIDDEN: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr,
    A_STRIDE: tl.constexpr, ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr,
    COLUMN_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Multi-LoRA shrink for few rows: out [PLANES, num_rows, N] = a [num_rows, HIDDEN] @
    A[adapter]^T for q, k and v. A is [G, R, HIDDEN], and every row has its own adapter.

    Grid (cdiv(PLANES * N, COLUMNS), tiles). A program computes COLUMNS columns over all of K, in
    steps of SLICES * BLOCK_K. Each warp computes one slice of a step. `lora_shrink` explains the
    other arguments.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    adapter, rows, row_mask = tile_rows(
        tl.program_id(1), ids_ptr, offsets_ptr, order_ptr, num_rows, num_rows, num_groups,
        rows_per_id, ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
    )  # fmt: skip
    weights, column_stride, real = weight_rows(
        columns, adapter, weight_ptr, second_distance, third_distance,
        N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
    )  # fmt: skip
    STEP: tl.constexpr = SLICES * BLOCK_K
    slices = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = a_ptr + (rows.to(tl.int64) * A_STRIDE)[None, :, None] + slices[:, None, :]
    accumulator = tl.zeros((SLICES, BLOCK_M, COLUMNS), tl.float32)
    for step in range(0, tl.where(adapter >= 0, HIDDEN, 0), STEP):
        ks = (slices + step)[:, None, :]
        weight_mask = real[None, :, None]
        x_mask = row_mask[None, :, None]
        if HIDDEN % STEP != 0:
            weight_mask = weight_mask & (ks < HIDDEN)
            x_mask = x_mask & (ks < HIDDEN)
        weight_ptrs = weights[None, :, None] + ks * column_stride
        if COLUMN_STRIDES[0] != COLUMN_STRIDES[1] or COLUMN_STRIDES[0] != COLUMN_STRIDES[2]:
            weight_ptrs = weights[None, :, None] + ks * column_stride[None, :, None]
        weight = tl.load(weight_ptrs, mask=weight_mask, other=0.0)
        x = tl.load(x_ptrs + step, mask=x_mask, other=0.0)
        accumulator = tl.dot(x, tl.permute(weight, (0, 2, 1)), accumulator, input_precision="ieee")
    values = tl.sum(accumulator, axis=0)
    store_columns(values, out_ptr, columns, rows, row_mask, num_rows, N, PLANES, RANKS)


@triton.jit
def lora_shrink_row(
    a_ptr, weight_ptr, ids_ptr, offsets_ptr, order_ptr, out_ptr,
    second_distance, third_distance, num_rows, num_groups, rows_per_id,
    HIDDEN: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr,
    A_STRIDE: tl.constexpr, ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr,
    COLUMN_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Multi-LoRA shrink for one or two rows, by fused multiply-adds: out [PLANES, num_rows, N] = a
    [num_rows, HIDDEN] @ A[adapter]^T for q, k and v. A is [G, R, HIDDEN], and every row has its own
    adapter.

    Grid (cdiv(PLANES * N, COLUMNS), tiles). If BLOCK_M is 1, a tile is one row. `lora_shrink`
    explains the other arguments.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    adapter, rows, row_mask = tile_rows(
        tl.program_id(1), ids_ptr, offsets_ptr, order_ptr, num_rows, num_rows, num_groups,
        rows_per_id, ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
    )  # fmt: skip
    weights, column_stride, real = weight_rows(
        columns, adapter, weight_ptr, second_distance, third_distance,
        N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
    )  # fmt: skip
    # Do not multiply rows without an adapter: an infinity times zero would be NaN.
    real = real & (adapter >= 0)
    values = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for step in tl.static_range(0, HIDDEN, BLOCK_K):
        ks = step + tl.arange(0, BLOCK_K)
        inside = ks < HIDDEN
        weight_ptrs = weights[:, None] + ks[None, :] * column_stride
        if COLUMN_STRIDES[0] != COLUMN_STRIDES[1] or COLUMN_STRIDES[0] != COLUMN_STRIDES[2]:
            weight_ptrs = weights[:, None] + ks[None, :] * column_stride[:, None]
        weight = tl.load(weight_ptrs, mask=real[:, None] & inside[None, :], other=0.0)
        if BLOCK_M == 1:
            x_ptrs = a_ptr + tl.program_id(1).to(tl.int64) * A_STRIDE + ks
            x = tl.load(x_ptrs, mask=inside & (adapter >= 0), other=0.0)
            products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
            values += tl.sum(products, axis=1)[None, :]
        else:
            x_ptrs = a_ptr + (rows.to(tl.int64) * A_STRIDE)[:, None] + ks[None, :]
            x_mask = (row_mask & (adapter >= 0))[:, None] & inside[None, :]
            x = tl.load(x_ptrs, mask=x_mask, other=0.0)
            products = x.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
            values += tl.sum(products, axis=2)
    store_columns(values, out_ptr, columns, rows, row_mask, num_rows, N, PLANES, RANKS)
