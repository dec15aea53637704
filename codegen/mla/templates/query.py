"""Prepares the queries of MLA for attention: rotates their rope columns and stores them, alone or
together with the other columns. May also cast the stored columns to 8 bits."""

import triton
import triton.language as tl

from tilewright.codegen.mla.templates.entries import load_pairs, rotated_pairs, store_pairs
from tilewright.codegen.mla.templates.latent import token_positions
from tilewright.codegen.templates.rounding import rounded


@triton.jit
def mla_query(
    q_ptr, cos_ptr, sin_ptr, row_offsets_ptr, starts_ptr, positions_ptr, scale_ptr, k_rope_ptr,
    joined_ptr, out_ptr,
    num_rows, token_run, rope_rows, num_sequences,
    q_sequence_stride, q_token_stride, q_head_stride,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr, ROPE_STYLE: tl.constexpr,
    FULL_WIDTH: tl.constexpr, COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr,
    BY_POSITION: tl.constexpr, BATCH_STRIDES: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    WHOLE: tl.constexpr, KEY_STRIDES: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Rotates MLA queries: out [rows, ROPE_DIM] = the last ROPE_DIM columns of q, rotated in fp32
    and rounded once. A row is one head of one token.

    Grid (cdiv(num_rows, BLOCK_R),).

    Args:
        WHOLE: out [rows, NOPE + ROPE_DIM] has all columns. If scale_ptr is given, they are divided
            by q's scale. If out is an 8-bit float, they saturate.
        joined_ptr: If it is given, the rotated columns come before the other columns of out. The
            keys `joined` then have a row for each row of q, and the kernel copies k_rope [tokens,
            ROPE_DIM] to their first ROPE_DIM columns.
        KEY_STRIDES: The strides of the rows of k_rope and of the rows of joined.
        BY_POSITION: Whether the position of a token selects its row of cos and sin. If not, the row
            is the token's number modulo rope_rows.
        token_run: The number of tokens of each sequence, if all sequences have equally many.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = rows < num_rows
    tokens = rows // NUM_HEADS
    starts = (tokens // token_run).to(tl.int64) * q_sequence_stride
    starts += (tokens % token_run).to(tl.int64) * q_token_stride
    starts += (rows % NUM_HEADS).to(tl.int64) * q_head_stride
    WIDTH: tl.constexpr = NOPE + ROPE_DIM if WHOLE else ROPE_DIM
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    places = rows.to(tl.int64) * WIDTH
    inverse = 1.0
    if scale_ptr is not None:
        inverse = 1.0 / tl.load(scale_ptr)
    low, high = load_pairs(
        q_ptr + NOPE, starts, mask, ROPE_DIM, PAIRS,
        ROPE_STYLE == "interleaved" or ROPE_STYLE == "interleaved_to_half", 1,
    )  # fmt: skip
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if ROPE_STYLE != "none":
        if BY_POSITION:
            turns = token_positions(
                tokens, mask, row_offsets_ptr, starts_ptr, positions_ptr, num_sequences, token_run,
                BATCH_STRIDES[0], BATCH_STRIDES[1], BATCH_STRIDES[2], SEARCH_STEPS,
            )  # fmt: skip
            known = mask & (turns >= 0) & (turns < rope_rows)
        else:
            turns = (tokens % rope_rows).to(tl.int64)
            known = mask
        low, high = rotated_pairs(
            low, high, cos_ptr, sin_ptr, turns, known,
            ROPE_DIM, PAIRS, ROPE_STYLE, FULL_WIDTH, COS_STRIDES, SIN_STRIDES,
        )  # fmt: skip
    if WHOLE:
        columns = tl.arange(0, NOPE_BLOCK)
        inside = mask[:, None] & (columns < NOPE)[None, :]
        values = tl.load(q_ptr + starts[:, None] + columns[None, :], mask=inside, other=0.0)
        codes = rounded(values.to(tl.float32) * inverse, DTYPE)
        first = places
        if joined_ptr is None:
            places += NOPE
        else:
            first += ROPE_DIM
        tl.store(out_ptr + first[:, None] + columns[None, :], codes, mask=inside)
        # Round the rotated columns to q's own dtype first, as if they had been stored in it.
        low = low.to(q_ptr.dtype.element_ty).to(tl.float32) * inverse
        high = high.to(q_ptr.dtype.element_ty).to(tl.float32) * inverse
    store_pairs(
        out_ptr, places, mask, rounded(low, DTYPE), rounded(high, DTYPE), ROPE_DIM, PAIRS,
        ROPE_STYLE == "interleaved", 1,
    )  # fmt: skip
    if joined_ptr is not None:
        columns = tl.arange(0, 2 * PAIRS)
        inside = mask[:, None] & (columns < ROPE_DIM)[None, :]
        sources = tokens.to(tl.int64)[:, None] * KEY_STRIDES[0] + columns[None, :]
        keys = tl.load(k_rope_ptr + sources, mask=inside, other=0.0)
        targets = rows.to(tl.int64)[:, None] * KEY_STRIDES[1] + columns[None, :]
        tl.store(joined_ptr + targets, keys, mask=inside)
