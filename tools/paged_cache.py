"""A paged KV cache for `generate()`, whose memory grows with the number of tokens.

    from tilewright.tools.paged_cache import PagedCache

    model.generate(**inputs, **cache_argument(model, PagedCache(model.config)))

Each layer has two pools [num_pages, page_size, heads, head_dim]. One block table [batch, pages per
sequence] says which pages each sequence has (`pages.py`). With latent attention, the pools hold
latents and rotated keys. Layers with a sliding window or chunks keep all their tokens, and the mask
hides the tokens that are out of sight. Pools may hold 8-bit floats, with the scales of a
checkpoint. The module needs transformers.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from tilewright.ops.formats.fp8 import FP8_DTYPES, saturating_cast
from tilewright.tools.pages import Pages, mark_address

BETWEEN_GRAPHS = (
    "PagedCache takes its pages between graphs; to take the pages before the call, use "
    "early_initialization() and reserve(tokens)"
)


#: The scale of a layer's keys, and the scale of the layer's values. Each scale is a float32 tensor
#: of shape [] or [heads].
Scales = tuple[torch.Tensor, torch.Tensor]


class PagedLayer(StaticLayer):
    """The pools of one layer. All layers share `pages`, and only the first layer adds the new
    tokens to the count in `pages`.

    stored: the dtype of the pools; None for the dtype of the keys and values.
    scales: the factors by which 8-bit floats in the pools are multiplied.
    """

    is_croppable = True
    keys: torch.Tensor
    values: torch.Tensor

    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def __init__(
        self,
        pages: Pages,
        layers: list[PagedLayer],
        stored: torch.dtype | None = None,
        scales: Scales | None = None,
    ) -> None:
        super().__init__(-1 if pages.max_length is None else pages.max_length)
        self.pages, self.layers = pages, layers
        self.stored, self.scales = stored, scales or (torch.ones(()), torch.ones(()))
        self.counts = not layers
        layers.append(self)

    @torch.compiler.disable(reason=BETWEEN_GRAPHS)
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the pools for states [batch, heads, tokens, head_dim], with all reserved
        pages."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.pages.begin(key_states.shape[0], self.device)
        if self.pages.length.device != self.device:
            raise ValueError(
                "PagedCache: expected the layers of the model on one device, got keys on "
                f"{self.device} and on {self.pages.length.device}"
            )
        self.keys, self.values = (
            _zeros(self.pages, states.shape[1], states.shape[3], states.to(self.stored))
            for states in (key_states, value_states)
        )
        self.k_scale, self.v_scale = (
            scale.to(self.device, torch.float32).reshape(-1, 1) for scale in self.scales
        )
        mark_address(self.k_scale)
        mark_address(self.v_scale)
        self.is_initialized = True
        for layer in self.layers:
            layer.follow()

    def follow(self) -> None:
        """Enlarges the pools, and updates the counts, to match the shared pages."""
        self.cumulative_length = self.pages.length
        self.batch_size = self.pages.batch
        if self.is_initialized and self.keys.shape[0] < self.pages.num_pages:
            self.keys, self.values = (self._grown(pool) for pool in (self.keys, self.values))

    def _grown(self, pool: torch.Tensor) -> torch.Tensor:
        larger = _zeros(self.pages, pool.shape[2], pool.shape[3], pool)
        larger[: pool.shape[0]] = pool
        return larger

    @torch.compiler.disable(reason=BETWEEN_GRAPHS)
    def reserve(self, tokens: int, batch: int = 0) -> None:
        """Reserves pages for `tokens` more tokens of each sequence. `batch` is the number of
        sequences, or 0 if it is not known."""
        changed = self.is_initialized and batch not in (0, self.pages.batch)
        if changed:
            self.pages.begin(batch, self.device)
        changed |= self.pages.reserve(tokens)
        if changed:
            for layer in self.layers:
                layer.follow()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens into their slots, and returns the keys and values of every
        sequence.

        States have the shape [batch, heads, tokens, head_dim]. Results have the shape [batch,
        heads, columns * page_size, head_dim]; positions without a token hold zeros or old values.
        Eager calls take the pages that they need. Compiled calls use the pages that were reserved
        before. Raises ValueError if the cache already holds another number of sequences.
        """
        batch, tokens = key_states.shape[0], key_states.shape[2]
        if self.counts and not (torch.compiler.is_compiling() and self.is_initialized):
            self.reserve(tokens, batch)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        table, page_size = self.pages.block_table, self.pages.page_size
        if table.shape[0] != batch:
            raise ValueError(
                f"PagedCache: the cache has pages of {table.shape[0]} sequences, but got keys of "
                f"{batch} sequences"
            )
        if self.counts:
            self.cumulative_length.add_(tokens)
        positions = torch.arange(tokens, device=table.device) + (self.cumulative_length - tokens)
        pages = table[:, positions // page_size]
        slots = (pages * page_size + positions % page_size).flatten()
        sides = (self.keys, key_states, self.k_scale), (self.values, value_states, self.v_scale)
        for pool, states, scale in sides:
            rows = states.transpose(1, 2).flatten(0, 1)
            if pool.dtype in FP8_DTYPES:
                rows = _bytes(saturating_cast(rows.float() / scale, pool.dtype))
            _bytes(pool).view(-1, *pool.shape[2:])[slots] = rows
        keys, values = (self._gathered(pool, scale) for pool, _, scale in sides)
        return keys, values

    def _gathered(self, pool: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Returns the keys or values of a pool as [batch, heads, columns * page_size, head_dim]."""
        rows = _bytes(pool)[self.pages.block_table].view(pool.dtype)
        if pool.dtype in FP8_DTYPES:
            rows = (rows.float() * scale).to(self.dtype)
        return rows.flatten(1, 2).transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys that `update` will return, and 0.

        `generate()` calls this method before each forward pass, compiled or not. Therefore the
        method takes the pages for the pass. Within a compiled model, taking pages breaks the graph,
        unless the caller has reserved pages.
        """
        if torch.compiler.is_compiling() and self.pages.ahead:
            return self.pages.block_table.shape[1] * self.pages.page_size, 0
        self.reserve(query_length)
        return self.pages.width * self.pages.page_size, 0

    def get_seq_length(self) -> Any:
        """Returns the number of tokens of each sequence, as int64 [] on the device. Outside a
        compiled model, returns the int 0 if the cache has no sequences yet."""
        if torch.compiler.is_compiling():
            return self.pages.length
        return self.pages.length.clone() if self.pages.batch else 0


class PagedCache(StaticCache):
    """A transformers Cache with pages and a block table, for any decoder that StaticCache supports.

    config: the configuration of the model.
    page_size: the number of tokens in a page, a power of two.
    max_cache_len: the maximum number of tokens of a sequence. If it is given, the shapes in a
        compiled forward pass do not change with the length.
    max_pages: the maximum number of pages of a pool.
    dtype: the dtype of the pools, float8_e4m3fn or float8_e5m2; None for the dtype of the model.
    scales: a dictionary from a layer's number to the two factors by which the layer's 8-bit keys
        and values are multiplied, as `kv_scales` reads them from a model. A layer that is not in
        the dictionary has the factors 1.

    Raises TypeError if `config` or `scales` has another type, and ValueError for other bad values.
    Also raises ValueError for a model without attention layers, and for a model whose attention
    layers cache more than keys and values.

    The cache takes pages between forward passes, as tokens come. In an eager pass, the first layer
    takes the pages. `generate()` asks for the size of the mask before each pass, and the cache then
    takes the pages for the pass. If a user calls a compiled model directly, taking pages breaks the
    graph, unless `reserve` has taken the pages before. Beams share full pages; only partly filled
    pages are copied.
    """

    def __init__(
        self,
        config: Any,
        page_size: int = 64,
        max_cache_len: int | None = None,
        max_pages: int | None = None,
        dtype: torch.dtype | None = None,
        scales: Mapping[int, Scales] | None = None,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            got = type(config).__name__
            raise TypeError(f"config: expected a model's configuration (model.config), got {got}")
        if dtype not in (None, *FP8_DTYPES):
            raise ValueError(f"dtype: expected None or one of {list(FP8_DTYPES)}, got {dtype!r}")
        if scales is not None and dtype is None:
            raise ValueError("scales: expected None because dtype is None, got scales")
        if scales is not None and not _are_scales(scales):
            raise TypeError(
                "scales: expected a dictionary of two tensors, of keys and of values, by the "
                f"layer's number, as kv_scales(model) returns it; got {scales!r}"
            )
        if not _is_count(page_size) or page_size & (page_size - 1):
            raise ValueError(f"page_size: expected a power of two, in tokens, got {page_size!r}")
        for name, value in (("max_cache_len", max_cache_len), ("max_pages", max_pages)):
            if value is not None and not _is_count(value):
                raise ValueError(f"{name}: expected None or an int of at least 1, got {value!r}")
        super().__init__(config=config, max_cache_len=1)
        self.pages = Pages(page_size, max_cache_len, max_pages)
        self.paged: list[PagedLayer] = []
        self.layers: list[Any] = [
            self._layer_for(layer, dtype, (scales or {}).get(number))
            for number, layer in enumerate(self.layers)
        ]
        if not self.paged:
            raise ValueError(
                f"PagedCache: a model of {type(config).__name__} has no attention layer"
            )
        if beyond := sorted(set(scales or ()) - set(range(len(self.layers)))):
            raise ValueError(
                f"scales: expected numbers of the model's {len(self.layers)} layers, got {beyond}"
            )

    def _layer_for(self, layer: Any, dtype: torch.dtype | None, scales: Scales | None) -> Any:
        """Returns a layer of pages in place of a static cache's keys and values. Returns layers of
        other kinds unchanged."""
        if type(layer) in (StaticLayer, StaticSlidingWindowLayer):
            return PagedLayer(self.pages, self.paged, dtype, scales)
        if isinstance(layer, StaticLayer):
            raise ValueError(
                "PagedCache: its layers hold keys and values, but this model needs "
                f"{type(layer).__name__}; use StaticCache instead"
            )
        return layer

    @property
    def num_pages(self) -> int:
        """Returns the number of pages of each pool."""
        return self.pages.num_pages

    def reserve(self, tokens: int) -> None:
        """Takes pages for `tokens` more tokens of each sequence, so that later calls do not have to
        take any.

        From then on, compiled calls take no pages themselves, until `crop` or `reset` is called or
        the batch size changes. A reservation before the first forward pass takes effect in that
        pass. Raises ValueError if `tokens` is not an int of at least 0, or if the tokens would
        exceed max_cache_len. Raises RuntimeError if they would exceed max_pages.
        """
        if not _is_count(tokens, least=0):
            raise ValueError(f"tokens: expected an int of at least 0, got {tokens!r}")
        self.paged[0].reserve(tokens)
        self.pages.ahead = True

    def most_tokens(self, batch: int) -> int | None:
        """Returns the maximum number of tokens for each of `batch` sequences. Returns None if there
        is no limit. Raises ValueError if `batch` is not an int of at least 1."""
        if not _is_count(batch):
            raise ValueError(f"batch: expected an int of at least 1, got {batch!r}")
        limits = []
        if self.pages.max_length is not None:
            limits.append(self.pages.max_length)
        if self.pages.max_pages is not None:
            limits.append(self.pages.max_pages // batch * self.pages.page_size)
        return min(limits, default=None)

    def reset(self) -> None:
        """Removes all tokens. The pools keep their size."""
        for layer in self._others():
            layer.reset()
        for pool in self._pools():
            pool.zero_()
        self.pages.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens of each sequence. `tokens_to_remove` is 0 or
        negative; with 0, the method does not wait for the device.

        A positive number, which transformers accepts up to release 5.17, is the number of tokens to
        keep.
        """
        for layer in self._others():
            layer.crop(tokens_to_remove)
        if tokens_to_remove == 0:
            return
        length = self.pages.present()
        kept = tokens_to_remove if tokens_to_remove > 0 else max(length + tokens_to_remove, 0)
        if kept < length:
            self._copy(self.pages.crop(kept))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replaces sequence b by sequence beam_idx[b]."""
        for layer in self._others():
            layer.reorder_cache(beam_idx)
        self._rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times. Copies of a sequence are adjacent."""
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)
        self._rearrange([b for b in range(self.pages.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps only the sequences at `indices`, in the order of `indices`."""
        for layer in self._others():
            layer.batch_select_indices(indices)
        chosen = torch.arange(self.pages.batch, device=indices.device)[indices]
        self._rearrange(chosen.tolist())

    def _rearrange(self, sources: Sequence[int]) -> None:
        if self.pages.batch:
            self._copy(self.pages.rearrange(sources))

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages in every pool. `copies` has the pages as pairs (from, to)."""
        for layer in self.paged:
            layer.follow()
        if not copies:
            return
        sources, places = torch.tensor(copies, device=self.pages.block_table.device).unbind(1)
        for pool in map(_bytes, self._pools()):
            pool[places] = pool[sources]

    def _others(self) -> list[Any]:
        """Returns the layers that hold no keys and values, such as layers of linear attention."""
        return [layer for layer in self.layers if not isinstance(layer, PagedLayer)]

    def _pools(self) -> list[torch.Tensor]:
        layers = [layer for layer in self.paged if layer.is_initialized]
        return [pool for layer in layers for pool in (layer.keys, layer.values)]


def _is_count(value: Any, least: int = 1) -> bool:
    """Returns whether the value is an integer of any integer type, and at least `least`."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def _are_scales(scales: Any) -> bool:
    """Returns whether the value is a dictionary from layer numbers to pairs of tensors."""
    return isinstance(scales, Mapping) and all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(scale, torch.Tensor) for scale in pair)
        for pair in scales.values()
    )


def kv_scales(model: nn.Module) -> dict[int, Scales]:
    """Returns the scales of keys and values in a checkpoint, by the number of the layer.

    Reads `k_scale` and `v_scale` of an attention module, as compressed-tensors stores them, or of
    its `k_proj` and `v_proj`, as ModelOpt stores them. Raises ValueError if the model has no such
    scales.
    """
    found: dict[int, Scales] = {}
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        linears = (getattr(module, f"{name}_proj", None) for name in "kv")
        for k_holder, v_holder in ((module, module), tuple(linears)):
            k, v = getattr(k_holder, "k_scale", None), getattr(v_holder, "v_scale", None)
            if isinstance(number, int) and k is not None and v is not None:
                found[number] = k.detach(), v.detach()
    if not found:
        raise ValueError("model: expected an attention module with k_scale and v_scale, found none")
    return found


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    """Returns a pool of 8-bit floats as bytes, because not every backend can index 8-bit floats."""
    return pool.view(torch.uint8) if pool.dtype in FP8_DTYPES else pool


def _zeros(pages: Pages, heads: int, head_dim: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a pool of zeros. Attention multiplies the value of a hidden key by zero, so that
    value must be finite."""
    pool = like.new_zeros((pages.num_pages, pages.page_size, heads, head_dim))
    mark_address(pool)
    return pool
