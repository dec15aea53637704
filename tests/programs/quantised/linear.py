"""A linear whose weight is computed from codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.programs.quantised.blocks import BLOCKS

PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, w, bias: plus(x @ w.t(), bias),
    "turned": lambda x, w, bias: plus(torch.matmul(x, w.mT.contiguous()), bias),
    "einsum": lambda x, w, bias: plus(torch.einsum("...k,nk->...n", x, w), bias),
    "rows": lambda x, w, bias: F.linear(x.reshape(-1, x.shape[-1]), w, bias).view(
        *x.shape[:-1], -1
    ),
    "addmm": lambda x, w, bias: (
        F.linear(x, w)
        if bias is None
        else torch.addmm(bias, x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], -1)
    ),
}


def plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias


class Coded(nn.Module):
    """A linear from x [..., K] to [..., N].

    axes: the drawn axes, which include product, bias and rounded.
    codes, scale: parameters.
    zero: a parameter or None.
    """

    def __init__(self, axes: Any, shape: tuple[int, int], dtype: torch.dtype, generator: Any):
        super().__init__()
        self.axes, self.shape, self.zero = axes, shape, None
        bias = torch.randn(shape[0], generator=generator).to(dtype) if axes.bias else None
        self.bias = held(bias)
        self.step = held(torch.tensor(0.02)) if axes.rounded is not None else None

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight [N, K] in a dtype."""
        raise NotImplementedError

    def multiplied(self, x: torch.Tensor) -> torch.Tensor:
        return PRODUCTS[self.axes.product](x, self.weight(x.dtype), self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = self.axes.rounded
        return self.multiplied(x if rounded is None else rounded(x, self.step))


def held(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


def grid_of(shape: tuple[int, int], block: str) -> tuple[int, int]:
    """Returns the shape [N / rows, K / columns] of the numbers by block, for a key of BLOCKS."""
    rows, columns = (
        1 if b is None else -(-n // b) for n, b in zip(shape, BLOCKS[block], strict=True)
    )
    return rows, columns
