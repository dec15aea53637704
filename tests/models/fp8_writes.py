"""Caches of eight-bit floats, with every way in which keys and values are scaled, rounded and
written.

The forms have the functions of cache_writes. They cast with `to(cache.dtype)`, so that a float64
run with float64 caches rounds nothing.
"""

from __future__ import annotations

import torch

from tests.models.cache_writes import (
    WriteForm,
    flat,
    gather_pages,
    kv,
    old_tokens,
    page_major,
    pages_of_pairs,
)

K_SCALE, V_SCALE = torch.tensor(0.021), torch.tensor([0.034])
K_INVERSE, V_INVERSE = 1 / K_SCALE, 1 / V_SCALE
HEAD_SCALES = torch.tensor([0.02, 0.05])
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def fp8_pages(axes, dtype=torch.float8_e4m3fn):
    return [old_tokens(*page_major(axes), dtype=dtype) for _ in range(2 * axes.num_layers)]


def fp8_pairs(axes):
    shape = pages_of_pairs(axes)
    return [old_tokens(*shape, dtype=torch.float8_e4m3fn) for _ in range(axes.num_layers)]


def e5m2_pages(axes):
    return fp8_pages(axes, torch.float8_e5m2)


def read(cache, step):
    """Reads pages as bytes, because some devices cannot index 8-bit floats by tensors."""
    return gather_pages(cache.view(torch.uint8), step).view(cache.dtype).to(torch.float32)


def gather(caches, layer, step):
    k_cache, v_cache = kv(caches, layer)
    return read(k_cache, step).to(torch.bfloat16), read(v_cache, step).to(torch.bfloat16)


def gather_scaled(caches, layer, step):
    k_cache, v_cache = kv(caches, layer)
    return read(k_cache, step) * K_SCALE, read(v_cache, step) * V_SCALE


def gather_by_head(caches, layer, step):
    scales = HEAD_SCALES[:, None]
    return tuple(read(cache, step) * scales for cache in kv(caches, layer))


def gather_pair(caches, layer, step):
    cache = caches[layer].view(torch.uint8)
    halves = (gather_pages(cache[:, i], step).view(caches[layer].dtype) for i in range(2))
    return tuple(half.to(torch.bfloat16) for half in halves)


def write(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    flat(k_cache)[step.slots] = k.to(k_cache.dtype)
    flat(v_cache)[step.slots] = v.to(v_cache.dtype)


def write_bytes(caches, layer, k, v, step):
    for cache, values in zip(kv(caches, layer), (k, v), strict=True):
        rounded = values.to(cache.dtype).view(torch.uint8)
        flat(cache.view(torch.uint8))[step.slots] = rounded


def write_divided(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    flat(k_cache)[step.slots] = (k / K_SCALE).to(k_cache.dtype)
    flat(v_cache)[step.slots] = (v / V_SCALE).to(v_cache.dtype)


def write_multiplied(caches, layer, k, v, step):
    """Scales and clamps in float32, and writes bytes, as quantised serving does."""
    k_cache, v_cache = kv(caches, layer)
    k = (k.float() * K_INVERSE).clamp(-LARGEST, LARGEST).to(k_cache.dtype)
    v = (V_INVERSE * v.float()).clamp(min=-LARGEST, max=LARGEST).to(v_cache.dtype)
    flat(k_cache.view(torch.uint8))[step.slots] = k.view(torch.uint8)
    flat(v_cache.view(torch.uint8))[step.slots] = v.view(torch.uint8)


def write_by_head(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    flat(k_cache)[step.slots] = (k / HEAD_SCALES[:, None]).to(k_cache.dtype)
    flat(v_cache)[step.slots] = (v / HEAD_SCALES[:, None]).to(v_cache.dtype)


def write_by_number(caches, layer, k, v, step):
    k_cache, v_cache = kv(caches, layer)
    k, v = torch.clamp(k / 0.021, -LARGEST, LARGEST), torch.clamp(v / 0.034, -LARGEST, LARGEST)
    k_cache[step.page, step.offset] = k.to(k_cache.dtype)
    v_cache[step.page, step.offset] = v.to(v_cache.dtype)


def write_stacked(caches, layer, k, v, step):
    cache = caches[layer]
    cache[step.page, :, step.offset] = (torch.stack([k, v], dim=1) * 4.0).to(cache.dtype)


def gather_pair_scaled(caches, layer, step):
    return tuple(half * 0.25 for half in gather_pair(caches, layer, step))


PAGED = {
    "fp8": WriteForm(fp8_pages, write, gather),
    "fp8_bytes": WriteForm(fp8_pages, write_bytes, gather),
    "fp8_e5m2": WriteForm(e5m2_pages, write, gather),
    "fp8_divided": WriteForm(fp8_pages, write_divided, gather_scaled),
    "fp8_multiplied": WriteForm(fp8_pages, write_multiplied, gather_scaled),
    "fp8_by_head": WriteForm(fp8_pages, write_by_head, gather_by_head),
    "fp8_by_number": WriteForm(fp8_pages, write_by_number, gather_scaled),
    "fp8_stacked": WriteForm(fp8_pairs, write_stacked, gather_pair_scaled),
}
