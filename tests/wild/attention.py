"""Attention over a cache in the manner of public code bases, one function per style.

    module, args = build("complex_pairs")        # one of STYLES

A style is `step(m, x, keys, values, positions) -> [B, S, Hq * D]`: it projects x [B, S, K] with m's
weights, rotates, writes the caches and attends. Caches are [B, Hkv, L, D] or [B, L, Hkv, D];
positions [S], or [B, S] where each sequence has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, SEQ, HEADS, KV_HEADS, WIDTH, HIDDEN, LENGTH = 2, 3, 4, 2, 16, 32, 12
EPS = 1e-6


# --- pieces ---------------------------------------------------------------------------------------


def split_heads(x):
    """[B, S, H * D] as [B, H, S, D]."""
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


def project(m, x):
    """q, k, v [B, S, H, D]."""
    return [w(x).unflatten(-1, (-1, WIDTH)) for w in (m.wq, m.wk, m.wv)]


def angles(positions):
    """[..., D / 2], fp32."""
    rates = 100.0 ** (-torch.arange(WIDTH // 2) * 2 / WIDTH)
    return positions[..., None].float() * rates


def cos_sin(positions, dtype=torch.float32):
    """Each [..., D], the halves alike."""
    turned = angles(positions).repeat(*[1] * positions.dim(), 2)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate(x, positions):
    """x [..., S, D]."""
    cos, sin = cos_sin(positions, x.dtype)
    return x * cos + rotate_half(x) * sin


def store(keys, values, positions, k, v):
    """k, v [B, Hkv, S, D]."""
    return keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)


def attend(q, keys, values, positions):
    """q [B, Hq, S, D] to [B, Hkv, L, D]: [B, S, Hq * D]."""
    seen = torch.arange(keys.shape[2]) <= positions[..., None]
    mask = seen if seen.dim() == 2 else seen[:, None]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def usual(q, k, v, keys, values, positions):
    """The rest of a layer whose heads, [B, S, H, D], are ready."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return attend(q, *store(keys, values, positions, k, v), positions)


# --- rotations ------------------------------------------------------------------------------------


