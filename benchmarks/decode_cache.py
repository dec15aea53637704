"""Makes static caches for whole forward passes, and the arguments that `generate()` passes with
such caches.

A cache holds random numbers and is rewound between rounds of replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StaticCache
from transformers.masking_utils import create_masks_for_generate

#: The largest number of replays of a captured pass before its cache is rewound.
REPLAYS = 16


def widths(config: Any) -> tuple[int, int, int]:
    """Returns (heads, columns of keys, columns of values) of a layer's cache.

    With latent attention, the latents are cached as keys and the rotated columns as values.
    """
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        return 1, rank, config.qk_rope_head_dim
    return config.num_key_value_heads, config.head_dim, config.head_dim


def layer_widths(model: Any) -> list[tuple[int, int, int]]:
    """Returns (heads, columns of keys, columns of values) that each layer of a model on the meta
    device caches."""
    cache = StaticCache(config=model.config, max_cache_len=8)
    with torch.no_grad(), torch.device("meta"):
        model(torch.zeros((1, 1), dtype=torch.int64), past_key_values=cache, use_cache=True)
    return [(layer.num_heads, layer.k_head_dim, layer.v_head_dim) for layer in cache.layers]


def new_cache(
    model: Any, batch: int, max_length: int, layers: Sequence[tuple[int, int, int]] = ()
) -> StaticCache:
    """Returns a cache of `max_length` tokens for each of `batch` sequences, on the model's device.

    `layers` gives the extents of each layer; by default, they come from `widths`.
    """
    cache = StaticCache(config=model.config, max_cache_len=max_length)
    layers = layers or [widths(model.config)] * len(cache.layers)
    for number, (layer, (heads, *columns)) in enumerate(zip(cache.layers, layers, strict=True)):
        # These tensors have no tokens, because only their other extents are used.
        keys, values = (
            torch.empty((batch, heads, 0, width), dtype=model.dtype, device=model.device)
            for width in columns
        )
        layer.lazy_initialization(keys, values)
        if model.device.type == "meta":
            continue
        generator = torch.Generator(model.device).manual_seed(number)
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache


def rewind(cache: StaticCache, position: int) -> None:
    """Sets the number of tokens that a cache holds, so that repeated calls do not run past its
    end."""
    _rewind_host(cache, position)
    lengths = [layer.cumulative_length for layer in cache.layers]
    torch._foreach_zero_(lengths)  # one launch for all layers
    if position:
        torch._foreach_add_(lengths, position)


def _rewind_host(cache: StaticCache, position: int) -> None:
    """Sets the lengths that sliding layers keep as numbers. Compiled code guards on these
    numbers."""
    for layer in cache.layers:
        if layer.is_sliding:
            layer.cumulative_length_int = position


@dataclass(frozen=True)
class CachedPass:
    """A forward pass over a cache that holds `position` tokens before it. A call returns logits.

    `inputs` has the other arguments, with `input_ids` [batch, tokens].
    """

    forward: Callable[..., Any]
    cache: StaticCache
    position: int
    inputs: dict[str, Any]

    def __call__(self) -> torch.Tensor:
        self.rewind()
        return self._logits()

    def rewind(self) -> None:
        rewind(self.cache, self.position)

    @property
    def captured(self) -> Callable[[], torch.Tensor]:
        """Returns the pass that a CUDA graph captures. Its cache must be rewound before each round
        of replays.

        The pass launches only the kernels of a user's pass. Each replay writes into the next slots
        of the cache; this is the same work, because mask and positions are given. If the cache has
        no room for REPLAYS passes, as for prompts, the captured pass also rewinds the cache.
        """
        tokens = self.inputs["input_ids"].shape[1]
        capacity = max(layer.max_cache_len for layer in self.cache.layers)
        return self._going_on if self.position + REPLAYS * tokens <= capacity else self

    def _going_on(self) -> torch.Tensor:
        _rewind_host(self.cache, self.position)
        return self._logits()

    def _logits(self) -> torch.Tensor:
        return self.forward(past_key_values=self.cache, use_cache=True, **self.inputs).logits


def padded_tokens(batch: int, tokens: int, device: torch.device | str = "cuda") -> torch.Tensor:
    """Returns the number of padding tokens among the `tokens` tokens of each sequence, [batch].

    A share of b / (2 * batch) of the tokens of sequence b is padding, as in a batch of prompts of
    unequal lengths.
    """
    return tokens * torch.arange(batch, device=device) // (2 * batch)


def generate_inputs(
    model: Any, cache: StaticCache, ids: torch.Tensor, position: int, *, padded: bool
) -> dict[str, Any]:
    """Returns the mask and positions with which `generate()` calls a model.

    The cache then holds `position` tokens. The mask is a 4-D mask that is made outside the compiled
    pass. With `padded`, the prompts differ in length, and shorter ones are padded on the left.
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
