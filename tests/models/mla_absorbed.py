"""Absorbed latent attention in the spellings of engines: the up-projection is multiplied into the
query and the result, and attention runs over the latents themselves.

Each function in SPELLINGS takes (model, q_nope [B, S, H, N], q_rope [B, S, H, R], entries [B, K, L
+ R], seen [S, K]) and returns [B, S, H, V]. The arguments of a model are x [B, S, hidden], the
entries, and the positions [S] of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.mla_attention import wide
from tests.models.mla_weights import Fp8Block

HIDDEN = float("-inf")


@dataclass(frozen=True)
class Axes:
    """The variants of a model.

    weight: "joined" (rows of one parameter), "apart" (two parameters), or "fp8" (codes with scales
    by block).
    """

    batch: int = 2
    queries: int = 3
    keys: int = 12
    num_heads: int = 4
    nope: int = 24
    rotated: int = 16
    v_dim: int = 32
    kv_rank: int = 40
    weight: str = "joined"
    dtype: torch.dtype = torch.bfloat16


def einsum(model, q_nope, q_rope, entries, seen):
    """Uses einsum with heads between queries and keys, and adds a mask of numbers in place."""
    axes = model.axes
    latents, rope_keys = entries.split([axes.kv_rank, axes.rotated], dim=-1)
    weight = model.weight.view(axes.num_heads, -1, axes.kv_rank)
    q_latent = torch.einsum("bshd,hdc->bshc", q_nope, weight[:, : axes.nope])
    scores = torch.einsum("bshc,btc->bsht", q_latent, latents)
    scores = (scores + torch.einsum("bshr,btr->bsht", q_rope, rope_keys)) * model.scale
    scores += torch.where(seen, 0.0, HIDDEN).unsqueeze(1)
    weights = scores.softmax(dim=-1, dtype=wide(scores)).type_as(q_nope)
    x = torch.einsum("bsht,btc->bshc", weights, latents)
    return torch.einsum("bshc,hdc->bshd", x, weight[:, -axes.v_dim :])


def matmul(model, q_nope, q_rope, entries, seen):
    """Puts heads first, uses two separate weights, and computes the product of the rotated part
    first."""
    axes = model.axes
    latents, rope_keys = entries.split([axes.kv_rank, axes.rotated], dim=-1)
    q_absorb, out_absorb = model.halves
    q_latent = torch.matmul(q_nope.transpose(1, 2), q_absorb)
    rope_keys = rope_keys.view(axes.batch, 1, -1, axes.rotated)
    scores = torch.matmul(q_rope.transpose(1, 2), rope_keys.mT)
    scores = (scores + torch.matmul(q_latent, latents.unsqueeze(-3).mT)) * model.scale
    scores = scores + torch.where(seen, 0.0, HIDDEN).to(scores.dtype)
    weights = F.softmax(scores, dim=-1, dtype=wide(scores)).to(q_rope.dtype)
    weights = F.dropout(weights, p=0.1, training=model.training)
    out = torch.einsum("bhql,blc->bhqc", weights, latents)
    return torch.matmul(out, out_absorb.mT).transpose(1, 2).contiguous()


def bmm(model, q_nope, q_rope, entries, seen):
    """Flattens the tokens of all sequences around bmm, joins the parts of q, and scales q."""
    axes = model.axes
    w_uk, w_uv = model.halves
    tokens = axes.batch * axes.queries
    flat = q_nope.reshape(tokens, axes.num_heads, -1).transpose(0, 1)
    q_latent = torch.bmm(flat, w_uk).transpose(0, 1).view(*q_nope.shape[:3], -1)
    q = torch.cat([q_latent, q_rope], dim=-1) * model.scale
    scores = torch.einsum("bshd,bkd->bhsk", q, entries).float()
    scores = scores.masked_fill(~seen, HIDDEN)
    weights = scores.softmax(-1).to(entries.dtype)
    out = torch.einsum("bhsk,bkd->bhsd", weights, entries[..., : axes.kv_rank])
    out = out.permute(1, 0, 2, 3).reshape(axes.num_heads, tokens, axes.kv_rank)
    out = torch.bmm(out, w_uv.transpose(1, 2)).transpose(0, 1)
    return out.reshape(axes.batch, axes.queries, axes.num_heads, axes.v_dim)


def sdpa(model, q_nope, q_rope, entries, seen):
    """Uses torch's SDPA with one key head for all query heads, and the rotated columns first."""
    axes = model.axes
    w_uk, w_uv = model.halves
    q = torch.cat([q_rope, torch.einsum("hnl,bshn->bshl", w_uk, q_nope)], dim=-1)
    latents, rope_keys = entries.split([axes.kv_rank, axes.rotated], dim=-1)
    k = torch.cat([rope_keys, latents], dim=-1).unsqueeze(1)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, latents.unsqueeze(1), seen, scale=model.scale, enable_gqa=True
    )
    return torch.einsum("bhsl,hvl->bshv", out, w_uv)


