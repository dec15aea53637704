"""8-bit floats: which there are, and the cast that saturates."""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def saturating_cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded to `dtype`; what lies outside an 8-bit float's range becomes its largest
    number (448 or 57344), infinities too. NaN stays NaN; wider dtypes keep their infinities."""
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)
