"""Every way in which real code writes new keys and values into a cache, and reads them back.

A form consists of three plain functions. `caches(axes)` makes the tensors that the graph gets as
inputs. `write(caches, layer, k, v, step)` stores k and v; a form that writes out of place returns
the new caches. `gather(caches, layer, step)` reads every token's own sequence, keys and values each
[T, W * page_size, Hkv, D], as attention over a block table does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Step(NamedTuple):
    """The places of the tokens of one step: positions, seq, page, offset and slots [T], and the
    block table [sequences, W]."""

    positions: torch.Tensor
    seq: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    page_size: int

    @property
    def page(self):
        return self.block_table[self.seq, self.positions // self.page_size]

    @property
    def offset(self):
        return self.positions % self.page_size


@dataclass(frozen=True)
class WriteForm:
    caches: Callable[..., Any]
    write: Callable[..., Any]
    gather: Callable[..., Any]


def old_tokens(*shape, dtype):
    """Fills a cache as earlier steps would, with numbers that make a stray write visible."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 61 / 61 - 0.5).view(shape).to(dtype)


# --- caches -------------------------------------------------------------------------------------


def pair(shape_of):
    def caches(axes):
        shape = shape_of(axes)
        return [old_tokens(*shape, dtype=axes.dtype) for _ in range(2 * axes.num_layers)]

    return caches


def one(shape_of):
    def caches(axes):
        return [old_tokens(*shape_of(axes), dtype=axes.dtype) for _ in range(axes.num_layers)]

    return caches


def page_major(axes):
    return (axes.num_pages, axes.page_size, axes.num_kv_heads, axes.head_dim)


def head_major(axes):
    return (axes.num_pages, axes.num_kv_heads, axes.page_size, axes.head_dim)


def pages_of_pairs(axes):
    return (axes.num_pages, 2, axes.page_size, axes.num_kv_heads, axes.head_dim)


def pair_of_pages(axes):
    return (2, *page_major(axes))


def max_blocks(axes):
    """Makes one pool for all layers: [P, 2, L, S, H, D]."""
    shape = (axes.num_pages, 2, axes.num_layers + 1, *page_major(axes)[1:])
    return [old_tokens(*shape, dtype=axes.dtype)]


def layers_in_pages(axes):
    """Makes one pool for all layers: [P, L, 2, S, H, D]."""
    shape = (axes.num_pages, axes.num_layers + 1, 2, *page_major(axes)[1:])
    return [old_tokens(*shape, dtype=axes.dtype)]


def joined_heads(axes):
    """Makes one tensor with the heads of K followed by the heads of V: [P, S, 2 * H, D]."""
    return (axes.num_pages, axes.page_size, 2 * axes.num_kv_heads, axes.head_dim)


def layered_slots(axes):
    """Makes one K tensor and one V tensor for all layers: [L, slots, H, D]."""
    slots = axes.num_pages * axes.page_size
    shape = (axes.num_layers + 1, slots, axes.num_kv_heads, axes.head_dim)
    return [old_tokens(*shape, dtype=axes.dtype) for _ in range(2)]


