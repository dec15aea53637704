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
from tilewright.codegen.templates.lora_shrink import part_places, store_columns, weight_tile


@triton.jit
def add_stretches(
    own, tile, program, earliest, latest, work, programs, workspace_ptr, first_column,
    BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of what programs earliest to latest have of a tile's columns, in their order; what
    `program` has is `own`."""
    places = part_places(first_column, BLOCK_M, COLUMNS, WIDTH)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    # Three at a time: one load does not wait for the one before.
    for base in range(earliest, latest + 1, 3):
        for index in tl.static_range(3):
            other = base + index
            begin = (other * work // programs).to(tl.int32)
            slot = 2 * other + (begin // STEPS != tile).to(tl.int32)
            part = workspace_ptr + slot.to(tl.int64) * (BLOCK_M * COLUMNS)
            there = (other <= latest) & (other != program)
            loaded = tl.load(part + places, mask=there, other=0.0, cache_modifier=".cg")
            total += tl.where(other == program, own, loaded)
    return total


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
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """out [PLANES, num_rows, N] = rows of a [., HIDDEN] by their adapters' weights [G, R, HIDDEN].

    Grid of any size P. WIDTHS: the columns of a tile in up to three accumulators, COLUMNS their
    sum. workspace: fp32 [2 P, BLOCK_M, COLUMNS]; counters: a zeroed int32 for each tile of each
    block of COLUMNS columns.
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
        # No steps for a tile without an adapter.
        for step in range(first, tl.where(adapter >= 0, last, first)):
            ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
            x_mask = row_mask[:, None]
            inside = None
            if HIDDEN % BLOCK_K != 0:
                inside = ks < HIDDEN
                x_mask = x_mask & inside[None, :]
            x = tl.load(x_rows[:, None] + ks[None, :], mask=x_mask, other=0.0)
            first_weight = weight_tile(
                first_columns, ks, inside, adapter, weight_ptr, second_distance, third_distance,
                N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
            )  # fmt: skip
            first_sum = tl.dot(x, first_weight.T, first_sum, input_precision="ieee")
            if WIDTHS[1] > 0:
                second_weight = weight_tile(
                    second_columns, ks, inside, adapter, weight_ptr, second_distance,
                    third_distance, N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
                )  # fmt: skip
                second_sum = tl.dot(x, second_weight.T, second_sum, input_precision="ieee")
            if WIDTHS[2] > 0:
                third_weight = weight_tile(
                    third_columns, ks, inside, adapter, weight_ptr, second_distance,
                    third_distance, N, PLANES, RANKS, ADAPTER_STRIDES, ROW_STRIDES, COLUMN_STRIDES,
                )  # fmt: skip
                third_sum = tl.dot(x, third_weight.T, third_sum, input_precision="ieee")
        complete = first == 0
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
            latest = (((tile * STEPS + STEPS) * programs - 1) // work).to(tl.int32)
            arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
            complete = arrived == latest - earliest
            if complete:
                first_sum = add_stretches(
                    first_sum, tile, program, earliest, latest, work, programs, workspace_ptr, 0,
                    BLOCK_M, COLUMNS, STEPS, WIDTHS[0],
                )  # fmt: skip
                if WIDTHS[1] > 0:
                    second_sum = add_stretches(
                        second_sum, tile, program, earliest, latest, work, programs, workspace_ptr,
                        WIDTHS[0], BLOCK_M, COLUMNS, STEPS, WIDTHS[1],
                    )  # fmt: skip
                if WIDTHS[2] > 0:
                    third_sum = add_stretches(
                        third_sum, tile, program, earliest, latest, work, programs, workspace_ptr,
                        WIDTHS[0] + WIDTHS[1], BLOCK_M, COLUMNS, STEPS, WIDTHS[2],
                    )  # fmt: skip
                # For the next launch.
                tl.store(counters_ptr + tile, 0)
        if complete:
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
