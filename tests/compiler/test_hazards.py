"""Every reason not to fuse: a tiny model with one edge broken, and the same model with it mended.

The broken model is missed by `qkv_cache` with the code, the stage and a message that names the
culprit, and still gives exactly what eager gives, caches included. The mended one is fused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import qkv_idioms
from tilewright.compiler import backend, lower, reports
from tilewright.patterns import effects, language
from tilewright.patterns.language import CODES, Match, Result, Stage

T, K, D = 5, 64, 16  # tokens, hidden size, head_dim
HQ, HKV = 4, 2


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    backend._REPORTS.clear()
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """Weights for one attention layer, and a step to run on them."""

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
        """q [T, Hq, D], k and v [T, Hkv, D]."""
        of = (x, x, x if v_of is None else v_of)
        parts = (p(y) for p, y in zip((self.q_proj, self.k_proj, self.v_proj), of, strict=True))
        return [part.view(T, -1, D) for part in parts]


def make_args():
    """x [T, K], caches [pages, slots, Hkv, D], slots [T]: what every step takes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, K, generator=generator)
    caches = [torch.randn(6, 8, HKV, D, generator=generator) for _ in range(2)]
    return (x, *caches, torch.tensor([3, 9, 40, 17, 0]))


# --- pieces of a step ---------------------------------------------------------------------------


def store(cache, slots, heads):
    cache.view(-1, *cache.shape[2:])[slots] = heads


def cos_sin(*heads):
    """cos and sin [T, 1, D], or [T, Hkv, D] where they vary from head to head."""
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


# --- steps with one edge broken -----------------------------------------------------------------


