"""Mixtures of experts in the manner of public code bases, one function per style.

    module, args = build("scattered_back")       # one of STYLES

A style is `step(m, x) -> [T, H]` for x [T, H]. The module m has `router` [E, H], stacked weights
`gate`, `up` [E, I, H], `down` [E, H, I], packed `gate_up` [E, H, 2 * I] and `down_t` [E, I, H], and
`experts`, a list of modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, EXPERTS, SLOTS, HIDDEN, INNER = 12, 4, 2, 32, 32


def softmax_choice(m, x, slots=SLOTS):
    """Returns (weights, ids), both [T, S]."""
    scores = F.linear(x, m.router).float().softmax(-1)
    return scores.topk(slots, -1)


def multiplied(rows, weight, ends):
    """Multiplies rows in groups [M, K] by weights [E, K, N]."""
    if rows.dtype != torch.float64:
        return torch._grouped_mm(rows, weight, offs=ends)
    parts = torch.tensor_split(rows, ends[:-1].long())
    return torch.cat([part @ one for part, one in zip(parts, weight, strict=True)])


def swiglu(rows, m, ends):
    """Computes SwiGLU with stacked weights and grouped GEMMs."""
    gate = multiplied(rows, m.gate.transpose(1, 2), ends)
    up = multiplied(rows, m.up.transpose(1, 2), ends)
    return multiplied(F.silu(gate) * up, m.down.transpose(1, 2), ends)


# --- every expert gathered: gpt-fast --------------------------------------------------------------


def gathered_weights(m, x):
    """Gathers the weights of each token's experts and multiplies by einsum, as gpt-fast's Mixtral
    does."""
    weights, ids = softmax_choice(m, x)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    w1, w3, w2 = m.gate[ids], m.up[ids], m.down[ids]
    x1 = F.silu(torch.einsum("ti, taoi -> tao", x, w1))
    x3 = torch.einsum("ti, taoi -> tao", x, w3)
    out = torch.einsum("tao, taio -> tai", x1 * x3, w2)
    return torch.einsum("tai, ta -> ti", out, weights)


def two_layers(m, x):
    """Two mixtures in sequence. The operations between them are not a third mixture."""
    x = x + gathered_weights(m, x)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x + gathered_weights(m, x)


# --- all experts, tokens weighed before: Llama 4 --------------------------------------------------


def scattered_back(m, x, slots=1, out=None):
    """Sends each token to all E experts, weighted by the sigmoid of the chosen score (or zero), and
    adds the results by scatter, as Meta's Llama 4 does."""
    scores = F.linear(x, m.router)
    top, ids = torch.topk(scores, slots, dim=1)
    tokens = x.shape[0]
    spread = torch.full_like(scores, float("-inf")).scatter_(1, ids, top).transpose(0, 1)
    of = torch.arange(tokens).view(1, -1).expand(spread.size(0), -1)
    spread = torch.sigmoid(spread)
    index = of.reshape(-1, 1).expand(-1, HIDDEN)
    rows = torch.gather(x, 0, index) * spread.reshape(-1, 1)
    rows = rows.view(EXPERTS, -1, HIDDEN)
    gate, up = torch.bmm(rows, m.gate.transpose(1, 2)), torch.bmm(rows, m.up.transpose(1, 2))
    routed = torch.bmm(F.silu(gate) * up, m.down.transpose(1, 2)).view(-1, HIDDEN)
    out = torch.zeros_like(x) if out is None else out
    out.scatter_add_(0, index, routed)
    return out


def scattered_back_twice(m, x):
    return scattered_back(m, x, 2)


# --- routes in order: torchtitan, Megatron --------------------------------------------------------


def counts_of(ids):
    """Counts the routes of each expert."""
    return torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)


