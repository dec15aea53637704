"""x @ weight^T by PyTorch's library, as a step of a call."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from tilewright.ops.runtime.program import Buffer, Library, Step


def multiply(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """out [T, N] = x [T, K] @ weight [N, K]^T, all of one dtype."""
    torch.mm(x, weight.t(), out=out)


def linear(x: torch.Tensor, weight: torch.Tensor) -> Generator[Step, Any, torch.Tensor]:
    """The same into new memory."""
    out = yield Buffer((x.shape[0], weight.shape[0]), x.dtype)
    yield Library(multiply, (out, x, weight))
    return out
