"""Latent attention in the manner of public inference code, one function per style of its cache.

    module, args = build("slices_apart")        # one of STYLES

A style is `step(m, new, start, *caches) -> ([B, K, L], [B, K, R])`. It writes the new latents [B,
S, L] and rope keys [B, S, R], and returns all latents and rope keys up to the last token. Caches
are [most sequences, length, width]; no axis is for heads. The letters are those of
`patterns/mla/keys.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, MOST, SEQ, START, LENGTH, HIDDEN = 2, 3, 2, 5, 12, 32
HEADS, RANK, ROTATED, NOPE, V_DIM = 4, 24, 8, 16, 16


def slices_apart(m, latent, rope_key, start, latents, rope_keys):
    """Has two buffers, and writes a slice of sequences and positions, as DeepSeek's inference code
    does."""
    end = start + latent.shape[1]
    latents[:BATCH, start:end] = latent
    rope_keys[:BATCH, start:end] = rope_key
    return latents[:BATCH, :end], rope_keys[:BATCH, :end]


def slices_joined(m, latent, rope_key, start, entries):
    """Has one buffer for latents and rope keys, which is written at once."""
    end = start + latent.shape[1]
    entries[:BATCH, start:end] = torch.cat((latent, rope_key), -1)
    return entries[:BATCH, :end].split((RANK, ROTATED), -1)


def slices_of_columns(m, latent, rope_key, start, entries):
    """Has one buffer, in which the columns of the rope key come first."""
    end = start + latent.shape[1]
    entries[:BATCH, start:end, RANK:] = rope_key
    entries[:BATCH, start:end, :RANK] = latent
    return entries[:BATCH, :end, :RANK], entries[:BATCH, :end, RANK:]


def copied_by_position(m, latent, rope_key, start, latents, rope_keys):
    """Writes by index_copy_ with the positions that all sequences share."""
    end = start + latent.shape[1]
    positions = torch.arange(start, end)
    latents[:BATCH].index_copy_(1, positions, latent)
    rope_keys[:BATCH].index_copy_(1, positions, rope_key)
    return latents[:BATCH, :end], rope_keys[:BATCH, :end]


def put_by_row(m, latent, rope_key, start, latents, rope_keys):
    """Writes to a slot for each sequence and token."""
    end = start + latent.shape[1]
    rows, positions = torch.arange(BATCH)[:, None], torch.arange(start, end)[None]
    latents[rows, positions] = latent
    rope_keys[rows, positions] = rope_key
    return latents[:BATCH, :end], rope_keys[:BATCH, :end]


def slices_shifted(m, latent, rope_key, start, latents, rope_keys):
    """Near miss: stores rope keys one slot after their latents."""
    end = start + latent.shape[1]
    latents[:BATCH, start:end] = latent
    rope_keys[:BATCH, start + 1 : end + 1] = rope_key
    return latents[:BATCH, :end], rope_keys[:BATCH, 1 : end + 1]


def normed_behind(m, latent, rope_key, start, latents, rope_keys):
    """Normalises the rope keys, too. The op has no such norm, so it stays in the graph."""
    return slices_apart(m, latent, F.rms_norm(rope_key, (ROTATED,)), start, latents, rope_keys)


def norm_with_bias(m, latent, rope_key, start, latents, rope_keys):
    """Normalises the latents with a bias. The op has no such norm, so it stays in the graph."""
    return put_by_row(m, latent + m.norm, rope_key, start, latents, rope_keys)


def keys_up_projected(m, latent, rope_key, start, keys, values):
    """Caches expanded keys and values, which have different widths, as the other form of DeepSeek's
    code does."""
    end = start + latent.shape[1]
    up = F.linear(latent, m.kv_b.flatten(0, 1)).unflatten(-1, (HEADS, -1))
    k = torch.cat((up[..., :NOPE], rope_key[:, :, None].expand(-1, -1, HEADS, -1)), -1)
    keys[:BATCH, start:end] = k
    values[:BATCH, start:end] = up[..., NOPE:]
    return keys[:BATCH, :end], values[:BATCH, :end]


@dataclass(frozen=True)
class Style:
    """A style.

    caches: the shapes of the caches after [number of sequences, length].
    absorbed: whether attention is over latents. If it is False, attention is over keys and values
        of heads.
    """

    step: Callable[..., Any]
    caches: tuple[tuple[int, ...], ...] = ((RANK,), (ROTATED,))
    absorbed: bool = True


_JOINED = ((RANK + ROTATED,),)
STYLES = {
    style.step.__name__: style
    for style in (
        Style(slices_apart),
        Style(slices_joined, _JOINED),
        Style(slices_of_columns, _JOINED),
        Style(copied_by_position),
        Style(put_by_row),
        Style(slices_shifted),
        Style(normed_behind),
        Style(norm_with_bias),
        Style(keys_up_projected, ((HEADS, NOPE + ROTATED), (HEADS, V_DIM)), absorbed=False),
    )
}


def turned(x, start):
    """Rotates pairs of neighbours of x [B, S, H, R] as complex numbers, by position."""
    rates = 100.0 ** (-torch.arange(ROTATED // 2) * 2 / ROTATED)
    angles = torch.arange(start, start + x.shape[1])[:, None] * rates
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    turns = torch.polar(torch.ones_like(angles, dtype=wide), angles.to(wide))
    pairs = torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns.view(1, x.shape[1], 1, -1)).flatten(3).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, style: Style, normal: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.style = style

        def weight(*shape):
            return nn.Parameter(normal(*shape) * shape[-1] ** -0.5, requires_grad=False)

        self.q = weight(HEADS * (NOPE + ROTATED), HIDDEN)
        self.kv_a = weight(RANK + ROTATED, HIDDEN)
        self.norm = nn.Parameter(1 + 0.1 * normal(RANK), requires_grad=False)
        self.kv_b = weight(HEADS, NOPE + V_DIM, RANK)

    def forward(self, x, start, *caches):
        q = F.linear(x, self.q).unflatten(-1, (HEADS, -1))
        q_nope, q_rope = q.split((NOPE, ROTATED), -1)
        q_rope = turned(q_rope, start)
        latent, rope_key = F.linear(x, self.kv_a).split((RANK, ROTATED), -1)
        rope_key = turned(rope_key.unsqueeze(2), start).squeeze(2)
        latent = F.rms_norm(latent, (RANK,), self.norm, 1e-6)
        first, second = self.style.step(self, latent, rope_key, start, *caches)
        scale = (NOPE + ROTATED) ** -0.5
        if not self.style.absorbed:
            q = torch.cat((q_nope, q_rope), -1)
            weights = self.softmax(torch.einsum("bshd,bthd->bsht", q, first) * scale, start)
            return torch.einsum("bsht,bthd->bshd", weights, second).flatten(2)
        q_latent = torch.einsum("bshd,hdc->bshc", q_nope, self.kv_b[:, :NOPE])
        scores = torch.einsum("bshc,btc->bsht", q_latent, first)
        scores = (scores + torch.einsum("bshr,btr->bsht", q_rope, second)) * scale
        out = torch.einsum("bsht,btc->bshc", self.softmax(scores, start), first)
        return torch.einsum("bshc,hdc->bshd", out, self.kv_b[:, -V_DIM:]).flatten(2)

    def softmax(self, scores, start):
        """Computes the causal softmax of scores [B, S, H, K] in fp32."""
        queries, keys = scores.shape[1], scores.shape[-1]
        hidden = torch.full((queries, keys), float("-inf"), dtype=scores.dtype).triu(start + 1)
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        return (scores + hidden.unsqueeze(1)).softmax(-1, dtype=wide).to(scores.dtype)


def build(name, tokens=SEQ, dtype=torch.bfloat16):
    """Returns (module, arguments). They are seeded, so that the same call gives the same
    numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    style = STYLES[name]
    caches = [normal(MOST, LENGTH, *shape) for shape in style.caches]
    return Layer(style, normal).eval(), [normal(BATCH, tokens, HIDDEN), START, *caches]
