"""A tiny attention layer, functions that run a step of it and that are fused, and the arguments of
a step.

A step takes (layer, x, k_cache, v_cache, slots).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

T, K, D = 5, 64, 16  # tokens, hidden size, head_dim
HQ, HKV = 4, 2


class Layer(nn.Module):
    """The weights of one attention layer, and a step that runs on them."""

    def __init__(self, step: Callable[..., Any], num_heads: int = HQ) -> None:
        super().__init__()
        self.step = step
        self.q_proj = nn.Linear(K, num_heads * D, bias=False)
        self.k_proj = nn.Linear(K, HKV * D, bias=False)
        self.v_proj = nn.Linear(K, HKV * D, bias=False)
        self.wide_proj = nn.Linear(K, 2 * HKV * D, bias=False)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.full_norm = nn.Parameter(torch.linspace(0.5, 1.5, HKV * D))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
            parameter.requires_grad_(False)

    def forward(self, *args):
        return self.step(self, *args)

    def qkv(self, x, v_of=None):
        """Returns q [T, Hq, D], and k and v [T, Hkv, D]."""
        of = (x, x, x if v_of is None else v_of)
        parts = (p(y) for p, y in zip((self.q_proj, self.k_proj, self.v_proj), of, strict=True))
        return [part.view(T, -1, D) for part in parts]


def make_args():
    """Returns the arguments of every step: x [T, K], caches [pages, slots, Hkv, D] and slots
    [T]."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, K, generator=generator)
    caches = [torch.randn(6, 8, HKV, D, generator=generator) for _ in range(2)]
    return (x, *caches, torch.tensor([3, 9, 40, 17, 0]))


# --- pieces of a step ---------------------------------------------------------------------------


def store(cache, slots, heads):
    cache.view(-1, *cache.shape[2:])[slots] = heads


def cos_sin(*heads):
    """Returns cos and sin, each [T, 1, D], or [T, Hkv, D] if they differ between heads."""
    angles = torch.arange(T).float()[:, None] * 0.1 ** (torch.arange(D // 2) / D)
    angles = torch.cat((angles, angles), -1)[:, None]
    if heads:
        angles = angles * torch.arange(1, 1 + heads[0])[:, None]
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def eight_bits(x):
    return x.to(torch.float8_e4m3fn).to(x.dtype)


# --- steps that match ---------------------------------------------------------------------------


def plain(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


def rotated(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(k, *table))
    store(v_cache, slots, v)
    return rotate(q, *table) * 2


def normed(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(rms_norm(k, m.norm), *table))
    store(v_cache, slots, v)
    return rotate(rms_norm(q, m.norm), *table) * 2


# --- other arguments ----------------------------------------------------------------------------


def caches_on_one_storage(v_from):
    """Returns caches on one storage. K's cache begins at the start of the storage, and V's cache at
    element `v_from`."""

    def make():
        x, k_cache, _, slots = make_args()
        count = k_cache.numel()
        pool = torch.arange(2.0 * count) / count
        pair = (pool[start : start + count].view(k_cache.shape) for start in (0, v_from))
        return x, *pair, slots

    return make


def column_major_activation():
    x, *rest = make_args()
    return x.t().contiguous().t(), *rest


def one_cache_twice():
    x, k_cache, _, slots = make_args()
    return x, k_cache, k_cache, slots


def caches_of(dtype, activations=torch.float32):
    def make():
        x, k_cache, v_cache, slots = make_args()
        return x.to(activations), k_cache.to(dtype), v_cache.to(dtype), slots

    return make


def caches_of_the_tokens_alone():
    x, *caches, slots = make_args()
    return x, *(c.view(-1, HKV, D)[:T].clone()[None] for c in caches), slots


def one_wide_head_each():
    x, *caches, slots = make_args()
    return x, *(c.view(6, 8, 1, HKV * D) for c in caches), slots


def longer_v_pages():
    x, k_cache, v_cache, slots = make_args()
    return x, k_cache, torch.cat((v_cache, v_cache), 1), slots
