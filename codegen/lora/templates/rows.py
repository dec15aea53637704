"""Finds the rows and the adapter of a tile of a LoRA kernel. All rows of a tile have the same
adapter.

ADDRESSING says how the adapters of rows are given:

- "single": all rows have adapter 0.
- "sequences": every rows_per_id consecutive rows have one id.
- "groups": there are offsets of consecutive groups, and an id for each group. If ids_ptr is None,
  the id of a group is its number.
- "rows": every rows_per_id consecutive rows have an id, in any order. Each program counts all ids
  and finds its own rows. For few rows, this takes less time than the launch of a sort.
- "sorted": like "rows", but `lora_order` ran before. order has the rows sorted by adapter, and
  offsets has the ends of the adapters' rows.

Rows without an adapter have separate tiles, so that every row is in exactly one tile.
"""

import triton
import triton.language as tl


@triton.jit
def adapter_of_ids(ids, NUM_ADAPTERS: tl.constexpr, NONE: tl.constexpr):
    """Returns ids as int32. Ids that belong to no adapter are replaced by NONE."""
    return tl.where((ids >= 0) & (ids < NUM_ADAPTERS), ids.to(tl.int32), NONE)


@triton.jit
def group_bounds(
    offsets_ptr, num_groups, total_rows, INCLUSIVE: tl.constexpr, GROUPS: tl.constexpr
):
    """Returns (first row, end of the rows) of the groups, each [GROUPS]. After the num_groups
    groups, there is one more group, which has all remaining rows."""
    groups = tl.arange(0, GROUPS)
    if INCLUSIVE:
        before = (groups > 0) & (groups <= num_groups)
        start = tl.load(offsets_ptr + groups - 1, mask=before, other=0).to(tl.int32)
        end = tl.load(offsets_ptr + groups, mask=groups < num_groups, other=0).to(tl.int32)
    else:
        start = tl.load(offsets_ptr + groups, mask=groups <= num_groups, other=0).to(tl.int32)
        end = tl.load(offsets_ptr + groups + 1, mask=groups < num_groups, other=0).to(tl.int32)
    end = tl.where(groups == num_groups, total_rows, end)
    return tl.maximum(start, 0), tl.minimum(end, total_rows)


@triton.jit
def rest_tile(tile, num_rows, total_rows, BLOCK_M: tl.constexpr):
    """Returns (rows, mask) of a tile of the rows from num_rows on. Tile 0 starts at row
    num_rows."""
    rows = num_rows + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, rows < total_rows


