"""Computes the combine step of a mixture of experts: multiplies each token's rows by weights, and
sums the products in the order of the slots."""

import triton
import triton.language as tl


@triton.jit
def moe_combine(
    y_ptr, ids_ptr, weights_ptr, out_ptr, num_tokens,
    NUM_SLOTS: tl.constexpr, NUM_EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    WEIGHT_STRIDES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, LAUNCH_PDL: tl.constexpr,
):  # fmt: skip
    """Computes the combine step of a mixture of experts: out [T, HIDDEN] = sum over slots of
    weights [T, S] * y [T * S, HIDDEN], in fp32.

    Grid (cdiv(T, BLOCK_T), cdiv(HIDDEN, BLOCK_H)). A slot without an expert adds nothing, because
    its row of y was never written.
    """
    if LAUNCH_PDL:
        tl.extra.cuda.gdc_wait()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    token_mask = tokens < num_tokens
    column_mask = columns < HIDDEN
    total = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        routes = tokens * NUM_SLOTS + slot
        ids = tl.load(ids_ptr + routes, mask=token_mask, other=-1)
        there = token_mask & (ids >= 0) & (ids < NUM_EXPERTS)
        rows = y_ptr + routes.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        y = tl.load(rows, mask=there[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
        places = tokens * WEIGHT_STRIDES[0] + slot * WEIGHT_STRIDES[1]
        weight = tl.load(weights_ptr + places, mask=there, other=0.0).to(tl.float32)
        total += y * weight[:, None]
    out = out_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(
        out, total.to(out_ptr.dtype.element_ty), mask=token_mask[:, None] & column_mask[None, :]
    )
