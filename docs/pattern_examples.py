"""The smallest model of each pattern family, in the plain PyTorch it is usually written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

Loaded = tuple[Any, tuple[Any, ...], dict[str, Any]]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 2, 64, 256
EXPERTS, SLOTS, INNER, TOKENS = 8, 2, 128, 16
RANK, ROPE, NOPE, V_DIM = 128, 64, 128, 128


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


class Router(nn.Module):
    """moe_router: logits, softmax, the largest, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, x):
        weights, ids = self.gate(x).float().softmax(-1).topk(SLOTS, -1)
        return weights / weights.sum(-1, keepdim=True), ids


class GroupedLinear(nn.Module):
    """grouped_gemm: one weight per group of rows, outside of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))

    def forward(self, rows, ends):
        return torch._grouped_mm(rows, self.weight, offs=ends)


class SharedHeads(nn.Module):
    """cache_attention: the heads of a cache, repeated for the queries that share them; a mask."""

    def forward(self, q, k, v, k_cache, v_cache, positions, mask):
        k_cache.index_copy_(2, positions, k)
        v_cache.index_copy_(2, positions, v)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k_cache, v_cache))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class GatedMlp(nn.Module):
    """linear_activation: gate and up of a norm that nobody else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        return nn.functional.silu(self.gate(normed)) * self.up(normed)


class OutputProjection(nn.Module):
    """linear_residual: what an attention gives, added to what went around it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, attended, residual):
        return residual + self.out(attended)


class SharedLinear(nn.Module):
    """all_reduce_residual_norm: each rank has a part of the linear's columns; the next layer reads
    the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, x, residual):
        total = residual + functional.all_reduce(self.down(x), "sum", dist.group.WORLD)
        return total, self.norm(total)


class LatentAttention(nn.Module):
    """mla_prefill: keys and values of every head made of one latent, one rope key for all."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + V_DIM), bias=False)

    def forward(self, q, latents, rope_keys):
        kv = self.kv_b(latents).view(1, -1, HEADS, NOPE + V_DIM).transpose(1, 2)
        k_nope, v = kv.split([NOPE, V_DIM], dim=-1)
        k = torch.cat([k_nope, rope_keys.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class AbsorbedAttention(nn.Module):
    """mla_decode: attention over latents, the up-projection multiplied into query and result."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b = nn.Linear(RANK, HEADS * (NOPE + V_DIM), bias=False)

    def forward(self, q_nope, q_rope, cache, seen):
        weight = self.kv_b.weight.view(HEADS, NOPE + V_DIM, RANK)
        q_latent = torch.einsum("bshn,hnl->bshl", q_nope, weight[:, :NOPE])
        scores = torch.einsum("bshl,bkl->bhsk", torch.cat([q_latent, q_rope], dim=-1), cache)
        scores = (scores * (NOPE + ROPE) ** -0.5).masked_fill(~seen, float("-inf"))
        latents = torch.einsum("bhsk,bkl->bshl", scores.softmax(-1), cache[..., :RANK])
        return torch.einsum("bshl,hvl->bshv", latents, weight[:, NOPE:])


class LatentWrite(nn.Module):
    """mla_latent_store: latents normed, their rope part rotated, both written by slot."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.norm = nn.RMSNorm(RANK)

    def forward(self, x, cos, sin, cache, slot_mapping):
        latents, rope_keys = self.kv_a(x).split([RANK, ROPE], dim=-1)
        rows = torch.cat([self.norm(latents), rotate(rope_keys, cos, sin)], dim=-1)
        cache.view(-1, RANK + ROPE)[slot_mapping] = rows


class Adapted(nn.Module):
    """lora_qkv: a low-rank delta, one of several for each row, added to q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, width in widths.items():
            self.register_parameter(f"w_{name}", nn.Parameter(torch.empty(width, HIDDEN)))
            self.register_parameter(f"a_{name}", nn.Parameter(torch.empty(4, 16, HIDDEN)))
            self.register_parameter(f"b_{name}", nn.Parameter(torch.empty(4, width, 16)))

    def forward(self, x, adapter_ids):
        out = []
        for name in "qkv":
            w, a, b = (getattr(self, f"{part}_{name}") for part in "wab")
            low = torch.einsum("th,trh->tr", x, a[adapter_ids])
            out.append(x @ w.T + torch.einsum("tr,tor->to", low, b[adapter_ids]))
        return tuple(out)


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


def moe_router() -> Loaded:
    return _loaded(Router(), _floats(TOKENS, HIDDEN))


def grouped_gemm() -> Loaded:
    return _loaded(
        GroupedLinear(), _floats(TOKENS, HIDDEN), torch.zeros(EXPERTS, dtype=torch.int32)
    )


def cache_attention() -> Loaded:
    q, k, v = (_floats(1, n, TOKENS, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    caches = [_floats(1, KV_HEADS, 32 * TOKENS, HEAD_DIM) for _ in "kv"]
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    mask = torch.zeros(1, 1, TOKENS, 32 * TOKENS, dtype=torch.bool)
    return _loaded(SharedHeads(), q, k, v, *caches, positions, mask)


def linear_activation() -> Loaded:
    return _loaded(GatedMlp(), _floats(TOKENS, HIDDEN))


def linear_residual() -> Loaded:
    return _loaded(OutputProjection(), _floats(TOKENS, HIDDEN), _floats(TOKENS, HIDDEN))


def all_reduce_residual_norm() -> Loaded:
    """Needs the ranks of a process group."""
    return _loaded(SharedLinear(), _floats(TOKENS, INNER), _floats(TOKENS, HIDDEN))


def mla_prefill() -> Loaded:
    q, rope_keys = _floats(1, HEADS, TOKENS, NOPE + ROPE), _floats(1, TOKENS, ROPE)
    return _loaded(LatentAttention(), q, _floats(1, TOKENS, RANK), rope_keys)


def mla_decode() -> Loaded:
    parts = (_floats(1, 1, HEADS, width) for width in (NOPE, ROPE))
    seen = torch.zeros(1, 1, 1, 32 * TOKENS, dtype=torch.bool)
    return _loaded(AbsorbedAttention(), *parts, _floats(1, 32 * TOKENS, RANK + ROPE), seen)


def mla_latent_store() -> Loaded:
    table, cache = _floats(TOKENS, ROPE), _floats(32, 16, RANK + ROPE)
    slots = torch.zeros(TOKENS, dtype=torch.int64)
    return _loaded(LatentWrite(), _floats(TOKENS, HIDDEN), table, table, cache, slots)


def lora_qkv() -> Loaded:
    return _loaded(Adapted(), _floats(TOKENS, HIDDEN), torch.zeros(TOKENS, dtype=torch.int64))


def on_meta(make: Callable[[], Loaded]) -> Callable[[], Loaded]:
    def made() -> Loaded:
        with torch.device("meta"):
            return make()

    return made


FAMILIES = (
    qkv_cache,
    cache_store,
    moe,
    moe_router,
    grouped_gemm,
    cache_attention,
    linear_activation,
    linear_residual,
    all_reduce_residual_norm,
    mla_prefill,
    mla_decode,
    mla_latent_store,
    lora_qkv,
)
EXAMPLES: Mapping[str, Callable[[], Loaded]] = {make.__name__: on_meta(make) for make in FAMILIES}