def sorted_results(m, x, weights, ids, counts):
    """Returns (tokens, weighted results) of the routes, sorted by expert."""
    order = torch.argsort(ids.view(-1), stable=True)
    rows = x[order // SLOTS]
    y = swiglu(rows, m, torch.cumsum(counts, 0, dtype=torch.int32))
    return order // SLOTS, y * weights.view(-1)[order][:, None].to(y.dtype)


def softmax_results(m, x):
    """Returns the results of a choice by softmax, which is counted as a histogram."""
    weights, ids = softmax_choice(m, x)
    return sorted_results(m, x, weights, ids, counts_of(ids))


def _sorted_experts(m, x, weights, ids, counts):
    return torch.zeros_like(x).index_add(0, *sorted_results(m, x, weights, ids, counts))


def counted_by_mask(m, x):
    """Counts the tokens of an expert in a mask of choices, as torchtitan does."""
    scores = F.linear(x, m.router).float().softmax(-1)
    weights, ids = torch.topk(scores, SLOTS, dim=-1)
    counts = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, True).sum(0)
    return _sorted_experts(m, x, weights, ids, counts)


def counted_by_other_mask(m, x):
    """Near miss: counts other choices than it sorts."""
    scores = F.linear(x, m.router).float().softmax(-1)
    weights, ids = torch.topk(scores, SLOTS, dim=-1)
    others = (ids + 1) % EXPERTS
    counts = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, others, True).sum(0)
    return _sorted_experts(m, x, weights, ids, counts)


def counted_by_repeated_choice(m, x):
    """Near miss: counts an id once if it repeats within a token, but sorts it twice."""
    scores = F.linear(x, m.router).float().softmax(-1)
    weights, ids = torch.topk(scores, SLOTS, dim=-1)
    ids = ids // 2
    counts = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, True).sum(0)
    return _sorted_experts(m, x, weights, ids, counts)