def wide_values(model, q_nope, q_rope, entries, seen):
    """Uses whole entries as values, and cuts their rope columns off the result."""
    axes = model.axes
    w_uk, w_uv = model.halves
    q = torch.cat([torch.einsum("bshn,hnl->bshl", q_nope, w_uk), q_rope], dim=-1)
    scores = torch.einsum("bshd,bkd->bhsk", q, entries) * model.scale
    weights = torch.where(seen, scores, HIDDEN).softmax(-1)
    out = torch.einsum("bhsk,bkd->bshd", weights, entries)[..., : axes.kv_rank]
    return torch.einsum("bshl,hvl->bshv", out, w_uv)


def in_float32(model, q_nope, q_rope, entries, seen):
    """Computes logits and softmax in fp32 after the products."""
    axes = model.axes
    w_uk, w_uv = model.halves
    q_latent = torch.einsum("bshn,hnl->bhsl", q_nope, w_uk)
    q = torch.cat([q_latent, q_rope.transpose(1, 2)], dim=-1).to(wide(q_nope))
    keys = entries.to(q.dtype).unsqueeze(1)
    weights = (q @ keys.mT * model.scale).masked_fill(~seen, HIDDEN).softmax(-1)
    out = (weights @ keys[..., : axes.kv_rank]).to(q_nope.dtype)
    return torch.einsum("bhsl,hvl->bshv", out, w_uv)


SPELLINGS = {f.__name__: f for f in (einsum, matmul, bmm, sdpa, wide_values, in_float32)}


class Model(nn.Module):
    """The model. Each step is an attribute, so that a test can replace one."""

    def __init__(self, axes: Axes, spelling: str) -> None:
        super().__init__()
        self.axes = axes
        width = axes.nope + axes.rotated
        self.scale = width**-0.5
        self.q = nn.Linear(48, axes.num_heads * width, bias=False)
        self.out = nn.Linear(axes.num_heads * axes.v_dim, 48, bias=False)
        if axes.weight == "fp8":
            self.kv_b = Fp8Block(axes)
        else:
            rows = axes.num_heads * (axes.nope + axes.v_dim)
            self.kv_b = nn.Linear(axes.kv_rank, rows, bias=False)
        if axes.weight == "apart":
            self.w_uk = nn.Parameter(torch.empty(axes.num_heads, axes.nope, axes.kv_rank))
            self.w_uv = nn.Parameter(torch.empty(axes.num_heads, axes.v_dim, axes.kv_rank))
        self.attend = SPELLINGS[spelling]
        self.q_nope_of = self.q_rope_of = self.entries_of = lambda x: x

    @property
    def weight(self):
        return self.kv_b.dequantised if self.axes.weight == "fp8" else self.kv_b.weight

    @property
    def halves(self):
        if self.axes.weight == "apart":
            return self.w_uk, self.w_uv
        per_head = self.weight.unflatten(0, (self.axes.num_heads, -1))
        return per_head[:, : self.axes.nope], per_head[:, self.axes.nope :]

    def forward(self, x, entries, positions):
        axes = self.axes
        q = self.q(x).view(*x.shape[:2], axes.num_heads, -1)
        q_nope, q_rope = q.split([axes.nope, axes.rotated], dim=-1)
        seen = torch.arange(entries.shape[1], device=x.device) <= positions[:, None]
        q_nope, q_rope = self.q_nope_of(q_nope), self.q_rope_of(q_rope.sin())
        out = self.attend(self, q_nope, q_rope, self.entries_of(entries), seen)
        return self.out(out.flatten(2))


def build(spelling: str, **changes):
    """Returns (model, args) of a spelling. `changes` are fields of Axes."""
    axes = Axes(**changes)
    model = Model(axes, spelling)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dtype.itemsize > 1:
                spread = torch.randn(parameter.shape, generator=generator)
                parameter.data = (spread * parameter.shape[-1] ** -0.5).to(axes.dtype)
            parameter.requires_grad_(False)
    x = torch.randn(axes.batch, axes.queries, 48, generator=generator)
    width = axes.kv_rank + axes.rotated
    entries = torch.randn(axes.batch, axes.keys, width, generator=generator)
    positions = axes.keys - axes.queries - 2 + torch.arange(axes.queries)
    return model.eval(), (x.to(axes.dtype), entries.to(axes.dtype), positions)
