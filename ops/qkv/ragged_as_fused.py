"""Converts a call of `fused_qkv_matmul_kv_cache_paged_ragged` to a call of `fused_qkv_paged`."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import Any, TypeAlias

import torch

from tilewright.ops.formats.gptq_buffer import SYMMETRIC_ZERO, sections
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.qkv.arguments import FusedQkvArguments, RaggedQkvArguments
from tilewright.ops.qkv.ragged_checks import kv_rows

#: The first row and the end of the rows of q, k and v in the weight.
Rows: TypeAlias = dict[str, tuple[int, int]]


def as_fused_qkv(a: RaggedQkvArguments) -> FusedQkvArguments:
    """Returns the arguments of the `fused_qkv_paged` call that is equivalent to a ragged call."""
    head_dim, rows = _head_dim(a), split_rows(a)
    windows = [_window(a, part, head_dim) for part in range(a.blocks.shape[1])]
    return FusedQkvArguments(
        x=a.hidden_state,
        k_cache=a.blocks,
        v_cache=None,
        slot_mapping=None,
        k_window=windows[0],
        v_window=[] if len(windows) == 1 else windows[1],
        slots="ragged",
        lookup_table=a.lookup_table,
        row_offsets=a.input_row_offsets,
        cache_lengths=a.cache_lengths,
        x_scale=_as_matrix(a.input_scale),
        out_dtype=a.out_dtype,
        k_cache_scale=a.k_cache_scale,
        v_cache_scale=a.v_cache_scale,
        cache_scale_multiplies=a.cache_scale_multiplies,
        static_tokens=a.static_tokens,
        tune=a.tune,
        **{"v_weight": None, **_weights(a, rows, head_dim)},
        **_heads("bias", a.bias, rows, head_dim),
    )


def split_rows(a: RaggedQkvArguments) -> Rows:
    """Returns the first row and the end of the rows of q, k and v in the weight. For MLA, there is
    no v."""
    total = a.weight.shape[1] if a.group_size else a.weight.shape[0]
    size, kinds = kv_rows(a.blocks), a.blocks.shape[1]
    ends = [total - size * left for left in range(kinds, -1, -1)]
    return dict(zip("qkv", pairwise([0, *ends]), strict=False))


def _head_dim(a: RaggedQkvArguments) -> int:
    """Returns the head_dim of the equivalent call. This is the head_dim of the cache, if it divides
    the number of q's columns. Otherwise (with MLA), it is a number that divides both. Without rope
    and norm, any such number is correct, and kernels are faster with powers of two."""
    head_dim, q_dim = a.blocks.shape[5], split_rows(a)["q"][1]
    if q_dim % head_dim == 0:
        return head_dim
    common = gcd(head_dim, q_dim)
    power = common & -common
    return power if power >= 16 else common


def _window(a: RaggedQkvArguments, part: int, head_dim: int) -> list[Any]:
    view = a.blocks[:, part, a.layer_idx]
    if a.blocks.shape[1] == 1:
        view = view[:, :, :1]
    if head_dim != a.blocks.shape[5]:
        view = view.squeeze(2).unflatten(-1, (-1, head_dim))
    return CacheWindow.of(view, a.blocks).to_ints()


def _heads(what: str, whole: torch.Tensor | None, rows: Rows, head_dim: int) -> dict[str, Any]:
    """Returns the rows of q, k and v in a tensor, each [H, D, ...], by argument name."""
    parts = _parts(what, whole, {letter: slice(*ends) for letter, ends in rows.items()})
    return {name: part.unflatten(0, (-1, head_dim)) for name, part in parts.items()}


def _parts(what: str, whole: torch.Tensor | None, slices: dict[str, slice]) -> dict[str, Any]:
    if whole is None:
        return {}
    return {f"{letter}_{what}": whole[own] for letter, own in slices.items()}


def _weights(a: RaggedQkvArguments, rows: Rows, head_dim: int) -> dict[str, Any]:
    if a.group_size:
        return _gptq(a, rows, head_dim)
    weights = _heads("weight", a.weight, rows, head_dim)
    if a.weight_scale is None:
        return weights
    scale, block = _scale_blocks(a, rows)
    own = {x: slice(first // block[0], -(-end // block[0])) for x, (first, end) in rows.items()}
    shared = dict.fromkeys(rows, slice(None))
    scales = _parts("scale", scale, shared if scale.shape[0] == 1 else own)
    return {**weights, **scales, "weight_format": "fp8", "scale_block": block}


def _scale_blocks(a: RaggedQkvArguments, rows: Rows) -> tuple[torch.Tensor, list[int]]:
    """Returns the scales of the weight and the size of their blocks. The size is chosen so that no
    block has rows of two projections."""
    scale = _as_matrix(a.weight_scale)
    assert scale is not None
    total, hidden = a.weight.shape
    if scale.numel() == 1:
        return scale, [total, hidden]
    if scale.shape[0] == total and scale.shape[1] == 1:
        return scale, [1, hidden]
    block = gcd(128, *(first for first, _ in rows.values()))
    if block < 128:
        scale = scale.repeat_interleave(128 // block, dim=0)[: -(-total // block)]
    return scale, [block, 128]


def _gptq(a: RaggedQkvArguments, rows: Rows, head_dim: int) -> dict[str, Any]:
    parts = sections(a.weight, a.hidden_state.shape[1], a.group_size, a.has_zp)
    # A word of zeros has the zeros of eight rows.
    words = {letter: slice(first // 8, end // 8) for letter, (first, end) in rows.items()}
    return {
        "weight_format": "int4_k",
        "scale_block": [1, a.group_size],
        "zero_point": 0 if a.has_zp else SYMMETRIC_ZERO,
        **_heads("weight", parts.words, rows, head_dim),
        **_parts("scale", parts.scales, {x: slice(*ends) for x, ends in rows.items()}),
        **_parts("zero", parts.zeros, words),
    }


def _as_matrix(scale: torch.Tensor | None) -> torch.Tensor | None:
    return scale.view(1, 1) if scale is not None and scale.dim() < 2 else scale
