"""Steps that must not fuse because of an operation between the activation and the cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.compiler.steps import (
    HKV,
    HQ,
    D,
    T,
    cos_sin,
    eight_bits,
    plain,
    rms_norm,
    rotate,
    store,
)


def fresh_cache(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    caches = torch.zeros_like(k_cache), torch.zeros_like(v_cache)
    store(caches[0], slots, k)
    store(caches[1], slots, v)
    return q * 2, *caches


def whole_cache(m, x, k_cache, v_cache, slots):
    """Writes the whole cache, so that any dimension could be the slots."""
    q, k, v = m.qkv(x)
    k_cache.copy_(k.view(k_cache.shape))
    v_cache.copy_(v.view(v_cache.shape))
    return q * 2


def moved_cache(m, x, k_cache, v_cache, slots):
    """Shifts all keys of a full window to make room."""
    q, k, v = m.qkv(x)
    for cache, new in ((k_cache, k), (v_cache, v)):
        flat = cache.view(-1, HKV, D)
        moved = flat.roll(-T, 0)
        moved[torch.arange(-T, 0)] = new
        flat.copy_(moved)
    return q * 2


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
    """K takes every second feature of a projection."""
    q, v = m.q_proj(x).view(T, HQ, D), m.v_proj(x).view(T, HKV, D)
    store(k_cache, slots, m.wide_proj(x)[:, ::2].view(T, HKV, D))
    store(v_cache, slots, v)
    return q * 2


def one_wide_head(m, x, k_cache, v_cache, slots):
    """Stores one head of 2 * D numbers, although the rotation treats it as heads of D numbers."""
    q, k, v = m.qkv(x)
    table = cos_sin()
    store(k_cache, slots, rotate(k, *table).view(T, 1, HKV * D))
    store(v_cache, slots, v.view(T, 1, HKV * D))
    return rotate(q, *table) * 2


def reinterpreted(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache.view(torch.int16), slots, k.view(torch.int16))
    store(v_cache.view(torch.int16), slots, v.view(torch.int16))
    return q * 2


def only_later_tokens(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)
    store(k_cache, slots[1:], k[1:])
    store(v_cache, slots[1:], v[1:])
    return q * 2


def slot_by_head(m, x, k_cache, v_cache, slots):
    """Writes every head of a token to a separate slot."""
    q, k, v = m.qkv(x)
    by_head = slots[:, None] + torch.arange(HKV)
    k_cache.view(-1, HKV, D)[by_head, torch.arange(HKV)] = k
    v_cache.view(-1, HKV, D)[by_head, torch.arange(HKV)] = v
    return q * 2


def pages_of_other_size(m, x, k_cache, v_cache, slots):
    """Stores K in six pages of 8 slots, and V in six pages of 16 slots."""
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
    """The linears read float32 and return bfloat16, without a cast in the graph."""
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
    projected = m.k_proj(x)
    k = projected.view(T, HKV, D)
    projected.add_(m.full_norm)
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


def bias(m, x, k_cache, v_cache, slots):
    q, v = m.q_proj(x).view(T, HQ, D), m.v_proj(x).view(T, HKV, D)
    store(k_cache, slots, (m.k_proj(x) + m.full_norm).view(T, HKV, D))
    store(v_cache, slots, v)
    return q * 2


def norm_of_the_first_token(m, x, k_cache, v_cache, slots):
    """Scales every token by the RMS of the first token."""
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


def norm_over_half_heads(m, x, k_cache, v_cache, slots):
    q, k, v = m.qkv(x)

    def halves(y):
        return rms_norm(y.view(T, -1, D // 2), m.norm[: D // 2]).view(y.shape)

    store(k_cache, slots, halves(k))
    store(v_cache, slots, v)
    return halves(q) * 2


def norm_twice(m, x, k_cache, v_cache, slots):
    """Normalises the heads before the rotation and after it."""
    q, k, v = m.qkv(x)
    table = cos_sin()
    q, k = (rms_norm(rotate(rms_norm(y, m.norm), *table), m.norm) for y in (q, k))
    store(k_cache, slots, k)
    store(v_cache, slots, v)
    return q * 2


def rotated_last_half(m, x, k_cache, v_cache, slots):
    """Rotates the last half of each head, and leaves the first half unchanged."""
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


def no_weight(m, x, k_cache, v_cache, slots):
    """Normalises only K, without a weight."""
    q, k, v = m.qkv(x)
    store(k_cache, slots, F.rms_norm(k, (D,)))
    store(v_cache, slots, v)
    return q * 2


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