@triton.jit
def adapter_of_row(
    row, ids_ptr, offsets_ptr, num_rows, num_groups, rows_per_id, ADDRESSING: tl.constexpr,
    INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns the adapter of one row; -1 if the row has no adapter."""
    if ADDRESSING == "single":
        adapter = tl.where(row < num_rows, 0, -1)
    elif ADDRESSING == "groups":
        groups = tl.arange(0, GROUPS)
        start, end = group_bounds(offsets_ptr, num_groups, num_rows, INCLUSIVE, GROUPS)
        if ids_ptr is None:
            ids = groups
        else:
            ids = tl.load(ids_ptr + groups, mask=groups < num_groups, other=-1)
        own = (groups < num_groups) & (start <= row) & (row < end)
        ids = adapter_of_ids(ids, NUM_ADAPTERS, -1)
        adapter = tl.sum(tl.where(own, ids + 1, 0), axis=0) - 1
    else:
        ids = tl.load(ids_ptr + row // rows_per_id, mask=row < num_rows, other=-1)
        adapter = adapter_of_ids(ids, NUM_ADAPTERS, -1)
    return adapter


@triton.jit
def tile_rows(
    tile, ids_ptr, offsets_ptr, order_ptr, num_rows, total_rows, num_groups, rows_per_id,
    ADDRESSING: tl.constexpr, INCLUSIVE: tl.constexpr, NUM_ADAPTERS: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Returns (adapter, rows [BLOCK_M], mask [BLOCK_M]) of one tile. The adapter is -1 if the rows
    have no adapter.

    Rows from num_rows to total_rows have no adapter. Past the last tile, the mask is false. GROUPS:
    a power of two greater than the number of groups, or greater than NUM_ADAPTERS for "rows" and
    "sorted". ROWS: for "rows", a power of two that is at least total_rows.
    """
    lanes = tl.arange(0, BLOCK_M)
    if BLOCK_M == 1:
        adapter = adapter_of_row(
            tile, ids_ptr, offsets_ptr, num_rows, num_groups, rows_per_id,
            ADDRESSING, INCLUSIVE, NUM_ADAPTERS, GROUPS,
        )  # fmt: skip
        rows = tile + lanes
        mask = rows < total_rows
    elif ADDRESSING == "single":
        blocks = (num_rows + BLOCK_M - 1) // BLOCK_M
        rows = tile * BLOCK_M + lanes
        mask = rows < num_rows
        adapter = tl.where(tile < blocks, 0, -1)
        if num_rows != total_rows and tile >= blocks:
            rows, mask = rest_tile(tile - blocks, num_rows, total_rows, BLOCK_M)
    elif ADDRESSING == "sequences":
        per_sequence = (rows_per_id + BLOCK_M - 1) // BLOCK_M
        blocks = num_rows // rows_per_id * per_sequence
        sequence = tile // per_sequence
        within = tile % per_sequence * BLOCK_M + lanes
        rows = sequence * rows_per_id + within
        mask = (within < rows_per_id) & (rows < num_rows)
        adapter = tl.load(ids_ptr + sequence, mask=tile < blocks, other=-1)
        adapter = adapter_of_ids(adapter, NUM_ADAPTERS, -1)
        if num_rows != total_rows and tile >= blocks:
            rows, mask = rest_tile(tile - blocks, num_rows, total_rows, BLOCK_M)
    elif ADDRESSING == "rows":
        every = tl.arange(0, ROWS)
        ids = tl.load(ids_ptr + every // rows_per_id, mask=every < num_rows, other=-1)
        ids = adapter_of_ids(ids, NUM_ADAPTERS, NUM_ADAPTERS)
        counts = tl.histogram(ids, GROUPS, mask=every < total_rows)
        blocks = (counts + BLOCK_M - 1) // BLOCK_M
        last = tl.cumsum(blocks, axis=0)
        bucket = tl.sum((last <= tile).to(tl.int32), axis=0)
        chosen = tl.arange(0, GROUPS) == bucket
        within = tile - tl.sum(tl.where(chosen, last - blocks, 0), axis=0)
        count = tl.sum(tl.where(chosen, counts, 0), axis=0)
        # `seen` is the number of the adapter's rows up to and including each row. The rows before
        # the adapter's n-th row (counted from 0) are exactly the rows where seen <= n.
        wanted = within * BLOCK_M + lanes
        own = ((ids == bucket) & (every < total_rows)).to(tl.int32)
        seen = tl.cumsum(own, axis=0)
        rows = tl.sum((seen[None, :] <= wanted[:, None]).to(tl.int32), axis=1)
        mask = wanted < count
        adapter = tl.where(bucket < NUM_ADAPTERS, bucket, -1)
    else:
        groups = tl.arange(0, GROUPS)
        start, end = group_bounds(offsets_ptr, num_groups, total_rows, INCLUSIVE, GROUPS)
        if ids_ptr is None or ADDRESSING == "sorted":
            ids = groups
        else:
            ids = tl.load(ids_ptr + groups, mask=groups < num_groups, other=-1)
        ids = adapter_of_ids(ids, NUM_ADAPTERS, -1)
        ids = tl.where(groups < num_groups, ids, -1)
        blocks = tl.where(groups <= num_groups, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
        blocks = tl.maximum(blocks, 0)
        last = tl.cumsum(blocks, axis=0)
        chosen = groups == tl.sum((last <= tile).to(tl.int32), axis=0)
        first = (tile - last + blocks) * BLOCK_M + start
        adapter = tl.sum(tl.where(chosen, ids + 1, 0), axis=0) - 1
        rows = tl.sum(tl.where(chosen, first, 0), axis=0) + lanes
        mask = rows < tl.sum(tl.where(chosen, end, 0), axis=0)
        if ADDRESSING == "sorted":
            rows = tl.load(order_ptr + rows, mask=mask, other=0)
    return adapter, rows, mask


@triton.jit
def of_plane(plane, VALUES: tl.constexpr):
    """Returns the value for q, k or v, selected by `plane`. If the three values are equal, the
    result is a constant."""
    value = VALUES[0]
    if VALUES[1] != VALUES[0]:
        value += (plane == 1) * (VALUES[1] - VALUES[0])
    if VALUES[2] != VALUES[0]:
        value += (plane == 2) * (VALUES[2] - VALUES[0])
    return value
