"""What the reference of a linear computes."""

from __future__ import annotations

import torch
from torch.nn import functional


def apply_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] through weight [N, K], bias [N]: [..., N] of x's dtype, computed in it."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