def complex_pairs(m, x, keys, values, positions):
    """As gemma_pytorch: (i, i + half) as complex numbers, split again by chunk and cat."""
    turns = torch.polar(torch.ones(SEQ, WIDTH // 2), angles(positions))

    def turned(t):
        pairs = torch.view_as_complex(
            torch.stack(torch.chunk(t.transpose(1, 2).float(), 2, -1), -1)
        )
        out = torch.view_as_real(pairs * turns).type_as(t)
        out = torch.cat(torch.chunk(out, 2, dim=-1), dim=-2)
        return out.reshape(out.shape[0], out.shape[1], out.shape[2], -1).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def complex_pairs_turned_back(m, x, keys, values, positions):
    """The near miss: chunks along the dimension beside the pairs', so that pairs stay apart."""
    turns = torch.polar(torch.ones(SEQ, WIDTH // 2), angles(positions))

    def turned(t):
        pairs = torch.view_as_complex(
            torch.stack(torch.chunk(t.transpose(1, 2).float(), 2, -1), -1)
        )
        out = torch.view_as_real(pairs * turns).type_as(t)
        out = out.roll(1, dims=-2)
        out = torch.cat(torch.chunk(out, 2, dim=-1), dim=-2)
        return out.reshape(out.shape[0], out.shape[1], -1, WIDTH).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def cast_after_half(m, x, keys, values, positions):
    """As ModernBERT's decoder: rotate_half in the model's dtype, the products in fp32."""
    cos, sin = cos_sin(positions)

    def turned(t):
        t = t.transpose(1, 2)
        out = t.float() * cos + rotate_half(t).float() * sin
        return out.to(t.dtype).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def cast_after_pairs(m, x, keys, values, positions):
    """As ERNIE 4.5: neighbours are paired, and cast after they changed places."""
    cos, sin = (
        t.repeat_interleave(2, -1) for t in (angles(positions).cos(), angles(positions).sin())
    )

    def swapped(t):
        return torch.stack((-t[..., 1::2], t[..., 0::2]), dim=-1).flatten(-2)

    def turned(t):
        t = t.transpose(1, 2)
        out = (t.float() * cos) + (swapped(t).float() * sin)
        return out.to(t.dtype).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def _in_pairs(m, x, keys, values, positions, table):
    def turned(t):
        swapped = torch.stack([-t[..., 1::2], t[..., ::2]], -1).reshape_as(t)
        cos, sin = (f(angles(positions)[:, None]).to(t.dtype) for f in (torch.cos, torch.sin))
        return t * table(cos) + swapped * table(sin)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def tables_stacked(m, x, keys, values, positions):
    """As RoFormer: the tables hold each number twice, stacked beside itself."""
    return _in_pairs(
        m, x, keys, values, positions, lambda t: torch.stack([t, t], -1).reshape(SEQ, 1, WIDTH)
    )


def tables_stacked_apart(m, x, keys, values, positions):
    """The near miss: the second number of a pair is its neighbour's."""
    return _in_pairs(
        m, x, keys, values, positions, lambda t: torch.stack([t, t.roll(1, -1)], -1).flatten(-2)
    )


def cast_of_sums(m, x, keys, values, positions):
    """The near miss: one operand of the rotation is rounded to fewer bits than the other."""
    cos, sin = cos_sin(positions)

    def turned(t):
        t = t.transpose(1, 2)
        out = t.float() * cos + rotate_half(t.to(torch.float8_e4m3fn).to(t.dtype)).float() * sin
        return out.to(t.dtype).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


# --- norms ----------------------------------------------------------------------------------------


def norm_in_place(m, x, keys, values, positions):
    """As nano-vllm: the heads are overwritten by their norm."""

    def normed(t, weight):
        dtype = t.dtype
        t = t.float()
        var = t.pow(2).mean(dim=-1, keepdim=True)
        t.mul_(torch.rsqrt(var + EPS))
        return t.to(dtype).mul_(weight)

    q, k, v = project(m, x)
    q, k = normed(q, m.q_norm), normed(k, m.k_norm)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def norm_in_place_seen(m, x, keys, values, positions):
    """The near miss: the projection itself is overwritten, and read again afterwards."""
    q, k, v = project(m, x)
    q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + EPS)
    k.mul_(torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + EPS))
    out = usual(q, k, v, keys, values, positions)
    return out + k.flatten(2).repeat(1, 1, 2)


def norm_of_values(m, x, keys, values, positions):
    """As Gemma 4: keys and queries are normed with a weight, values without."""

    def normed(t, weight=None):
        out = t.float() * torch.rsqrt(t.float().pow(2).mean(-1, keepdim=True) + EPS)
        return (out if weight is None else out * weight.float()).type_as(t)

    q, k, v = project(m, x)
    q, k, v = normed(q, m.q_norm), normed(k, m.k_norm), normed(v)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def norm_of_values_weighted(m, x, keys, values, positions):
    """The near miss: the norm of the values has a weight too."""
    q, k, v = project(m, x)
    q, k, v = (F.rms_norm(t, (WIDTH,), m.k_norm, EPS) for t in (q, k, v))
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def values_of_keys(m, x, keys, values, positions):
    """As Gemma 4's global layers: the values are the keys' projection, normed otherwise."""
    q, k, _ = project(m, x)
    v = F.rms_norm(k, (WIDTH,), None, EPS)
    q, k = (F.rms_norm(t, (WIDTH,), w, EPS) for t, w in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def layer_norm_with_bias(m, x, keys, values, positions):
    """As Persimmon: a layer norm with a bias on each head, and a rotation of the first half."""

    def turned(t):
        t = t.transpose(1, 2)
        first, rest = t[..., : WIDTH // 2], t[..., WIDTH // 2 :]
        turns = angles(positions)[..., : WIDTH // 4].repeat(1, 2).to(t.dtype)
        first = first * turns.cos() + rotate_half(first) * turns.sin()
        return torch.cat((first, rest), -1).transpose(1, 2)

    q, k, v = project(m, x)
    q = F.layer_norm(q, (WIDTH,), m.q_norm, m.q_bias, 1e-5)
    k = F.layer_norm(k, (WIDTH,), m.k_norm, m.k_bias, 1e-5)
    return usual(turned(q), turned(k), v, keys, values, positions)


def layer_norm_spelled_out(m, x, keys, values, positions):
    """The same by hand, in fp32 and over whole heads' rotation; the keys' norm alone has a bias."""

    def normed(t, weight, bias):
        t = t.float()
        out = (t - t.mean(-1, keepdim=True)) * torch.rsqrt(
            t.var(-1, keepdim=True, correction=0) + EPS
        )
        return out * weight.float() + bias

    q, k, v = project(m, x)
    q = F.layer_norm(q, (WIDTH,), m.q_norm, None, EPS)
    k = normed(k, m.k_norm, m.k_bias.float()).to(x.dtype)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def norm_shifted_by_token(m, x, keys, values, positions):
    """The near miss: what is added after the norm differs from token to token."""
    q, k, v = project(m, x)
    shift = positions[:, None, None] * m.k_bias
    q, k = (F.layer_norm(t, (WIDTH,), w, None, EPS) for t, w in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (rotate((t + shift).transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def layer_norm_by_head(m, x, keys, values, positions):
    """As StableLM 2: each head has a norm of its own, of a split and joined again."""

    def normed(t, weights):
        heads = torch.split(t.transpose(1, 2), 1, dim=1)
        done = [
            F.layer_norm(h, (WIDTH,), w, None, 1e-5) for h, w in zip(heads, weights, strict=True)
        ]
        return torch.cat(done, dim=1).transpose(1, 2)

    q, k, v = project(m, x)
    q, k = normed(q, m.q_norms), normed(k, m.k_norms)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def layer_norm_by_other_head(m, x, keys, values, positions):
    """The near miss: the heads change places between split and join."""

    def normed(t, weights):
        heads = torch.split(t.transpose(1, 2), 1, dim=1)[::-1]
        done = [
            F.layer_norm(h, (WIDTH,), w, None, 1e-5) for h, w in zip(heads, weights, strict=True)
        ]
        return torch.cat(done, dim=1).transpose(1, 2)

    q, k, v = project(m, x)
    q, k = normed(q, m.q_norms), normed(k, m.k_norms)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


# --- gates ----------------------------------------------------------------------------------------


def _gated(m, x, keys, values, positions, gate_of, split, packed=False):
    """split: q_proj's result [B, S, H, 2, D] or [B, S, 2, H, D] as q and gate [B, S, H, D]. packed:
    one linear makes all."""

    def normed(t, weight):
        out = t.float() * torch.rsqrt(t.float().pow(2).mean(-1, keepdim=True) + EPS)
        return (out * (1.0 + weight.float())).type_as(t)

    if packed:
        both = (2 * HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH)
        made, *kv = F.linear(x, m.packed, m.packed_bias).split(both, dim=-1)
    else:
        made, kv = m.wqg(x), [m.wk(x), m.wv(x)]
    q, gate = split(made)
    gate = gate_of(gate)
    k, v = (t.unflatten(-1, (-1, WIDTH)) for t in kv)
    q, k = normed(q, m.q_norm), normed(k, m.k_norm)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions), gate


def gate_beside_query(m, x, keys, values, positions):
    """As Qwen3-Next: a head of q_proj is a query's and its gate's columns."""

    def split(t):
        q, gate = torch.chunk(t.view(BATCH, SEQ, -1, WIDTH * 2), 2, dim=-1)
        return q, gate.reshape(BATCH, SEQ, -1)

    out, gate = _gated(m, x, keys, values, positions, lambda g: g, split)
    return out * torch.sigmoid(gate)


def gate_in_packed(m, x, keys, values, positions):
    """As engines pack it: queries and gates, keys, values in one linear with a bias."""

    def split(t):
        q, gate = t.view(BATCH, SEQ, -1, WIDTH * 2).chunk(2, dim=-1)
        return q, gate.flatten(2)

    out, gate = _gated(m, x, keys, values, positions, lambda g: g, split, packed=True)
    return out * torch.sigmoid(gate)


def gate_behind_query(m, x, keys, values, positions):
    """All queries, then all gates; the sigmoid stands before the writes."""

    def split(t):
        q, gate = t.chunk(2, dim=-1)
        return q.unflatten(-1, (-1, WIDTH)), gate

    out, gate = _gated(m, x, keys, values, positions, torch.sigmoid, split)
    return out * gate


def gate_across_query(m, x, keys, values, positions):
    """The near miss: the gates are read with the queries as they were projected."""

    def split(t):
        t = t.view(BATCH, SEQ, -1, WIDTH * 2)
        return t[..., :WIDTH], t.sum(-1, keepdim=True).expand(-1, -1, -1, WIDTH).flatten(2)

    out, gate = _gated(m, x, keys, values, positions, lambda g: g, split)
    return out * torch.sigmoid(gate)


# --- scales ---------------------------------------------------------------------------------------


def int8_product_scaled(m, x, keys, values, positions):
    """As gpt-fast's int8 weights: the product of codes is scaled, split, and then rotated."""
    qkv = F.linear(x, m.codes.to(x.dtype)) * m.scales
    q, k, v = qkv.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH], dim=-1)
    q, k, v = (t.view(BATCH, SEQ, -1, WIDTH) for t in (q, k, v))
    table = torch.stack((angles(positions).cos(), angles(positions).sin()), -1).to(x.dtype)

    def turned(t):
        shaped = t.float().reshape(*t.shape[:-1], -1, 2)
        turns = table.view(1, SEQ, 1, WIDTH // 2, 2)
        out = torch.stack(
            [
                shaped[..., 0] * turns[..., 0] - shaped[..., 1] * turns[..., 1],
                shaped[..., 1] * turns[..., 0] + shaped[..., 0] * turns[..., 1],
            ],
            -1,
        )
        return out.flatten(3).type_as(t)

    q, k, v = (t.transpose(1, 2) for t in (turned(q), turned(k), v))
    k_out, v_out = keys, values
    k_out[:, :, positions] = k
    v_out[:, :, positions] = v
    return attend(q, k_out, v_out, positions)


def int8_both_scaled(m, x, keys, values, positions):
    """Separate projections, each product scaled."""
    q, k, v = (
        (F.linear(x, w.to(x.dtype)) * s).view(BATCH, SEQ, -1, WIDTH)
        for w, s in zip(
            m.codes.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH]),
            m.scales.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH]),
            strict=True,
        )
    )
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def key_multiplier(m, x, keys, values, positions):
    """As Falcon-H1: a constant on the keys before they are rotated."""
    q, k, v = project(m, x)
    k = k * 0.39
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def value_multiplier(m, x, keys, values, positions):
    """As MiMo-V2: a constant on the values."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v * 0.707, keys, values, positions)


def key_divided(m, x, keys, values, positions):
    """Keys over a number once they are rotated, in fp32; both have a factor."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, (k.float() / 3.0).to(x.dtype), 2 * v, keys, values, positions)


def key_multiplied_before_norm(m, x, keys, values, positions):
    """The near miss: a norm follows, whose epsilon the factor would move."""
    q, k, v = project(m, x)
    q, k = (F.rms_norm(t, (WIDTH,), w, 1e-3) for t, w in ((q, m.q_norm), (k * 0.05, m.k_norm)))
    return usual(q, k, v, keys, values, positions)


def query_multiplier(m, x, keys, values, positions):
    """A constant on the queries before they are rotated: they are multiplied behind the op."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q * 0.39, k))
    return usual(q, k, v, keys, values, positions)


def key_multiplied_after_norm(m, x, keys, values, positions):
    """Constants on queries and keys between their norms and the rotation."""
    q, k, v = project(m, x)
    q, k = (F.rms_norm(t, (WIDTH,), w, EPS) * 1.2 for t, w in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def query_multiplied_by_token(m, x, keys, values, positions):
    """The near miss: a factor that differs from token to token, in front of the rotation."""
    q, k, v = project(m, x)
    q = q * (1 + positions.to(x.dtype))[:, None, None]
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


# --- writes ---------------------------------------------------------------------------------------


def rows_unrolled(m, x, keys, values, positions):
    """As LitGPT with positions [B, S]: each sequence is written by a call of its own."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions[:, None]), rotate(k, positions[:, None])
    for cache, new in ((keys, k), (values, v)):
        for i in range(BATCH):
            cache[i].index_copy_(1, positions[i], new[i])
    return attend(q, keys, values, positions)


def rows_crossed(m, x, keys, values, positions):
    """The near miss: sequence 0's tokens go to the slots of sequence 1."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions[:, None]), rotate(k, positions[:, None])
    for cache, new in ((keys, k), (values, v)):
        for i in range(BATCH):
            cache[i].index_copy_(1, positions[i], new[1 - i])
    return attend(q, keys, values, positions)


def scattered_rows(m, x, keys, values, positions):
    """As Moshi: scatter_ by [B, 1, T, 1] expanded over heads and columns; positions modulo L."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions[:, None]), rotate(k, positions[:, None])
    at = (positions % LENGTH).view(BATCH, 1, SEQ, 1)
    at = at.expand(-1, KV_HEADS, SEQ, WIDTH)
    keys.scatter_(2, at, k)
    values.scatter_(2, at, v)
    return attend(q, keys, values, positions)


def scattered_heads(m, x, keys, values, positions):
    """The near miss: the slot depends on the head too."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    at = positions.view(BATCH, 1, SEQ, 1) + torch.arange(KV_HEADS).view(1, KV_HEADS, 1, 1)
    at = (at % LENGTH).expand(-1, -1, SEQ, WIDTH)
    keys.scatter_(2, at, k)
    values.scatter_(2, at, v)
    return attend(q, keys, values, positions)


def put_rows(m, x, keys, values, positions):
    """index_put_ by sequence and position, caches by token [B, L, Hkv, D]."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions[:, None]).transpose(1, 2) for t in (q, k))
    rows = torch.arange(BATCH)[:, None]
    keys.index_put_((rows, positions), k)
    values.index_put_((rows, positions), v)
    return attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), positions)


