"""A template for `tests/codegen/test_kernel.py`."""

import triton
import triton.language as tl


@triton.jit
def gather(
    x_ptr, ids_ptr, out_ptr, num_rows, X_STRIDES: tl.constexpr, BLOCK: tl.constexpr,
    bias_ptr=None, BIAS_STRIDE: tl.constexpr = 0,
):  # fmt: skip
    """Computes out [num_rows, BLOCK] = x[ids] + bias."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    taken = tl.load(ids_ptr + row) * X_STRIDES[0] + columns * X_STRIDES[1]
    values = tl.load(x_ptr + taken)
    if bias_ptr is not None:
        values += tl.load(bias_ptr + columns * BIAS_STRIDE)
    tl.store(out_ptr + row * BLOCK + columns, values, mask=row < num_rows)


@triton.jit
def scatter(
    x_ptr, k_ptr, out_ptr, X_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, K: tl.constexpr,
    K_STRIDE: tl.constexpr = 1,
):  # fmt: skip
    """Stores x [K] at places k of out: out[k[i]] = x[i]."""
    columns = tl.arange(0, K)
    places = tl.load(k_ptr + columns * K_STRIDE)
    tl.store(out_ptr + places * OUT_STRIDE, tl.load(x_ptr + columns * X_STRIDE))
