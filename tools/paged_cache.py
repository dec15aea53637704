"""A paged KV cache, as serving engines keep it, behind transformers' cache interface.

Each layer has two pools `[num_pages, page_size, heads, head_dim]`; one block table
`[batch, pages per sequence]` lists the pages of each sequence. Needs transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer


class PagedLayer(StaticLayer):
    """The pools of one layer. All layers share `block_table`."""

    def __init__(self, max_cache_len: int, page_size: int, block_table: torch.Tensor) -> None:
        super().__init__(max_cache_len)
        self.page_size, self.block_table = page_size, block_table

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = self._pool(key_states), self._pool(value_states)

    def _pool(self, states: torch.Tensor) -> torch.Tensor:
        """A pool for [batch, heads, tokens, head_dim] states."""
        shape = (self.block_table.numel(), self.page_size, states.shape[1], states.shape[3])
        return torch.zeros(shape, dtype=states.dtype, device=states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens into their slots; returns every sequence's keys and values."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        tokens = key_states.shape[-2]
        positions = torch.arange(tokens, device=self.device) + self.cumulative_length
        self.cumulative_length.add_(tokens)
        pages = self.block_table[:, positions // self.page_size]
        slots = (pages * self.page_size + positions % self.page_size).flatten()
        for pool, states in ((self.keys, key_states), (self.values, value_states)):
            rows = states.transpose(1, 2).flatten(0, 1)
            pool.view(-1, *pool.shape[2:])[slots] = rows
        return self._gathered(self.keys), self._gathered(self.values)

    def _gathered(self, pool: torch.Tensor) -> torch.Tensor:
        """[batch, heads, max_cache_len, head_dim] of a pool."""
        return pool[self.block_table].flatten(1, 2).transpose(1, 2)


class PagedCache(StaticCache):
    """A StaticCache with pages. max_cache_len must be a multiple of page_size, in tokens."""

    def __init__(
        self, config: Any, max_cache_len: int, batch: int, page_size: int, device: str
    ) -> None:
        if max_cache_len % page_size:
            raise ValueError(
                f"max_cache_len: expected a multiple of page_size {page_size}, got {max_cache_len}"
            )
        super().__init__(config=config, max_cache_len=max_cache_len)
        pages = batch * max_cache_len // page_size
        # Any permutation will do: pages of a sequence need not be neighbours.
        block_table = torch.arange(pages, device=device).flip(0).view(batch, -1)
        self.layers = [PagedLayer(max_cache_len, page_size, block_table) for _ in self.layers]
