"""Styles of operations on heads before they are cached, such as rotations, norms, gates and
scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.wild.attention_pieces import (
    BATCH,
    BIASES,
    EPS,
    HEADS,
    KV_HEADS,
    NORMS,
    SEQ,
    WIDTH,
    Style,
    angles,
    attend,
    cos_sin,
    project,
    rotate,
    rotate_half,
    usual,
)

# --- rotations ------------------------------------------------------------------------------------


def _turned_pairs(t, turns):
    """Returns [B, S, H, D] as pairs (i, i + half), rotated: [B, H, S, D / 2, 2]."""
    pairs = torch.view_as_complex(torch.stack(torch.chunk(t.transpose(1, 2).float(), 2, -1), -1))
    return torch.view_as_real(pairs * turns).type_as(t)


def complex_pairs(m, x, keys, values, positions):
    """Rotates (i, i + half) as complex numbers and splits them again by chunk and cat, as
    gemma_pytorch does."""
    turns = torch.polar(torch.ones(SEQ, WIDTH // 2), angles(positions))

    def turned(t):
        out = _turned_pairs(t, turns)
        out = torch.cat(torch.chunk(out, 2, dim=-1), dim=-2)
        return out.reshape(out.shape[0], out.shape[1], out.shape[2], -1).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def complex_pairs_turned_back(m, x, keys, values, positions):
    """Near miss: chunks along another dimension than that of the pairs, which does not join
    pairs."""
    turns = torch.polar(torch.ones(SEQ, WIDTH // 2), angles(positions))

    def turned(t):
        out = _turned_pairs(t, turns)
        out = out.roll(1, dims=-2)
        out = torch.cat(torch.chunk(out, 2, dim=-1), dim=-2)
        return out.reshape(out.shape[0], out.shape[1], -1, WIDTH).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def cast_after_half(m, x, keys, values, positions):
    """Computes rotate_half in the model's dtype and the products in fp32, as ModernBERT's decoder
    does."""
    cos, sin = cos_sin(positions)

    def turned(t):
        t = t.transpose(1, 2)
        out = t.float() * cos + rotate_half(t).float() * sin
        return out.to(t.dtype).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


def cast_after_pairs(m, x, keys, values, positions):
    """Pairs adjacent columns, and casts them after they are exchanged, as ERNIE 4.5 does."""
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
    """Uses tables that have each number twice in a row, made by `stack`, as RoFormer does."""
    return _in_pairs(
        m, x, keys, values, positions, lambda t: torch.stack([t, t], -1).reshape(SEQ, 1, WIDTH)
    )


def tables_stacked_apart(m, x, keys, values, positions):
    """Near miss: uses, for the second number of a pair, the table entry of the next pair."""
    return _in_pairs(
        m, x, keys, values, positions, lambda t: torch.stack([t, t.roll(1, -1)], -1).flatten(-2)
    )


def cast_of_sums(m, x, keys, values, positions):
    """Near miss: rounds one operand of the rotation to fewer bits than the other."""
    cos, sin = cos_sin(positions)

    def turned(t):
        t = t.transpose(1, 2)
        out = t.float() * cos + rotate_half(t.to(torch.float8_e4m3fn).to(t.dtype)).float() * sin
        return out.to(t.dtype).transpose(1, 2)

    q, k, v = project(m, x)
    return usual(turned(q), turned(k), v, keys, values, positions)


# --- norms ----------------------------------------------------------------------------------------


def norm_in_place(m, x, keys, values, positions):
    """Overwrites the heads with their norm, as nano-vllm does."""

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
    """Near miss: overwrites the projection itself, and reads it again afterwards."""
    q, k, v = project(m, x)
    q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + EPS)
    k.mul_(torch.rsqrt(k.pow(2).mean(-1, keepdim=True) + EPS))
    out = usual(q, k, v, keys, values, positions)
    return out + k.flatten(2).repeat(1, 1, 2)


def norm_of_values(m, x, keys, values, positions):
    """Normalises keys and queries with a weight and values without one, as Gemma 4 does."""

    def normed(t, weight=None):
        out = t.float() * torch.rsqrt(t.float().pow(2).mean(-1, keepdim=True) + EPS)
        return (out if weight is None else out * weight.float()).type_as(t)

    q, k, v = project(m, x)
    q, k, v = normed(q, m.q_norm), normed(k, m.k_norm), normed(v)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def norm_of_values_weighted(m, x, keys, values, positions):
    """Near miss: the norm of the values has a weight, too."""
    q, k, v = project(m, x)
    q, k, v = (F.rms_norm(t, (WIDTH,), m.k_norm, EPS) for t in (q, k, v))
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def values_of_keys(m, x, keys, values, positions):
    """Lets keys and values share a projection, with different norms, as Gemma 4's global layers
    do."""
    q, k, _ = project(m, x)
    v = F.rms_norm(k, (WIDTH,), None, EPS)
    q, k = (F.rms_norm(t, (WIDTH,), w, EPS) for t, w in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def layer_norm_with_bias(m, x, keys, values, positions):
    """Applies a layer norm with a bias to each head, and rotates the first half, as Persimmon
    does."""

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
    """Computes the same as `layer_norm_with_bias`, but writes the norm by hand in fp32 and rotates
    whole heads. Only the norm of the keys has a bias."""

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
    """Near miss: adds a value after the norm that differs between tokens."""
    q, k, v = project(m, x)
    shift = positions[:, None, None] * m.k_bias
    q, k = (F.layer_norm(t, (WIDTH,), w, None, EPS) for t, w in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (rotate((t + shift).transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def layer_norm_by_head(m, x, keys, values, positions):
    """Splits the heads, normalises each with its own norm, and joins them, as StableLM 2 does."""
    return _normed_by_head(m, x, keys, values, positions, 1)


def layer_norm_by_other_head(m, x, keys, values, positions):
    """Near miss: joins the heads in another order than that in which they were split."""
    return _normed_by_head(m, x, keys, values, positions, -1)


def _normed_by_head(m, x, keys, values, positions, step):
    """Normalises each head with its own norm. `step` gives the order in which the heads are
    joined."""

    def normed(t, weights):
        heads = torch.split(t.transpose(1, 2), 1, dim=1)[::step]
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
    """Runs a layer with gates.

    `split` splits q_proj's result [B, S, H, 2, D] or [B, S, 2, H, D] into q and gate [B, S, H, D].
    `packed` says whether one linear makes q, gates, k and v.
    """

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
    """Has columns of a query and of its gate in each head of q_proj, as Qwen3-Next does."""

    def split(t):
        q, gate = torch.chunk(t.view(BATCH, SEQ, -1, WIDTH * 2), 2, dim=-1)
        return q, gate.reshape(BATCH, SEQ, -1)

    out, gate = _gated(m, x, keys, values, positions, lambda g: g, split)
    return out * torch.sigmoid(gate)


def gate_in_packed(m, x, keys, values, positions):
    """Packs queries and gates, keys, and values in one linear with a bias, as engines do."""

    def split(t):
        q, gate = t.view(BATCH, SEQ, -1, WIDTH * 2).chunk(2, dim=-1)
        return q, gate.flatten(2)

    out, gate = _gated(m, x, keys, values, positions, lambda g: g, split, packed=True)
    return out * torch.sigmoid(gate)


def gate_behind_query(m, x, keys, values, positions):
    """Projects all queries, then all gates, and computes the sigmoid before the writes."""

    def split(t):
        q, gate = t.chunk(2, dim=-1)
        return q.unflatten(-1, (-1, WIDTH)), gate

    out, gate = _gated(m, x, keys, values, positions, torch.sigmoid, split)
    return out * gate


def gate_across_query(m, x, keys, values, positions):
    """Near miss: the gates are computed from the columns of the queries, too."""

    def split(t):
        t = t.view(BATCH, SEQ, -1, WIDTH * 2)
        return t[..., :WIDTH], t.sum(-1, keepdim=True).expand(-1, -1, -1, WIDTH).flatten(2)

    out, gate = _gated(m, x, keys, values, positions, lambda g: g, split)
    return out * torch.sigmoid(gate)


# --- scales ---------------------------------------------------------------------------------------


def int8_product_scaled(m, x, keys, values, positions):
    """Scales the product of codes, splits it, and then rotates, as gpt-fast does with int8
    weights."""
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
    """Has separate projections, whose products are each scaled."""
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
    """Multiplies the keys by a constant before they are rotated, as Falcon-H1 does."""
    q, k, v = project(m, x)
    k = k * 0.39
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def value_multiplier(m, x, keys, values, positions):
    """Multiplies the values by a constant, as MiMo-V2 does."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v * 0.707, keys, values, positions)