def put_rows_heads_first(m, x, keys, values, positions):
    """The same with caches [B, Hkv, L, D]: the heads lie between the indices."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions[:, None]).transpose(1, 2) for t in (q, k))
    rows = torch.arange(BATCH)[:, None]
    keys[rows, :, positions] = k
    values[rows, :, positions] = v
    return attend(q.transpose(1, 2), keys, values, positions)


def rolled(m, x, keys, values, positions):
    """A full window of transformers: the oldest goes out, the newest comes last; one token."""
    q, k, v = (t.transpose(1, 2)[:, :, :1] for t in project(m, x))
    seen = []
    for cache, new in ((keys, k), (values, v)):
        whole = torch.cat((cache[:, :, 1:], new), dim=-2)
        cache.copy_(whole)
        seen.append(whole)
    return F.scaled_dot_product_attention(q, *seen, enable_gqa=True).transpose(1, 2).flatten(2)


# --- what stands beside ---------------------------------------------------------------------------


def sum_after(m, x, keys, values, positions):
    """Something is added to the query that only a later value knows."""
    q, k, v = project(m, x)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keys, values = store(keys, values, positions, k, v)
    q = q + x.sum() * 0
    return attend(q, keys, values, positions)


def query_capped(m, x, keys, values, positions):
    """What the op has not goes over the finished queries, before the caches are written."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions), rotate(k, positions)
    q = torch.where(positions[:, None] > 4, 5.0 * torch.tanh(q / 5.0), q)
    return attend(q, *store(keys, values, positions, k, v), positions)


