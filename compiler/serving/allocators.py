"""Allocators for transformers' continuous batching engine that present its memory as one tensor,
and the pages of requests as block tables.

transformers' engine keeps the keys and values of all layers in one flat tensor. For each kind of
attention it has an allocator, which gives blocks of that tensor to requests. A block holds a page
of K and a page of V for each layer of the allocator. The allocators here use the same memory in the
same order. They differ from transformers' allocators in what they pass to the model: the pages of
each request, not the place of each token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching import cache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from tilewright.ops.formats.paged_cache import CacheWindow

#: The name of the attention of models in the engine. transformers builds no mask for a name that
#: contains "flash". If a 2 or 3 followed, transformers would look for a package.
ATTENTION = "tilewright_flash"


class FullPages(FullAttentionCacheAllocator):
    """Allocates pages for layers that attend to all tokens of a request."""

    def register_cache_tensor(self, *args: Any, **kwargs: Any) -> None:
        """Registers the memory as transformers does, and makes it one tensor `[rows, heads, head
        dim]` that all allocators share.

        If a graph read several tensors in one memory, each would be an input of its own, and a
        write to one would change the others. With one tensor the graph has one input.
        """
        super().register_cache_tensor(*args, **kwargs)
        _keep_rows(self.pool, self.cache_tensor, (self.num_key_value_heads, self.head_dim))

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of a layer of the model, each `[blocks, page size, heads, head dim]`."""
        pool: Any = self.pool
        shape = (self.tokens_per_page, self.num_key_value_heads, self.head_dim)
        blocks = pool.rows.view(-1, self.pages_per_block, 2, *shape)
        number = self.layer_indices.index(layer)
        return blocks[:, number, 0], blocks[:, number, 1]

    @property
    def trash_block(self) -> int:
        """The block to which padding is written. It is never read."""
        return self.blocks_per_sector

    def kept(self, past_length: int) -> int:
        """Returns the index of the first page of a request that may be read once the request has
        `past_length` tokens."""
        return 0

    def live_blocks(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Returns the blocks of a request, from its first kept page."""
        end = -(-(past_length + query_length) // self.tokens_per_page)
        return self.block_table[request_id][self.kept(past_length) : end]

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Returns how many keys of a request are in its kept pages."""
        return past_length + query_length - self.kept(past_length) * self.tokens_per_page

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Returns the block of each kept page. The method of transformers' allocators returns a row
        for each token instead."""
        return self.live_blocks(request_id, past_length, query_length)

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: torch.Tensor
    ) -> None:
        """Writes the block of each kept page into a row of the block table, an int32 tensor on any
        device."""
        blocks = torch.tensor(
            self.live_blocks(request_id, past_length, query_length), dtype=block_table.dtype
        )
        block_table[: len(blocks)].copy_(blocks, non_blocking=True)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError, because only an attention that is not tilewright's calls this
        method."""
        raise RuntimeError(
            "the model's attention was changed while a manager of continuous batching runs: stop "
            "one manager before you start the next"
        )

    get_cache_for_block_table = update


class WindowPages(FullPages):
    """Allocates pages for layers with a sliding window, and takes back the pages before the window.

    transformers keeps such layers in a ring buffer, which a block table cannot describe. Here a
    request has a block table as for full attention. An entry of 0 in this table stands for a page
    that was given back; no request ever has block 0.
    """

    layer_type = SlidingAttentionCacheAllocator.layer_type
    supports_block_sharing = False

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        window = getattr(config, "sliding_window", None)
        if not isinstance(window, int) or window <= 0:
            raise ValueError(f"sliding_window: expected a positive integer, got {window!r}")
        self.sliding_window = window
        super().__init__(*args, config=config, **kwargs)

    def kept(self, past_length: int) -> int:
        return max(0, past_length - self.sliding_window + 1) // self.tokens_per_page

    def _behind(self, request_id: str, past_length: int) -> list[int]:
        """Returns the blocks before the window, which the next allocation gives back."""
        table = self.block_table.get(request_id, [])
        return [block for block in table[: self.kept(past_length)] if block]

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Returns how many blocks a request needs in addition to the blocks that it has and the
        blocks that it gives back."""
        had = len(self.block_table.get(request_id, []))
        new = self._compute_blocks_needed(
            max(had, self.kept(past_length)), past_length, query_length
        )
        return max(0, new - len(self._behind(request_id, past_length)))

    def allocate_cache_to_request(
        self, request_id: str, past_length: int, query_length: int
    ) -> None:
        """Gives back the pages before the window, and takes pages for the new tokens."""
        kept = self.kept(past_length)
        gone = self._behind(request_id, past_length)
        table = self.block_table.setdefault(request_id, [])
        table[:kept] = [0] * kept
        self.pool.free_blocks(self.index, gone)
        super().allocate_cache_to_request(request_id, past_length, query_length)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Gives back all pages of a request."""
        if request_id in self.block_table:
            self.block_table[request_id] = [b for b in self.block_table[request_id] if b]
        super().free_blocks(request_id, no_cache)

    def count_non_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """Returns how many blocks a fork of the request needs."""
        return sum(block != 0 for block in self.block_table[source_request_id])

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Gives a fork blocks of its own for the pages that the request still has. Returns the
        blocks of the request, and the fork's new blocks in the same order."""
        table = self.block_table[source_request_id]
        source = [block for block in table if block]
        fresh = self.pool.get_free_blocks(self.index, len(source))
        left = iter(fresh)
        self.block_table[dest_request_id] = [next(left) if block else 0 for block in table]
        return source, fresh


class LatentPages(FullPages):
    """Allocates pages for layers with latent attention; each token has one row, its latent and its
    rotated key.

    transformers has no such allocator: it caches the keys and values computed from the latents.
    """

    rows_per_token = 1

    def __init__(
        self,
        index: int,
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ) -> None:
        self.rank, self.head_dim = (
            config.kv_lora_rank,
            config.kv_lora_rank + config.qk_rope_head_dim,
        )
        self.num_key_value_heads, self.cache_dtype = 1, cache_dtype
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            bytes_per_page=page_size * self.head_dim * cache_dtype.itemsize,
            allow_block_sharing=allow_block_sharing,
        )

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        """Makes the memory one tensor `[rows, rank + rope width]`."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        rows = cache_tensor.view(self.cache_dtype).view(-1, self.head_dim)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, rows, pool)
        _keep_rows(pool, rows, (self.head_dim,))

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the latents `[blocks, page size, rank]` and the rotated keys `[blocks, page size,
        rope width]` of a layer."""
        pool: Any = self.pool
        blocks = pool.rows.view(-1, self.pages_per_block, self.tokens_per_page, self.head_dim)
        page = blocks[:, self.layer_indices.index(layer)]
        return page[..., : self.rank], page[..., self.rank :]

    def windows(self, layer: int) -> tuple[list[int], list[int]]:
        """Returns where the latents and the rotated keys lie in the memory, as the integers of a
        `CacheWindow`."""
        pool: Any = self.pool
        of_page = self.tokens_per_page * self.head_dim
        start = self.layer_indices.index(layer) * of_page
        blocks = pool.rows.shape[0] // self.tokens_per_block
        strides = (self.pages_per_block * of_page, self.head_dim, self.head_dim, 1)
        rank, size = self.rank, (blocks, self.tokens_per_page, 1)
        latents = CacheWindow(*size, rank, *strides, start)
        rope_keys = CacheWindow(*size, self.head_dim - rank, *strides, start + rank)
        return latents.to_ints(), rope_keys.to_ints()


