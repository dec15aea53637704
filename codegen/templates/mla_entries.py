"""Entries of a latent cache: loaded, normed, rotated, quantised, stored.

An entry is a tile of latents [rows, L] and two tiles of rope columns [rows, pairs], the two members
of every pair.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.qkv_finish import rounded


@triton.jit
def load_latents(
    pointer, offsets, mask, RANK: tl.constexpr, BLOCK_L: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """pointer[offsets, columns] [rows, BLOCK_L]; zeros past RANK and where mask is false."""
    columns = tl.arange(0, BLOCK_L)
    inside = mask[:, None] & (columns < RANK)[None, :]
    return tl.load(pointer + offsets[:, None] + (columns * STRIDE)[None, :], mask=inside, other=0.0)


@triton.jit
def store_latents(
    pointer, offsets, mask, values,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_L)
    inside = mask[:, None] & (columns < RANK)[None, :]
    tl.store(pointer + offsets[:, None] + (columns * STRIDE)[None, :], values, mask=inside)


@triton.jit
def load_pairs(
    pointer, offsets, mask, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Both members of the pairs of pointer[offsets]: neighbours, or half the columns apart."""
    HALF: tl.constexpr = ROPE_DIM // 2
    if NEIGHBOURS:
        columns = tl.arange(0, 2 * PAIRS)
        inside = mask[:, None] & (columns < ROPE_DIM)[None, :]
        places = offsets[:, None] + (columns * STRIDE)[None, :]
        values = tl.load(pointer + places, mask=inside, other=0.0)
        low, high = tl.split(tl.reshape(values, (offsets.shape[0], PAIRS, 2)))
    else:
        pairs = tl.arange(0, PAIRS)
        inside = mask[:, None] & (pairs < HALF)[None, :]
        places = offsets[:, None] + (pairs * STRIDE)[None, :]
        low = tl.load(pointer + places, mask=inside, other=0.0)
        high = tl.load(pointer + places + HALF * STRIDE, mask=inside, other=0.0)
    return low, high