def key_divided(m, x, keys, values, positions):
    """Divides rotated keys by a number in fp32. Keys and values both have a factor."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, (k.float() / 3.0).to(x.dtype), 2 * v, keys, values, positions)


def key_multiplied_before_norm(m, x, keys, values, positions):
    """Near miss: a norm follows the factor, so moving the factor would change the norm's
    epsilon."""
    q, k, v = project(m, x)
    q, k = (F.rms_norm(t, (WIDTH,), w, 1e-3) for t, w in ((q, m.q_norm), (k * 0.05, m.k_norm)))
    return usual(q, k, v, keys, values, positions)


def query_multiplier(m, x, keys, values, positions):
    """Multiplies the queries by a constant before the rotation. The constant is applied after the
    op instead."""
    q, k, v = project(m, x)
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q * 0.39, k))
    return usual(q, k, v, keys, values, positions)


def key_multiplied_after_norm(m, x, keys, values, positions):
    """Multiplies queries and keys by constants between their norms and the rotation."""
    q, k, v = project(m, x)
    q, k = (F.rms_norm(t, (WIDTH,), w, EPS) * 1.2 for t, w in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


def query_multiplied_by_token(m, x, keys, values, positions):
    """Near miss: a factor before the rotation differs from token to token."""
    q, k, v = project(m, x)
    q = q * (1 + positions.to(x.dtype))[:, None, None]
    q, k = (rotate(t.transpose(1, 2), positions).transpose(1, 2) for t in (q, k))
    return usual(q, k, v, keys, values, positions)


STYLES = (
    Style(complex_pairs),
    Style(complex_pairs_turned_back),
    Style(cast_after_half),
    Style(cast_after_pairs),
    Style(cast_of_sums),
    Style(tables_stacked),
    Style(tables_stacked_apart),
    Style(norm_in_place, names=NORMS),
    Style(norm_in_place_seen),
    Style(norm_of_values, names=NORMS),
    Style(norm_of_values_weighted, names=NORMS),
    Style(values_of_keys, names=NORMS),
    Style(layer_norm_with_bias, names=(*NORMS, *BIASES)),
    Style(layer_norm_spelled_out, names=(*NORMS, *BIASES)),
    Style(norm_shifted_by_token, names=(*NORMS, *BIASES)),
    Style(layer_norm_by_head, names=("norms",)),
    Style(layer_norm_by_other_head, names=("norms",)),
    Style(gate_beside_query, names=(*NORMS, "gated")),
    Style(gate_in_packed, names=(*NORMS, "packed")),
    Style(gate_behind_query, names=(*NORMS, "gated")),
    Style(gate_across_query, names=(*NORMS, "gated")),
    Style(int8_product_scaled, names=("codes",)),
    Style(int8_both_scaled, names=("codes",)),
    Style(key_multiplier),
    Style(value_multiplier),
    Style(key_divided),
    Style(key_multiplied_before_norm, names=NORMS),
    Style(query_multiplier),
    Style(query_multiplied_by_token),
    Style(key_multiplied_after_norm, names=NORMS),
)
