"""Runs a model under eager and under the backend, on equal arguments."""

from __future__ import annotations

import torch

from tests.found import patterns_in
from tests.models import qkv_idioms
from tilewright.compiler import reports


def build(name, **axes):
    return qkv_idioms.build(name, dtype=torch.float32, **axes)


def copies(args):
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def compiled(model, **options):
    return torch.compile(model, backend="tilewright", options={"inner": "eager", **options})


def through(rewrite, gm):
    """Returns the result of a rewrite of a graph, and checks that the graph is still valid."""
    told = rewrite(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return told


def same_bits(a, b):
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(a, b, strict=True)
        if isinstance(x, torch.Tensor)
    )


def run_both(model, args, **options):
    """Returns ((eager result, args after the call), (compiled result, args after the call))."""
    eager, ours = copies(args), copies(args)
    return (model(*eager), eager), (compiled(model, **options)(*ours), ours)


def assert_close(model, args, **options):
    """Compares the results of both runs. Arguments and weights are in float32, so that a wrong
    number shows."""
    (expected, eager), (actual, ours) = run_both(model, args, **options)
    for a, b in zip((actual, *ours), (expected, *eager), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def patterns_used(*names):
    """Returns the pattern of every match in all reports, for the named patterns or families: see
    tests/found.py."""
    return [pattern for report in reports() for pattern in patterns_in(report, *names or ("qkv",))]


@torch.compiler.allow_in_graph
def doubled(t):
    """Doubles a tensor. It stands for a user's function that graphs call by its name."""
    return t * 2
