"""The shrink of multi-LoRA: rows by their adapters' A matrices, planar for q, k and v.

`lora_shrink` makes all planes of a tile of rows in one pass over them. K may be split over
programs; the last of a tile to arrive adds the parts in their order.

`lora_shrink_few` has a few rows of one adapter and a few columns of one plane, all of K: K is split
over the warps of a program, which costs no exchange through memory. `lora_shrink_row` is the same
for one row, without a tensor core.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.lora_rows import adapter_of_row, of_plane, tile_rows


@triton.jit
def plane_weight(
    plane,
    adapter,
    first_weight_ptr,
    second_weight_ptr,
    third_weight_ptr,
    ADAPTER_STRIDES: tl.constexpr,
):
    """Where the plane-th weight of an adapter begins."""
    place = adapter.to(tl.int64) * of_plane(plane, ADAPTER_STRIDES)
    if second_weight_ptr is None:
        weight_ptr = first_weight_ptr + place
    elif third_weight_ptr is None:
        weight_ptr = first_weight_ptr + place
        if plane == 1:
            weight_ptr = second_weight_ptr + place
    else:
        weight_ptr = first_weight_ptr + place
        if plane == 1:
            weight_ptr = second_weight_ptr + place
        elif plane == 2:
            weight_ptr = third_weight_ptr + place
    return weight_ptr


@triton.jit
def weight_tile(
    weight_ptr, adapter, columns, ks, ADAPTER_STRIDE: tl.constexpr, ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr, RANK: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr,
    HIDDEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows `columns` of one adapter's weight at `ks`, [columns, ks]; zero from RANK on.

    columns: COLUMNS of them from a multiple of that on.
    """
    places = adapter.to(tl.int64) * ADAPTER_STRIDE + columns[:, None] * ROW_STRIDE
    pointers = weight_ptr + places + ks[None, :] * COLUMN_STRIDE
    mask = None
    if RANK < N or RANK % COLUMNS != 0:
        mask = (columns < RANK)[:, None]
        if not WHOLE:
            mask = mask & (ks < HIDDEN)[None, :]
    elif not WHOLE:
        mask = (ks < HIDDEN)[None, :]
    if mask is None:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def store_part(values, workspace_ptr, place, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """Keeps fp32 values [BLOCK_M, COLUMNS] as the place-th part of the workspace."""
    offsets = tl.arange(0, BLOCK_M)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(workspace_ptr + place * (BLOCK_M * COLUMNS) + offsets, values)


@triton.jit
def sum_of_parts(
    workspace_ptr, place, step, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sum of SPLIT_K parts, `step` apart from the place-th on, in their order."""
    offsets = tl.arange(0, BLOCK_M)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    for part in tl.static_range(SPLIT_K):
        parts = workspace_ptr + (place + part * step) * (BLOCK_M * COLUMNS)
        total += tl.load(parts + offsets, cache_modifier=".cg")
    return total


@triton.jit
def store_plane(
    values, out_ptr, plane, rows, row_mask, first_column, num_rows, N: tl.constexpr,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes values [rows, COLUMNS] to columns first_column... of a plane of out [P, M, N]."""
    columns = first_column + tl.arange(0, COLUMNS)
    if RANKS[0] != N or RANKS[1] != N or RANKS[2] != N:
        # Zero times an infinity is NaN.
        values = tl.where((columns < of_plane(plane, RANKS))[None, :], values, 0.0)
    places = (plane * num_rows + rows).to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(
        out_ptr + places, values.to(out_ptr.dtype.element_ty),
        mask=row_mask[:, None] & (columns < N)[None, :],
    )  # fmt: skip


@triton.jit
def lora_shrink(
    a_ptr, first_weight_ptr, second_weight_ptr, third_weight_ptr, ids_ptr, offsets_ptr, order_ptr,
    out_ptr, workspace_ptr, counters_ptr, num_rows, num_groups, rows_per_id,
    HIDDEN: tl.constexpr, N: tl.constexpr, RANKS: tl.constexpr, A_STRIDE: tl.constexpr,
    ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """out [P, num_rows, N] = rows of a [., HIDDEN] by their adapters' weights [G, R, HIDDEN].

    Grid (SPLIT_K, tiles, cdiv(N, COLUMNS)). COLUMNS: a power of two. With SPLIT_K > 1 workspace
    holds fp32 [tiles, cdiv(N, COLUMNS), SPLIT_K, P, BLOCK_M, COLUMNS] and counters a zeroed int32
    for each of the first two.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    tile = tl.program_id(1)
    COLUMN_BLOCKS: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    first_column = 0
    if COLUMN_BLOCKS > 1:
        first_column = tl.program_id(2) * COLUMNS
    adapter, rows, row_mask = tile_rows(
        tile, ids_ptr, offsets_ptr, order_ptr, num_rows, num_rows, num_groups, rows_per_id,
        ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
    )  # fmt: skip
    PLANES: tl.constexpr = 1 if second_weight_ptr is None else 2 if third_weight_ptr is None else 3
    PART: tl.constexpr = (HIDDEN + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    WHOLE: tl.constexpr = HIDDEN % (BLOCK_K * SPLIT_K) == 0
    columns = first_column + tl.arange(0, COLUMNS)
    x_rows = a_ptr + rows.to(tl.int64) * A_STRIDE
    first = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    second = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    third = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    # No steps for a tile without an adapter.
    for step in range(0, tl.where(adapter >= 0, PART, 0), BLOCK_K):
        ks = part * PART + step + tl.arange(0, BLOCK_K)
        x_mask = row_mask[:, None]
        if not WHOLE:
            x_mask = x_mask & (ks < HIDDEN)[None, :]
        x = tl.load(
            x_rows[:, None] + ks[None, :], mask=x_mask, other=0.0, eviction_policy="evict_first"
        )
        weight = weight_tile(
            first_weight_ptr, adapter, columns, ks, ADAPTER_STRIDES[0], ROW_STRIDES[0],
            COLUMN_STRIDES[0], RANKS[0], N, COLUMNS, HIDDEN, WHOLE,
        )  # fmt: skip
        first = tl.dot(x, weight.T, first)
        if PLANES > 1:
            weight = weight_tile(
                second_weight_ptr, adapter, columns, ks, ADAPTER_STRIDES[1], ROW_STRIDES[1],
                COLUMN_STRIDES[1], RANKS[1], N, COLUMNS, HIDDEN, WHOLE,
            )  # fmt: skip
            second = tl.dot(x, weight.T, second)
        if PLANES > 2:
            weight = weight_tile(
                third_weight_ptr, adapter, columns, ks, ADAPTER_STRIDES[2], ROW_STRIDES[2],
                COLUMN_STRIDES[2], RANKS[2], N, COLUMNS, HIDDEN, WHOLE,
            )  # fmt: skip
            third = tl.dot(x, weight.T, third)
    exchanged = False
    if SPLIT_K > 1:
        exchanged = adapter >= 0
        if exchanged:
            if COLUMN_BLOCKS > 1:
                tile = tile * COLUMN_BLOCKS + tl.program_id(2)
            place = tile * SPLIT_K * PLANES
            store_part(first, workspace_ptr, place + part * PLANES, BLOCK_M, COLUMNS)
            if PLANES > 1:
                store_part(second, workspace_ptr, place + part * PLANES + 1, BLOCK_M, COLUMNS)
            if PLANES > 2:
                store_part(third, workspace_ptr, place + part * PLANES + 2, BLOCK_M, COLUMNS)
            # All threads' stores come before the one thread's atomic.
            tl.debug_barrier()
            if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1:
                for plane in tl.static_range(PLANES):
                    total = sum_of_parts(
                        workspace_ptr, place + plane, PLANES, SPLIT_K, BLOCK_M, COLUMNS
                    )
                    store_plane(
                        total, out_ptr, plane, rows, row_mask, first_column, num_rows, N, RANKS,
                        COLUMNS,
                    )  # fmt: skip
                # For the next launch.
                tl.store(counters_ptr + tile, 0)
    if (part == 0) & (not exchanged):
        store_plane(first, out_ptr, 0, rows, row_mask, first_column, num_rows, N, RANKS, COLUMNS)
        if PLANES > 1:
            store_plane(
                second, out_ptr, 1, rows, row_mask, first_column, num_rows, N, RANKS, COLUMNS
            )
        if PLANES > 2:
            store_plane(
                third, out_ptr, 2, rows, row_mask, first_column, num_rows, N, RANKS, COLUMNS
            )


@triton.jit
def lora_shrink_few(
    a_ptr, first_weight_ptr, second_weight_ptr, third_weight_ptr, ids_ptr, offsets_ptr, order_ptr,
    out_ptr, num_rows, num_groups, rows_per_id,
    HIDDEN: tl.constexpr, N: tl.constexpr, RANKS: tl.constexpr, A_STRIDE: tl.constexpr,
    ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, SLICES: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """The same for few rows: COLUMNS columns of one plane per program, all of K.

    Grid (P * cdiv(N, COLUMNS), tiles). K is walked in steps of SLICES * BLOCK_K; each warp has its
    slice of a step.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    PER_PLANE: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    plane = tl.program_id(0) // PER_PLANE
    first_column = tl.program_id(0) % PER_PLANE * COLUMNS
    adapter, rows, row_mask = tile_rows(
        tl.program_id(1), ids_ptr, offsets_ptr, order_ptr, num_rows, num_rows, num_groups,
        rows_per_id, ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
    )  # fmt: skip
    weight_ptr = plane_weight(
        plane, adapter, first_weight_ptr, second_weight_ptr, third_weight_ptr, ADAPTER_STRIDES
    )
    columns = first_column + tl.arange(0, COLUMNS)
    ks = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    weight_ptrs = weight_ptr + (
        columns[None, :, None] * of_plane(plane, ROW_STRIDES)
        + ks[:, None, :] * of_plane(plane, COLUMN_STRIDES)
    )
    x_ptrs = a_ptr + (rows.to(tl.int64) * A_STRIDE)[None, :, None] + ks[:, None, :]
    column_mask = (columns < of_plane(plane, RANKS))[None, :, None]
    STEP: tl.constexpr = SLICES * BLOCK_K
    accumulator = tl.zeros((SLICES, BLOCK_M, COLUMNS), tl.float32)
    for step in range(0, tl.where(adapter >= 0, HIDDEN, 0), STEP):
        weight_mask = column_mask
        x_mask = row_mask[None, :, None]
        if HIDDEN % STEP != 0:
            inside = (ks + step < HIDDEN)[:, None, :]
            weight_mask = weight_mask & inside
            x_mask = x_mask & inside
        weight = tl.load(
            weight_ptrs + step * of_plane(plane, COLUMN_STRIDES), mask=weight_mask, other=0.0
        )
        x = tl.load(x_ptrs + step, mask=x_mask, other=0.0)
        accumulator = tl.dot(x, tl.permute(weight, (0, 2, 1)), accumulator)
    values = tl.sum(accumulator, axis=0)
    store_plane(values, out_ptr, plane, rows, row_mask, first_column, num_rows, N, RANKS, COLUMNS)


@triton.jit
def lora_shrink_row(
    a_ptr, first_weight_ptr, second_weight_ptr, third_weight_ptr, ids_ptr, offsets_ptr,
    out_ptr, num_rows, num_groups, rows_per_id,
    HIDDEN: tl.constexpr, N: tl.constexpr, RANKS: tl.constexpr, A_STRIDE: tl.constexpr,
    ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """The same for one row per program. Grid (P * cdiv(N, COLUMNS), num_rows)."""
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    PER_PLANE: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    plane = tl.program_id(0) // PER_PLANE
    row = tl.program_id(1)
    columns = tl.program_id(0) % PER_PLANE * COLUMNS + tl.arange(0, COLUMNS)
    adapter = adapter_of_row(
        row, ids_ptr, offsets_ptr, num_rows, num_groups, rows_per_id,
        ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS,
    )  # fmt: skip
    weight_ptr = plane_weight(
        plane, adapter, first_weight_ptr, second_weight_ptr, third_weight_ptr, ADAPTER_STRIDES
    )
    ks = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + (
        columns[:, None] * of_plane(plane, ROW_STRIDES)
        + ks[None, :] * of_plane(plane, COLUMN_STRIDES)
    )
    x_ptrs = a_ptr + row.to(tl.int64) * A_STRIDE + ks
    real = (columns < of_plane(plane, RANKS)) & (adapter >= 0)
    products = tl.zeros((COLUMNS, BLOCK_K), tl.float32)
    for step in tl.static_range(0, HIDDEN, BLOCK_K):
        x = tl.load(x_ptrs + step, mask=ks + step < HIDDEN, other=0.0)
        weight = tl.load(
            weight_ptrs + step * of_plane(plane, COLUMN_STRIDES),
            mask=real[:, None] & (ks + step < HIDDEN)[None, :], other=0.0,
        )  # fmt: skip
        products += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    # An infinity in the row of no adapter would make its zeros NaN.
    values = tl.where(real, tl.sum(products, axis=1), 0.0)
    places = (plane * num_rows + row).to(tl.int64) * N + columns
    tl.store(out_ptr + places, values.to(out_ptr.dtype.element_ty), mask=columns < N)
