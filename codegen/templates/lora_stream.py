"""The shrink of multi-LoRA for many rows: all programs get as much of the work as each other.

The work is counted in steps of K over all tiles, one tile after the other, and each program has one
stretch of it: the end of a tile, whole tiles, the beginning of another ("stream-K", Osama et al.
2023). What a program has of a tile that others have too goes through memory, and the last of them
to arrive adds the parts in the order of K. So no multiprocessor waits while some have one more
tile, and a tile may have more rows, which is what reads weights less often.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.lora_rows import count_tiles, tile_rows
from tilewright.codegen.templates.lora_shrink import store_columns, weight_rows


@triton.jit
def weight_tile(
    columns, ks, adapter, weight_ptr, second_distance, third_distance,
    HIDDEN: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr,
    ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr, COLUMN_STRIDES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The weight rows of columns, [columns, BLOCK_K] from ks on."""
    weights, column_stride, real = weight_rows(
        columns, adapter, weight_ptr, second_distance, third_distance,
        N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
    )  # fmt: skip
    pointers = weights[:, None] + ks[None, :] * column_stride
    if COLUMN_STRIDES[0] != COLUMN_STRIDES[1] or COLUMN_STRIDES[0] != COLUMN_STRIDES[2]:
        pointers = weights[:, None] + ks[None, :] * column_stride[:, None]
    mask = real[:, None]
    if HIDDEN % BLOCK_K != 0:
        mask = mask & (ks < HIDDEN)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def part_places(first_column, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Where columns from first_column on of a tile's part lie in its workspace."""
    columns = first_column + tl.arange(0, WIDTH)
    return tl.arange(0, BLOCK_M)[:, None] * COLUMNS + columns[None, :]


@triton.jit
def store_sum(
    tile, program, last_program, work, programs, workspace_ptr, out_ptr, columns, first_column,
    rows, row_mask, num_rows, N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes WIDTH columns of a tile: the parts of programs `program` to last_program, in order."""
    places = part_places(first_column, BLOCK_M, COLUMNS, WIDTH)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for other in range(program, last_program + 1):
        begin = (other * work // programs).to(tl.int32)
        slot = 2 * other + (begin // STEPS != tile).to(tl.int32)
        part = workspace_ptr + slot.to(tl.int64) * (BLOCK_M * COLUMNS)
        total += tl.load(part + places, cache_modifier=".cg")
    store_columns(total, out_ptr, columns, rows, row_mask, num_rows, N, PLANES, RANKS)


@triton.jit
def lora_shrink_stream(
    a_ptr, weight_ptr, ids_ptr, offsets_ptr, order_ptr, out_ptr, workspace_ptr, counters_ptr,
    second_distance, third_distance, num_rows, num_groups, rows_per_id,
    HIDDEN: tl.constexpr, N: tl.constexpr, PLANES: tl.constexpr, RANKS: tl.constexpr,
    A_STRIDE: tl.constexpr, ADAPTER_STRIDES: tl.constexpr, ROW_STRIDES: tl.constexpr,
    COLUMN_STRIDES: tl.constexpr,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, WIDTHS: tl.constexpr, BLOCK_K: tl.constexpr,
    SUM_WIDTH: tl.constexpr, USE_TMA: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """out [PLANES, num_rows, N] = rows of a [., HIDDEN] by their adapters' weights [G, R, HIDDEN].

    Grid of any size P. WIDTHS: the columns of a tile in up to three accumulators, COLUMNS their
    sum, SUM_WIDTH divides them. workspace: fp32 [2 P, BLOCK_M, COLUMNS]; counters: a zeroed int32
    for each tile of each block of COLUMNS columns. USE_TMA: rows in order, and weights
    [G, PLANES * N, HIDDEN] in one piece.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    COLUMN_BLOCKS: tl.constexpr = (PLANES * N + COLUMNS - 1) // COLUMNS
    STEPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    tiles = count_tiles(
        ids_ptr, offsets_ptr, num_rows, num_groups, rows_per_id,
        ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
    )  # fmt: skip
    work = tiles.to(tl.int64) * (COLUMN_BLOCKS * STEPS)
    programs = tl.maximum(tl.minimum(work, tl.num_programs(0)), 1)
    program = tl.program_id(0)
    if USE_TMA:
        a_desc = tl.make_tensor_descriptor(
            a_ptr, [num_rows, HIDDEN], [A_STRIDE, 1], [BLOCK_M, BLOCK_K]
        )
        first_desc = tl.make_tensor_descriptor(
            weight_ptr, [NUM_ADAPTERS * PLANES * N, HIDDEN], [ROW_STRIDES[0], 1],
            [WIDTHS[0], BLOCK_K],
        )  # fmt: skip
        if WIDTHS[1] > 0:
            second_desc = tl.make_tensor_descriptor(
                weight_ptr, [NUM_ADAPTERS * PLANES * N, HIDDEN], [ROW_STRIDES[0], 1],
                [WIDTHS[1], BLOCK_K],
            )  # fmt: skip
        if WIDTHS[2] > 0:
            third_desc = tl.make_tensor_descriptor(
                weight_ptr, [NUM_ADAPTERS * PLANES * N, HIDDEN], [ROW_STRIDES[0], 1],
                [WIDTHS[2], BLOCK_K],
            )  # fmt: skip
    begin = (tl.minimum(program, programs) * work // programs).to(tl.int32)
    end = (tl.minimum(program + 1, programs) * work // programs).to(tl.int32)
    for tile in range(begin // STEPS, (end + STEPS - 1) // STEPS):
        first = tl.maximum(begin - tile * STEPS, 0)
        last = tl.minimum(end - tile * STEPS, STEPS)
        adapter, rows, row_mask = tile_rows(
            tile // COLUMN_BLOCKS, ids_ptr, offsets_ptr, order_ptr, num_rows, num_rows, num_groups,
            rows_per_id, ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS, ROWS, BLOCK_M,
        )  # fmt: skip
        first_column = tile % COLUMN_BLOCKS * COLUMNS
        first_columns = first_column + tl.arange(0, WIDTHS[0])
        first_sum = tl.zeros((BLOCK_M, WIDTHS[0]), tl.float32)
        if WIDTHS[1] > 0:
            second_columns = first_column + WIDTHS[0] + tl.arange(0, WIDTHS[1])
            second_sum = tl.zeros((BLOCK_M, WIDTHS[1]), tl.float32)
        if WIDTHS[2] > 0:
            third_columns = first_column + WIDTHS[0] + WIDTHS[1] + tl.arange(0, WIDTHS[2])
            third_sum = tl.zeros((BLOCK_M, WIDTHS[2]), tl.float32)
        x_rows = a_ptr + rows.to(tl.int64) * A_STRIDE
        if USE_TMA:
            # Rows of other adapters may come along; they are not stored.
            row = tl.min(rows, axis=0)
            weight_row = adapter * (PLANES * N) + first_column
        # No steps for a tile without an adapter.
        for step in range(first, tl.where(adapter >= 0, last, first)):
            if USE_TMA:
                x = a_desc.load([row, step * BLOCK_K])
                first_weight = first_desc.load([weight_row, step * BLOCK_K])
            else:
                ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
                x_mask = row_mask[:, None]
                if HIDDEN % BLOCK_K != 0:
                    x_mask = x_mask & (ks < HIDDEN)[None, :]
                x = tl.load(x_rows[:, None] + ks[None, :], mask=x_mask, other=0.0)
                first_weight = weight_tile(
                    first_columns, ks, adapter, weight_ptr, second_distance, third_distance,
                    HIDDEN, N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES, BLOCK_K,
                )  # fmt: skip
            first_sum = tl.dot(x, first_weight.T, first_sum, input_precision="ieee")
            if WIDTHS[1] > 0:
                if USE_TMA:
                    second_weight = second_desc.load([weight_row + WIDTHS[0], step * BLOCK_K])
                else:
                    second_weight = weight_tile(
                        second_columns, ks, adapter, weight_ptr, second_distance, third_distance,
                        HIDDEN, N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
                        BLOCK_K,
                    )  # fmt: skip
                second_sum = tl.dot(x, second_weight.T, second_sum, input_precision="ieee")
            if WIDTHS[2] > 0:
                if USE_TMA:
                    third_weight = third_desc.load(
                        [weight_row + WIDTHS[0] + WIDTHS[1], step * BLOCK_K]
                    )
                else:
                    third_weight = weight_tile(
                        third_columns, ks, adapter, weight_ptr, second_distance, third_distance,
                        HIDDEN, N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
                        BLOCK_K,
                    )  # fmt: skip
                third_sum = tl.dot(x, third_weight.T, third_sum, input_precision="ieee")
        if (adapter >= 0) & (last - first < STEPS):
            slot = 2 * program + (tile != begin // STEPS).to(tl.int32)
            part = workspace_ptr + slot.to(tl.int64) * (BLOCK_M * COLUMNS)
            tl.store(part + part_places(0, BLOCK_M, COLUMNS, WIDTHS[0]), first_sum)
            if WIDTHS[1] > 0:
                places = part_places(WIDTHS[0], BLOCK_M, COLUMNS, WIDTHS[1])
                tl.store(part + places, second_sum)
            if WIDTHS[2] > 0:
                places = part_places(WIDTHS[0] + WIDTHS[1], BLOCK_M, COLUMNS, WIDTHS[2])
                tl.store(part + places, third_sum)
            # All threads' stores come before the one thread's atomic.
            tl.debug_barrier()
            # Whoever has the tile's first and last step, and all between them.
            earliest = (((tile * STEPS + 1) * programs - 1) // work).to(tl.int32)
            latest = ((tile * STEPS + STEPS) * programs - 1) // work
            others = latest.to(tl.int32) - earliest
            if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == others:
                # A part of the columns at a time: all would not fit the registers.
                for start in tl.static_range(0, COLUMNS, SUM_WIDTH):
                    store_sum(
                        tile, earliest, earliest + others, work, programs, workspace_ptr, out_ptr,
                        first_column + start + tl.arange(0, SUM_WIDTH), start, rows, row_mask,
                        num_rows, N, PLANES, RANKS, BLOCK_M, COLUMNS, STEPS, SUM_WIDTH,
                    )  # fmt: skip
                # For the next launch.
                tl.store(counters_ptr + tile, 0)
        elif first == 0:
            store_columns(
                first_sum, out_ptr, first_columns, rows, row_mask, num_rows, N, PLANES, RANKS
            )
            if WIDTHS[1] > 0:
                store_columns(
                    second_sum, out_ptr, second_columns, rows, row_mask, num_rows, N, PLANES, RANKS
                )
            if WIDTHS[2] > 0:
                store_columns(
                    third_sum, out_ptr, third_columns, rows, row_mask, num_rows, N, PLANES, RANKS
                )
