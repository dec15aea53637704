"""Converts the arguments of MLA ops to the static problems of their kernels. This needs only
metadata and addresses."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.mla.key_kernels import LATENTS, LatentProblem, UpProblem
from tilewright.codegen.mla.query_kernels import Rotation
from tilewright.codegen.operand import Operand
from tilewright.ops.attention.positions import sequences
from tilewright.ops.cache.addressing import address_values
from tilewright.ops.checks import given
from tilewright.ops.mla.arguments import (
    FP8,
    LatentArguments,
    MlaPrefillArguments,
    rotates_keys,
    widths,
)
from tilewright.ops.mla.attention.operands import rotation_of
from tilewright.ops.mla.keys import cache_views
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.operands import operand, tma_reaches
from tilewright.ops.runtime.program import Buffer


@dataclass(frozen=True)
class Chunk:
    """The keys that one pass attends to. They are rows of a buffer, one sequence after another.

    Attributes:
        rows: The number of rows of all sequences.
        offsets: [B + 1], the rows of each sequence. If it is None, all sequences have the same
            number of rows.
        starts: [B], the position of the first row of each sequence. If it is None, the position is
            0.
        first: Whether the tokens of this call are written before this chunk.
    """

    rows: int
    offsets: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    first: bool = True


@dataclass(frozen=True)
class Buffers:
    """The tensors that keys are read from.

    Attributes:
        latent: The latents, values or codes, [K, >= L].
        k_rope: The rope columns [K, R].
        scale: The scales of codes [groups, >= K].
        scale_strides: The strides of the scales.
        made: The names of the tensors that the kernel of latents has to fill.
    """

    latent: torch.Tensor
    k_rope: torch.Tensor
    scale: torch.Tensor | None = None
    scale_strides: tuple[int, int] = (0, 1)
    made: tuple[str, ...] = ()


def dense_views(a: MlaPrefillArguments) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns (latents [B * S, L], rope columns [B * S, R]) as views of the cache, if all its slots
    are equally far apart and columns are contiguous; else None."""
    made = []
    for view in cache_views(a):
        pages, size, width = view.shape
        page, slot, column = view.stride()
        if (pages > 1 and page != size * slot) or column != 1:
            return None
        made.append(view.as_strided((pages * size, width), (slot, 1), view.storage_offset()))
    return made[0], made[1]


def key_buffers(a: MlaPrefillArguments, chunk: Chunk) -> Generator[Buffer, torch.Tensor, Buffers]:
    """Returns the buffers of a chunk's keys. Allocates the buffers that have to be filled."""
    fp8_rope = a.attention_dtype == FP8
    if a.latent_scale is not None:
        strides = (a.latent_scale.stride(1), a.latent_scale.stride(0))
        latents = given(a.latent), given(a.k_rope)
        ready: Buffers | None = Buffers(*latents, a.latent_scale, strides)
    elif a.keys == "given":
        ready = Buffers(given(a.latent), given(a.k_rope))
    else:
        views = dense_views(a) if a.keys == "pages" else None
        ready = None if views is None else Buffers(*views)
    new_latent = a.quantize_latent or ready is None
    new_rope = fp8_rope or ready is None
    if a.keys == "given":
        new_latent = new_latent or a.norm_weight is not None
        new_rope = new_rope or rotates_keys(a)
    if ready is not None and not tma_reaches(ready.latent, ready.latent.stride(0)):
        new_latent = True
    return (yield from _with_new(a, chunk.rows, ready, new_latent, new_rope))


