"""From the arguments of MLA ops to the static problems of their kernels; metadata and addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.mla.key_specs import (
    LATENT_POINTERS,
    LatentProblem,
    UpProblem,
)
from tilewright.ops.cache.addressing import address_tensors
from tilewright.ops.mla.attention_operands import paired
from tilewright.ops.mla.checks import FP8, widths
from tilewright.ops.mla.keys import sequences
from tilewright.ops.mla.latents import cache_views
from tilewright.ops.qkv.operands import unaligned
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.recording import noted_scratch


@dataclass(frozen=True)
class Chunk:
    """The keys that one pass attends to: rows of a buffer, sequence after sequence.

    offsets [B + 1] (None: equal runs), starts [B] the position of each sequence's first row (None:
    0), rows of all. first: this call's tokens are written before it.
    """

    rows: int
    offsets: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    first: bool = True


@dataclass(frozen=True)
class Buffers:
    """What keys are read from: latents (values or codes) [K, >= L], rope columns [K, R], and the
    codes' scales [groups, >= K]; those that the kernel of latents has to fill are `made`."""

    latent: torch.Tensor
    k_rope: torch.Tensor
    scale: torch.Tensor | None = None
    scale_strides: tuple[int, int] = (0, 1)
    made: tuple[str, ...] = ()


def rotates_keys(a: Any) -> bool:
    return a.rope_style != "none" and "k" in getattr(a, "rope_on", "k")


