"""Dequantises all expert weights. This is faster for many rows per expert, because a GEMM would
decode every weight again for each of its row tiles."""

import triton
import triton.language as tl

from tilewright.codegen.templates.expert_weights import block_scales, dequantize_tile


@triton.jit
def dequantize_experts(
    weight_ptr, scale_ptr, out_ptr,
    HIDDEN: tl.constexpr, INNER: tl.constexpr, EXPERT_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr, FORMAT: tl.constexpr, PER_BYTE: tl.constexpr,
    SCALE_BLOCK: tl.constexpr, SCALE_STRIDES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Dequantises expert weights: out [E, HIDDEN, INNER] = codes * scales. A row of codes has INNER
    / PER_BYTE bytes.

    Grid (cdiv(INNER, BLOCK_K), cdiv(HIDDEN, BLOCK_N), E).
    """
    expert = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK_K
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    stored_columns = column // PER_BYTE + tl.arange(0, BLOCK_K // PER_BYTE)
    row_mask = rows < HIDDEN
    codes = tl.load(
        weight_ptr + expert * EXPERT_STRIDE + rows[:, None] * ROW_STRIDE + stored_columns[None, :],
        mask=row_mask[:, None] & (stored_columns < INNER // PER_BYTE)[None, :],
    )  # fmt: skip
    scales = block_scales(
        scale_ptr + expert * SCALE_STRIDES[0], rows, row_mask, column, INNER, BLOCK_K,
        SCALE_STRIDES, SCALE_BLOCK, FORMAT,
    )  # fmt: skip
    values = dequantize_tile(codes, scales, BLOCK_N, BLOCK_K, FORMAT, out_ptr.dtype.element_ty)
    columns = column + tl.arange(0, BLOCK_K)
    tl.store(
        out_ptr + (expert * HIDDEN + rows[:, None]) * INNER + columns[None, :], values,
        mask=row_mask[:, None] & (columns < INNER)[None, :],
    )  # fmt: skip
