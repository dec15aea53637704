"""Mixtures that run their experts one by one, in Python loops that break the graph.

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

    def forward(self, x):
        return self.step(self, x, *F.linear(x, self.router).float().softmax(-1).topk(S, -1))

    def expert(self, x, e):
        gate, up = F.linear(x, self.gate_up[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[e])


def one_hot_nonzero(m, x, weights, ids):
    """Loops over experts as transformers does with experts_implementation="eager"."""
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


#: For each name, the function that computes the mixture.
LOOPS = {
    "one_hot_nonzero": one_hot_nonzero,
    "where_each": where_each,
    "sorted_lists": sorted_lists,
}


def build(name):
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    return MoeLoop(LOOPS[name]).eval(), (x,)
