"""Loads the operands of attention (rows, queries, and the page numbers of keys), and converts keys
and values to the dtype of queries."""

import triton
import triton.language as tl


@triton.jit
def load_rows(rows, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Loads WIDTH contiguous elements at each pointer of `rows`. Columns from WIDTH to BLOCK, and
    rows that are not `real`, are zeros. If real is None, all rows are real."""
    columns = tl.arange(0, BLOCK)
    mask = (columns < WIDTH)[None, :]
    if real is not None:
        mask = mask & real[:, None]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def converted(values, DTYPE: tl.constexpr):
    """Converts values to DTYPE. 8-bit floats keep their infinities and NaN."""
    FP8: tl.constexpr = values.dtype == tl.float8e4nv or values.dtype == tl.float8e5
    if FP8 and tl.bfloat16 == DTYPE:
        # On SM90 and newer chips, a direct conversion of float8e5 turns infinity and NaN into
        # finite numbers, and a direct conversion of float8e4nv takes four times as long.
        values = values.to(tl.float16).to(tl.float32)
    return values.to(DTYPE)


@triton.jit
def load_queries(
    base, first_row, own_queries, token_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Loads a tile of queries [BLOCK_M, BLOCK]. Rows after the sequence's last query are zeros."""
    if TMA:
        # With specialised warps, Triton 3.6 divides this load among warp groups. Triton adds the
        # offset of each group to the row index of the load, and by mistake also to all other uses
        # of the same value. Therefore the descriptor begins at the first row of the tile, and the
        # row index is a value that is always zero and that nothing else uses. A descriptor needs at
        # least one row, so this one has a row even if there are no queries. The result of that row
        # is never stored.
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
    """Returns (page, slot in the page, whether the key exists) for BLOCK_N keys of a sequence.

    first_slot: the slot of the sequence's first key. table_ptr: the page numbers of the sequence;
    if None, the sequence is one page with number 0. ONE_PAGE: each block lies in one page.
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
