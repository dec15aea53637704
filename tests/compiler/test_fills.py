"""Zeros like a tensor that the graph computes get its sizes, and read it no more."""

from __future__ import annotations

import torch

from tests.compiler.running import through
from tilewright.compiler.rewrite.fills import make_fills_plain


def filled(step, *args, dynamic=False):
    """(how many became plain, what the step gives, what eager gives)."""
    found = []

    def backend(gm, inputs):
        found.append(through(make_fills_plain, gm))
        return gm.forward

    torch._dynamo.reset()
    ours = torch.compile(step, backend=backend, dynamic=dynamic)(*args)
    return sum(found), ours, step(*args)


def computed(x):
    return torch.zeros_like(x.sigmoid(), dtype=torch.bool), torch.ones_like(x * 2)


def given(x):
    return torch.zeros_like(x) + x


def turned(x):
    return torch.zeros_like(x.sigmoid().t())


def pinned(x):
    return torch.zeros_like(x.sigmoid(), memory_format=torch.contiguous_format)


def inside_of_vmap(x):
    """Each entry has zeros of its own, that are written to."""

    def one(row):
        y = row.sigmoid()
        return torch.zeros_like(y).add_(y)

    return torch.vmap(one)(x)


def test_only_fills_whose_sizes_are_known_change():
    x = torch.randn(3, 4)
    for step, changed in ((computed, 2), (given, 0), (turned, 0), (pinned, 0),
                          (inside_of_vmap, 0)):  # fmt: skip
        for dynamic in (False, True):
            count, ours, eager = filled(step, x, dynamic=dynamic)
            assert count == changed, step.__name__
            torch.testing.assert_close(ours, eager)
            for one, other in zip(ours, eager, strict=True):
                assert (one.dtype, one.stride()) == (other.dtype, other.stride())