def sorted_scatter_back(m, x):
    """Adds rows to their tokens by scatter_add with a repeated index, as torchtitan does."""
    weights, ids = softmax_choice(m, x)
    order = torch.argsort(ids.view(-1), stable=True)
    counts = counts_of(ids)
    index = (order // SLOTS).reshape(-1, 1).expand(-1, HIDDEN)
    rows = torch.gather(x, dim=0, index=index)
    y = swiglu(rows, m, torch.cumsum(counts, 0, dtype=torch.int32))
    y = (y.float() * weights.view(-1)[order].reshape(-1, 1)).to(x.dtype)
    return torch.zeros_like(x).scatter_add(dim=0, index=index, src=y)


def sorted_scatter_into(m, x):
    """Adds rows to their tokens as `sorted_scatter_back` does, but in place."""
    tokens, y = softmax_results(m, x)
    out = torch.zeros_like(x)
    out.scatter_add_(0, tokens[:, None].expand(-1, HIDDEN), y)
    return out


def top_one_sigmoid(m, x):
    """Multiplies each token by a sigmoid before its single expert, with tokens in order, as Llama 4
    does."""
    order, weights, ends = _one_each(m, x)
    y = swiglu(x[order] * weights, m, ends)
    return torch.zeros_like(x).index_add(0, order, y)


def _one_each(m, x):
    """Returns tokens sorted by expert, their weights in this order, and the end of each expert's
    tokens."""
    scores = F.linear(x, m.router)
    top, ids = torch.topk(scores, 1, dim=1)
    weights = torch.sigmoid(top.float()).to(x.dtype)
    order = torch.argsort(ids.view(-1), stable=True)
    ends = torch.cumsum(counts_of(ids), 0, dtype=torch.int32)
    return order, weights.view(-1)[order][:, None], ends


def top_two_before(m, x):
    """Near miss: each token has two experts and is weighted before them."""
    weights, ids = softmax_choice(m, x)
    order = torch.argsort(ids.view(-1), stable=True)
    counts = counts_of(ids)
    rows = x[order // SLOTS] * weights.to(x.dtype).view(-1)[order][:, None]
    y = swiglu(rows, m, torch.cumsum(counts, 0, dtype=torch.int32))
    return torch.zeros_like(x).index_add(0, order // SLOTS, y)


def added_to_shared(m, x):
    """Adds the results in place to the result of a shared expert, as Meta's Llama 4 does."""
    tokens, y = softmax_results(m, x)
    out = m.experts[0](x)
    out.index_add_(0, tokens, y)
    return out


def added_to_shared_of_all(m, x):
    """Adds the results of all experts to a shared expert's result, as Meta's Llama 4 does."""
    return scattered_back(m, x, out=m.experts[0](x))


def added_to_wider(m, x):
    """Near miss: the result of the shared expert is wider, and so is the sum."""
    tokens, y = softmax_results(m, x)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = m.experts[0](x).to(wide).index_add(0, tokens, y.to(wide))
    return out.to(x.dtype)


def added_beside_a_view(m, x):
    """Returns another view of the memory that the result is added to, so the addition must stay in
    place."""
    tokens, y = softmax_results(m, x)
    out = m.experts[0](x)
    whole = out.view(-1)
    out.index_add_(0, tokens, y)
    return out, whole


def _by_route(m, x, slots, back):
    """Gathers rows by an index of tokens and adds them back by it, as transformers 5.0's batched
    experts do."""
    weights, ids = softmax_choice(m, x, slots)
    token = torch.arange(TOKENS).unsqueeze(1).expand(-1, slots).reshape(-1)
    ids, rows = ids.reshape(-1), x[token]
    gate = torch.bmm(m.gate[ids], rows.unsqueeze(-1)).squeeze(-1)
    up = torch.bmm(m.up[ids], rows.unsqueeze(-1)).squeeze(-1)
    y = torch.bmm(m.down[ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    y = y * weights.reshape(-1).unsqueeze(-1)
    out = torch.zeros_like(x)
    out.index_add_(0, back(token), y.to(out.dtype))
    return out


def added_by_route(m, x):
    return _by_route(m, x, SLOTS, lambda token: token)


def added_by_route_top_one(m, x):
    return _by_route(m, x, 1, lambda token: token)


def added_by_other_route(m, x):
    """Near miss: the rows go back to other tokens than those from which they were taken."""
    return _by_route(m, x, SLOTS, lambda token: token.flip(0))


def columns_in_order(m, x):
    """Has weights in a column that is put in the order of the rows, as transformers 5.0's grouped
    experts do."""
    weights, ids = softmax_choice(m, x)
    token = torch.arange(TOKENS).unsqueeze(1).expand(-1, SLOTS).reshape(-1)
    ids = ids.reshape(-1)
    perm = torch.argsort(ids)
    counts = torch.histc(ids[perm].float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    y = swiglu(x[token][perm], m, torch.cumsum(counts, 0, dtype=torch.int32))
    y = (y * weights.reshape(-1, 1)[perm])[torch.argsort(perm)]
    return y.view(TOKENS, SLOTS, HIDDEN).sum(dim=1).to(x.dtype)


def sorted_and_added_by_route(m, x):
    """Sorts rows, puts them back in order and then adds them, as transformers 5.0's grouped experts
    do."""
    weights, ids = softmax_choice(m, x)
    token = torch.arange(TOKENS).unsqueeze(1).expand(-1, SLOTS).reshape(-1)
    ids = ids.reshape(-1)
    perm = torch.argsort(ids)
    inverse = torch.argsort(perm)
    counts = torch.histc(ids[perm].float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    y = swiglu(x[token][perm], m, torch.cumsum(counts, 0, dtype=torch.int32))
    y = (y * weights.reshape(-1)[perm].unsqueeze(-1))[inverse]
    out = torch.zeros_like(x)
    out.index_add_(0, token, y.to(out.dtype))
    return out


def top_one_after(m, x):
    """Computes the same as `top_one_sigmoid`, but multiplies the rows by their weights after the
    experts."""
    order, weights, ends = _one_each(m, x)
    return torch.zeros_like(x).index_add(0, order, swiglu(x[order], m, ends) * weights)


def mapped_rows(m, x):
    """Has a map [T, E] of routes, whose transpose lists the tokens of each expert, as Megatron
    does."""
    scores = F.linear(x, m.router).float()
    top, ids = torch.topk(scores, SLOTS, dim=1)
    probs = torch.softmax(top, dim=-1)
    spread = torch.zeros_like(scores).scatter(1, ids, probs)
    routes = torch.zeros_like(scores).int().scatter(1, ids, 1).bool()
    counts = routes.sum(dim=0)
    of = torch.arange(x.shape[0]).unsqueeze(0).expand(EXPERTS, -1)
    index = of.masked_select(routes.T.contiguous())
    rows = x.index_select(0, index)
    kept = spread.T.contiguous().masked_select(routes.T.contiguous())
    y = swiglu(rows, m, torch.cumsum(counts, 0, dtype=torch.int32)) * kept[:, None].to(x.dtype)
    out = torch.zeros_like(x)
    out.scatter_add_(0, index.unsqueeze(1).expand(-1, HIDDEN), y)
    return out


def _mapped_cells(m, x, inside=False, stable=True, mapped=lambda ids: ids):
    logits = F.linear(x, m.router)
    top, ids = torch.topk(logits, SLOTS, dim=1)
    probs = torch.softmax(top, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    spread = torch.zeros_like(logits).scatter(1, ids, probs.to(x.dtype))
    routes = torch.zeros_like(logits).int().scatter(1, mapped(ids), 1).bool()
    cells = routes.T.contiguous().reshape(-1).argsort(descending=True, stable=stable)
    cells = cells[: TOKENS * SLOTS]
    token = cells % TOKENS
    by = spread.T.contiguous().reshape(-1)[cells].unsqueeze(-1)
    rows, ends = x.index_select(0, token), torch.cumsum(routes.sum(0), 0, dtype=torch.int32)
    gate, up = (multiplied(rows, w.transpose(1, 2), ends) for w in (m.gate, m.up))
    h = F.silu(gate) * up
    y = multiplied((h * by).to(h.dtype) if inside else h, m.down.transpose(1, 2), ends)
    out = torch.zeros_like(x)
    return out.scatter_add_(0, token.unsqueeze(1).expand(-1, HIDDEN), y if inside else y * by)


def mapped_cells(m, x):
    """Lists the true cells of a map [T, E] by expert, from a stable sort of all cells, as Megatron
    does."""
    return _mapped_cells(m, x)


def mapped_cells_weighed_inside(m, x):
    """Computes the same as `mapped_cells`, but multiplies the rows by their weights before the last
    product."""
    return _mapped_cells(m, x, inside=True)


def mapped_cells_in_any_order(m, x):
    """Near miss: the sort is not stable, so the cells of an expert may not stay together."""
    return _mapped_cells(m, x, stable=False)


def mapped_cells_of_others(m, x):
    """Near miss: a token may name an expert twice, and the map holds it once."""
    return _mapped_cells(m, x, mapped=lambda ids: ids // 2)


# --- what stands around a mixture -----------------------------------------------------------------


def scaled_results(m, x):
    """Scales the result of each expert by one more number."""
    tokens, y = softmax_results(m, x)
    return torch.zeros_like(x).index_add(0, tokens, y * 2.5)


def scaled_channels(m, x):
    """Near miss: scales by a number for each channel."""
    weights, ids = softmax_choice(m, x)
    order = torch.argsort(ids.view(-1), stable=True)
    counts = counts_of(ids)
    y = swiglu(x[order // SLOTS], m, torch.cumsum(counts, 0, dtype=torch.int32)) * m.router[0]
    y = y * weights.view(-1)[order][:, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, order // SLOTS, y)


def counted_for_statistics(m, x):
    """Also returns the counts of the experts, for statistics."""
    weights, ids = softmax_choice(m, x)
    return _sorted_experts(m, x, weights, ids, counts_of(ids)), F.one_hot(ids, EXPERTS).sum((0, 1))


@dataclass(frozen=True)
class Style:
    step: Callable[..., Any]


# --- routers -------------------------------------------------------------------------------------


def _limited_groups(m, x, mask, fill):
    scores = torch.sigmoid(F.linear(x, m.router).float())
    grouped = (scores + m.router[:, 0].float()).unflatten(-1, (2, EXPERTS // 2))
    best = grouped.topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1, sorted=False)[1]
    left = grouped.masked_fill(mask(best), fill).flatten(-2)
    ids = torch.topk(left, SLOTS, dim=-1, sorted=False)[1]
    weights = scores.gather(-1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
    counts = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, True).sum(0)
    return _sorted_experts(m, x, weights, ids, counts)


def _others(best):
    return torch.ones(TOKENS, 2, dtype=torch.bool).scatter_(-1, best, False).unsqueeze(-1)


def limited_groups(m, x):
    """Leaves out all but the best groups of scores [T, G, E / G], as torchtitan and DeepSeek do."""
    return _limited_groups(m, x, _others, float("-inf"))


def limited_groups_filled(m, x):
    """Near miss: fills with 0, which may be larger than a corrected score."""
    return _limited_groups(m, x, _others, 0.0)


def limited_groups_turned(m, x):
    """Near miss: the best groups are the ones that are left out."""
    return _limited_groups(m, x, lambda best: ~_others(best), float("-inf"))


STYLES = {
    step.__name__: Style(step)
    for step in (
        gathered_weights, two_layers, scattered_back, scattered_back_twice, counted_by_mask,
        counted_by_other_mask, counted_by_repeated_choice, sorted_scatter_back,
        sorted_scatter_into, top_one_sigmoid, top_one_after, top_two_before, added_to_shared,
        added_by_route, added_by_route_top_one, added_by_other_route, sorted_and_added_by_route,
        mapped_rows, added_to_shared_of_all, added_to_wider, added_beside_a_view,
        columns_in_order, mapped_cells, mapped_cells_weighed_inside, mapped_cells_in_any_order,
        mapped_cells_of_others, scaled_results, scaled_channels, counted_for_statistics,
        limited_groups, limited_groups_filled, limited_groups_turned,
    )
}  # fmt: skip


class Expert(nn.Module):
    """Computes w2(silu(w1(x)) * w3(x)), with parts of the stacked weights."""

    def __init__(self, gate, up, down) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = gate, up, down

    def forward(self, x):
        return F.linear(F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3), self.w2)


class Mixture(nn.Module):
    def __init__(self, style: Style, normal: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.step = style.step

        def weight(*shape):
            return nn.Parameter(normal(*shape) * HIDDEN**-0.5, requires_grad=False)

        self.router = weight(EXPERTS, HIDDEN)
        self.gate, self.up = weight(EXPERTS, INNER, HIDDEN), weight(EXPERTS, INNER, HIDDEN)
        self.down = weight(EXPERTS, HIDDEN, INNER)
        self.gate_up = weight(EXPERTS, HIDDEN, 2 * INNER)
        self.down_t = weight(EXPERTS, INNER, HIDDEN)
        own = [weight(INNER, HIDDEN) for _ in range(2 * EXPERTS)]
        downs = [weight(HIDDEN, INNER) for _ in range(EXPERTS)]
        parts = zip(own[::2], own[1::2], downs, strict=True)
        self.experts = nn.ModuleList(Expert(*three) for three in parts)

    def expert(self, x, e):
        return F.linear(F.silu(F.linear(x, self.gate[e])) * F.linear(x, self.up[e]), self.down[e])

    def forward(self, x):
        return self.step(self, x)


def build(name, dtype=torch.bfloat16, styles=STYLES):
    """Returns (module, arguments). They are seeded, so that the same call gives the same
    numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    module = Mixture(styles[name], normal).eval()
    return module, [normal(TOKENS, HIDDEN)]
