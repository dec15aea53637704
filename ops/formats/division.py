"""Division as IEEE 754 has it, on every device."""

from __future__ import annotations

import torch


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number, rounded once. PyTorch on CUDA multiplies by the reciprocal of a plain number."""
    return x / torch.full_like(x, number)
