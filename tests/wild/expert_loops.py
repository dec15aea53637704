"""Loops over experts in the manner of public code bases. As in `mixtures`, there is one function
for each style.

Under `torch._dynamo.config.capture_dynamic_output_shape_ops`, Dynamo captures most of them whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.wild.mixtures import EXPERTS, HIDDEN, Style, softmax_choice


def loop_over_hits(m, x):
    """Loops as transformers' eager experts do."""
    weights, ids = softmax_choice(m, x)
    out = torch.zeros_like(x)
    expert_mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    expert_hit = (expert_mask.sum((-1, -2)) > 0).nonzero()
    for e in expert_hit:
        slot, token = torch.where(expert_mask[e[0]])
        y = m.expert(x[token], e[0]) * weights[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def moe_loop_over_modules(m, x):
    """Loops as Mistral's reference code and LitGPT do."""
    weights, ids = softmax_choice(m, x)
    weights = weights.to(x.dtype)
    results = torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        token, slot = torch.where(ids == i)
        results[token] += weights[token, slot, None] * expert(x[token])
    return results


def moe_loop_over_counts(m, x):
    """Loops as DeepSeek's reference code does."""
    weights, ids = softmax_choice(m, x)
    y = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
    for i in range(EXPERTS):
        if counts[i] == 0:
            continue
        token, slot = torch.where(ids == i)
        y[token] += m.experts[i](x[token]) * weights[token, slot, None].to(x.dtype)
    return y


def moe_added_modules(m, x):
    """Makes the masks by one_hot with slots before tokens, as transformers 4 does."""
    weights, ids = softmax_choice(m, x)
    out = torch.zeros_like(x)
    masks = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        slot, token = torch.where(masks[e])
        y = expert(x[None, token].reshape(-1, HIDDEN)) * weights[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


STYLES = {
    step.__name__: Style(step)
    for step in (
        loop_over_hits, moe_loop_over_modules, moe_loop_over_counts, moe_added_modules,
    )
}  # fmt: skip
