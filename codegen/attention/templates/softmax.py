"""Computes the steps of the online softmax (FlashAttention, Dao et al. 2022), in the base-2
domain."""

import triton
import triton.language as tl

from tilewright.codegen.attention.templates.tiles import visible

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# In the base-2 domain, numbers of a mask that are lower than LOWEST are replaced by LOWEST. The
# weight of a key with this number is too small to matter. Without the replacement, a very low
# finite number could become minus infinity in the base-2 domain, and a row that has only such
# numbers would attend to no key.
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def capped(scores, factor, softcap):
    """Returns softcap * tanh(y), where scores * factor = 2 * log2(e) * y."""
    return softcap - 2.0 * softcap / (tl.exp2(scores * factor) + 1.0)


@triton.jit
def mask_scores(
    scores, positions, first_row, first_key, own_queries, own_keys, key_start, lead, masks,
    steepness,
    MASK: tl.constexpr, WINDOW: tl.constexpr, MASK_KIND: tl.constexpr, LED: tl.constexpr,
    EVERY_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns (scores, whether each key is visible). The scores of hidden keys are -inf. If there
    is an additive mask, the returned scores are in the base-2 domain."""
    keys = tl.arange(0, BLOCK_N)
    if EVERY_BLOCK:
        # Subtract the offset of the block from the rows, so that the column numbers are the same
        # for every block.
        seen = visible(positions, keys, first_key, key_start, own_keys, lead, MASK, WINDOW, LED)
        keys += first_key
    else:
        keys += first_key
        seen = visible(positions, keys, 0, key_start, own_keys, lead, MASK, WINDOW, LED)
    if MASK_KIND != "none":
        mask_base, mask_row_stride, mask_column_stride = masks
        rows = first_row + tl.arange(0, BLOCK_M)
        places = (
            mask_base + rows.to(tl.int64)[:, None] * mask_row_stride
            + keys.to(tl.int64)[None, :] * mask_column_stride
        )  # fmt: skip
        inside = (rows < own_queries)[:, None] & (keys < own_keys)[None, :]
        given = tl.load(places, mask=inside, other=0)
        if MASK_KIND == "bool":
            seen = seen & (given != 0)
        else:
            numbers = given.to(tl.float32)
            seen = seen & (numbers != float("-inf"))
            scores = scores * steepness + tl.maximum(numbers * LOG2E, LOWEST)
    return tl.where(seen, scores, float("-inf")), seen


@triton.jit
def online_softmax_step(scores, top, total, factor, SHIFT: tl.constexpr):
    """Performs a step of the online softmax. Returns (weights, factor for earlier sums, new
    maximum, new sum).

    factor: converts scores to the base-2 domain. SHIFT: weights are multiplied by 2 ** SHIFT, so
    that small weights do not become zero in fp8.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    # Rows that have not attended to any key yet use the base 0 in place of -inf.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - (base - SHIFT)[:, None])
    decay = tl.exp2(top - base)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def add_values(output, decay, weights, values, PROMOTE: tl.constexpr):
    """Returns output * decay + weights @ values. PROMOTE: whether the product of each block has its
    own fp32 accumulator."""
    if PROMOTE:
        output = output * decay[:, None] + tl.dot(weights.to(values.dtype), values)
    else:
        output = tl.dot(weights.to(values.dtype), values, output * decay[:, None])
    return output


@triton.jit
def finish(
    output, top, total, out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, v_scale_place, first_token,
    query, head, real,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Stores the rows of output [rows, V_BLOCK], divided by their sums of weights, and stores their
    log-sum-exp. For a row that attends to no key, stores zeros and -inf.

    query, head, real: the query and the head of each row, and whether the row exists. v_scale: the
    factor of the values. SHIFT: as in `online_softmax_step`.
    """
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        scale = tl.exp2(top - new_top)
        output *= scale[:, None]
        total = total * scale + tl.exp2(sink - new_top)
    sees = total != 0.0
    total = tl.where(sees, total, 1.0)
    rows = (first_token + query) * HEADS + head
    if lse_ptr is not None:
        lse = tl.where(sees, (top - SHIFT + tl.log2(total)) * LN2, float("-inf"))
        tl.store(lse_ptr + rows, lse, mask=real)
    output *= (1.0 / total)[:, None]
    if v_scale_ptr is not None:
        output *= tl.load(v_scale_ptr + v_scale_place)
    dims = tl.arange(0, V_BLOCK)
    tl.store(
        out_ptr + rows[:, None] * V_DIM + dims[None, :], output.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (dims < V_DIM)[None, :],
    )  # fmt: skip
