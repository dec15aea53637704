"""The static cache of whole forward passes: random numbers, rewound between replays."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache


def new_cache(model: Any, batch: int, max_length: int) -> StaticCache:
    """A bfloat16 cache of `max_length` tokens for each of `batch` sequences, on the GPU."""
    config = model.config
    cache = StaticCache(config=config, max_cache_len=max_length)
    cache.early_initialization(
        batch_size=batch,
        num_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    for number, layer in enumerate(cache.layers):
        generator = torch.Generator("cuda").manual_seed(number)
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache


def rewind(cache: StaticCache, position: int) -> None:
    """Sets how many tokens a cache holds, so that replays never run past its end."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)