def query_by_old_cache(m, x, keys, values, positions):
    """The near miss: what goes over them reads the cache as it was."""
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = rotate(q, positions), rotate(k, positions)
    q = torch.maximum(q, keys[:, :1, 4 : 4 + SEQ])
    return attend(q, *store(keys, values, positions, k, v), positions)


def beside_convolution(m, x, keys, values, positions):
    """As LFM2: a layer beside keeps the last inputs of its convolution, [B, C, width]."""
    m.inputs.copy_(torch.cat((m.inputs, m.wk(x).transpose(1, 2)), -1)[..., -m.inputs.shape[-1] :])
    return usual(*project(m, x), keys, values, positions)


def beside_recurrence(m, x, keys, values, positions):
    """As gated linear attention: a state [B, H, D, D] decays, and takes up new keys and values."""
    _, k, v = project(m, x.flip(-1))
    decay = torch.exp(-F.softplus(k.float().mean(dim=(1, 3)))[..., None, None])
    m.state.copy_(m.state * decay + torch.einsum("bshk,bshv->bhkv", k.float(), v.float()))
    return usual(*project(m, x), keys, values, positions)


def beside_recurrence_by_head(m, x, keys, values, positions):
    """As Zamba: each head's part of the state is replaced by itself; time steps are made of two
    products with a matrix for each head, and a bias."""
    _, k, v = project(m, x[:, :1].flip(-1))
    steps = m.up[:, None] @ (m.down[:, None] @ k.permute(2, 0, 3, 1)) + m.step_bias
    for head in range(KV_HEADS):
        decay = torch.exp(-F.softplus(steps[head].float()))
        new = k[:, 0, head, :, None].float() * v[:, 0, head, None].float()
        m.state[:, head].copy_(m.state[:, head] * decay + new)
    return usual(*project(m, x), keys, values, positions)


