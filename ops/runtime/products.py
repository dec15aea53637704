"""Products that PyTorch's library computes, as steps of a call."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from tilewright.ops.runtime.program import Buffer, Library, Step


def multiply(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Computes out [T, N] = x [T, K] @ weight [N, K]^T + bias [N]. All tensors except the bias have
    one dtype."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)


def multiply_batch(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """Computes out [B, T, N] = x [B, T, K] @ y [B, K, N], all of one dtype."""
    torch.bmm(x, y, out=out)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Generator[Step, Any, torch.Tensor]:
    """Returns x @ weight^T + bias as a new tensor."""
    out = yield Buffer((x.shape[0], weight.shape[0]), x.dtype)
    yield Library(multiply, (out, x, weight) if bias is None else (out, x, weight, bias))
    return out
