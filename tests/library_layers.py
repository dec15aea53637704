"""Layers that consist of a quantisation library's linears (projections with a cache write, and a
gated MLP). Tests compare them with eager and float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.agreement import assert_no_worse, cloned

Linear = Callable[[int, int, int], nn.Module]

HEAD_DIM = 64
HEADS = {"q": 4, "k": 2, "v": 2}


def run(model: nn.Module, *args: Any, **options: Any):
    """Returns (result, arguments after the call) of the compiled layer, and of the eager layer."""
    ours, eager = cloned(args), cloned(args)
    options = {"inner": "eager", **options}
    made = torch.compile(model, backend="tilewright", options=options)(*ours)
    return (made, ours), (model(*eager), eager)


class Attention(nn.Module):
    """Has projections and a cache write. `linear` makes a linear with the given rows, columns and
    seed."""

    def __init__(self, linear: Linear, hidden: int) -> None:
        super().__init__()
        for seed, (name, heads) in enumerate(HEADS.items()):
            setattr(self, name, linear(heads * HEAD_DIM, hidden, seed))

    def forward(self, x, slots, k_cache, v_cache):
        q, k, v = (getattr(self, n)(x).unflatten(-1, (-1, HEAD_DIM)) for n in HEADS)
        k_cache.view(-1, 2, HEAD_DIM)[slots] = k
        v_cache.view(-1, 2, HEAD_DIM)[slots] = v
        return q * 2


def attention_args(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the arguments of `Attention` for x of up to four tokens."""
    cache = torch.zeros(4, 4, 2, HEAD_DIM, dtype=torch.bfloat16)
    return x, torch.tensor([3, 9, 1, 6])[: len(x)], cache, cache.clone()


def assert_attention_no_worse(ours: Any, eager: Any, exact: Mapping[str, torch.Tensor]) -> None:
    """Asserts that the compiled result is no further from float64 than the eager result.

    `ours` and `eager` are (result, arguments) of a call. `exact` has the projections of x, [T, N]
    in float64.
    """
    (actual, caches), (expected, theirs) = ours, eager
    q, k, v = (exact[name].unflatten(-1, (-1, HEAD_DIM)) for name in HEADS)
    assert_no_worse(actual, expected, q * 2, "q")
    for at, new in ((2, k), (3, v)):
        wanted = torch.zeros(4, 4, 2, HEAD_DIM, dtype=torch.float64)
        wanted.view(-1, 2, HEAD_DIM)[theirs[1]] = new
        assert_no_worse(caches[at], theirs[at], wanted, "cache")


class Mlp(nn.Module):
    """A gated MLP with a residual. `linear` makes a linear with the given rows, columns and
    seed."""

    def __init__(self, linear: Linear, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (linear(inner, hidden, seed) for seed in (3, 4))
        self.down = linear(hidden, inner, 5)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))
