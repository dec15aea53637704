"""Loops over experts in the manner of public code bases, one function per style: as in `mixtures`.

Under `torch._dynamo.config.capture_dynamic_output_shape_ops` Dynamo holds most of them whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.wild.mixtures import EXPERTS, HIDDEN, Style, softmax_choice

# --- that Dynamo cuts -----------------------------------------------------------------------------


def loop_over_hits(m, x):
    """As transformers' eager experts."""
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
    """As Mistral's reference code."""
    weights, ids = softmax_choice(m, x)
    weights = weights.to(x.dtype)
    results = torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        token, slot = torch.where(ids == i)
        results[token] += weights[token, slot, None] * expert(x[token])
    return results


def moe_loop_over_counts(m, x):
    """As DeepSeek's reference code."""
    weights, ids = softmax_choice(m, x)
    y = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
    for i in range(EXPERTS):
        if counts[i] == 0:
            continue
        token, slot = torch.where(ids == i)
        y[token] += m.experts[i](x[token]) * weights[token, slot, None].to(x.dtype)
    return y


# --- that it may hold whole -----------------------------------------------------------------------


def _parts(m):
    return [lambda x, e=e: m.expert(x, e) for e in range(EXPERTS)]


def _put_back(m, x, experts, number=lambda e: e, chosen=lambda ids: ids):
    weights, ids = softmax_choice(m, x)
    weights, ids = weights.to(x.dtype), chosen(ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(ids == number(e))
        out[token] += weights[token, slot, None] * expert(x[token])
    return out


def moe_put_back(m, x):
    """As Mistral's reference code, where the weights are parts of one tensor."""
    return _put_back(m, x, _parts(m))


def moe_put_back_repeated(m, x):
    """The near miss: ids that may repeat within a token; put back, one of the two is lost."""
    return _put_back(m, x, _parts(m), chosen=lambda ids: ids // 2)


def moe_put_back_by_other_number(m, x):
    """The near miss: the tokens of the next expert."""
    return _put_back(m, x, _parts(m), number=lambda e: (e + 1) % EXPERTS)


def moe_put_back_modules(m, x):
    """As it is published: each expert has weights of its own."""
    return _put_back(m, x, m.experts)


def moe_put_back_by_masks(m, x):
    """As LitGPT: all masks at once, compared with all numbers."""
    weights, ids = softmax_choice(m, x)
    masks = (ids.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
    out = torch.zeros_like(x)
    for mask, expert in zip(masks, _parts(m), strict=True):
        token, slot = torch.where(mask)
        out[token] += weights.to(x.dtype)[token, slot, None] * expert(x[token])
    return out


def _added(m, x, out, experts):
    """As transformers 4: the masks by one_hot, slots before tokens."""
    weights, ids = softmax_choice(m, x)
    masks = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(experts):
        slot, token = torch.where(masks[e])
        y = expert(x[None, token].reshape(-1, HIDDEN)) * weights[token, slot, None]
        out.index_add_(0, token, y.to(out.dtype))
    return out


def moe_added_by_one_hot(m, x):
    return _added(m, x, torch.zeros_like(x), _parts(m))


def moe_added_modules(m, x):
    return _added(m, x, torch.zeros_like(x), m.experts)


def moe_added_to_shared(m, x):
    return _added(m, x, m.experts[0](x), _parts(m))


STYLES = {
    step.__name__: Style(step)
    for step in (
        loop_over_hits, moe_loop_over_modules, moe_loop_over_counts, moe_put_back,
        moe_put_back_repeated, moe_put_back_by_other_number, moe_put_back_modules,
        moe_put_back_by_masks, moe_added_by_one_hot, moe_added_modules, moe_added_to_shared,
    )
}  # fmt: skip