def dense_views(a: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(latents [B * S, L], rope columns [B * S, R]) where pages follow each other like slots."""
    made = []
    for view in cache_views(a):
        pages, size, width = view.shape
        page, slot, column = view.stride()
        if (pages > 1 and page != size * slot) or column != 1:
            return None
        made.append(view.as_strided((pages * size, width), (slot, 1), view.storage_offset()))
    return made[0], made[1]


def key_buffers(a: Any, chunk: Chunk) -> Buffers:
    """Where a chunk's keys are read from; new buffers, not filled yet, where they must be made."""
    fp8_rope = a.attention_dtype == FP8
    if a.latent_scale is not None:
        strides = (a.latent_scale.stride(1), a.latent_scale.stride(0))
        ready: Buffers | None = Buffers(a.latent, a.k_rope, a.latent_scale, strides)
    elif a.keys == "given":
        ready = Buffers(a.latent, a.k_rope)
    else:
        views = dense_views(a) if a.keys == "pages" else None
        ready = None if views is None else Buffers(*views)
    new_latent = a.quantize_latent or ready is None
    new_rope = fp8_rope or ready is None
    if a.keys == "given":
        new_latent = new_latent or a.norm_weight is not None
        new_rope = new_rope or rotates_keys(a)
    if ready is not None and not _reachable(ready.latent):
        new_latent = True
    return _with_new(a, chunk.rows, ready, new_latent, new_rope)


def _reachable(rows: torch.Tensor) -> bool:
    """Whether TMA can read the rows as they lie."""
    return rows.stride(0) * rows.element_size() % 16 == 0 and rows.data_ptr() % 16 == 0


def _with_new(
    a: Any, rows: int, ready: Buffers | None, new_latent: bool, new_rope: bool
) -> Buffers:
    rank, rope_dim = a.kv_b_weight.shape[1], widths(a)[1]
    latent, scale, strides = (None, None, (0, 1))
    if ready is not None:
        latent, scale, strides = ready.latent, ready.scale, ready.scale_strides
    if new_latent:
        dtype = FP8 if a.quantize_latent else a.q.dtype
        latent = noted_scratch(a.q.new_empty((rows, -(-rank // 16) * 16), dtype=dtype))
        if a.quantize_latent:
            padded = -(-max(rows, 1) // 16) * 16
            groups = -(-rank // a.scale_block[1])
            scale = noted_scratch(a.q.new_empty((groups, padded), dtype=torch.float32))
            strides = (padded, 1)
    rope_dtype = FP8 if a.attention_dtype == FP8 else a.q.dtype
    if new_rope:
        k_rope = noted_scratch(a.q.new_empty((rows, rope_dim), dtype=rope_dtype))
    else:
        assert ready is not None
        k_rope = ready.k_rope
    assert latent is not None
    made = ("latent",) * new_latent + ("k_rope",) * new_rope
    return Buffers(latent, k_rope, scale, strides, made)


def latent_values(
    a: Any, chunk: Chunk | None, buffers: Buffers | None, *, store: bool, gather: bool, fused: bool
) -> dict[str, Any]:
    """Tensors and counts of a launch of `mla_latents`, by parameter name."""
    keep = chunk is not None and not gather
    new = store or keep or fused
    num_tokens = a.latent.shape[0] if new else 0
    values: dict[str, Any] = dict.fromkeys(LATENT_POINTERS)
    if new:
        values |= {"latent_ptr": a.latent, "k_rope_ptr": a.k_rope, "norm_ptr": a.norm_weight}
        if rotates_keys(a):
            together = a.cos is not None and paired(a.cos, a.sin, a.k_rope.shape[1])
            values |= {"cos_ptr": a.cos, "sin_ptr": None if together else a.sin}
        by_position = a.rope_by_position and rotates_keys(a)
        if fused or by_position:
            values |= {"row_offsets_ptr": a.row_offsets, "lengths_ptr": a.cache_lengths}
        if by_position:
            values["token_positions_ptr"] = a.positions
    pages = 1
    if store or gather:
        latent, rope = cache_views(a)
        values |= {"latent_cache_ptr": latent, "rope_cache_ptr": rope}
        pages = latent.shape[0]
    counts = dict.fromkeys(("sequence_tokens", "table_rows", "table_width", "table_stride"), 1)
    if store:
        slots, owners, places = address_tensors(a)
        values |= {"slots_ptr": slots, "sequences_ptr": owners, "positions_ptr": places}
        counts["sequence_tokens"] = slots.shape[0]
        if owners is not None:
            counts |= {"table_rows": slots.shape[0], "table_width": slots.shape[1]}
            counts["table_stride"] = slots.stride(0)
    counts |= {"lookup_columns": 1, "lookup_stride": 1}
    if gather:
        assert chunk is not None
        values |= {"key_offsets_ptr": chunk.offsets, "key_starts_ptr": chunk.starts}
        if a.keys == "table":
            values["lookup_ptr"] = a.lookup_table
            counts["lookup_columns"] = a.lookup_table.shape[1]
            counts["lookup_stride"] = a.lookup_table.stride(0)
        elif a.keys == "slots":
            values["key_slots_ptr"] = a.key_slots
    if buffers is not None:
        if "latent" in buffers.made:
            values |= {"latent_out_ptr": buffers.latent, "scale_out_ptr": buffers.scale}
        if "k_rope" in buffers.made:
            values["rope_out_ptr"] = buffers.k_rope
    batch = _batch(a)
    rows = 0 if chunk is None else chunk.rows
    run = a.positions.shape[0] if a.positions is not None else num_tokens // max(batch, 1)
    return {
        **values,
        **counts,
        "num_tokens": num_tokens,
        "num_rows": rows,
        "rope_rows": 1 if a.cos is None else a.cos.shape[0],
        "token_run": max(run, 1),
        "key_run": max(rows // max(batch, 1), 1),
        "num_pages": pages,
        "num_sequences": batch,
        "scale_stride": 16 if buffers is None else buffers.scale_strides[0],
    }


def _batch(a: Any) -> int:
    if hasattr(a, "num_sequences"):
        return sequences(a)
    return 1 if a.row_offsets is None else a.row_offsets.shape[0] - 1


def latent_problem(
    a: Any,
    values: dict[str, Any],
    buffers: Buffers | None,
    *,
    store: bool,
    gather: bool,
    fused: bool,
) -> LatentProblem:
    """The static part of a launch whose values are those of `latent_values`."""
    tensors = {name: values[name] for name in LATENT_POINTERS}
    latent, k_rope, cos = tensors["latent_ptr"], tensors["k_rope_ptr"], tensors["cos_ptr"]
    rank, rope_dim = _widths_of(a)
    styled = a.rope_style if rotates_keys(a) else "none"
    made = () if buffers is None else buffers.made
    quantized = "latent" in made and buffers is not None and buffers.scale is not None
    cache = tensors["latent_cache_ptr"]
    rope_cache = tensors["rope_cache_ptr"]
    return LatentProblem(
        types=tuple(
            (name, None if t is None else TRITON_TYPES[t.dtype]) for name, t in tensors.items()
        ),
        rank=rank,
        rope_dim=rope_dim,
        latent_stride=0 if latent is None else latent.stride(0),
        rope_stride=0 if k_rope is None else k_rope.stride(0),
        norm_eps=a.norm_eps,
        rope_style=styled if cos is not None else "none",
        full_width=cos is not None and cos.shape[1] == rope_dim,
        cos_strides=(0, 0) if cos is None else cos.stride(),
        sin_strides=(0, 0) if cos is None else a.sin.stride(),
        by_position=cos is not None and a.rope_by_position,
        neighbours=styled == "interleaved",
        page_size=1 if cache is None else cache.shape[1],
        latent_strides=(0, 0, 0) if cache is None else cache.stride(),
        rope_strides=(0, 0, 0) if rope_cache is None else rope_cache.stride(),
        addressing=a.slots if store else "none",
        wrap_negative=a.indexing == "torch",
        address_strides=_address_strides(a) if store else (0, 0, 0),
        search_steps=max(values["num_sequences"], 1).bit_length(),
        batch_strides=_strides(tensors, "row_offsets_ptr", "lengths_ptr", "token_positions_ptr"),
        keys=a.keys if gather else "none",
        lookup_stride=0 if tensors["lookup_ptr"] is None else tensors["lookup_ptr"].stride(1),
        key_strides=_strides(tensors, "key_offsets_ptr", "key_starts_ptr", "key_slots_ptr"),
        store=store,
        keep=bool(made) and not gather,
        gather=gather,
        fused=fused,
        out_stride=buffers.latent.stride(0) if buffers is not None and "latent" in made else 0,
        group=a.scale_block[1] if quantized else 0,
        cap=a.latent_scale_cap if quantized else 0.0,
        rope_scale=a.k_scale if "k_rope" in made and a.attention_dtype == FP8 else 1.0,
        unaligned=unaligned(tensors),
    )


def _widths_of(a: Any) -> tuple[int, int]:
    if hasattr(a, "kv_b_weight"):
        return a.kv_b_weight.shape[1], widths(a)[1]
    return a.latent.shape[1], a.k_rope.shape[1]


def _address_strides(a: Any) -> tuple[int, int, int]:
    slots, owners, places = address_tensors(a)
    if owners is None or places is None:
        return slots.stride(0), 0, 0
    return slots.stride(1), owners.stride(0), places.stride(0)


def _strides(tensors: dict[str, Any], *names: str) -> tuple[int, int, int]:
    steps = [0 if tensors[name] is None else tensors[name].stride(0) for name in names]
    return steps[0], steps[1], steps[2]


def up_problem(
    a: Any, buffers: Buffers, *, limited: bool = False, joined: bool = False
) -> UpProblem:
    """The up-projection of a chunk's keys. Of values (and codes made numbers) the weight and the
    latents are of q's dtype; the fp8 core reads keys and values of 8 bits, values transposed.
    joined: a head's row has the rope columns too."""
    nope, rope_dim, v_dim = widths(a)
    heads = a.q.shape[1]
    coded = buffers.scale is not None
    narrow = a.attention_dtype == FP8
    weight, latent = a.kv_b_weight, buffers.latent
    numbers = weight.dtype == FP8 and not coded
    row = nope if narrow else nope + v_dim + rope_dim * joined
    dtype = a.q.dtype
    return UpProblem(
        latent_type=TRITON_TYPES[latent.dtype],
        weight_type=TRITON_TYPES[dtype if numbers else weight.dtype],
        out_type=TRITON_TYPES[FP8 if narrow else dtype],
        rank=weight.shape[1],
        latent_stride=latent.stride(0),
        weight_stride=weight.shape[1] if numbers else weight.stride(0),
        num_heads=heads,
        nope=nope,
        v_dim=v_dim,
        scale_block=(a.scale_block[0], a.scale_block[1]) if coded else None,
        scale_types=(
            TRITON_TYPES[buffers.scale.dtype] if buffers.scale is not None else "fp32",
            TRITON_TYPES[a.kv_b_scale.dtype] if coded else "fp32",
        ),
        latent_scale_stride=buffers.scale_strides[1],
        weight_scale_strides=a.kv_b_scale.stride() if coded else (0, 0),
        joint=not narrow,
        k_strides=(heads * row, row),
        v_row_stride=1 if narrow else 0,
        k_scale=a.k_scale if narrow else 1.0,
        v_scale=a.v_scale if narrow else 1.0,
        limited=limited,
        unaligned=unaligned({"latent_ptr": latent, "weight_ptr": weight}),
    )


def numbers_problem(a: Any) -> UpProblem:
    """Making numbers of the weight's codes."""
    nope, _, v_dim = widths(a)
    return UpProblem(
        latent_type="fp8e4nv",
        weight_type="fp8e4nv",
        out_type=TRITON_TYPES[a.q.dtype],
        rank=a.kv_b_weight.shape[1],
        latent_stride=16,
        weight_stride=a.kv_b_weight.stride(0),
        num_heads=a.q.shape[1],
        nope=nope,
        v_dim=v_dim,
        scale_block=(a.scale_block[0], a.scale_block[1]),
        scale_types=("fp32", TRITON_TYPES[a.kv_b_scale.dtype]),
        weight_scale_strides=a.kv_b_scale.stride(),
        unaligned=unaligned({"weight_ptr": a.kv_b_weight}),
    )
