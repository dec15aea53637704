"""A layer whose step is a plain function, the arguments of the step, and a comparison with
eager."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_as_eager
from tilewright.compiler import lower, reports

T, K, D = 6, 32, 8  # tokens, hidden size, head_dim
HQ, HKV = 4, 2
N = (HQ + 2 * HKV) * D

ROWS = {"q": (HQ * D, K), "k": (HKV * D, K), "v": (HKV * D, K)}
BY_HEAD = {"q": (HQ, D, K), "k": (HKV, D, K), "v": (HKV, D, K)}
PACKED = {"w": (N, K)}


class Layer(nn.Module):
    """A layer that has weights by name. `step` computes it."""

    def __init__(self, step, **shapes):
        super().__init__()
        self.step = step
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) / 4
            setattr(self, name, nn.Parameter(weight, requires_grad=False))

    def forward(self, *args):
        return self.step(self, *args)


def make_args(heads=HKV, head_dim=D, tokens=T):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, K, generator=generator)
    caches = [torch.randn(6, 4, heads, head_dim, generator=generator) for _ in range(2)]
    return (x, *caches, torch.tensor([3, 9, 20, 17, 0, 22])[:tokens])


def store(cache, slots, heads):
    cache.view(-1, *cache.shape[2:])[slots] = heads


def write(k_cache, v_cache, slots, k, v):
    store(k_cache, slots, k)
    store(v_cache, slots, v)


def rotate(x):
    """Rotates [T, H, D] by position."""
    angles = torch.arange(x.shape[0]).float()[:, None] * 0.1 ** (torch.arange(D // 2) / D)
    angles = torch.cat((angles, angles), -1)[:, None]
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()


def compare(layer, args, exactly):
    """Compares outputs, and arguments after the call, of eager and of the compiled layer. Returns
    the report."""
    assert_as_eager(layer, lambda: [a.clone() for a in args], exactly)
    (report,) = reports()[-1:]
    return report


def nodes_after(layer, args):
    (graph,) = lower(layer, args).graphs
    return list(graph.after.graph.nodes)


def site_arguments(layer, args):
    """Returns the fused op's arguments as fake tensors, by name."""
    (node,) = (n for n in nodes_after(layer, args) if "tilewright" in n.meta)
    schema = node.target._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {
        name: a.meta["example_value"] if isinstance(a, torch.fx.Node) else a
        for name, a in given.items()
    }


def heads(x):
    return x.unflatten(-1, (-1, D))


def clipped(clamp):
    def step(m, x, k_cache, v_cache, slots):
        q, k, v = (heads(clamp(F.linear(x, w))) for w in (m.q, m.k, m.v))
        write(k_cache, v_cache, slots, k, v)
        return q * 2

    return step
