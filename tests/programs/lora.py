"""Adapters of q, k and v. The ways in which they are stored, selected, multiplied, scaled, masked
and added are chosen independently."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.cache_writes import old_tokens


@dataclass(frozen=True)
class LoraAxes:
    """The variants of a model.

    take: the way to select each row's adapter.
    product: the kind of product.
    stored: whether A of q, k and v are "apart", or in one tensor by "rows" or "planes".
    scale: the place of the scale, "before" or "after" B, or "" for none.
    masked: the way to leave rows without an adapter unchanged.
    base: "separate" or "packed" projections.
    cache: whether K and V are then written into a cache.
    """

    take: str = "getitem"
    product: str = "einsum"
    stored: str = "apart"
    scale: str = ""
    masked: str = ""
    base: str = "separate"
    add: str = "plus"
    cache: bool = False
    num_tokens: int = 6
    hidden: int = 32
    rank: int = 8
    num_adapters: int = 4
    head_dim: int = 16
    num_heads: int = 2
    dtype: torch.dtype = torch.float32


TAKES = {
    "getitem": lambda table, index: table[index],
    "index_select": lambda table, index: table.index_select(0, index),
    "embedding": lambda table, index: F.embedding(index, table.flatten(1)).view(
        -1, *table.shape[1:]
    ),
}


def einsum(x, a, b):
    return torch.einsum("tr,twr->tw", torch.einsum("th,trh->tr", x, a), b)


def bmm(x, a, b):
    return torch.bmm(b, torch.bmm(a, x.unsqueeze(-1))).squeeze(-1)


def matmul(x, a, b):
    return (x.unsqueeze(1) @ a.transpose(1, 2) @ b.mT).squeeze(1)


PRODUCTS = {f.__name__: f for f in (einsum, bmm, matmul)}
#: Products that compute all adapters, instead of selecting one by its number.
WHOLE = ("one_hot", "compared", "looped", "grouped")
MASKS = ("", "where", "factor", "fill", "fill_below", "where_below")
ADDS = ("plus", "in_place", "reversed", "after_view")


class Lora(nn.Module):
    def __init__(self, axes: LoraAxes) -> None:
        super().__init__()
        self.axes = axes
        self.widths = {
            "q": axes.num_heads * axes.head_dim, "k": axes.head_dim, "v": axes.head_dim,
        }  # fmt: skip
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return nn.Parameter(values.to(axes.dtype), requires_grad=False)

        self.base = nn.ParameterDict({n: random(w, axes.hidden) for n, w in self.widths.items()})
        self.packed = random(sum(self.widths.values()), axes.hidden)
        shape = (axes.num_adapters, axes.rank, axes.hidden)
        if axes.stored == "apart":
            self.a = nn.ParameterDict({n: random(*shape) for n in self.widths})
        elif axes.stored == "rows":
            self.a_rows = random(shape[0], 3 * axes.rank, axes.hidden)
        else:
            self.a_planes = random(shape[0], 3, *shape[1:])
        self.b = nn.ParameterDict(
            {n: random(axes.num_adapters, w, axes.rank) for n, w in self.widths.items()}
        )
        self.scales = nn.Parameter(
            torch.linspace(0.5, 2.0, axes.num_adapters).to(axes.dtype), False
        )

    def bases(self, x):
        if self.axes.base == "packed":
            parts = F.linear(x, self.packed).split([*self.widths.values()], -1)
            return dict(zip(self.widths, parts, strict=True))
        return {n: F.linear(x, self.base[n]) for n in self.widths}

    def shrink(self, n):
        """Returns A [G, R, H] of q, k or v."""
        at = "qkv".index(n)
        if self.axes.stored == "apart":
            return self.a[n]
        if self.axes.stored == "rows":
            return self.a_rows.split(self.axes.rank, 1)[at]
        return self.a_planes[:, at]

    def delta(self, x, index, n):
        axes = self.axes
        a, b = self.shrink(n), self.b[n]
        if axes.product in WHOLE:
            return getattr(self, axes.product)(x, index, a, b)
        safe = index.clamp(min=0) if axes.masked else index
        take = TAKES[axes.take]
        scale = self.scales[safe][:, None]
        if axes.scale == "before":
            x = x * scale
        d = PRODUCTS[axes.product](x, take(a, safe), take(b, safe))
        if axes.scale == "after":
            d = d * scale
        some = (index >= 0)[:, None]
        if axes.masked == "where":
            return torch.where(some, d, 0.0)
        if axes.masked == "factor":
            return d * some.to(d.dtype)
        none = (index < 0)[:, None]
        if axes.masked == "fill_below":
            return d.masked_fill(none, 0.0)
        if axes.masked == "where_below":
            return torch.where(none, 0.0, d)
        return d.masked_fill(~some, 0.0) if axes.masked == "fill" else d

    def one_hot(self, x, index, a, b):
        s = torch.einsum("th,grh->tgr", x, a)
        s = s * F.one_hot(index.clamp(min=0), len(a)).to(x.dtype).unsqueeze(-1)
        return torch.einsum("tgr,gwr->tw", s, b)

    def compared(self, x, index, a, b):
        own = index[:, None] == torch.arange(len(a))
        s = torch.einsum("th,grh->tgr", x, a) * own[..., None].to(x.dtype)
        return torch.einsum("tgr,gwr->tw", s, b) * 2.0

    def looped(self, x, index, a, b):
        total = 0
        for g in range(len(a)):
            rows = x * (index == g).to(x.dtype).unsqueeze(-1)
            total = total + F.linear(F.linear(rows, a[g]), b[g])
        return total

    def grouped(self, x, index, a, b):
        ids, order = torch.sort(index.clamp(min=0), stable=True)
        ends = torch.searchsorted(ids, torch.arange(len(a)), right=True).to(torch.int32)
        s = F.grouped_mm(x[order], a.transpose(1, 2), offs=ends)
        return F.grouped_mm(s, b.transpose(1, 2), offs=ends)[torch.argsort(order)]

    def forward(self, x, index, slots, k_cache, v_cache):
        axes, y = self.axes, self.bases(x)
        for n in self.widths:
            d = self.delta(x, index, n)
            if axes.add == "plus":
                y[n] = y[n] + d
            elif axes.add == "in_place":
                y[n] += d
            elif axes.add == "reversed":
                y[n] = d + y[n]
            else:
                y[n] = y[n].view(len(x), -1, axes.head_dim) + d.view(len(x), -1, axes.head_dim)
                y[n] = y[n].flatten(1)
        if not axes.cache:
            return y["q"], y["k"], y["v"]
        for cache, n in ((k_cache, "k"), (v_cache, "v")):
            cache.view(-1, 1, axes.head_dim)[slots] = y[n].view(len(x), 1, axes.head_dim)
        return y["q"].view(len(x), -1, axes.head_dim) * 2


def build(axes: LoraAxes):
    """Returns (module, (x, index, slots, k_cache, v_cache))."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(axes.num_tokens, axes.hidden, generator=generator).to(axes.dtype)
    index = torch.randint(0, axes.num_adapters, (axes.num_tokens,), generator=generator)
    if axes.masked or axes.product in ("compared", "looped"):
        index[axes.num_tokens // 2] = -1
    slots = torch.randperm(24, generator=generator)[: axes.num_tokens]
    caches = [old_tokens(3, 8, 1, axes.head_dim, dtype=axes.dtype) for _ in range(2)]
    return Lora(axes).eval(), (x, index, slots, *caches)
