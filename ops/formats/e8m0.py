"""Scales of the type e8m0, which are powers of two stored as uint8: 2 ** (code - 127). The code 255
is NaN."""

from __future__ import annotations

import torch

BIAS = 127
NAN_SCALE = 255


def scale_numbers(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the powers of two that e8m0 scales stand for, in `dtype`. The code 255 gives NaN."""
    exponent = scales.to(torch.int32) - BIAS
    powers = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent).to(dtype)
    return torch.where(scales == NAN_SCALE, torch.nan, powers)
