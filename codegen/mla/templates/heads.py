"""Products of each head with its own weight, for few tokens: reading the weights once takes all the
time."""

import triton
import triton.language as tl


@triton.jit
def head_products(
    x_ptr, weights_ptr, out_ptr, num_tokens,
    NUM_HEADS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDES: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes out [T, H, WIDTH] = x [T, H, K] @ weights[h] [K, WIDTH], summed in fp32.

    Grid (H * cdiv(WIDTH, BLOCK_W), cdiv(T, BLOCK_T)). Columns of the weights are on the tensor
    core's M side and tokens on its N side. X_STRIDES: (token, head). WEIGHT_STRIDES: (head, k,
    column).
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    TILES: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    head = (tl.program_id(0) // TILES).to(tl.int64)
    columns = tl.program_id(0) % TILES * BLOCK_W + tl.arange(0, BLOCK_W)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = tokens < num_tokens
    column_mask = columns < WIDTH
    k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + head * X_STRIDES[1] + tokens.to(tl.int64) * X_STRIDES[0]
    weight_columns = weights_ptr + head * WEIGHT_STRIDES[0] + columns * WEIGHT_STRIDES[2]
    product = tl.zeros((BLOCK_W, BLOCK_T), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        x = tl.load(
            x_rows[:, None] + (start + k)[None, :], mask=token_mask[:, None] & inside[None, :],
            other=0.0,
        )  # fmt: skip
        weight = tl.load(
            weight_columns[:, None] + (start + k)[None, :] * WEIGHT_STRIDES[1],
            mask=column_mask[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        product = tl.dot(weight, x.T, product)
    places = (tokens.to(tl.int64) * NUM_HEADS + head)[None, :] * WIDTH + columns[:, None]
    tl.store(
        out_ptr + places, product.to(out_ptr.dtype.element_ty),
        mask=column_mask[:, None] & token_mask[None, :],
    )  # fmt: skip
