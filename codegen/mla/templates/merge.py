"""Merges results of attention over disjoint sets of keys, by means of their log-sum-exps."""

import triton
import triton.language as tl


@triton.jit
def mla_merge(
    parts_ptr, lses_ptr, out_ptr, num_rows, part_stride, lse_stride,
    PARTS: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Merges PARTS results of attention over disjoint sets of keys [PARTS, rows, V_DIM] to out
    [rows, V_DIM], by means of their log-sum-exps.

    Grid (row blocks,). A row is one query of one head. If no part has a key for a row, the row
    becomes zeros.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, V_BLOCK)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (dims < V_DIM)[None, :]
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        lse = tl.load(lses_ptr + part * lse_stride + rows, mask=row_mask, other=float("-inf"))
        top = tl.maximum(top, lse)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK_R,), tl.float32)
    output = tl.zeros((BLOCK_R, V_BLOCK), tl.float32)
    for part in tl.static_range(PARTS):
        lse = tl.load(lses_ptr + part * lse_stride + rows, mask=row_mask, other=float("-inf"))
        weight = tl.exp(lse - base)
        places = parts_ptr + part * part_stride + rows[:, None] * V_DIM + dims[None, :]
        output += weight[:, None] * tl.load(places, mask=mask, other=0.0).to(tl.float32)
        total += weight
    total = tl.where(top == float("-inf"), 1.0, total)
    output *= (1.0 / total)[:, None]
    places = out_ptr + rows[:, None] * V_DIM + dims[None, :]
    tl.store(places, output.to(out_ptr.dtype.element_ty), mask=mask)
