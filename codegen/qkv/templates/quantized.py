"""Permutes x to the order in which codes of weights are decoded along K."""

import triton
import triton.language as tl

from tilewright.codegen.templates.codes import x_in_order


@triton.jit
def order_x(
    x_ptr, ordered_ptr, num_tokens,
    HIDDEN: tl.constexpr, X_STRIDE: tl.constexpr, PER: tl.constexpr,
    INTERLEAVED_NIBBLES: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Permutes the columns of x [tokens, HIDDEN] to the order in which `qkv_projection_swapped`,
    with X_IN_ORDER, takes codes.

    Grid (steps, cdiv(tokens, BLOCK_T)). Each step of BLOCK_K columns is permuted separately, and
    the last one is padded with zeros.
    """
    STEPS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    tokens = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    mask = tokens < num_tokens
    x = tl.load(
        x_ptr + tokens.to(tl.int64) * X_STRIDE + columns[None, :],
        mask=mask & (columns < HIDDEN)[None, :],
        other=0.0,
    )
    x = x_in_order(x, PER, INTERLEAVED_NIBBLES, GROUPS)
    ordered = ordered_ptr + tokens.to(tl.int64) * (STEPS * BLOCK_K) + columns[None, :]
    tl.store(ordered, x, mask=mask)
