"""Sample inputs of the attention ops. The cases are small and random, and together they use every
option."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from tilewright.ops.cache.addressing import SLOT_FORMS
from tilewright.ops.formats.paged_cache import CacheWindow, slot_limit
from tilewright.ops.formats.sample_codes import CodedCase
from tilewright.ops.sampling import PagedBatch, Sampler, sample_table

# Names of fields of a case that are also names of arguments, but with another meaning: the argument
# is a tensor, and the field says how the tensor is made.
DRAWN = {"x_scale", "delta"}


@dataclass(frozen=True)
class AttentionCase(CodedCase, PagedBatch):
    """One case of an attention op that writes a cache. The fields that are not listed here are
    sizes, or have the names of the op's arguments.

    Attributes:
        projection: The memory layout of the weights: "separate" tensors; "packed" as one tensor
            [(Hq + 2 Hkv) D, K]; "per_head", with q, k and v of each head next to each other, as in
            GPT-NeoX (this needs num_heads == num_kv_heads); "grouped", with the q heads of a kv
            head next to its k and v, as in Falcon; or "n_major" as one tensor [K, (Hq + 2 Hkv) D],
            as in GPT-2. For quantised weights, "separate" or "packed".
        table_width: "full" if cos and sin have rotary_dim columns, "half" if they have half as
            many.
        tokens_per_row: T / T_rope, the number of tokens that share a row of cos and sin.
        qk_norm: Whether there are weights of norms of q and k. They are [D], or [H, D] with
            norm_per_head.
        normed: The letters of the projections that have a norm weight.
        norm_bias: Whether the norms also have biases.
        transposed: Whether the weight and its scales are stored in the other memory order, as in
            GPTQ and AWQ.
        codes: Whether x has codes. In this case, `dtype` is the dtype of q.
        x_scale: "none", "tensor", "token" or "block". It is used if x has codes.
        cache_dtype: The dtype of the cache; None for `dtype`.
        cache_scale: "none", "scalar" [], "one" [1] or "head" [Hkv].
        input_norm: The kind of norm of x: "rms", "weightless" (an RMS norm without a weight),
            "layer" (with a weight and a bias), "layer_unbiased" (with a weight), "layer_bare"
            (without both), or "" for none.

    new_tokens and cached_tokens are used if `slots` is "block_table" or "ragged".
    """

    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    layout: str = "page_major"
    indexing: str = "paged"
    projection: str = "separate"
    bias: bool = False
    delta: bool = False
    qk_norm: bool = False
    rope_style: str = "none"
    rotary_dim: int = 0
    table_width: str = "full"
    table_dtype: torch.dtype = torch.float32
    tokens_per_row: int = 1
    writes_v: bool = True
    kv_repeat: int = 1
    gate_run: int = 0
    clip: float = 0.0
    weightless_norm: bool = False
    normed: str = "qk"
    norm_per_head: bool = False
    norm_kind: str = "rms"
    norm_width: str = "head"
    norm_after_rope: bool = False
    norm_offset: float = 0.0
    norm_bias: bool = False
    v_norm: bool = False
    transposed: bool = False
    codes: bool = False
    x_scale: str = "none"
    cache_dtype: torch.dtype | None = None
    cache_scale: str = "none"
    cache_scale_multiplies: bool = False
    input_norm: str = ""
    input_norm_offset: float = 0.0


def sample_cache(case: AttentionCase, sampler: Sampler, arguments: type[Any]) -> dict[str, Any]:
    """Returns caches full of random numbers, their windows, slots and rope table, by argument name.
    Also returns the options that both the case and `arguments` have."""
    caches = _caches(case, sampler)
    shared = {one.name for one in fields(arguments)} & vars(case).keys() - DRAWN
    return {
        **{name: getattr(case, name) for name in shared},
        **caches,
        **_cache_scales(case, sampler),
        **_places(case, sampler, caches),
        **_rope(case, sampler),
    }


def _caches(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    pages, size, dim = case.num_pages, case.page_size, case.head_dim
    heads, dtype = case.num_kv_heads * case.kv_repeat, case.cache_dtype or case.dtype
    shapes = {
        "page_major": (pages, size, heads, dim),
        "head_major": (pages, heads, size, dim),
        "static_cache": (pages, heads, size, dim),
        "vllm_pair": (2, pages, size, heads, dim),
        "max_pair": (pages, 2, 3, size, heads, dim),
    }
    k_cache = sampler.normal(*shapes[case.layout], dtype=dtype)
    v_cache = None
    if case.layout == "vllm_pair":
        k_window, v_window = CacheWindow.vllm_pair(k_cache)
    elif case.layout == "max_pair":
        k_window, v_window = CacheWindow.max_pair(k_cache, layer=1)
    else:
        k_window = v_window = getattr(CacheWindow, case.layout)(k_cache)
        v_cache = sampler.normal(*k_cache.shape, dtype=dtype) if case.writes_v else None
    return {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_window": k_window.to_ints(),
        "v_window": v_window.to_ints() if case.writes_v else [],
    }


def _cache_scales(case: AttentionCase, sampler: Sampler) -> dict[str, Any]:
    shapes: dict[str, tuple[int, ...]] = {"scalar": (), "one": (1,), "head": (case.num_kv_heads,)}
    if case.cache_scale == "none":
        return {}
    scales = [sampler.scales(*shapes[case.cache_scale], size=0.6) for _ in range(2)]
    return {"k_cache_scale": scales[0], "v_cache_scale": scales[1] if case.writes_v else None}


def _places(case: AttentionCase, sampler: Sampler, caches: dict[str, Any]) -> dict[str, Any]:
    named = SLOT_FORMS[case.slots]
    if "slot_mapping" not in named:
        return {"slot_mapping": None, **sample_table(case, sampler, named)}
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
    # The tables are not true rotations: every column differs, so that a wrong column changes the
    # result.
    table = [sampler.normal(rows, width, dtype=case.table_dtype) for _ in range(2)]
    return {"cos": table[0], "sin": table[1]}
