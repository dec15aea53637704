"""Norms by PyTorch's library, as steps of a call."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from tilewright.ops.runtime.program import Buffer, Library, Step


def rms_normed(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
) -> Generator[Step, Any, torch.Tensor]:
    """x / rms(x) * (offset + weight) of rows, in new memory; rounded once."""
    out = yield Buffer.like(x)
    norm = partial(_rms_norm, eps=eps, offset=offset)
    yield Library(norm, (out, x) if weight is None else (out, x, weight))
    return out


def _rms_norm(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float,
) -> None:
    factor = None if weight is None else _widened(weight).add_(offset)
    out.copy_(functional.rms_norm(_widened(x), x.shape[-1:], factor, eps))


def _widened(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32).copy_(x)
