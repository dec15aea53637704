"""Single linears that tests compare with linears of a library, and their inputs."""

from __future__ import annotations

import torch
from torch import nn

SHAPES = [(1, 256), (5, 256), (2, 3, 256), (2, 1, 3, 256), (0, 256), (2, 0, 256)]


def one_linear(columns=256, rows=64, bias=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=bias)).to(dtype)
    return model.eval().requires_grad_(False)


def inputs(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_no_further(model, theirs, weight, dtype):
    """Asserts that a model is as close to float64 as its library, up to one rounding.

    `weight` is the decoded weight of both, [N, K] in float64.
    """
    bias = None if theirs[0].bias is None else theirs[0].bias.double()
    for shape in [shape for shape in SHAPES if 0 not in shape]:
        x = inputs(shape, dtype)
        exact = nn.functional.linear(x.double(), weight, bias)
        ours, their = ((one(x).double() - exact).norm() for one in (model, theirs))
        assert ours <= their + torch.finfo(dtype).eps * exact.norm() / 4, (shape, ours, their)