def _with_new(
    a: MlaPrefillArguments, rows: int, ready: Buffers | None, new_latent: bool, new_rope: bool
) -> Generator[Buffer, torch.Tensor, Buffers]:
    rank, rope_dim = a.entry
    found: dict[str, Any] = {} if ready is None else dict(vars(ready))
    found["made"] = ("latent",) * new_latent + ("k_rope",) * new_rope
    if new_latent:
        dtype = FP8 if a.quantize_latent else a.q.dtype
        found["latent"] = yield Buffer((rows, -(-rank // 16) * 16), dtype)
    if new_latent and a.quantize_latent:
        padded = -(-max(rows, 1) // 16) * 16
        found["scale_strides"] = (padded, 1)
        found["scale"] = yield Buffer((-(-rank // a.scale_block[1]), padded), torch.float32)
    if new_rope:
        dtype = FP8 if a.attention_dtype == FP8 else a.q.dtype
        found["k_rope"] = yield Buffer((rows, rope_dim), dtype)
    return Buffers(**found)


@dataclass(frozen=True)
class LatentCall:
    """A launch of `mla_latents`: the problem, the rotation of new tokens, and the values, except
    the values that depend on the tile sizes."""

    problem: LatentProblem
    rotation: Rotation
    values: dict[str, Any]


def latent_call(
    a: LatentArguments,
    chunk: Chunk | None = None,
    buffers: Buffers | None = None,
    *,
    store: bool = False,
    gather: bool = False,
) -> LatentCall:
    """Returns the call that writes the new tokens, or computes the keys of a chunk, or does both.

    chunk: the keys that the call computes; None if it computes no keys. store: whether the call
    writes the new tokens to the cache. gather: whether the call reads the keys of `chunk` from the
    cache. If not, it computes them from the new tokens.
    """
    keep = chunk is not None and not gather
    tensors: dict[str, torch.Tensor | None] = dict.fromkeys(
        pointer.tensor for pointer in LATENTS.pointers
    )
    tables = None
    counts = {"num_pages": 1, "sequence_tokens": 1, "lookup_columns": 1, "lookup_stride": 1}
    num_tokens = 0
    if store or keep:
        num_tokens = given(a.latent).shape[0]
        tensors |= {"latent": a.latent, "k_rope": a.k_rope, "norm": a.norm_weight}
        if rotates_keys(a):
            tables = a.rope
        by_position = tables is not None and tables.rope_by_position
        if (store and gather) or by_position:
            tensors |= {"row_offsets": a.row_offsets, "lengths": a.cache_lengths}
        if by_position:
            tensors["token_positions"] = a.positions
    if store or gather:
        latent, rope = cache_views(a)
        tensors |= {"latent_cache": latent, "rope_cache": rope}
        counts["num_pages"] = latent.shape[0]
    if gather:
        assert chunk is not None
        tensors |= {"key_offsets": chunk.offsets, "key_starts": chunk.starts}
        assert isinstance(a, MlaPrefillArguments)
        if a.keys == "table":
            table = tensors["lookup"] = given(a.lookup_table)
            counts["lookup_columns"] = table.shape[1]
            counts["lookup_stride"] = table.stride(0)
        elif a.keys == "slots":
            tensors["key_slots"] = a.key_slots
    if buffers is not None:
        if "latent" in buffers.made:
            tensors |= {"latent_out": buffers.latent, "scale_out": buffers.scale}
        if "k_rope" in buffers.made:
            tensors["rope_out"] = buffers.k_rope
    batch, rows = sequences(a), 0 if chunk is None else chunk.rows
    run = a.positions.shape[0] if a.positions is not None else num_tokens // max(batch, 1)
    rotation, rotated = rotation_of(tables, a.entry[1])
    values = {
        **tensors,
        **rotated,
        **counts,
        "num_tokens": num_tokens,
        "num_rows": rows,
        "rope_rows": 1 if a.cos is None else a.cos.shape[0],
        "token_run": max(run, 1),
        "key_run": max(rows // max(batch, 1), 1),
        "num_sequences": batch,
        "scale_stride": 16 if buffers is None else buffers.scale_strides[0],
    }
    if store:  # keys and new tokens are addressed by the same lookup_table
        values |= address_values(a)
    problem = _latent_problem(a, tensors, rotation, batch, store=store, gather=gather)
    return LatentCall(problem, rotation, values)


def _latent_problem(
    a: LatentArguments,
    tensors: dict[str, torch.Tensor | None],
    rotation: Rotation,
    batch: int,
    *,
    store: bool,
    gather: bool,
) -> LatentProblem:
    rank, rope_dim = a.entry
    latent, rope = tensors["latent_cache"], tensors["rope_cache"]
    rows, turned = tensors["latent_out"], tensors["rope_out"]
    neighbours = rotates_keys(a) and a.rope_style == "interleaved"
    group, cap, rope_scale = 1, 0.0, 1.0
    if tensors["scale_out"] is not None:
        assert isinstance(a, MlaPrefillArguments)
        group, cap = a.scale_block[1], a.latent_scale_cap
    if turned is not None and a.attention_dtype == FP8:
        rope_scale = a.k_scale
    return LatentProblem(
        rank=rank,
        rope_dim=rope_dim,
        row=0 if rows is None else rows.stride(0),
        norm_eps=a.norm_eps,
        neighbours=neighbours,
        page_size=1 if latent is None else latent.shape[1],
        addressing=a.slots if store else "none",
        wrap_negative=store and a.indexing == "torch",
        search_steps=max(batch, 1).bit_length(),
        keys=a.keys if gather else "none",
        keep=not gather and (rows is not None or turned is not None),
        group=group,
        cap=cap,
        rope_scale=rope_scale,
        units=(_unit(latent), _unit(rope)),
        one_source=_one_source(tensors, rotation, neighbours),
    )


def _unit(cache: torch.Tensor | None) -> int:
    """Returns the largest number up to 16 that divides the strides of pages and of slots."""
    return 16 if cache is None else math.gcd(16, *cache.stride()[:2])


def _one_source(
    tensors: dict[str, torch.Tensor | None], rotation: Rotation, neighbours: bool
) -> bool:
    """Whether the kernel can load the rows of new tokens and the rows of the cache with the same
    code."""
    latent, k_rope = tensors["latent"], tensors["k_rope"]
    latents, ropes = tensors["latent_cache"], tensors["rope_cache"]
    if latent is None or k_rope is None or latents is None or ropes is None:
        return False
    return (
        latent.dtype == latents.dtype
        and k_rope.dtype == ropes.dtype
        and latents.stride(2) == ropes.stride(2) == 1
        and neighbours == (rotation.rope_style in ("interleaved", "interleaved_to_half"))
    )


def up_problem(
    a: MlaPrefillArguments, buffers: Buffers, *, limited: bool = False, joined: bool = False
) -> UpProblem:
    """Returns the problem of the up-projection of a chunk's keys. Weight and latents have q's
    dtype, unless both are quantised. For the fp8 attention kernel, keys and values are rounded to 8
    bits, and values are transposed. joined: whether the row of a head includes rope columns."""
    nope, rope_dim, v_dim = widths(a)
    heads, weight, rank = a.q.shape[1], a.kv_b_weight, a.kv_b_weight.shape[1]
    coded, narrow = buffers.scale is not None, a.attention_dtype == FP8
    row = nope if narrow else nope + v_dim + rope_dim * joined
    value, out = TRITON_TYPES[a.q.dtype], TRITON_TYPES[FP8 if narrow else a.q.dtype]
    return UpProblem(
        num_heads=heads,
        nope=nope,
        v_dim=v_dim,
        rank=rank,
        latent=operand(buffers.latent, buffers.latent.stride(0)),
        weight=Operand(value, (rank,)) if dequantizes(a) else operand(weight, weight.stride(0)),
        k=Operand(out, (heads * row, row)),
        joint=not narrow,
        scale_block=(a.scale_block[0], a.scale_block[1]) if coded else None,
        k_scale=a.k_scale if narrow else 1.0,
        v_scale=a.v_scale if narrow else 1.0,
        limited=limited,
    )


def dequantizes(a: MlaPrefillArguments) -> bool:
    """Whether the weight is quantised and the latents are not. In this case, the weight is
    dequantised first."""
    coded = a.quantize_latent or a.latent_scale is not None
    return a.kv_b_weight.dtype == FP8 and not coded
