"""The static cache of whole forward passes: random numbers, rewound between replays."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache


def widths(config: Any) -> tuple[int, int, int]:
    """(heads, columns of keys, columns of values) that a layer caches: with latent attention its
    latents are the keys, and the rotated columns the values."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        return 1, rank, config.qk_rope_head_dim
    return config.num_key_value_heads, config.head_dim, config.head_dim


def new_cache(model: Any, batch: int, max_length: int) -> StaticCache:
    """A bfloat16 cache of `max_length` tokens for each of `batch` sequences, on the GPU."""
    heads, *columns = widths(model.config)
    cache = StaticCache(config=model.config, max_cache_len=max_length)
    for number, layer in enumerate(cache.layers):
        # Without tokens: only the other extents count.
        keys, values = (
            torch.empty((batch, heads, 0, width), dtype=torch.bfloat16, device="cuda")
            for width in columns
        )
        layer.lazy_initialization(keys, values)
        generator = torch.Generator("cuda").manual_seed(number)
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache


def rewind(cache: StaticCache, position: int) -> None:
    """Sets how many tokens a cache holds, so that replays never run past its end."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)
