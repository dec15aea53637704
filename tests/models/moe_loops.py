"""Mixtures whose experts run one by one: in Python loops that end the graph, or written out.

module, args = build("one_hot_nonzero")          # one of LOOPS
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

T, E, S, H, INNER = 12, 4, 2, 32, 32


class MoeLoop(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return nn.Parameter(values.bfloat16(), requires_grad=False)

        self.router = random(E, H)
        self.gate_up = random(E, 2 * INNER, H)
        self.down = random(E, H, INNER)
        self.experts = nn.ModuleList()
        for _ in range(E):
            mlp = nn.Sequential(nn.Linear(H, INNER, bias=False), nn.SiLU(), nn.Linear(INNER, H))
            self.experts.append(mlp.bfloat16().requires_grad_(False))

    def forward(self, x):
        return self.step(self, x, *F.linear(x, self.router).float().softmax(-1).topk(S, -1))

    def expert(self, x, e):
        gate, up = F.linear(x, self.gate_up[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[e])


def one_hot_nonzero(m, x, weights, ids):
    """As transformers has it under experts_implementation="eager"."""
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, E).permute(2, 1, 0)
    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in expert_hit:
        slot, token = torch.where(expert_mask[e[0]])
        y = m.expert(x[token], e[0]) * weights[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def where_each(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(E):
        expert_token, slot = torch.where(ids == e)
        y = m.expert(x[expert_token], e) * weights[expert_token, slot, None]
        out = out.index_add(0, expert_token, y.to(out.dtype))
    return out


def sorted_lists(m, x, weights, ids):
    order = ids.flatten().argsort()
    expert_counts = torch.bincount(ids.flatten(), minlength=E).tolist()
    rows, start = x[order // S], 0
    parts = []
    for e, count in enumerate(expert_counts):
        parts.append(m.expert(rows[start : start + count], e))
        start += count
    y = torch.cat(parts) * weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // S, y)


def masked_stacked(m, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(E):
        weight = (weights * (ids == e)).sum(-1, keepdim=True)
        out = out + m.expert(x, e) * weight.to(x.dtype)
    return out


def masked_modules(m, x, weights, ids):
    scores = torch.zeros(x.shape[0], E).scatter(1, ids, weights).to(x.dtype)
    out = 0
    for e, expert in enumerate(m.experts):
        out = out + expert(x) * scores[:, e : e + 1]
    return out


#: name -> (step, whether the graph breaks, the code that says so)
LOOPS = {
    "one_hot_nonzero": (one_hot_nonzero, True, "EXPERT_LOOP"),
    "where_each": (where_each, True, "EXPERT_LOOP"),
    "sorted_lists": (sorted_lists, True, "EXPERT_LOOP"),
    "masked_stacked": (masked_stacked, False, "EXPERT_UNROLLED"),
    "masked_modules": (masked_modules, False, "EXPERT_UNROLLED"),
}


def build(name):
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    return MoeLoop(LOOPS[name][0]).eval(), (x,)