@triton.jit
def store_pairs(
    pointer, offsets, mask, low, high, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = ROPE_DIM // 2
    if NEIGHBOURS:
        columns = tl.arange(0, 2 * PAIRS)
        inside = mask[:, None] & (columns < ROPE_DIM)[None, :]
        places = offsets[:, None] + (columns * STRIDE)[None, :]
        values = tl.reshape(tl.join(low, high), (offsets.shape[0], 2 * PAIRS))
        tl.store(pointer + places, values, mask=inside)
    else:
        pairs = tl.arange(0, PAIRS)
        inside = mask[:, None] & (pairs < HALF)[None, :]
        places = offsets[:, None] + (pairs * STRIDE)[None, :]
        tl.store(pointer + places, low, mask=inside)
        tl.store(pointer + places + HALF * STRIDE, high, mask=inside)


@triton.jit
def store_entries(
    page, slot, mask, latent, low, high, latent_cache_ptr, rope_cache_ptr,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, LATENT_STRIDES: tl.constexpr, ROPE_STRIDES: tl.constexpr,
):  # fmt: skip
    """Entries to their slots of the cache; strides (page, slot, column)."""
    places = page * LATENT_STRIDES[0] + slot * LATENT_STRIDES[1]
    store_latents(latent_cache_ptr, places, mask, latent, RANK, BLOCK_L, LATENT_STRIDES[2])
    places = page * ROPE_STRIDES[0] + slot * ROPE_STRIDES[1]
    store_pairs(
        rope_cache_ptr, places, mask, low, high, ROPE_DIM, PAIRS, NEIGHBOURS, ROPE_STRIDES[2]
    )


@triton.jit
def table_columns(
    pointer, rows, mask, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, FULL_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """What the first and the second members of all pairs take from a table, fp32 [rows, PAIRS].

    Of a table of ROPE_DIM columns each member takes the column where it is after the rotation.
    """
    pairs = tl.arange(0, PAIRS)
    inside = mask[:, None] & (pairs < ROPE_DIM // 2)[None, :]
    starts = pointer + (rows * STRIDES[0])[:, None]
    if FULL_WIDTH and NEIGHBOURS:
        low = tl.load(starts + (2 * pairs * STRIDES[1])[None, :], mask=inside, other=0.0)
        high = tl.load(starts + ((2 * pairs + 1) * STRIDES[1])[None, :], mask=inside, other=0.0)
    else:
        low = tl.load(starts + (pairs * STRIDES[1])[None, :], mask=inside, other=0.0)
        high = low
        if FULL_WIDTH:
            second = (pairs + ROPE_DIM // 2) * STRIDES[1]
            high = tl.load(starts + second[None, :], mask=inside, other=0.0)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def turned_pairs(
    low, high, cos_ptr, sin_ptr, rows, known,
    ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr, ROPE_STYLE: tl.constexpr,
    FULL_WIDTH: tl.constexpr, COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr,
):  # fmt: skip
    """Members of pairs, fp32 [rows, PAIRS], rotated by rows of the tables; zeros unless known."""
    TOGETHER: tl.constexpr = ROPE_STYLE == "interleaved"
    low_cos, high_cos = table_columns(
        cos_ptr, rows, known, ROPE_DIM, PAIRS, TOGETHER, FULL_WIDTH, COS_STRIDES
    )
    low_sin, high_sin = table_columns(
        sin_ptr, rows, known, ROPE_DIM, PAIRS, TOGETHER, FULL_WIDTH, SIN_STRIDES
    )
    return low * low_cos - high * low_sin, high * high_cos + low * high_sin


@triton.jit
def new_entries(
    tokens, mask, positions, latent_ptr, k_rope_ptr, norm_ptr, cos_ptr, sin_ptr, rope_rows,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    NORM_EPS: tl.constexpr, ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """(latents, first and second rope members) of new tokens, normed and rotated in fp32, each
    rounded once to the tokens' dtype."""
    DTYPE: tl.constexpr = k_rope_ptr.dtype.element_ty
    latent = load_latents(latent_ptr, tokens.to(tl.int64) * LATENT_STRIDE, mask, RANK, BLOCK_L, 1)
    if norm_ptr is not None:
        columns = tl.arange(0, BLOCK_L)
        wide = latent.to(tl.float32)
        mean = tl.sum(wide * wide, axis=1) / RANK
        weight = tl.load(norm_ptr + columns, mask=columns < RANK, other=0.0).to(tl.float32)
        wide = wide * tl.rsqrt(mean + NORM_EPS)[:, None]
        latent = (wide * weight[None, :]).to(DTYPE)
    low, high = load_pairs(
        k_rope_ptr, tokens.to(tl.int64) * ROPE_STRIDE, mask, ROPE_DIM, PAIRS,
        ROPE_STYLE == "interleaved" or ROPE_STYLE == "interleaved_to_half", 1,
    )  # fmt: skip
    if ROPE_STYLE != "none":
        if BY_POSITION:
            rows = positions
            known = mask & (rows >= 0) & (rows < rope_rows)
        else:
            rows = (tokens % rope_rows).to(tl.int64)
            known = mask
        low, high = turned_pairs(
            low.to(tl.float32), high.to(tl.float32), cos_ptr, sin_ptr, rows, known,
            ROPE_DIM, PAIRS, ROPE_STYLE, FULL_WIDTH, COS_STRIDES, SIN_STRIDES,
        )  # fmt: skip
        low = low.to(DTYPE)
        high = high.to(DTYPE)
    return latent, low, high


@triton.jit
def quantized_groups(
    latent, CAP: tl.constexpr, GROUP: tl.constexpr, BLOCK_L: tl.constexpr
):  # fmt: skip
    """(codes [rows, BLOCK_L], scales [rows, BLOCK_L / GROUP]) of latents; CAP 0: none.

    Zero codes where the scale's inverse is not a finite number.
    """
    ROWS: tl.constexpr = latent.shape[0]
    groups = tl.reshape(latent.to(tl.float32), (ROWS, BLOCK_L // GROUP, GROUP))
    largest = tl.max(tl.abs(groups), axis=2)
    bound = largest
    if CAP > 0.0:
        bound = tl.minimum(largest, CAP)
    scale = tl.math.div_rn(bound, tl.full(bound.shape, 448.0, tl.float32))
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    inverse = tl.where((largest == 0.0) | (inverse == float("inf")), 0.0, inverse)
    codes = rounded(groups * inverse[:, :, None], tl.float8e4nv)
    return tl.reshape(codes, (ROWS, BLOCK_L)), scale


@triton.jit
def write_rows(
    rows, mask, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr, scale_stride,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, OUT_STRIDE: tl.constexpr,
    CAP: tl.constexpr, GROUP: tl.constexpr, ROPE_SCALE: tl.constexpr,
):  # fmt: skip
    """Entries to their rows of the buffers: latents or codes [K, OUT_STRIDE], scales [groups, K],
    rope columns [K, ROPE_DIM]."""
    starts = rows.to(tl.int64)
    if latent_out_ptr is not None:
        if scale_out_ptr is not None:
            codes, scales = quantized_groups(latent, CAP, GROUP, BLOCK_L)
            groups = tl.arange(0, BLOCK_L // GROUP)
            inside = mask[:, None] & (groups < (RANK + GROUP - 1) // GROUP)[None, :]
            places = groups.to(tl.int64)[None, :] * scale_stride + starts[:, None]
            tl.store(scale_out_ptr + places, scales, mask=inside)
            latent = codes
        store_latents(latent_out_ptr, starts * OUT_STRIDE, mask, latent, OUT_STRIDE, BLOCK_L, 1)
    if rope_out_ptr is not None:
        DTYPE: tl.constexpr = rope_out_ptr.dtype.element_ty
        if ROPE_SCALE != 1.0:
            low = low.to(tl.float32) / ROPE_SCALE
            high = high.to(tl.float32) / ROPE_SCALE
        store_pairs(
            rope_out_ptr, starts * ROPE_DIM, mask,
            rounded(low.to(tl.float32), DTYPE), rounded(high.to(tl.float32), DTYPE),
            ROPE_DIM, PAIRS, NEIGHBOURS, 1,
        )  # fmt: skip
