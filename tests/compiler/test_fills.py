"""Tests zeros that have the shape of a tensor that the graph computes. They get the tensor's sizes,
and no longer read the tensor."""

from __future__ import annotations

import torch

from tests.compiler.running import through
from tilewright.compiler import lower
from tilewright.compiler.rewrite.fills import make_fills_plain


def filled(step, *args, dynamic=False):
    """Returns (the number of fills that no longer read a tensor, the result of the step, the result
    of eager)."""
    found = []

    def backend(gm, inputs):
        found.append(through(make_fills_plain, gm))
        return gm.forward

    torch._dynamo.reset()
    ours = torch.compile(step, backend=backend, dynamic=dynamic)(*args)
    return sum(found), ours, step(*args)


def computed(x):
    return torch.zeros_like(x.sigmoid(), dtype=torch.bool), torch.ones_like(x * 2)


def exported(x):
    """Has the fills as torch.export writes them."""
    zeros = torch.ops.aten.zeros_like.default(x.sigmoid(), dtype=torch.bool, pin_memory=False)
    return zeros, torch.ops.aten.ones_like.default(x * 2, pin_memory=False)


def of_its_dtype(x):
    """Has sizes as separate arguments and in a list, another dtype, and a number."""
    y = x.double().sigmoid()
    return (
        y.new_full((2, 3), -float("inf")),
        y.new_zeros(2, x.shape[1]),
        y.new_ones([4], dtype=torch.int32),
        y.new_full(size=(2,), fill_value=True, dtype=torch.bool),
        y.new_full(size=(2,), fill_value=False, dtype=torch.bool),
        torch.ops.aten.new_full.default(y, [2], 0.5, pin_memory=False),
    )


def given(x):
    return torch.zeros_like(x) + x


def turned(x):
    return torch.zeros_like(x.sigmoid().t())


def pinned(x):
    return torch.zeros_like(x.sigmoid(), memory_format=torch.contiguous_format)


def inside_of_vmap(x):
    """Makes separate zeros for each entry of the batch, and writes them."""

    def one(row):
        y = row.sigmoid()
        return torch.zeros_like(y).add_(y) + y.new_ones(4).add_(y)

    return torch.vmap(one)(x)


def test_only_fills_whose_sizes_are_known_change():
    x = torch.randn(3, 4)
    for step, changed in ((computed, 2), (exported, 2), (of_its_dtype, 6), (given, 0), (turned, 0),
                          (pinned, 0), (inside_of_vmap, 0)):  # fmt: skip
        for dynamic in (False, True):
            count, ours, eager = filled(step, x, dynamic=dynamic)
            assert count == changed, step.__name__
            torch.testing.assert_close(ours, eager)
            for one, other in zip(ours, eager, strict=True):
                assert (one.dtype, one.stride()) == (other.dtype, other.stride())


def test_a_mask_made_like_projected_queries_is_a_mask():
    """A mask that is filled with a number reads only the shape of the queries. In the near miss,
    another projected tensor is added to the scores."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(64, 3 * 64, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            q, k, v = (t.view(5, 2, 32).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
            scores = q @ k.mT * 0.25 + q.new_full((5, 5), -float("inf")).triu(1)
            return scores.softmax(-1) @ v

    x = torch.randn(5, 64, dtype=torch.bfloat16)
    found = lower(Attention().requires_grad_(False), (x,))
    assert [site.pattern for site in found.matches] == ["cache_attention"]
