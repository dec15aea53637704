"""Parts of the attention styles: sizes, projections, rotations, writes and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BATCH, SEQ, HEADS, KV_HEADS, WIDTH, HIDDEN, LENGTH = 2, 3, 4, 2, 16, 32, 12
EPS = 1e-6
#: The sizes of parameters that styles name.
NORMS, BIASES = ("q_norm", "k_norm"), ("q_bias", "k_bias")


@dataclass(frozen=True)
class Style:
    """A style.

    by_row: whether each sequence has its own positions.
    by_token: whether the caches are ordered by token.
    names: the names of its parameters.
    """

    step: Callable[..., Any]
    by_row: bool = False
    by_token: bool = False
    names: tuple[str, ...] = ()


def split_heads(x):
    """Returns [B, S, H * D] as [B, H, S, D]."""
    return x.unflatten(-1, (-1, WIDTH)).transpose(1, 2)


def project(m, x):
    """Returns q, k and v, each [B, S, H, D]."""
    return [w(x).unflatten(-1, (-1, WIDTH)) for w in (m.wq, m.wk, m.wv)]


def angles(positions):
    """Returns angles [..., D / 2] in fp32."""
    rates = 100.0 ** (-torch.arange(WIDTH // 2) * 2 / WIDTH)
    return positions[..., None].float() * rates


def cos_sin(positions, dtype=torch.float32):
    """Returns cos and sin, each [..., D] with two equal halves."""
    turned = angles(positions).repeat(*[1] * positions.dim(), 2)
    return turned.cos().to(dtype), turned.sin().to(dtype)


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate(x, positions):
    """Rotates x [..., S, D]."""
    cos, sin = cos_sin(positions, x.dtype)
    return x * cos + rotate_half(x) * sin


def store(keys, values, positions, k, v):
    """Writes k and v [B, Hkv, S, D] into the caches."""
    return keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)


def attend(q, keys, values, positions):
    """Attends with q [B, Hq, S, D] to keys and values [B, Hkv, L, D]. Returns [B, S, Hq * D]."""
    seen = torch.arange(keys.shape[2]) <= positions[..., None]
    mask = seen if seen.dim() == 2 else seen[:, None]
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def usual(q, k, v, keys, values, positions):
    """Computes the rest of a layer from its heads [B, S, H, D]: rotation, writes and attention."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return attend(q, *store(keys, values, positions, k, v), positions)
