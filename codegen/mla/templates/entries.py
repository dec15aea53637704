"""Loads, normalises, rotates, quantises and stores entries of an MLA latent cache.

In these functions, entries are three tiles: the latents [rows, L], and two tiles of rope columns
[rows, pairs]. One of the two has the first members of all rotated pairs, and the other has the
second members.
"""

import triton
import triton.language as tl

from tilewright.codegen.templates.fp8_groups import quantized_groups
from tilewright.codegen.templates.rounding import rounded


@triton.jit
def load_latents(
    pointer, offsets, mask, RANK: tl.constexpr, BLOCK_L: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """Loads latents [rows, BLOCK_L] at pointer + offsets. Columns from RANK on, and masked rows,
    are zeros."""
    columns = tl.arange(0, BLOCK_L)
    inside = mask[:, None] & (columns < RANK)[None, :]
    return tl.load(pointer + offsets[:, None] + (columns * STRIDE)[None, :], mask=inside, other=0.0)


@triton.jit
def store_latents(
    pointer, offsets, mask, values,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    # Each lane stores eight adjacent columns, even if they are codes of one byte, because it has
    # loaded eight. Otherwise, values would have to move between lanes.
    columns = tl.max_contiguous(tl.arange(0, BLOCK_L), 8)
    inside = mask[:, None] & (columns < RANK)[None, :]
    tl.store(pointer + offsets[:, None] + (columns * STRIDE)[None, :], values, mask=inside)


@triton.jit
def load_pairs(
    pointer, offsets, mask, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Loads the first and the second members of pairs [rows, PAIRS] at pointer + offsets. If
    NEIGHBOURS, the members of a pair are adjacent. If not, they are half the columns apart."""
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
def through_scalars(values, ROWS: tl.constexpr):
    """Returns integers [ROWS] unchanged, after a conversion of each to a scalar and back.

    If several layouts read a tensor (here those of latents, rope columns and tables), Triton
    computes the tensor once for each of them. It computes a scalar only once.
    """
    index = tl.arange(0, ROWS)
    result = tl.zeros_like(values)
    for row in tl.static_range(ROWS):
        one = tl.sum(tl.where(index == row, values, 0), axis=0)
        result = tl.where(index == row, one, result)
    return result


@triton.jit
def entry_places(
    page, slot, STRIDES: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Returns the offsets of entries in a cache with STRIDES (page, slot, column). UNIT divides the
    first two strides."""
    # Multiply by UNIT last: loads of 16 bytes need to know the divisibility of the offsets, which
    # `through_scalars` loses.
    units = page * (STRIDES[0] // UNIT) + slot * (STRIDES[1] // UNIT)
    return through_scalars(units, ROWS) * UNIT


@triton.jit
def load_entries(
    places, rope_places, mask, latent_cache_ptr, rope_cache_ptr,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Loads entries of a cache, or tokens that have the same layout. Returns (latents, first
    members of pairs, second members of pairs). STRIDE, ROPE_STRIDE: the strides between columns."""
    latent = load_latents(latent_cache_ptr, places, mask, RANK, BLOCK_L, STRIDE)
    low, high = load_pairs(
        rope_cache_ptr, rope_places, mask, ROPE_DIM, PAIRS, NEIGHBOURS, ROPE_STRIDE
    )
    return latent, low, high


@triton.jit
def store_entries(
    places, rope_places, mask, latent, low, high, latent_cache_ptr, rope_cache_ptr,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, LATENT_STRIDES: tl.constexpr, ROPE_STRIDES: tl.constexpr,
):  # fmt: skip
    """Stores entries to their places in the cache. The strides belong to (page, slot, column)."""
    store_latents(latent_cache_ptr, places, mask, latent, RANK, BLOCK_L, LATENT_STRIDES[2])
    store_pairs(
        rope_cache_ptr, rope_places, mask, low, high, ROPE_DIM, PAIRS, NEIGHBOURS, ROPE_STRIDES[2]
    )


@triton.jit
def table_columns(
    pointer, rows, mask, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, FULL_WIDTH: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Loads the values of a cos or sin table for the first and for the second members of pairs,
    each fp32 [rows, PAIRS].

    If FULL_WIDTH, the table has ROPE_DIM columns, and each member uses the column of the place that
    it has after the rotation.
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
def pair_angles(
    cos_ptr, sin_ptr, rows, known,
    ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr, ROPE_STYLE: tl.constexpr,
    FULL_WIDTH: tl.constexpr, COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr,
):  # fmt: skip
    """Returns the cosines of the first and of the second members of pairs, then their sines, each
    fp32 [rows, PAIRS]. Rows that `known` masks out are zeros.

    If there is no sin_ptr, the sine of a pair follows its cosine in one table, which is read once.
    """
    TOGETHER: tl.constexpr = ROPE_STYLE == "interleaved"
    if sin_ptr is None:
        low_cos, low_sin = load_pairs(
            cos_ptr, rows * COS_STRIDES[0], known, ROPE_DIM, PAIRS, True, 1
        )
        low_cos = low_cos.to(tl.float32)
        low_sin = low_sin.to(tl.float32)
        high_cos = low_cos
        high_sin = low_sin
    else:
        low_cos, high_cos = table_columns(
            cos_ptr, rows, known, ROPE_DIM, PAIRS, TOGETHER, FULL_WIDTH, COS_STRIDES
        )
        low_sin, high_sin = table_columns(
            sin_ptr, rows, known, ROPE_DIM, PAIRS, TOGETHER, FULL_WIDTH, SIN_STRIDES
        )
    return low_cos, high_cos, low_sin, high_sin


@triton.jit
def rotated_by(low, high, low_cos, high_cos, low_sin, high_sin):
    """Rotates the members of pairs, all in fp32."""
    # The FMAs are explicit. Without them, the compiler could fuse the first product in one copy of
    # this function and the second product in another copy, and the two copies would round
    # differently.
    turned_low = tl.fma(low, low_cos, -(high * low_sin))
    return turned_low, tl.fma(high, high_cos, low * high_sin)


@triton.jit
def rotated_pairs(
    low, high, cos_ptr, sin_ptr, rows, known,
    ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr, ROPE_STYLE: tl.constexpr,
    FULL_WIDTH: tl.constexpr, COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr,
):  # fmt: skip
    """Rotates the members of pairs, fp32 [rows, PAIRS], by rows of the tables. Rows that `known`
    masks out become zeros."""
    low_cos, high_cos, low_sin, high_sin = pair_angles(
        cos_ptr, sin_ptr, rows, known, ROPE_DIM, PAIRS, ROPE_STYLE, FULL_WIDTH, COS_STRIDES,
        SIN_STRIDES,
    )  # fmt: skip
    return rotated_by(low, high, low_cos, high_cos, low_sin, high_sin)


@triton.jit
def load_tokens(
    tokens, mask, latent_ptr, k_rope_ptr,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, ROPE_STYLE: tl.constexpr,
):  # fmt: skip
    """Loads new tokens, before norm and rotation. Returns (latents, first members of rope pairs,
    second members of rope pairs)."""
    tokens = tokens.to(tl.int64)
    latent = load_latents(latent_ptr, tokens * LATENT_STRIDE, mask, RANK, BLOCK_L, 1)
    low, high = load_pairs(
        k_rope_ptr, tokens * ROPE_STRIDE, mask, ROPE_DIM, PAIRS,
        ROPE_STYLE == "interleaved" or ROPE_STYLE == "interleaved_to_half", 1,
    )  # fmt: skip
    return latent, low, high


@triton.jit
def normed_and_rotated(
    latent, low, high, rows, known, norm_ptr, cos_ptr, sin_ptr,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NORM_EPS: tl.constexpr, ROPE_STYLE: tl.constexpr, FULL_WIDTH: tl.constexpr,
    COS_STRIDES: tl.constexpr, SIN_STRIDES: tl.constexpr,
):  # fmt: skip
    """Returns the entries of new tokens. They are normalised and rotated in fp32, and rounded once
    to their dtype.

    rows: the row of the cos and sin tables for each token. The rope columns of tokens that are not
    `known` become zeros.
    """
    DTYPE: tl.constexpr = low.dtype
    if ROPE_STYLE != "none":
        low, high = rotated_pairs(
            low.to(tl.float32), high.to(tl.float32), cos_ptr, sin_ptr, rows, known,
            ROPE_DIM, PAIRS, ROPE_STYLE, FULL_WIDTH, COS_STRIDES, SIN_STRIDES,
        )  # fmt: skip
        low = low.to(DTYPE)
        high = high.to(DTYPE)
    if norm_ptr is not None:
        columns = tl.arange(0, BLOCK_L)
        weight = tl.load(norm_ptr + columns, mask=columns < RANK, other=0.0).to(tl.float32)
        wide = latent.to(tl.float32)
        mean = tl.sum(wide * wide, axis=1) / RANK
        wide = wide * tl.rsqrt(mean + NORM_EPS)[:, None]
        latent = (wide * weight[None, :]).to(DTYPE)
    return latent, low, high


@triton.jit
def write_rows(
    rows, mask, latent, low, high, latent_out_ptr, rope_out_ptr, scale_out_ptr, scale_stride,
    RANK: tl.constexpr, BLOCK_L: tl.constexpr, ROPE_DIM: tl.constexpr, PAIRS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, OUT_STRIDE: tl.constexpr,
    CAP: tl.constexpr, GROUP: tl.constexpr, ROPE_SCALE: tl.constexpr,
):  # fmt: skip
    """Stores entries to their rows of the buffers. The buffers hold latents or codes [K,
    OUT_STRIDE], scales [groups, K], and rope columns [K, ROPE_DIM]."""
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
