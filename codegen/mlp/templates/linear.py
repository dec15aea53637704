"""Linears for few tokens: the time is that of reading the weights, once.

Weight rows stand on the tensor core's M side and tokens on its N side. An RMS norm in front is a
factor of each row of the result, whose sum of squares is taken in the same pass over K.
"""

import triton
import triton.language as tl

from tilewright.codegen.mlp.templates.finish import bias_column, finish_linear, residual_tile
from tilewright.codegen.templates.activation import activate


@triton.jit
def prefetch_rows(
    rows_ptr, first, K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """Asks the L2 cache for LINES lines of LINE elements, 128 bytes, of each row of K, from column
    `first` on: a hint, which reads nothing, so that whoever still writes there is not disturbed."""
    columns = tl.minimum(first + tl.arange(0, LINES) * LINE, K - 1)
    lines = rows_ptr[:, None] + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1
    )


@triton.jit
def weight_tile(ptrs, row_mask, column_mask, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """A tile of a weight, which nobody reads again. The grid is known at the launch alone, so that
    the emitter cannot tell whether there are rows past the last."""
    if EVEN_ROWS and EVEN_COLUMNS:
        tile = tl.load(ptrs, eviction_policy="evict_first")
    elif EVEN_COLUMNS:
        tile = tl.load(ptrs, mask=row_mask, other=0.0, eviction_policy="evict_first")
    else:
        mask = row_mask & column_mask
        tile = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def streamed_linear(
    x_ptr, norm_weight_ptr, weight_ptr, up_weight_ptr, bias_ptr, up_bias_ptr, residual_ptr,
    out_ptr, workspace_ptr, counters_ptr,
    num_tokens,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr, UP_STRIDES: tl.constexpr, BIAS_STRIDES: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    NORM: tl.constexpr, NORM_EPS: tl.constexpr, NORM_OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr, LETS_IN: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] = residual + SCALE * activation(norm(x) @ weight^T + bias) * (norm(x) @
    up_weight^T + up_bias), all but the product optional; fp32, rounded once.

    Grid (cdiv(N, BLOCK_N) * SPLIT_K, cdiv(T, BLOCK_T)). NORM: x is divided by its rms and
    multiplied by NORM_OFFSET + norm_weight, rounded before the product. ACTIVATION "": none. Weight
    strides (row, column). With SPLIT_K > 1, workspace holds fp32 [tiles, SPLIT_K, weights * BLOCK_N
    * BLOCK_T + NORM * BLOCK_T] and counters one zero per tile. PREFETCH: columns of each row that
    are asked for before the kernel waits for the one before it. LETS_IN: the next kernel's programs
    may take their places while this one runs.
    """
    row_tile = tl.program_id(0) // SPLIT_K
    part = tl.program_id(0) % SPLIT_K
    rows = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    PART: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K) * BLOCK_K
    columns = part * PART + tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + rows.to(tl.int64) * WEIGHT_STRIDES[0]
    if up_weight_ptr is not None:
        up_rows = up_weight_ptr + rows.to(tl.int64) * UP_STRIDES[0]
    if LAUNCH_PDL:
        if PREFETCH > 0:
            last = (N - 1 - row_tile * BLOCK_N).to(tl.int64)
            inside = tl.minimum(tl.arange(0, BLOCK_N), last) + row_tile * BLOCK_N
            LINES: tl.constexpr = PREFETCH // 64
            first = part * PART
            prefetch_rows(weight_ptr + inside * WEIGHT_STRIDES[0], first, K, LINES, 64)
            if up_weight_ptr is not None:
                prefetch_rows(up_weight_ptr + inside * UP_STRIDES[0], first, K, LINES, 64)
        tl.extra.cuda.gdc_wait()
        if LETS_IN:
            tl.extra.cuda.gdc_launch_dependents()
    places = tokens.to(tl.int64)[None, :]
    there = row_mask[:, None] & token_mask[None, :]
    # Before the loop: after it nothing would hide the latency of these loads.
    residual = residual_tile(residual_ptr, places, rows, there, RESIDUAL_STRIDE)
    bias = bias_column(bias_ptr, rows, row_mask, BIAS_STRIDES[0])
    up_bias = bias_column(up_bias_ptr, rows, row_mask, BIAS_STRIDES[1])
    weight_ptrs = weight_rows[:, None] + columns[None, :] * WEIGHT_STRIDES[1]
    if up_weight_ptr is not None:
        up_ptrs = up_rows[:, None] + columns[None, :] * UP_STRIDES[1]
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * X_STRIDE + columns[None, :]
    if NORM:
        squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
        if norm_weight_ptr is not None:
            # The same for each token: a load of so many bytes can be made ahead, a row's not.
            norm_ptrs = tl.broadcast_to(
                norm_weight_ptr + columns[None, :] * NORM_STRIDE, (BLOCK_T, BLOCK_K)
            )
    product = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    up = product
    for step in range(0, PART, BLOCK_K):
        x_mask = token_mask[:, None]
        column_mask = (columns + step < K)[None, :]
        if K % (BLOCK_K * SPLIT_K) != 0:
            x_mask = x_mask & column_mask
        x = tl.load(x_ptrs + step, mask=x_mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            squares += wide * wide
            if norm_weight_ptr is not None:
                factor = tl.load(norm_ptrs + step * NORM_STRIDE, mask=x_mask, other=0.0)
                x = (wide * (factor.to(tl.float32) + NORM_OFFSET)).to(x_ptr.dtype.element_ty)
        weight = weight_tile(
            weight_ptrs + step * WEIGHT_STRIDES[1], row_mask[:, None], column_mask,
            N % BLOCK_N == 0, K % (BLOCK_K * SPLIT_K) == 0,
        )  # fmt: skip
        product = tl.dot(weight, x.T, product)
        if up_weight_ptr is not None:
            up_weight = weight_tile(
                up_ptrs + step * UP_STRIDES[1], row_mask[:, None], column_mask,
                N % BLOCK_N == 0, K % (BLOCK_K * SPLIT_K) == 0,
            )  # fmt: skip
            up = tl.dot(up_weight, x.T, up)
    square = 0.0
    if NORM:
        square = tl.sum(squares, axis=1)
    finish_linear(
        product, up, square, bias, up_bias, residual,
        up_weight_ptr, bias_ptr, up_bias_ptr, residual_ptr, out_ptr, workspace_ptr, counters_ptr,
        row_tile, part, rows, places, there, token_mask,
        N, K, NORM, NORM_EPS, ACTIVATION, SCALE, RESIDUAL_STRIDE,
        BLOCK_N, BLOCK_T, SPLIT_K,
    )  # fmt: skip


@triton.jit
def activate_products(
    gate_ptr, up_ptr, out_ptr, num_elements, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """out = activation(gate) * up, or activation(gate) where up_ptr is None; out may be gate.

    Grid (cdiv(num_elements, BLOCK),)."""
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    gate = tl.load(gate_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if up_ptr is None:
        value = activate(gate, gate, ACTIVATION, 1.0, 0.0, False)
    else:
        up = tl.load(up_ptr + places, mask=mask, other=0.0).to(tl.float32)
        value = activate(gate, up, ACTIVATION, 1.0, 0.0, True)
    tl.store(out_ptr + places, value.to(out_ptr.dtype.element_ty), mask=mask)
