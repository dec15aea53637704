"""Parts of a layer whose linears have weights of codes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import mla_idioms, ropes
from tests.models.cache_writes import old_tokens
from tests.programs.quantised.draws import draw_linears
from tests.programs.quantised.linear import Coded

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, SLOTS = 64, 4, 2, 16, 12
KV_WIDTH = KV_HEADS * HEAD_DIM
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16,) * 6 + (torch.float16,) * 3 + (torch.float32,)


def normal(draw: random.Random, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 20))
    return torch.randn(shape, generator=generator).to(dtype)


def told(linears: Sequence[Coded], drawn: dict[str, Any], dtype: torch.dtype) -> str:
    return f"{[linear.axes for linear in linears]} {drawn} {dtype}"


class Part(nn.Module):
    """A part of a layer. It has some linears, and writes into the codes or scales of one linear
    before another one runs."""

    def __init__(self, linears: Sequence[nn.Module], drawn: dict[str, Any]) -> None:
        super().__init__()
        self.linears, self.drawn = nn.ModuleList(linears), drawn

    def ran(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Computes a linear, then performs the drawn write if there is one, and returns the
        linear's result."""
        y = self.linears[number](x)
        written = self.drawn["written"]
        if written is not None and written[0] == number:
            _, other, name = written
            tensor = getattr(self.linears[other], name)
            if tensor.dtype.itemsize > 1 and tensor.dtype.is_floating_point:
                tensor.mul_(2.0)
            else:
                tensor.copy_(tensor.flip(0))
        return y


def draw_written(draw: random.Random, count: int) -> tuple[int, int, str] | None:
    if draw.random() > 0.1:
        return None
    return draw.randrange(count), draw.randrange(count), draw.choice(("codes", "scale"))


class Attention(Part):
    """Has Q, K and V, a write to the cache, attention to the cache, and a residual sum."""

    def forward(self, x, residual, positions, k_cache, v_cache):
        drawn = self.drawn
        q, k, v = self.projected(x)
        if drawn["norm"]:
            q, k = (F.rms_norm(t, (HEAD_DIM,), eps=1e-6) for t in (q, k))
        if drawn["rope"] is not None:
            steps = torch.arange(HEAD_DIM // 2) / HEAD_DIM
            angles = (positions[:, None] * 100.0**-steps)[:, None]
            cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
            q, k = (drawn["rope"](t, cos, sin) for t in (q, k))
        for cache, new in ((k_cache, k), (v_cache, v)):
            if drawn["write"] == "index_copy":
                cache.index_copy_(0, positions, new)
            else:
                cache[positions] = new
        keys, values = (cache.transpose(0, 1)[None] for cache in (k_cache, v_cache))
        seen = torch.arange(SLOTS) <= positions[:, None]
        q = q.transpose(0, 1)[None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        return residual + self.ran(-1, y[0].transpose(0, 1).flatten(1))

    def projected(self, x):
        joined = self.drawn["joined"]
        if joined == "one":
            parts = self.ran(0, x).split([HIDDEN, KV_WIDTH, KV_WIDTH], -1)
        elif joined == "k and v":
            parts = (self.ran(0, x), *self.ran(1, x).chunk(2, -1))
        else:
            parts = [self.ran(i, x) for i in range(3)]
        return [part.unflatten(-1, (-1, HEAD_DIM)) for part in parts]


JOINED = {"": (HIDDEN, KV_WIDTH, KV_WIDTH), "k and v": (HIDDEN, 2 * KV_WIDTH)}
JOINED["one"] = (HIDDEN + 2 * KV_WIDTH,)


def attention(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    dtype, tokens = draw.choice(DTYPES), draw.choice((1, 3, 5))
    joined = draw.choice(("", "", "", *JOINED))
    shapes = [(width, HIDDEN) for width in (*JOINED[joined], HIDDEN)]
    drawn = {
        "joined": joined,
        "norm": draw.random() < 0.4,
        "rope": draw.choice((None, ropes.half, ropes.half, ropes.interleaved)),
        "write": draw.choice(("index_copy", "setitem")),
        "written": draw_written(draw, len(shapes)),
    }
    linears = draw_linears(draw, shapes, dtype)
    x, residual = normal(draw, dtype, tokens, HIDDEN), normal(draw, dtype, tokens, HIDDEN)
    caches = [old_tokens(SLOTS, KV_HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)]
    first = draw.randrange(SLOTS - tokens)
    args = (x, residual, torch.arange(first, first + tokens), *caches)
    return Attention(linears, drawn), args, told(linears, drawn, dtype)


class Gated(Part):
    def forward(self, x, residual):
        if self.drawn["joined"]:
            gate, up = self.ran(0, x).chunk(2, -1)
        else:
            gate, up = self.ran(0, x), self.ran(1, x)
        return residual + self.ran(-1, self.drawn["activation"](gate) * up)


def gated(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    dtype, tokens, joined = draw.choice(NARROW), draw.choice((1, 3)), draw.random() < 0.3
    inner = draw.choice((64, 96))
    shapes = [(2 * inner, HIDDEN)] if joined else [(inner, HIDDEN)] * 2
    shapes += [(HIDDEN, inner)]
    drawn = {
        "joined": joined,
        "activation": draw.choice((F.silu, F.silu, F.gelu)),
        "written": draw_written(draw, len(shapes)),
    }
    linears = draw_linears(draw, shapes, dtype)
    args = tuple(normal(draw, dtype, tokens, HIDDEN) for _ in range(2))
    return Gated(linears, drawn), args, told(linears, drawn, dtype)


def latents(draw: random.Random) -> tuple[nn.Module, tuple[Any, ...], str]:
    """Draws the up-projection of latents."""
    dtype = draw.choice(DTYPES)
    changes = {
        "kv_rank": 64, "num_heads": 4, "nope": 16, "v_dim": 16, "rotated": 16, "hidden": 32,
        "num_tokens": draw.choice((1, 4)), "dtype": dtype, "q_lora": False,
        "attention": draw.choice(("masked", "causal", "eager", "einsum", "masked_float")),
        "concat": draw.choice(tuple(mla_idioms.CONCATS)),
    }  # fmt: skip
    module, args = mla_idioms.build("plain", **changes)
    (module.kv_b,) = linears = draw_linears(draw, [(128, 64)], dtype)
    return module, args, told(linears, changes, dtype)
