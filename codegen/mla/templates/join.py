"""Copies the two parts of MLA keys to one tensor, for a library's attention."""

import triton
import triton.language as tl


@triton.jit
def mla_join(
    k_ptr, rope_ptr, out_ptr, num_rows, run, k_sequence_stride, k_head_stride, rope_sequence_stride,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    K_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Copies the two parts of MLA keys to one tensor out [keys, H, NOPE + ROPE]. Each row has the
    columns of k [keys, H, NOPE] and then the rope columns [keys, ROPE], which all heads share.

    Grid (cdiv(num_rows, BLOCK_R),). A row is one head of one key. run: the number of keys of each
    sequence.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < num_rows
    keys = rows // NUM_HEADS
    heads = (rows % NUM_HEADS).to(tl.int64)
    sequences = (keys // run).to(tl.int64)
    places = (keys % run).to(tl.int64)
    starts = rows.to(tl.int64) * (NOPE + ROPE)
    columns = tl.arange(0, NOPE_BLOCK)
    inside = mask[:, None] & (columns < NOPE)[None, :]
    k_rows = k_ptr + sequences * k_sequence_stride + places * K_STRIDE + heads * k_head_stride
    k = tl.load(k_rows[:, None] + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + starts[:, None] + columns[None, :], k, mask=inside)
    columns = tl.arange(0, ROPE_BLOCK)
    inside = mask[:, None] & (columns < ROPE)[None, :]
    rope_rows = rope_ptr + sequences * rope_sequence_stride + places * ROPE_STRIDE
    rope = tl.load(rope_rows[:, None] + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + starts[:, None] + NOPE + columns[None, :], rope, mask=inside)
