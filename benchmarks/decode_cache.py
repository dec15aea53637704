"""The static cache of whole forward passes (random numbers, rewound between replays), and what
`generate()` hands to one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache
from transformers.masking_utils import create_masks_for_generate


def widths(config: Any) -> tuple[int, int, int]:
    """(heads, columns of keys, columns of values) that a layer caches: with latent attention its
    latents are the keys, and the rotated columns the values."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        return 1, rank, config.qk_rope_head_dim
    return config.num_key_value_heads, config.head_dim, config.head_dim


def new_cache(model: Any, batch: int, max_length: int) -> StaticCache:
    """A cache of `max_length` tokens for each of `batch` sequences, as a model's device has it."""
    heads, *columns = widths(model.config)
    cache = StaticCache(config=model.config, max_cache_len=max_length)
    for number, layer in enumerate(cache.layers):
        # Without tokens: only the other extents count.
        keys, values = (
            torch.empty((batch, heads, 0, width), dtype=model.dtype, device=model.device)
            for width in columns
        )
        layer.lazy_initialization(keys, values)
        generator = torch.Generator(model.device).manual_seed(number)
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache


def rewind(cache: StaticCache, position: int) -> None:
    """Sets how many tokens a cache holds, so that replays never run past its end."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(position)


def padded_tokens(batch: int, tokens: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """Counts the padding tokens in each sequence of a batch of unequal prompts: of
    sequence b a share of b / (2 * batch)."""
    return tokens * torch.arange(batch, device=device) // (2 * batch)


def generate_inputs(
    model: Any, cache: StaticCache, ids: torch.Tensor, position: int, *, padded: bool
) -> dict[str, Any]:
    """The keyword arguments besides input_ids with which `generate()` calls a model whose cache
    holds `position` tokens: a 4-D mask, made outside of the compiled pass, and positions.

    padded: the prompts of a batch differ in length, so that shorter ones have padding before them.
    """
    batch, tokens = ids.shape
    present = torch.ones((batch, position + tokens), dtype=torch.int64, device=ids.device)
    if padded:
        places = torch.arange(position + tokens, device=ids.device)
        present *= places >= padded_tokens(batch, position + tokens, ids.device)[:, None]
    positions = (present.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
    rewind(cache, position)
    mask = create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty((batch, tokens, 0), dtype=model.dtype, device=ids.device),
        attention_mask=present,
        past_key_values=cache,
        position_ids=positions,
    )
    if isinstance(mask, dict):
        mask = {name: m if m is None else m.contiguous() for name, m in mask.items()}
    elif mask is not None:
        mask = mask.contiguous()
    return {"attention_mask": mask, "position_ids": positions}