def vllm_v1_split(axes, x=8):
    """Makes K [P, H, D / x, S, x] and V [P, H, D, S]."""
    pages, heads, size = axes.num_pages, axes.num_kv_heads, axes.page_size
    k_shape = (pages, heads, axes.head_dim // x, size, x)
    v_shape = (pages, heads, axes.head_dim, size)
    made = []
    for _ in range(axes.num_layers):
        made += [old_tokens(*k_shape, dtype=axes.dtype), old_tokens(*v_shape, dtype=axes.dtype)]
    return made


# --- gathers ------------------------------------------------------------------------------------


def kv(caches, layer):
    return caches[2 * layer], caches[2 * layer + 1]


def gather_pages(cache, step):
    return cache[step.block_table[step.seq]].flatten(1, 2)


def gather_page_major(caches, layer, step):
    return tuple(gather_pages(cache, step) for cache in kv(caches, layer))


def gather_head_major(caches, layer, step):
    return tuple(gather_pages(cache.transpose(1, 2), step) for cache in kv(caches, layer))


def gather_pages_of_pairs(caches, layer, step):
    cache = caches[layer]
    return gather_pages(cache[:, 0], step), gather_pages(cache[:, 1], step)


def gather_pair_of_pages(caches, layer, step):
    k_cache, v_cache = caches[layer].unbind(0)
    return gather_pages(k_cache, step), gather_pages(v_cache, step)


def gather_max(caches, layer, step):
    blocks = caches[0]
    return gather_pages(blocks[:, 0, layer], step), gather_pages(blocks[:, 1, layer], step)


def gather_layer_after_page(caches, layer, step):
    pool = caches[0]
    return gather_pages(pool[:, layer, 0], step), gather_pages(pool[:, layer, 1], step)


def gather_heads_joined(caches, layer, step):
    return gather_pages(caches[layer], step).chunk(2, dim=-2)


def gather_layered_slots(caches, layer, step):
    within = torch.arange(step.page_size, device=step.slots.device)
    slots = (step.block_table[step.seq][:, :, None] * step.page_size + within).flatten(1)
    return caches[0][layer][slots], caches[1][layer][slots]


def gather_vllm_v1(caches, layer, step):
    k_cache, v_cache = kv(caches, layer)
    keys = k_cache.permute(0, 3, 1, 2, 4).flatten(3, 4)
    return gather_pages(keys, step), gather_pages(v_cache.permute(0, 3, 1, 2), step)


# --- writes -------------------------------------------------------------------------------------


def flat(cache):
    return cache.view(-1, *cache.shape[2:])


def write_setitem(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    flat(k_cache)[step.slots] = k
    flat(v_cache)[step.slots] = v


def write_index_put(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    flat(k_cache).index_put_((step.slots,), k)
    flat(v_cache).index_put_((step.slots,), v)


def write_index_copy(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    flat(k_cache).index_copy_(0, step.slots, k)
    flat(v_cache).index_copy_(0, step.slots, v)


def write_scatter(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    index = step.slots[:, None, None].expand_as(k)
    flat(k_cache).scatter_(0, index, k)
    flat(v_cache).scatter_(0, index, v)


def write_page_offset(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    page, offset = step.page, step.offset
    k_cache[page, offset] = k
    v_cache[page, offset] = v


def write_gathered_page(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    block = torch.div(step.positions, step.page_size, rounding_mode="floor")
    rows = step.block_table.index_select(0, step.seq)
    page = rows.gather(1, block.unsqueeze(1)).squeeze(1)
    offset = torch.remainder(step.positions, step.page_size)
    k_cache[page, offset] = k
    v_cache[page, offset] = v


def write_shifted(caches, layer, k, v, step):
    """Computes block and offset by shift and mask, as hand-written kernels do."""
    k_cache, v_cache = kv(caches, layer)
    bits = step.page_size.bit_length() - 1
    page = step.block_table[step.seq, step.positions >> bits]
    offset = step.positions & (step.page_size - 1)
    k_cache[page, offset] = k
    v_cache[page, offset] = v


def write_slots_computed(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    slots = step.page * step.page_size + step.offset
    flat(k_cache)[slots] = k
    flat(v_cache)[slots] = v


def write_batched_rows(caches, layer, k, v, step):
    """Writes by two-dimensional slots, as for a batch of equal lengths."""
    k_cache, v_cache = kv(caches, layer)
    page, offset = step.page.view(2, -1), step.offset.view(2, -1)
    k_cache[page, offset] = k.unflatten(0, (2, -1))
    v_cache[page, offset] = v.unflatten(0, (2, -1))


def write_head_major(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    page, offset = step.page, step.offset
    k_cache[page, :, offset] = k
    v_cache[page, :, offset] = v


def write_head_index(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    page, offset = step.page[:, None], step.offset[:, None]
    head = torch.arange(k.shape[1], device=k.device)[None, :]
    k_cache[page, head, offset] = k
    v_cache[page, head, offset] = v


def write_pages_of_pairs(caches, layer, k, v, step):
    cache, page, offset = caches[layer], step.page, step.offset
    cache[page, 0, offset] = k
    cache[page, 1, offset] = v


def write_stacked(caches, layer, k, v, step):
    caches[layer][step.page, :, step.offset] = torch.stack([k, v], dim=1)


def write_unbound(caches, layer, k, v, step):
    k_cache, v_cache = caches[layer].unbind(0)
    flat(k_cache)[step.slots] = k
    flat(v_cache)[step.slots] = v


def write_selected(caches, layer, k, v, step):
    cache = caches[layer]
    flat(cache[0])[step.slots] = k
    flat(cache[1])[step.slots] = v


def write_max(caches, layer, k, v, step):
    blocks, page, offset = caches[0], step.page, step.offset
    blocks[page, 0, layer, offset] = k
    blocks[page, 1, layer, offset] = v


def write_layer_after_page(caches, layer, k, v, step):
    pool, page, offset = caches[0], step.page, step.offset
    pool[page, layer, 0, offset] = k
    pool[page, layer, 1, offset] = v


def write_heads_joined(caches, layer, k, v, step):
    caches[layer][step.page, step.offset] = torch.cat((k, v), dim=-2)


def write_layered_slots(caches, layer, k, v, step):
    caches[0][layer][step.slots] = k
    caches[1][layer][step.slots] = v


def write_vllm_v1(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    page, offset = step.page, step.offset
    k_cache[page, :, :, offset] = k.view(*k.shape[:2], -1, k_cache.shape[-1])
    v_cache[page, :, :, offset] = v


@torch.library.custom_op("tilewright_models::store", mutates_args=("k_cache", "v_cache"))
def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    flat(k_cache)[slots] = k
    flat(v_cache)[slots] = v


@store.register_fake
def _(k, v, k_cache, v_cache, slots):
    return None


def write_custom_op(caches, layer, k, v, step):
    store(k, v, *kv(caches, layer), step.slots)


def write_where(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    slots = torch.where(step.slots >= 0, step.slots, 0)
    flat(k_cache)[slots] = k
    flat(v_cache)[slots] = v


def write_out_of_place(caches, layer, k, v, step):
    changed = list(caches)
    for cache_index, values in ((2 * layer, k), (2 * layer + 1, v)):
        cache = caches[cache_index]
        changed[cache_index] = flat(cache).index_put((step.slots,), values).view_as(cache)
    return changed


def write_masked(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    kept = step.slots >= 0
    flat(k_cache)[step.slots[kept]] = k[kept]
    flat(v_cache)[step.slots[kept]] = v[kept]


PAGED = {
    "setitem_on_view": WriteForm(pair(page_major), write_setitem, gather_page_major),
    "index_put": WriteForm(pair(page_major), write_index_put, gather_page_major),
    "index_copy": WriteForm(pair(page_major), write_index_copy, gather_page_major),
    "scatter": WriteForm(pair(page_major), write_scatter, gather_page_major),
    "page_offset": WriteForm(pair(page_major), write_page_offset, gather_page_major),
    "gathered_page": WriteForm(pair(page_major), write_gathered_page, gather_page_major),
    "head_major": WriteForm(pair(head_major), write_head_major, gather_head_major),
    "head_index": WriteForm(pair(head_major), write_head_index, gather_head_major),
    "pages_of_pairs": WriteForm(one(pages_of_pairs), write_pages_of_pairs, gather_pages_of_pairs),
    "stacked": WriteForm(one(pages_of_pairs), write_stacked, gather_pages_of_pairs),
    "unbound": WriteForm(one(pair_of_pages), write_unbound, gather_pair_of_pages),
    "selected": WriteForm(one(pair_of_pages), write_selected, gather_pair_of_pages),
    "max_blocks": WriteForm(max_blocks, write_max, gather_max),
    "layered_slots": WriteForm(layered_slots, write_layered_slots, gather_layered_slots),
    "shifted": WriteForm(pair(page_major), write_shifted, gather_page_major),
    "slots_computed": WriteForm(pair(page_major), write_slots_computed, gather_page_major),
    "layer_after_page": WriteForm(layers_in_pages, write_layer_after_page, gather_layer_after_page),
    "heads_joined": WriteForm(one(joined_heads), write_heads_joined, gather_heads_joined),
    "batched_rows": WriteForm(pair(page_major), write_batched_rows, gather_page_major),
    "vllm_v1": WriteForm(vllm_v1_split, write_vllm_v1, gather_vllm_v1),
    "custom_op": WriteForm(pair(page_major), write_custom_op, gather_page_major),
    "where": WriteForm(pair(page_major), write_where, gather_page_major),
    "out_of_place": WriteForm(pair(page_major), write_out_of_place, gather_page_major),
    "masked": WriteForm(pair(page_major), write_masked, gather_page_major),
}


# --- batches: k and v [B, H, S, D] --------------------------------------------------------------


def write_static_cache(k_cache, v_cache, k, v, positions):
    """Writes as Hugging Face's StaticCache does. Caches are [B, H, L, D]."""
    k_cache.index_copy_(2, positions, k)
    v_cache.index_copy_(2, positions, v)
    return k_cache, v_cache


def write_gpt_fast(k_cache, v_cache, k, v, positions):
    """Writes caches [B, H, L, D]."""
    k_cache[:, :, positions] = k
    v_cache[:, :, positions] = v
    return k_cache, v_cache


def write_llama_reference(k_cache, v_cache, k, v, start):
    """Writes caches [max_batch, L, H, D]. `start` is a Python int."""
    batch, _, length, _ = k.shape
    k_cache[:batch, start : start + length] = k.transpose(1, 2)
    v_cache[:batch, start : start + length] = v.transpose(1, 2)
    end = start + length
    return k_cache[:batch, :end].transpose(1, 2), v_cache[:batch, :end].transpose(1, 2)


def write_narrow(k_cache, v_cache, k, v, start):
    """Writes caches [B, H, L, D]. `start` is a Python int."""
    length = k.shape[2]
    k_cache.narrow(2, start, length).copy_(k)
    v_cache.narrow(2, start, length).copy_(v)
    return k_cache.narrow(2, 0, start + length), v_cache.narrow(2, 0, start + length)


BATCHED = {
    "static_cache": write_static_cache,
    "gpt_fast": write_gpt_fast,
    "llama_reference": write_llama_reference,
    "narrow_copy": write_narrow,
}
