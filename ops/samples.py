"""Sample inputs for the attention ops: small, random, and together reaching every option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.ops.formats.paged_cache import CacheWindow, slot_limit

LAYOUTS = ("page_major", "head_major", "static_cache", "vllm_pair", "max_pair")
PROJECTIONS = ("separate", "packed", "per_head")


@dataclass(frozen=True)
class AttentionCase:
    """One setting of an attention op that writes a cache.

    projection: how the weights lie in memory: three tensors, one [(Hq + 2 Hkv) D, K] tensor, or
    q, k and v interleaved per head as GPT-NeoX has them (needs num_heads == num_kv_heads).
    table_width: "full" for cos and sin of width rotary_dim, "half" for half of it.
    tokens_per_row: T / T_rope, the tokens that share a row of cos and sin.
    skipped: tokens whose slot is negative.
    """

    name: str
    num_tokens: int = 5
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    layout: str = "page_major"
    num_pages: int = 6
    page_size: int = 8
    slots: str = "flat"
    indexing: str = "paged"
    slot_dtype: torch.dtype = torch.int64
    skipped: int = 0
    projection: str = "separate"
    bias: bool = False
    qk_norm: bool = False
    rope_style: str = "none"
    rotary_dim: int = 0
    table_width: str = "full"
    table_dtype: torch.dtype = torch.float32
    tokens_per_row: int = 1
    writes_v: bool = True


ATTENTION_CASES = (
    AttentionCase("plain"),
    AttentionCase("half_rope", rope_style="half", rotary_dim=32, slot_dtype=torch.int32),
    AttentionCase(
        "half_table", rope_style="half", rotary_dim=32, table_width="half", layout="head_major"
    ),
    AttentionCase("interleaved", rope_style="interleaved", rotary_dim=32, layout="vllm_pair"),
    AttentionCase(
        "interleaved_half_table",
        rope_style="interleaved",
        rotary_dim=32,
        table_width="half",
        table_dtype=torch.bfloat16,
        projection="packed",
        layout="max_pair",
    ),
    AttentionCase("partial_rope", rope_style="half", rotary_dim=12, bias=True, skipped=2),
    AttentionCase(
        "neox", num_kv_heads=4, projection="per_head", bias=True, rope_style="half", rotary_dim=8
    ),
    AttentionCase(
        "static_cache",
        num_tokens=6,
        num_pages=3,
        layout="static_cache",
        slots="per_sequence",
        indexing="torch",
        rope_style="half",
        rotary_dim=32,
        tokens_per_row=3,
        qk_norm=True,
    ),
    AttentionCase("negative_wraps", indexing="torch", skipped=1, dtype=torch.float32),
    AttentionCase("no_tokens", num_tokens=0, rope_style="half", rotary_dim=32),
    AttentionCase("half_precision", dtype=torch.float16, qk_norm=True, projection="packed"),
    AttentionCase(
        "double", dtype=torch.float64, table_dtype=torch.float64, qk_norm=True, bias=True
    ),
)


class Sampler:
    """Random tensors on one device, the same for the same seed whatever the device."""

    def __init__(self, device: str | torch.device, seed: int) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(dtype).to(self.device)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.generator)


def sample_cache(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    """Caches full of random numbers, their windows, slots and rope table, by argument name."""
    caches = _caches(case, sampler)
    return {**caches, **_slots(case, sampler, caches), **_rope(case, sampler)}


def _caches(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    pages, size, heads, dim = case.num_pages, case.page_size, case.num_kv_heads, case.head_dim
    shapes = {
        "page_major": (pages, size, heads, dim),
        "head_major": (pages, heads, size, dim),
        "static_cache": (pages, heads, size, dim),
        "vllm_pair": (2, pages, size, heads, dim),
        "max_pair": (pages, 2, 3, size, heads, dim),
    }
    k_cache = sampler.normal(*shapes[case.layout], dtype=case.dtype)
    v_cache = None
    if case.layout == "vllm_pair":
        k_window, v_window = CacheWindow.vllm_pair(k_cache)
    elif case.layout == "max_pair":
        k_window, v_window = CacheWindow.max_pair(k_cache, layer=1)
    else:
        k_window = v_window = getattr(CacheWindow, case.layout)(k_cache)
        v_cache = sampler.normal(*k_cache.shape, dtype=case.dtype) if case.writes_v else None
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_window": k_window.to_ints(),
        "v_window": v_window.to_ints() if case.writes_v else [],
        "slots": case.slots,
        "indexing": case.indexing,
    }


def _slots(case: AttentionCase, sampler: Sampler, caches: dict[str, Any]) -> dict[str, Any]:
    window = CacheWindow.from_ints(caches["k_window"])
    count = case.num_tokens
    if case.slots == "per_sequence":
        count //= case.num_pages
    slots = sampler.permutation(slot_limit(window, case.slots))[:count]
    slots[: case.skipped] = -1 - torch.arange(case.skipped)
    return {"slot_mapping": slots.to(case.slot_dtype).to(sampler.device)}


def _rope(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    if case.rope_style == "none":
        return {}
    width = case.rotary_dim if case.table_width == "full" else case.rotary_dim // 2
    rows = max(case.num_tokens // case.tokens_per_row, 1)
    # Not a true rotation: every column differs, so a wrong column shows.
    table = [sampler.normal(rows, width, dtype=case.table_dtype) for _ in range(2)]
    return {
        "cos": table[0],
        "sin": table[1],
        "rotary_dim": case.rotary_dim,
        "rope_style": case.rope_style,
    }


def sample_weights(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    """q, k and v weights [H, D, K] and biases [H, D] as the case's projection lays them out."""
    scale = case.hidden**-0.5
    weights = _project(case, sampler, (case.hidden,), scale)
    biases = _project(case, sampler, (), 1.0) if case.bias else (None, None, None)
    names = ("q", "k", "v")
    return {
        **{f"{name}_weight": weight for name, weight in zip(names, weights, strict=True)},
        **{f"{name}_bias": bias for name, bias in zip(names, biases, strict=True)},
    }


def _project(
    case: AttentionCase, sampler: Sampler, tail: tuple[int, ...], scale: float
) -> tuple[torch.Tensor, ...]:
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    if case.projection == "per_head":
        shape = (case.num_heads, 3, case.head_dim, *tail)
        return sampler.normal(*shape, dtype=case.dtype, scale=scale).unbind(1)
    if case.projection == "packed":
        shape = (sum(heads), case.head_dim, *tail)
        return sampler.normal(*shape, dtype=case.dtype, scale=scale).split(heads)
    return tuple(
        sampler.normal(h, case.head_dim, *tail, dtype=case.dtype, scale=scale) for h in heads
    )