def fresh_cache(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    caches = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    store(caches[0], slots, k)
    store(caches[1], slots, v)
    return q * 2, *caches


def accumulated(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    k_cache.view(-1, HKV, D).index_put_((slots,), k, accumulate=True)
    v_cache.view(-1, HKV, D).index_put_((slots,), v, accumulate=True)
    return q * 2


def lone_key(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    return q * 2 + F.pad(v, (0, 0, 0, HQ - HKV))


def other_slots_for_v(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots.flip(0), v)
    return q * 2


def random_slots(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, torch.multinomial(slots.float() + 1, T), k)
    store(v_cache, torch.multinomial(slots.float() + 1, T), v)
    return q * 2


def features_apart(m, x, k_cache, v_cache, slots):
    """K is every second feature of a projection."""
    q, v = m.q_proj(x).view(T, HQ, D), m.v_proj(x).view(T, HKV, D)
    store(k_cache, slots, m.wide_proj(x)[:, ::2].view(T, HKV, D))
    store(v_cache, slots, v)
    return q * 2


def one_wide_head(m, x, k_cache, v_cache, slots):
    """The caches hold one head of 2 * D, the rotation has heads of D."""
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(k, *table).view(T, 1, HKV * D))
    store(v_cache, slots, v.view(T, 1, HKV * D))
    return rotate(q, *table) * 2


def reinterpreted(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache.view(torch.int32), slots, k.view(torch.int32))
    store(v_cache.view(torch.int32), slots, v.view(torch.int32))
    return q * 2


def only_later_tokens(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots[1:], k[1:])
    store(v_cache, slots[1:], v[1:])
    return q * 2


def slot_by_head(m, x, k_cache, v_cache, slots):
    """Every head of a token goes to a slot of its own."""
    q, k, v = m.qkv(x)
    by_head = slots[:, None] + torch.arange(HKV)
    k_cache.view(-1, HKV, D)[by_head, torch.arange(HKV)] = k
    v_cache.view(-1, HKV, D)[by_head, torch.arange(HKV)] = v
    return q * 2


def pages_of_other_size(m, x, k_cache, v_cache, slots):
    """K in six pages of 8 slots, V in six pages of 16."""
    q, k, v = m.qkv(x)
    k_cache[slots // 8, slots % 8] = k
    v_cache[slots // 8, slots % 8] = v
    return q * 2


def detour_k(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, eight_bits(k))
    store(v_cache, slots, v)
    return q * 2


def detour_before_rope(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(eight_bits(k), *table))
    store(v_cache, slots, v)
    return rotate(q, *table) * 2


def detour_v(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, eight_bits(v))
    return q * 2


def narrower_cache(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k.to(k_cache.dtype))
    store(v_cache, slots, v.to(k_cache.dtype))
    return q * 2


def under_autocast(*args):
    """The linears read float32 and give bfloat16, without a cast in the graph."""
    with torch.autocast("cpu", torch.bfloat16):
        return plain(*args)


def gelu_k(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, F.gelu(k))
    store(v_cache, slots, v)
    return q * 2


def gelu_v(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, F.gelu(v))
    return q * 2


def rotated_v(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(k, *table))
    store(v_cache, slots, rotate(v, *table))
    return rotate(q, *table) * 2


def einsum(m, x, k_cache, v_cache, slots):
    """Heads straight from an einsum: a projection, though not one that is read as a linear."""
    q, k, v = (
        torch.einsum("tk,hdk->thd", x, p.weight.view(-1, D, K))
        for p in (m.q_proj, m.k_proj, m.v_proj)
    )
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


@torch.library.custom_op("tilewright_tests::quantised_linear", mutates_args=())
def quantised_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


@quantised_linear.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def projected_by_a_custom_op(m, x, k_cache, v_cache, slots):
    projections = (m.q_proj, m.k_proj, m.v_proj)
    q, k, v = (quantised_linear(x, p.weight).view(T, -1, D) for p in projections)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


def relu_k_in_place(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    F.relu(k, inplace=True)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


def bias_scaled(m, x, k_cache, v_cache, slots):
    q, v = m.q_proj(x).view(T, HQ, D), m.v_proj(x).view(T, HKV, D)
    store(k_cache, slots, torch.add(m.k_proj(x), m.full_norm, alpha=2).view(T, HKV, D))
    store(v_cache, slots, v)
    return q * 2


def bias_in_place(m, x, k_cache, v_cache, slots):
    q, v = m.q_proj(x).view(T, HQ, D), m.v_proj(x).view(T, HKV, D)
    store(k_cache, slots, m.k_proj(x).add_(m.full_norm).view(T, HKV, D))
    store(v_cache, slots, v)
    return q * 2


def bias(m, x, k_cache, v_cache, slots):
    q, v = m.q_proj(x).view(T, HQ, D), m.v_proj(x).view(T, HKV, D)
    store(k_cache, slots, (m.k_proj(x) + m.full_norm).view(T, HKV, D))
    store(v_cache, slots, v)
    return q * 2


def norm_of_the_first_token(m, x, k_cache, v_cache, slots):
    """Everybody is scaled by the first token's RMS."""
    q, k, v = m.qkv(x)
    scale = torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + 1e-6)[:1]
    store(k_cache, slots, k * scale * m.norm)
    store(v_cache, slots, v)
    return rms_norm(q, m.norm) * 2


def norm_with_scaled_eps(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    mean = torch.add(k.pow(2).mean(-1, keepdim=True), 0.5, alpha=2)
    store(k_cache, slots, k * torch.rsqrt(mean) * m.norm)
    store(v_cache, slots, v)
    return rms_norm(q, m.norm, 0.5) * 2


def query_of_something_else(m, x, k_cache, v_cache, slots):
    k, v = (p(x).view(T, HKV, D) for p in (m.k_proj, m.v_proj))
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return m.q_proj(x.sin()).view(T, HQ, D) * 2


def query_rotated_otherwise(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    cos, sin = cos_sin()
    store(k_cache, slots, rotate(k, cos, sin))
    store(v_cache, slots, v)
    return rotate(q, sin, cos) * 2


def query_of_two(m, x, k_cache, v_cache, slots):
    out = plain(m, x, k_cache, v_cache, slots)
    return out, m.q_proj(x).sin()


def norm_over_all_heads(m, x, k_cache, v_cache, slots):
    q, v = m.q_proj(x).view(T, HQ, D), m.v_proj(x).view(T, HKV, D)
    store(k_cache, slots, rms_norm(m.k_proj(x), m.full_norm).view(T, HKV, D))
    store(v_cache, slots, v)
    return rms_norm(q, m.norm) * 2


def norm_after_rope(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rms_norm(rotate(k, *table), m.norm))
    store(v_cache, slots, v)
    return rms_norm(rotate(q, *table), m.norm) * 2


def rotated_backwards(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    cos, sin = cos_sin()
    store(k_cache, slots, k * cos - (rotate(k, cos, sin) - k * cos))
    store(v_cache, slots, v)
    return q * 2


def rotated_last_half(m, x, k_cache, v_cache, slots):
    """The last half of the head rotates, the first passes."""
    q, k, v = m.qkv(x)
    cos, sin = (t[..., : D // 2] for t in cos_sin())

    def turn(y):
        return torch.cat((y[..., : D // 2], rotate(y[..., D // 2 :], cos, sin)), -1)

    store(k_cache, slots, turn(k))
    store(v_cache, slots, v)
    return turn(q) * 2


def rotated_by_head(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, rotate(k, *cos_sin(HKV)))
    store(v_cache, slots, v)
    return rotate(q, *cos_sin(HQ)) * 2


def values_of_something_else(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x, v_of=x + 1)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


def read_between(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    seen = k_cache.sum()
    store(v_cache, slots, v)
    return q * 2, seen


def copied_between(copy):
    def step(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache, slots, k)
        seen = copy(k_cache)
        store(v_cache, slots, v)
        return q * 2, seen

    return step


@torch.library.custom_op("tilewright_tests::attend", mutates_args=("out",))
def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(q.sum() + cache.sum())


@attend.register_fake
def _(q, cache, out):
    return None


def read_by_an_op_that_returns_nothing(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    out = torch.zeros(3)
    store(k_cache, slots, k)
    attend(x, cache=k_cache, out=out)
    store(v_cache, slots, v)
    return q * 2, out


def zeroed_between(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    k_cache[0] = 0
    store(v_cache, slots, v)
    return q * 2


def zeroed_before_and_after(m, x, k_cache, v_cache, slots):
    k_cache[0] = 0
    out = plain(m, x, k_cache, v_cache, slots)
    v_cache[0, 0] = 0
    return out


def scale_in_the_cache(m, x, k_cache, v_cache, slots):
    """The norm's weight is a piece of the cache."""
    q, k, v = m.qkv(x)
    weight = k_cache[0, 0, 0]
    normed_k, normed_q = rms_norm(k, weight), rms_norm(q, weight)
    store(k_cache, slots, normed_k)
    store(v_cache, slots, v)
    return normed_q * 2


def scale_outside_the_cache(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    weight = x[0, :D]
    normed_k, normed_q = rms_norm(k, weight), rms_norm(q, weight)
    store(k_cache, slots, normed_k)
    store(v_cache, slots, v)
    return normed_q * 2


def slots_moved_between(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    at = slots + 0
    store(k_cache, at, k)
    keep = at.clone()
    at.add_(1)
    store(v_cache, keep, v)
    return q * 2


def slots_moved_before(m, x, k_cache, v_cache, slots):
    at = slots + 0
    at.add_(1)
    return plain(m, x, k_cache, v_cache, at)


def activation_changed(change):
    def step(m, x, k_cache, v_cache, slots):
        h = x + 0
        q, k, v = m.qkv(h)
        store(k_cache, slots, k)
        change(h)
        store(v_cache, slots, v)
        return q * 2

    return step


def key_returned(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2, k


def key_used(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2, k.sum()


def key_used_by_an_op_that_returns_nothing(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    out = torch.zeros(3)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    attend(k, cache=x, out=out)
    return q * 2, out


def query_used_first(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    early = q.sum()
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2, early


def query_norm_after(m, x, k_cache, v_cache, slots):
    """The query's norm weight is computed only after the write."""
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(rms_norm(k, m.norm), *table))
    store(v_cache, slots, v)
    return rotate(rms_norm(q, m.norm.exp()), *table) * 2


def query_norm_before(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    table, weight = cos_sin(), m.norm.exp()
    store(k_cache, slots, rotate(rms_norm(k, m.norm), *table))
    store(v_cache, slots, v)
    return rotate(rms_norm(q, weight), *table) * 2


def no_weight(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, F.rms_norm(k, (D,)))
    store(v_cache, slots, v)
    return F.rms_norm(q, (D,)) * 2


def two_eps(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, rms_norm(k, m.norm, 1e-6))
    store(v_cache, slots, v)
    return rms_norm(q, m.norm, 1e-3) * 2


def one_eps(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots, rms_norm(k, m.norm))
    store(v_cache, slots, v)
    return rms_norm(q, m.norm) * 2


# --- other arguments ----------------------------------------------------------------------------


def caches_on_one_storage(v_from):
    """V's cache starts `v_from` elements into the storage that K's begins."""

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


def one_wide_head_each():
    x, *caches, slots = make_args()
    return x, *(c.view(6, 8, 1, HKV * D) for c in caches), slots


def longer_v_pages():
    x, k_cache, v_cache, slots = make_args()
    return x, k_cache, torch.cat((v_cache, v_cache), 1), slots


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hazard:
    """culprit: what the message has to say. mended: the same step with the edge right. instead: the
    pattern that still takes the write alone."""

    code: str
    stage: Stage
    culprit: str
    broken: Callable[..., Any]
    mended: Callable[..., Any] = plain
    instead: str | None = "cache_store"
    broken_args: Callable[[], tuple[Any, ...]] = make_args
    mended_args: Callable[[], tuple[Any, ...]] = make_args
    layer: dict[str, Any] = field(default_factory=dict)
    mended_layer: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


A, X, KP, VP, QP, G, H = list(Stage)[:7]

HAZARDS = {
    "fresh_cache": Hazard("FRESH_CACHE", A, "allocates", fresh_cache, instead=None),
    "accumulated": Hazard("ACCUMULATED_WRITE", A, "accumulates", accumulated, instead=None),
    "lone_key": Hazard("LONE_WRITE", A, "no twin", lone_key),
    "other_slots_for_v": Hazard("LONE_WRITE", A, "no twin at the same slots", other_slots_for_v),
    "random_slots": Hazard("LONE_WRITE", A, "no twin at the same slots", random_slots),
    "one_cache_twice": Hazard("LONE_WRITE", A, "no twin", plain, broken_args=one_cache_twice),
    "features_apart": Hazard("LAYOUT", KP, "run of consecutive features", features_apart),
    "one_wide_head": Hazard(
        "CACHE_LAYOUT",
        KP,
        "1 heads of 32, the K projection makes 2 of 16",
        one_wide_head,
        rotated,
        broken_args=one_wide_head_each,
    ),
    "reinterpreted": Hazard("CACHE_LAYOUT", A, "reinterpreting view", reinterpreted, instead=None),
    "only_later_tokens": Hazard("SLOT_INDEX", KP, "every token once", only_later_tokens),
    "slot_by_head": Hazard("SLOT_INDEX", A, "from head to head", slot_by_head, instead=None),
    "pages_of_other_size": Hazard(
        "SLOT_INDEX",
        G,
        "different slots",
        pages_of_other_size,
        pages_of_other_size,
        None,
        broken_args=longer_v_pages,
    ),
    "detour_k": Hazard("CAST", KP, "float8_e4m3fn to float32", detour_k),
    "detour_before_rope": Hazard(
        "CAST", KP, "float8_e4m3fn to float32", detour_before_rope, rotated
    ),
    "detour_v": Hazard("CAST", VP, "float8_e4m3fn to float32", detour_v),
    "narrower_cache": Hazard(
        "CAST", KP, "float32 to bfloat16", narrower_cache, broken_args=caches_of(torch.bfloat16)
    ),
    "gelu_k": Hazard("K_PATH", KP, "aten.gelu", gelu_k),
    "einsum": Hazard("K_PATH", KP, "aten.einsum", einsum),
    "projected_by_a_custom_op": Hazard(
        "K_PATH", KP, "tilewright_tests::quantised_linear", projected_by_a_custom_op
    ),
    "relu_k_in_place": Hazard("K_PATH", KP, "store", relu_k_in_place),
    "bias_scaled": Hazard("K_PATH", KP, "aten.add", bias_scaled),
    "norm_of_the_first_token": Hazard("K_PATH", KP, "aten.mul", norm_of_the_first_token, one_eps),
    "norm_with_scaled_eps": Hazard("K_PATH", KP, "aten.mul", norm_with_scaled_eps, one_eps),
    "bias_in_place": Hazard("ESCAPES", H, "also used by store", bias_in_place, bias),
    "gelu_v": Hazard("V_PATH", VP, "aten.gelu", gelu_v),
    "rotated_v": Hazard("V_PATH", VP, "both writes are rotated", rotated_v, rotated),
    "query_of_something_else": Hazard("Q_PATH", QP, "no query", query_of_something_else),
    "query_rotated_otherwise": Hazard("Q_PATH", QP, "no query", query_rotated_otherwise, rotated),
    "query_of_two": Hazard("Q_PATH", QP, "2 candidates", query_of_two),
    "norm_over_all_heads": Hazard(
        "NORM_WIDTH", KP, "32 elements, head_dim is 16", norm_over_all_heads, one_eps
    ),
    "norm_after_rope": Hazard("NORM_AFTER_ROPE", KP, "rotated, then norm", norm_after_rope, normed),
    "rotated_last_half": Hazard("ROPE_STYLE", KP, "first ones", rotated_last_half, rotated),
    "rotated_by_head": Hazard("ROPE_TABLE", KP, "from head to head", rotated_by_head, rotated),
    "values_of_something_else": Hazard(
        "ACTIVATION", X, "V projects aten.add", values_of_something_else
    ),
    "float64": Hazard(
        "DTYPE",
        G,
        "have float64; expected one of bfloat16, float16, float32",
        plain,
        instead=None,
        broken_args=caches_of(torch.float64, torch.float64),
        dtype=torch.float64,
    ),
    "autocast": Hazard(
        "DTYPE",
        G,
        "have bfloat16, float32",
        under_autocast,
        instead="cache_store",
        broken_args=caches_of(torch.bfloat16),
    ),
    "three_query_heads": Hazard(
        "HEADS", G, "3 query, 2 key heads", rotated, rotated, layer={"num_heads": 3}
    ),
    "read_between": Hazard("CACHE_READ", H, "sum", read_between, instead=None),
    "cloned_between": Hazard(
        "CACHE_READ", H, "clone", copied_between(lambda c: c.clone()), instead=None
    ),
    "made_contiguous_between": Hazard(
        "CACHE_READ", H, "contiguous", copied_between(lambda c: c.mT.contiguous()), instead=None
    ),
    "reshaped_between": Hazard(
        "CACHE_READ", H, "reshape", copied_between(lambda c: c.mT.reshape(6, -1)), instead=None
    ),
    "repeated_between": Hazard(
        "CACHE_READ",
        H,
        "repeat_interleave",
        copied_between(lambda c: c.repeat_interleave(2, dim=2)),
        instead=None,
    ),
    "read_by_an_op_that_returns_nothing": Hazard(
        "CACHE_READ", H, "attend", read_by_an_op_that_returns_nothing, instead=None
    ),
    "zeroed_between": Hazard(
        "CACHE_WRITE", H, "written again", zeroed_between, zeroed_before_and_after, None
    ),
    "scale_in_the_cache": Hazard(
        "CACHE_ALIAS",
        H,
        "norm_weight lies in the cache's own memory",
        scale_in_the_cache,
        scale_outside_the_cache,
    ),
    "overlapping_caches": Hazard(
        "CACHE_OVERLAP",
        H,
        "one storage",
        plain,
        instead=None,
        broken_args=caches_on_one_storage(256),
        mended_args=caches_on_one_storage(6 * 8 * HKV * D),
    ),
    "slots_moved_between": Hazard(
        "INPUT_MUTATED", H, "slot_mapping", slots_moved_between, slots_moved_before, None
    ),
    "activation_scaled": Hazard(
        "INPUT_MUTATED", H, "x is", activation_changed(lambda h: h.mul_(2))
    ),
    "activation_row_scaled": Hazard(
        "INPUT_MUTATED", H, "x is", activation_changed(lambda h: h[0].mul_(2))
    ),
    "activation_rectified": Hazard(
        "INPUT_MUTATED", H, "x is", activation_changed(lambda h: F.relu(h, inplace=True))
    ),
    "activation_squashed": Hazard(
        "INPUT_MUTATED", H, "x is", activation_changed(lambda h: F.hardtanh(h, -0.1, 0.1, True))
    ),
    "key_returned": Hazard("ESCAPES", H, "the graph's output", key_returned),
    "key_used": Hazard("ESCAPES", H, "aten.sum", key_used),
    "key_used_by_an_op_that_returns_nothing": Hazard(
        "ESCAPES", H, "store", key_used_by_an_op_that_returns_nothing
    ),
    "query_used_first": Hazard(
        "ORDER",
        H,
        "used by aten.sum before the cache is written (test_hazards.py:",
        query_used_first,
    ),
    "query_norm_after": Hazard(
        "ORDER",
        H,
        "q_norm_weight is computed only after the cache is written",
        query_norm_after,
        query_norm_before,
    ),
    "column_major_activation": Hazard(
        "UNSUPPORTED",
        Stage.CAPABILITY,
        "x: expected a contiguous last dimension (stride 1), got strides [1, 5]",
        plain,
        broken_args=column_major_activation,
    ),
    "no_weight": Hazard("UNSUPPORTED", KP, "without a weight", no_weight, one_eps),
    "two_eps": Hazard("UNSUPPORTED", G, "different eps", two_eps, one_eps),
}


def layer_of(hazard, mended):
    step, settings = (
        (hazard.mended, hazard.mended_layer) if mended else (hazard.broken, hazard.layer)
    )
    return Layer(step, **settings).to(torch.float32 if mended else hazard.dtype)


@pytest.mark.parametrize("name", HAZARDS)
def test_a_broken_edge_is_named(name):
    hazard = HAZARDS[name]
    lowered = lower(layer_of(hazard, mended=False), hazard.broken_args())
    (miss, *_) = (m for m in lowered.misses if m.code == hazard.code)
    assert miss.stage == hazard.stage
    assert hazard.culprit in miss.message
    assert miss.nodes
    assert miss.source.startswith("test_hazards.py:")
    used = {m.pattern for m in lowered.matches}
    assert used == ({hazard.instead} if hazard.instead else set()), str(lowered)


@pytest.mark.parametrize("name", HAZARDS)
def test_a_broken_edge_leaves_the_model_as_it_was(name):
    """cache_store copies what it is given, so even with it nothing may differ by a bit."""
    hazard = HAZARDS[name]
    layer = layer_of(hazard, mended=False)
    assert_same(layer, hazard.broken_args, exactly=True)


@pytest.mark.parametrize("name", HAZARDS)
def test_the_mended_edge_matches(name):
    hazard = HAZARDS[name]
    layer = layer_of(hazard, mended=True)
    assert_same(layer, hazard.mended_args, exactly=False)
    (report,) = reports()
    assert [m.pattern for m in report.matches] == ["qkv_cache"], [str(m) for m in report.misses]
    assert report.misses == ()


def assert_same(layer, make, exactly):
    """Outputs and arguments after the call, under eager and compiled; aliased caches stay so."""
    eager, ours = make(), make()
    torch.manual_seed(0)
    expected = layer(*eager)
    torch.manual_seed(0)
    actual = torch.compile(layer, backend="tilewright", options={"inner": "eager"})(*ours)
    for a, b in zip(flat([actual, ours]), flat([expected, eager]), strict=True):
        if exactly:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def flat(items):
    if isinstance(items, torch.Tensor):
        return [items]
    return [t for item in items for t in flat(item)]


# --- hazards that take more than a step -----------------------------------------------------------


@dataclass(frozen=True)
class Projection:
    """Takes the first linear of a graph, which the built-in patterns would absorb."""

    name: str = "tests_projection"
    op: str = "tilewright_tests::none"

    def anchors(self, flow):
        return [next(v for v in flow.values if v.op == "aten.linear")]

    def match(self, anchor, flow):
        result = Result(anchor, effects.identity(anchor.shape))
        return Match(self.name, self.op, anchor, {}, (result,), (anchor,), (), {})


def test_a_site_that_another_match_absorbs_is_claimed():
    language.register(Projection())
    try:
        layer, args = Layer(rotated), make_args()
        lowered = lower(layer, args, patterns=["qkv_cache", "tests_projection"])
    finally:
        language.unregister("tests_projection")
    assert [m.pattern for m in lowered.matches] == ["qkv_cache"]
    (miss,) = lowered.misses
    assert (miss.code, miss.stage, miss.pattern) == ("CLAIMED", Stage.HAZARDS, "tests_projection")
    assert "qkv_cache at the top level already absorbs" in miss.message
    torch._dynamo.reset()
    assert lower(layer, args, patterns=["qkv_cache"]).misses == []


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_collective_inside_is_named(process_group):
    from torch.distributed._functional_collectives import all_reduce

    def reduced(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache, slots, all_reduce(k, "sum", "0"))
        store(v_cache, slots, v)
        return q * 2

    def reduced_after(m, *args):
        return all_reduce(plain(m, *args), "sum", "0")

    layer = Layer(reduced)
    lowered = lower(layer, make_args())
    (miss,) = lowered.misses
    assert (miss.code, miss.stage) == ("COLLECTIVE", Stage.K_PATH)
    assert "_c10d_functional" in miss.message
    assert [m.pattern for m in lowered.matches] == ["cache_store"]
    assert_same(layer, make_args, exactly=True)
    torch._dynamo.reset()
    assert [m.pattern for m in lower(Layer(reduced_after), make_args()).matches] == ["qkv_cache"]


def test_a_projection_may_read_what_another_site_made():
    """The second site's activation is the first one's query, which the rewrite replaces."""

    def twice(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        store(k_cache, slots, k)
        store(v_cache, slots, v)
        return plain(m, q.view(T, -1), k_cache, v_cache, slots + 1)

    layer = Layer(twice)
    assert_same(layer, make_args, exactly=False)
    assert [m.pattern for m in reports()[-1].matches] == ["qkv_cache"] * 2


def test_norms_of_one_plus_weight_match():
    def gemma(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        table = cos_sin()
        q, k = (rotate(rms_norm(y, 1 + m.norm), *table) for y in (q, k))
        store(k_cache, slots, k)
        store(v_cache, slots, v)
        return q * 2

    layer = Layer(gemma)
    assert_same(layer, make_args, exactly=False)
    assert [m.pattern for m in reports()[-1].matches] == ["qkv_cache"]


def test_every_code_has_a_test_that_reaches_it():
    reached = {h.code for h in HAZARDS.values()} | {"CLAIMED", "COLLECTIVE"}
    assert reached | set(IDIOMS_MISSED) == set(CODES)


#: code -> a plain idiom of tests.models that reaches it (None: the backend's tests do).
IDIOMS_MISSED = {
    "FUNCTIONAL_WRITE": "out_of_place",
    "OPAQUE_WRITE": "custom_op",
    "SLICE_WRITE": "narrow_copy",
    "MASKED_WRITE": "masked",
    "GRAPH_BREAK": "masked",
    "GROWING_CACHE": None,
}


@pytest.mark.parametrize("code", [c for c, name in IDIOMS_MISSED.items() if name])
def test_idioms_reach_their_codes(code):
    module, args = qkv_idioms.build(IDIOMS_MISSED[code])
    captures = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=code == "MASKED_WRITE")
    with captures:
        lowered = lower(module, args)
    miss = next(m for m in lowered.misses if m.code == code)
    assert miss.stage in (Stage.ANCHORED, Stage.K_PATH)
    assert miss.message


def test_a_cache_that_grows_is_told_to_stop(caplog):
    def growing(m, x, k_cache, v_cache, slots):
        q, k, v = m.qkv(x)
        past = [c.view(-1, HKV, D) for c in (k_cache, v_cache)]
        return q * 2, *(torch.cat(pair) for pair in zip(past, (k, v), strict=True))

    layer = Layer(growing)
    with caplog.at_level(logging.WARNING, "tilewright"):
        assert_same(layer, make_args, exactly=True)
    (miss,) = reports()[-1].misses
    assert (miss.code, miss.count, miss.stage) == ("GROWING_CACHE", 2, Stage.ANCHORED)
    assert "static cache" in miss.hint
    assert "GROWING_CACHE x2" in caplog.text
