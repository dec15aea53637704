"""Loads of attention's operands: rows, queries, and the pages that keys lie in."""

import triton
import triton.language as tl


@triton.jit
def load_rows(rows, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH contiguous elements at each pointer of `rows`, zeros up to BLOCK columns, and where
    not `real`; None: all are."""
    columns = tl.arange(0, BLOCK)
    mask = (columns < WIDTH)[None, :]
    if real is not None:
        mask = mask & real[:, None]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_queries(
    base, first_row, own_queries, token_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Queries [BLOCK_M, BLOCK] of a tile, zeros after the sequence's last."""
    if TMA:
        # Where warps are specialised, Triton 3.6 adds each warp group's share to the row that is
        # loaded, and to every other use of that value: so the row is a value of its own, zero. A
        # descriptor needs a row: without queries it has one, of which nothing is stored.
        source = tl.make_tensor_descriptor(
            base + first_row.to(tl.int64) * token_stride,
            [tl.maximum(own_queries - first_row, 1), WIDTH], [token_stride, 1], [BLOCK_M, BLOCK],
        )  # fmt: skip
        queries = source.load([tl.minimum(own_queries, 0), 0])
    else:
        rows = first_row + tl.arange(0, BLOCK_M)
        queries = load_rows(
            base + rows.to(tl.int64) * token_stride, rows < own_queries, WIDTH, BLOCK
        )
    return queries


@triton.jit
def places_of_keys(
    first_key, own_keys, first_slot, table_ptr, num_pages, PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(page, slot in it, which exist) of BLOCK_N keys of a sequence, whose first is at first_slot.

    table_ptr: the pages of the sequence; None: it is one page, 0. ONE_PAGE: so is each block.
    """
    keys = first_key + tl.arange(0, BLOCK_N)
    exists = keys < own_keys
    if table_ptr is None:
        return 0, keys.to(tl.int64), exists
    else:
        slots = first_slot + keys
        if ONE_PAGE:
            pages = tl.load(table_ptr + (first_slot + first_key) // PAGE_SIZE).to(tl.int64)
        else:
            pages = tl.load(table_ptr + slots // PAGE_SIZE, mask=exists, other=-1).to(tl.int64)
        exists = exists & ((pages >= 0) & (pages < num_pages))
        return pages, (slots % PAGE_SIZE).to(tl.int64), exists