def replaced_whole(m, x, keys, values, positions):
    """The near miss: as many tokens as the caches have slots, and none is an index."""
    q, k, v = project(m, x.repeat(1, LENGTH // SEQ, 1))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keys.copy_(k)
    values.copy_(v)
    return attend(q[:, :, :SEQ], keys, values, positions)


def replaced_by_joined(m, x, keys, values, positions):
    """The same of heads that end in a join of their parts: no token moves."""

    def turned(t):
        return torch.cat((t[..., : WIDTH // 2].tanh(), t[..., WIDTH // 2 :]), -1)

    q, k, v = project(m, x.repeat(1, LENGTH // SEQ, 1))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    keys.copy_(turned(k))
    values.copy_(torch.stack(v.unbind(1), 1))
    return attend(turned(q)[:, :, :SEQ], keys, values, positions)


def query_in_float32(m, x, keys, values, positions):
    """As CodeGen: the tables are fp32, the keys are rounded for the cache, the queries never."""
    cos, sin = cos_sin(positions)
    q, k, v = (t.transpose(1, 2) for t in project(m, x))
    q, k = (t * cos + rotate_half(t) * sin for t in (q, k))
    keys, values = store(keys, values, positions, k.to(x.dtype), v)
    return attend(q, keys.to(q.dtype), values.to(q.dtype), positions).to(x.dtype)


def cross_once(m, x, keys, values, positions):
    """The keys and values of an encoder's states, written once; queries come of x."""
    states = m.states
    q = m.wq(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
    k, v = (w(states).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for w in (m.wk, m.wv))
    keys, values = store(keys, values, torch.arange(states.shape[1]), k, v)
    out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Style:
    """by_row: positions of each sequence. by_token: the caches' order. names: of parameters."""

    step: Callable[..., Any]
    by_row: bool = False
    by_token: bool = False
    names: tuple[str, ...] = field(default=())


_NORMS, _BIASES = ("q_norm", "k_norm"), ("q_bias", "k_bias")
STYLES = {
    style.step.__name__: style
    for style in (
        Style(complex_pairs),
        Style(complex_pairs_turned_back),
        Style(cast_after_half),
        Style(cast_after_pairs),
        Style(cast_of_sums),
        Style(tables_stacked),
        Style(tables_stacked_apart),
        Style(norm_in_place, names=_NORMS),
        Style(norm_in_place_seen),
        Style(norm_of_values, names=_NORMS),
        Style(norm_of_values_weighted, names=_NORMS),
        Style(values_of_keys, names=_NORMS),
        Style(layer_norm_with_bias, names=(*_NORMS, *_BIASES)),
        Style(layer_norm_spelled_out, names=(*_NORMS, *_BIASES)),
        Style(norm_shifted_by_token, names=(*_NORMS, *_BIASES)),
        Style(layer_norm_by_head, names=("norms",)),
        Style(layer_norm_by_other_head, names=("norms",)),
        Style(gate_beside_query, names=(*_NORMS, "gated")),
        Style(gate_in_packed, names=(*_NORMS, "packed")),
        Style(gate_behind_query, names=(*_NORMS, "gated")),
        Style(gate_across_query, names=(*_NORMS, "gated")),
        Style(int8_product_scaled, names=("codes",)),
        Style(int8_both_scaled, names=("codes",)),
        Style(key_multiplier),
        Style(value_multiplier),
        Style(key_divided),
        Style(key_multiplied_before_norm, names=_NORMS),
        Style(query_multiplier),
        Style(query_multiplied_by_token),
        Style(key_multiplied_after_norm, names=_NORMS),
        Style(query_capped),
        Style(query_by_old_cache),
        Style(rows_unrolled, by_row=True),
        Style(rows_crossed, by_row=True),
        Style(scattered_rows, by_row=True),
        Style(scattered_heads, by_row=True),
        Style(put_rows, by_row=True, by_token=True),
        Style(put_rows_heads_first, by_row=True),
        Style(rolled),
        Style(sum_after),
        Style(beside_convolution, names=("inputs",)),
        Style(beside_recurrence, names=("state",)),
        Style(beside_recurrence_by_head, names=("state", "steps")),
        Style(replaced_whole),
        Style(replaced_by_joined),
        Style(query_in_float32),
        Style(cross_once, names=("states",)),
    )
}


class Layer(nn.Module):
    """Projection, a style, projection."""

    def __init__(self, style: Style, normal: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.step = style.step
        self.wq = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        if "gated" in style.names:
            self.wqg = nn.Linear(HIDDEN, 2 * HEADS * WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(HIDDEN, KV_HEADS * WIDTH, bias=False) for _ in range(2))
        if "packed" in style.names:
            rows = 2 * (HEADS + KV_HEADS) * WIDTH
            self.packed = nn.Parameter(torch.empty(rows, HIDDEN))
            self.packed_bias = nn.Parameter(torch.empty(rows))
        if "steps" in style.names:
            self.down = nn.Parameter(torch.empty(KV_HEADS, 4, WIDTH))
            self.up = nn.Parameter(torch.empty(KV_HEADS, WIDTH, 4))
            self.step_bias = nn.Parameter(torch.empty(WIDTH, 1))
        self.wo = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        for weight in self.parameters():
            weight.data = normal(*weight.shape) * HIDDEN**-0.5
        for name in (*_NORMS, *_BIASES):
            if name in style.names:
                setattr(self, name, nn.Parameter(normal(WIDTH) * 0.3 + ("norm" in name)))
        if "norms" in style.names:
            for name, heads in (("q_norms", HEADS), ("k_norms", KV_HEADS)):
                own = [nn.Parameter(normal(WIDTH) * 0.3 + 1) for _ in range(heads)]
                setattr(self, name, nn.ParameterList(own))
        if "codes" in style.names:
            rows = (HEADS + 2 * KV_HEADS) * WIDTH
            codes = (normal(rows, HIDDEN).float() * 40).round().clamp(-127, 127)
            self.register_buffer("codes", codes.to(torch.int8))
            self.register_buffer("scales", normal(rows).abs() * 0.01)
        if "states" in style.names:
            self.register_buffer("states", normal(BATCH, LENGTH - 4, HIDDEN))
        if "inputs" in style.names:
            self.register_buffer("inputs", normal(BATCH, KV_HEADS * WIDTH, 4))
        if "state" in style.names:
            self.register_buffer("state", normal(BATCH, KV_HEADS, WIDTH, WIDTH).float())

    def forward(self, x, keys, values, positions):
        return self.wo(self.step(self, x, keys, values, positions))


def build(name, dtype=torch.bfloat16):
    """(module, its arguments): seeded, so that the same call gives the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    style = STYLES[name]
    layer = Layer(style, normal).requires_grad_(False)
    shape = (BATCH, LENGTH, KV_HEADS, WIDTH) if style.by_token else (BATCH, KV_HEADS, LENGTH, WIDTH)
    positions = torch.arange(4, 4 + SEQ)
    if style.by_row:
        positions = torch.stack((positions, positions - 3))
    return layer, [normal(BATCH, SEQ, HIDDEN), normal(*shape), normal(*shape), positions]
