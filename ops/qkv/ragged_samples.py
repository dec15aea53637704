"""Sample inputs of `fused_qkv_matmul_kv_cache_paged_ragged`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.formats.gptq_buffer import pack_buffer
from tilewright.ops.sampling import Sampler, sample_places

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class RaggedCase:
    """One case of `fused_qkv_matmul_kv_cache_paged_ragged`. The fields that are not listed here are
    sizes, or have the names of the op's arguments.

    Attributes:
        q_dim: The number of q's columns; 0 for num_heads * head_dim.
        mla: Whether there is only K, with one head.
        scale: Which part of an fp8 weight shares a scale: "tensor", "channel" or "block"; "none"
            for other weights.
        input_scale: Which part of the hidden states shares a scale: "tensor", "token" or "block";
            "none" if the hidden states have no codes.
    """

    name: str
    new_tokens: tuple[int, ...] = (3, 0, 9, 1)
    cached_tokens: tuple[int, ...] = (6, 3, 0, 8)
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    q_dim: int = 0
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    cache_scale: tuple[int, ...] | None = None
    num_pages: int = 8
    page_size: int = 8
    index_dtype: torch.dtype = torch.uint32
    mla: bool = False
    bias: bool = False
    group_size: int = 0
    has_zp: bool = False
    scale: str = "none"
    input_scale: str = "none"


RAGGED_CASES = (
    RaggedCase("plain"),
    RaggedCase("bias", bias=True, dtype=torch.float16, index_dtype=torch.int32),
    RaggedCase("one_sequence", new_tokens=(17,), cached_tokens=(0,), page_size=16),
    RaggedCase("no_new_tokens", new_tokens=(0, 0), cached_tokens=(3, 0)),
    RaggedCase("no_sequences", new_tokens=(), cached_tokens=()),
    RaggedCase("double", dtype=torch.float64, bias=True),
    RaggedCase("mla", mla=True, head_dim=24, q_dim=64),
    RaggedCase("mla_whole_heads", mla=True, head_dim=32, bias=True, cache_dtype=FP8),
    RaggedCase("gptq", group_size=32, dtype=torch.float16, bias=True),
    RaggedCase("gptq_zeros", group_size=64, has_zp=True),
    RaggedCase("gptq_mla", group_size=16, mla=True, head_dim=40, q_dim=72, dtype=torch.float32),
    RaggedCase("fp8_tensor", scale="tensor", bias=True),
    RaggedCase("fp8_channel", scale="channel", input_scale="token"),
    RaggedCase("fp8_blocks", scale="block", input_scale="block", hidden=192, num_heads=8),
    RaggedCase("fp8_blocks_across_heads", scale="block", input_scale="tensor", hidden=160),
    RaggedCase("fp8_cache", cache_dtype=FP8, cache_scale=(2,), dtype=torch.float32),
    RaggedCase("fp8_cache_wide", cache_dtype=torch.float8_e5m2, cache_scale=()),
)


def sample_ragged(
    case: RaggedCase, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Returns random arguments of a case, by name. The blocks have random numbers, so that a write
    to a wrong place is noticed."""
    sampler = Sampler(device, seed)
    kv_heads, kv = (1, 1) if case.mla else (case.num_kv_heads, 2)
    rows = (case.q_dim or case.num_heads * case.head_dim) + kv * kv_heads * case.head_dim
    shape = (case.num_pages, kv, 3, case.page_size, kv_heads, case.head_dim)
    values: dict[str, Any] = {
        **_projection(case, sampler, rows),
        **_batch(case, sampler),
        "blocks": sampler.normal(*shape, dtype=case.cache_dtype or case.dtype),
        "layer_idx": 1,
    }
    if case.bias:
        values["bias"] = sampler.normal(rows, dtype=case.dtype)
    if case.cache_scale is not None:
        for name in ("k_cache_scale", "v_cache_scale"):
            values[name] = sampler.scales(*case.cache_scale, size=0.6)
    return values


def _batch(case: RaggedCase, sampler: Sampler) -> dict[str, Any]:
    places = sample_places(case, sampler)
    places["input_row_offsets"] = places.pop("row_offsets")
    names = ("lookup_table", "input_row_offsets", "cache_lengths")
    return {name: places[name].to(case.index_dtype).to(sampler.device) for name in names}


def _projection(case: RaggedCase, sampler: Sampler, rows: int) -> dict[str, Any]:
    shape, tokens = (rows, case.hidden), sum(case.new_tokens)
    coded = case.input_scale != "none"
    x = sampler.normal(tokens, case.hidden, dtype=FP8 if coded else case.dtype)
    size = case.hidden**-0.5
    if case.group_size:
        grid = (rows, case.hidden // case.group_size)
        zeros = sampler.integers(0, 16, *grid) if case.has_zp else None
        scales = sampler.scales(*grid, size=size / 4, dtype=torch.float16)
        weight = pack_buffer(sampler.integers(0, 16, *shape), scales, zeros)
        options = {"group_size": case.group_size, "has_zp": case.has_zp}
        return {"hidden_state": x, "weight": weight, **options}
    if case.scale == "none":
        return {"hidden_state": x, "weight": sampler.normal(*shape, dtype=case.dtype, scale=size)}
    columns = -(-case.hidden // 128)
    grids = {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // 128), columns)}
    values: dict[str, Any] = {
        "hidden_state": x,
        "weight": sampler.normal(*shape, dtype=FP8, scale=8.0),
        "weight_scale": sampler.scales(*grids[case.scale], size=size / 8),
    }
    if coded:
        grids = {"tensor": (1, 1), "token": (tokens, 1), "block": (tokens, columns)}
        values["input_scale"] = sampler.scales(*grids[case.input_scale], size=0.5)
        values["out_dtype"] = case.dtype
    return values
