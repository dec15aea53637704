"""The linear that references use."""

from __future__ import annotations

import torch
from torch.nn import functional


def apply_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [..., K] @ weight [N, K]^T + bias [N], as [..., N], computed in x's dtype."""
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
