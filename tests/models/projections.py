"""Every way in which real code projects an activation to q, k and v.

A form is a module from x [..., K] to q [..., Hq, D] and k and v [..., Hkv, D]. `FORMS` has the
forms by name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Form(nn.Module):
    """The sizes of a projection. `groups` is the number of kv heads that are projected."""

    def __init__(self, axes) -> None:
        super().__init__()
        self.hidden, self.head_dim, self.clip = axes.hidden, axes.head_dim, axes.clip
        self.groups = axes.projected_kv_heads or axes.num_kv_heads
        self.heads = (axes.num_heads, self.groups, self.groups)
        self.widths = [heads * axes.head_dim for heads in self.heads]
        self.build(axes)

    def weight(self, *shape):
        return nn.Parameter(torch.empty(shape))

    def by_head(self, *parts):
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]


class ThreeLinears(Form):
    def build(self, axes):
        self.q_proj = nn.Linear(axes.hidden, self.widths[0], bias=axes.bias)
        self.k_proj = nn.Linear(axes.hidden, self.widths[1], bias=axes.bias)
        self.v_proj = nn.Linear(axes.hidden, self.widths[2], bias=axes.bias)

    def forward(self, x):
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return [part.view(*x.shape[:-1], -1, self.head_dim) for part in parts]


class Clamped(ThreeLinears):
    def forward(self, x):
        parts = (p(x).clamp(-self.clip, self.clip) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.by_head(*parts)


class ScaledQuery(ThreeLinears):
    """Projects as OPT does: the query is scaled right after its projection."""

    def forward(self, x):
        parts = (self.q_proj(x) * self.head_dim**-0.5, self.k_proj(x), self.v_proj(x))
        return self.by_head(*parts)


class Packed(Form):
    def build(self, axes):
        self.qkv_proj = nn.Linear(axes.hidden, sum(self.widths), bias=axes.bias)

    def forward(self, x):
        return self.by_head(*self.parts(self.qkv_proj(x)))


class Split(Packed):
    def parts(self, packed):
        return packed.split(self.widths, dim=-1)


class Chunk(Packed):
    def parts(self, packed):
        return packed.chunk(3, dim=-1)


class Slices(Packed):
    def parts(self, packed):
        q_width, k_width, _ = self.widths
        middle = q_width + k_width
        return packed[..., :q_width], packed[..., q_width:middle], packed[..., middle:]


class ClampedPacked(Packed):
    """Projects as DBRX and MPT do: q, k and v are clamped together."""

    def parts(self, packed):
        return packed.clamp(min=-self.clip, max=self.clip).split(self.widths, dim=-1)


class Unbind(Packed):
    def forward(self, x):
        return self.qkv_proj(x).view(*x.shape[:-1], 3, -1, self.head_dim).unbind(-3)


class HeadSplit(Packed):
    def forward(self, x):
        return self.qkv_proj(x).view(*x.shape[:-1], -1, self.head_dim).split(self.heads, dim=-2)


class PerHead(Packed):
    """Projects as GPT-NeoX does: for each head, q, k and v are next to each other."""

    def forward(self, x):
        by_head = self.qkv_proj(x).view(*x.shape[:-1], self.heads[0], 3 * self.head_dim)
        return by_head.chunk(3, dim=-1)


class ListIndex(Form):
    """Projects as Falcon-7B does: one kv head is picked by a list, and the weight is multiplied
    from the right."""

    def build(self, axes):
        self.query_key_value = self.weight(sum(self.widths), axes.hidden)

    def forward(self, x):
        fused = x @ self.query_key_value.T
        fused = fused.view(*x.shape[:-1], self.heads[0] + 2, self.head_dim)
        return fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]


class Grouped(Packed):
    """Projects as InternLM2 does, with a result [kv heads, q heads of each + 2, D]."""

    def forward(self, x):
        fused = self.qkv_proj(x).view(*x.shape[:-1], self.groups, -1, self.head_dim)
        return fused[..., :-2, :].flatten(-3, -2), fused[..., -2, :], fused[..., -1, :]


class GroupedBroadcast(Packed):
    """Projects as Falcon-40B does: heads are grouped, and every q head gets a copy of its k and v,
    also in the cache."""

    def forward(self, x):
        fused = self.qkv_proj(x).view(*x.shape[:-1], self.groups, -1, self.head_dim)
        query, key, value = fused[..., :-2, :], fused[..., [-2], :], fused[..., [-1], :]
        key, value = (torch.broadcast_to(part, query.shape) for part in (key, value))
        return [part.flatten(-3, -2) for part in (query, key, value)]


class RepeatedHeads(ThreeLinears):
    """Repeats keys and values to more heads before they are cached."""

    def forward(self, x):
        q, k, v = super().forward(x)
        times = self.heads[0] // self.groups
        return q, k.repeat_interleave(times, dim=-2), v.repeat_interleave(times, dim=-2)


class Conv1D(Form):
    """Projects as GPT-2 does: the weight is [K, N], and keys and values are viewed before
    queries."""

    def build(self, axes):
        self.c_attn = self.weight(axes.hidden, sum(self.widths))
        self.bias = self.weight(sum(self.widths))

    def forward(self, x):
        packed = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.c_attn)
        q, k, v = packed.view(*x.shape[:-1], -1).split(self.widths, dim=-1)
        k, v = self.by_head(k, v)
        return *self.by_head(q), k, v


class Unsqueezed(Packed):
    """Projects as GPT-BigCode does: one kv head is split from a tensor that already has a head
    dimension."""

    def forward(self, x):
        q, k, v = self.qkv_proj(x).unsqueeze(-2).split(self.widths, dim=-1)
        return q.view(*x.shape[:-1], -1, self.head_dim), k, v


class QueryAndPackedKv(Form):
    def build(self, axes):
        self.q_proj = nn.Linear(axes.hidden, self.widths[0], bias=axes.bias)
        self.kv_proj = nn.Linear(axes.hidden, 2 * self.widths[1], bias=axes.bias)

    def forward(self, x):
        return self.by_head(self.q_proj(x), *self.kv_proj(x).chunk(2, dim=-1))


class Einsum(Form):
    """Has weights [H, D, K]."""

    equation = "...k,hdk->...hd"

    def build(self, axes):
        self.q, self.k, self.v = (self.weight(*self.shape(heads)) for heads in self.heads)

    def shape(self, heads):
        return heads, self.head_dim, self.hidden

    def forward(self, x):
        return [torch.einsum(self.equation, x, w) for w in (self.q, self.k, self.v)]


class EinsumHiddenFirst(Einsum):
    """Has weights [K, H, D]."""

    equation = "...k,khd->...hd"

    def shape(self, heads):
        return self.hidden, heads, self.head_dim


class EinsumPacked(Form):
    """Has one weight [K, all heads, D], and splits the result by head."""

    def build(self, axes):
        self.qkv = self.weight(axes.hidden, sum(self.heads), axes.head_dim)

    def forward(self, x):
        return torch.einsum("...k,khd->...hd", x, self.qkv).split(self.heads, dim=-2)


class FromTheRight(Einsum):
    """Computes x @ W, with weights W [K, H * D]."""

    def shape(self, heads):
        return self.hidden, heads * self.head_dim

    def forward(self, x):
        return self.by_head(*(x @ w for w in (self.q, self.k, self.v)))


class MatmulByHead(Einsum):
    """Computes a product for each head: x [..., 1, T, K] @ W [H, K, D]."""

    def shape(self, heads):
        return heads, self.hidden, self.head_dim

    def forward(self, x):
        of = x.unsqueeze(-3)
        return [torch.matmul(of, w).transpose(-3, -2) for w in (self.q, self.k, self.v)]


class BmmOfOne(FromTheRight):
    """Computes batched products with a batch of one, or with a weight that the batch shares."""

    def forward(self, x):
        batch = x if x.dim() == 3 else x[None]
        parts = (
            torch.bmm(batch, w.expand(batch.shape[0], -1, -1)) for w in (self.q, self.k, self.v)
        )
        return self.by_head(*(part.view(*x.shape[:-1], -1) for part in parts))


class JoinedWeights(Form):
    """Joins three weights in every call."""

    def build(self, axes):
        self.weights = nn.ParameterList(self.weight(width, axes.hidden) for width in self.widths)
        self.biases = nn.ParameterList(self.weight(width) for width in self.widths)

    def forward(self, x):
        packed = F.linear(x, torch.cat(list(self.weights)), torch.cat(list(self.biases)))
        return self.by_head(*packed.split(self.widths, dim=-1))


class BiasApart(Packed):
    """Adds the bias to the packed product."""

    def build(self, axes):
        super().build(axes)
        self.bias = self.weight(sum(self.widths))

    def parts(self, packed):
        return (packed + self.bias).split(self.widths, dim=-1)


class BiasByHead(Einsum):
    """Adds a separate bias [H, D] to each of q, k and v."""

    def build(self, axes):
        super().build(axes)
        self.biases = nn.ParameterList(self.weight(heads, axes.head_dim) for heads in self.heads)

    def forward(self, x):
        return [part + b for part, b in zip(super().forward(x), self.biases, strict=True)]


class BiasOfParts(Packed):
    """Adds a separate bias to each part of one packed product."""

    def build(self, axes):
        super().build(axes)
        self.biases = nn.ParameterList(self.weight(width) for width in self.widths)

    def parts(self, packed):
        parts = packed.split(self.widths, dim=-1)
        return [part + b for part, b in zip(parts, self.biases, strict=True)]


FORMS = {
    "three_linears": ThreeLinears,
    "clamped": Clamped,
    "scaled_query": ScaledQuery,
    "packed_split": Split,
    "packed_chunk": Chunk,
    "packed_slice": Slices,
    "packed_clamped": ClampedPacked,
    "packed_unbind": Unbind,
    "packed_head_split": HeadSplit,
    "per_head": PerHead,
    "list_index": ListIndex,
    "grouped": Grouped,
    "grouped_broadcast": GroupedBroadcast,
    "repeated_heads": RepeatedHeads,
    "conv1d": Conv1D,
    "unsqueezed": Unsqueezed,
    "q_and_kv": QueryAndPackedKv,
    "einsum": Einsum,
    "einsum_hidden_first": EinsumHiddenFirst,
    "einsum_packed": EinsumPacked,
    "from_the_right": FromTheRight,
    "matmul_by_head": MatmulByHead,
    "bmm_of_one": BmmOfOne,
    "joined_weights": JoinedWeights,
    "bias_apart": BiasApart,
    "bias_by_head": BiasByHead,
    "bias_of_parts": BiasOfParts,
}