def has_latents(config: Any) -> bool:
    """Whether a language model with this configuration caches latents instead of keys and
    values."""
    return getattr(config, "kv_lora_rank", None) is not None


def _keep_rows(pool: Any, memory: torch.Tensor, shape: tuple[int, ...]) -> None:
    if not hasattr(pool, "rows"):
        pool.rows = memory.view(-1, *shape)
        torch._dynamo.mark_static_address(pool.rows)


#: Allocators by kind of attention, in transformers' terms.
ALLOCATORS: dict[str, type[FullPages]] = {
    kind.layer_type: kind for kind in (FullPages, WindowPages)
}


class Chosen:
    """An entry of transformers' table of allocators. It makes tilewright's allocator for a model
    that tilewright runs, and transformers' allocator for any other model."""

    def __init__(self, ours: type[FullPages], theirs: Any) -> None:
        self.ours, self.theirs = ours, theirs

    def __call__(self, *args: Any, config: Any, **kwargs: Any) -> Any:
        chosen = self.theirs
        if config._attn_implementation == ATTENTION:
            chosen = LatentPages if has_latents(config) else self.ours
        return chosen(*args, config=config, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.theirs, name)


def register() -> None:
    """Replaces the entries of transformers' table of allocators by `Chosen`, where that is not done
    yet."""
    table = cache.ATTN_TYPE_TO_ALLOCATOR
    for kind, ours in ALLOCATORS.items():
        if not isinstance(table[kind], Chosen):
            table[kind] = Chosen(ours, table[kind])
