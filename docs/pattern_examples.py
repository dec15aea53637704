"""The smallest model of each pattern family, in the plain PyTorch it is usually written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Loaded = tuple[Any, tuple[Any, ...], dict[str, Any]]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 2, 64, 256
EXPERTS, SLOTS, INNER, TOKENS = 8, 2, 128, 16


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-two, one], dim=-1) * sin


class CachedAttention(nn.Module):
    """qkv_cache: projections, rotation, write of K and V into pages."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)

    def forward(self, x, cos, sin, k_cache, v_cache, slot_mapping):
        q = self.q(x).view(-1, HEADS, HEAD_DIM)
        k = self.k(x).view(-1, KV_HEADS, HEAD_DIM)
        v = self.v(x).view(-1, KV_HEADS, HEAD_DIM)
        k_cache.view(-1, KV_HEADS, HEAD_DIM)[slot_mapping] = rotate(k, cos, sin)
        v_cache.view(-1, KV_HEADS, HEAD_DIM)[slot_mapping] = v
        return rotate(q, cos, sin)


class CacheWrite(nn.Module):
    """cache_store: other layers read the new keys too, so the write alone is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_DIM, bias=False)

    def forward(self, x, k_cache, v_cache, slot_mapping):
        k, v = self.kv(x).view(-1, 2, KV_HEADS, HEAD_DIM).unbind(1)
        k_cache.view(-1, KV_HEADS, HEAD_DIM)[slot_mapping] = k
        v_cache.view(-1, KV_HEADS, HEAD_DIM)[slot_mapping] = v
        return k.relu(), v.relu()


class Experts(nn.Module):
    """moe: sort by expert, two grouped products, weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, HIDDEN))

    def forward(self, x, expert_ids, expert_weights):
        order = expert_ids.flatten().argsort(stable=True)
        sorted_ids = expert_ids.flatten()[order]
        ends = torch.histc(sorted_ids.int(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // SLOTS], self.gate_up, offs=ends).chunk(2, dim=-1)
        rows = torch._grouped_mm(nn.functional.silu(gate) * up, self.down, offs=ends)
        rows = rows * expert_weights.flatten()[order].unsqueeze(-1)
        out = torch.empty_like(rows)
        out[order] = rows
        return out.view(-1, SLOTS, HIDDEN).sum(1)


def _floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _loaded(model: nn.Module, *args: torch.Tensor) -> Loaded:
    return model.to(torch.bfloat16).requires_grad_(False), args, {}


def _caches() -> tuple[torch.Tensor, ...]:
    return tuple(_floats(32, 16, KV_HEADS, HEAD_DIM) for _ in "kv")


def qkv_cache() -> Loaded:
    angles = _floats(TOKENS, 1, HEAD_DIM), _floats(TOKENS, 1, HEAD_DIM)
    slots = torch.zeros(TOKENS, dtype=torch.int64)
    return _loaded(CachedAttention(), _floats(TOKENS, HIDDEN), *angles, *_caches(), slots)


def cache_store() -> Loaded:
    slots = torch.zeros(TOKENS, dtype=torch.int64)
    return _loaded(CacheWrite(), _floats(TOKENS, HIDDEN), *_caches(), slots)


def moe() -> Loaded:
    ids = torch.zeros(TOKENS, SLOTS, dtype=torch.int64)
    return _loaded(Experts(), _floats(TOKENS, HIDDEN), ids, _floats(TOKENS, SLOTS))


def on_meta(make: Callable[[], Loaded]) -> Callable[[], Loaded]:
    def made() -> Loaded:
        with torch.device("meta"):
            return make()

    return made


EXAMPLES: Mapping[str, Callable[[], Loaded]] = {
    make.__name__: on_meta(make) for make in (qkv_cache, cache_store, moe)
}
