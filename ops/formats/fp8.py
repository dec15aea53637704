"""8-bit floats, and casts of numbers that are outside of their range."""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: The dtypes whose cast saturates in this release of torch, on every device. The cast to
#: float8_e4m3fn saturates in newer releases and gives NaN in older ones. The cast to float8_e5m2
#: saturates in no release; it gives infinity.
SATURATED_BY_TORCH = frozenset(
    dtype
    for dtype in FP8_DTYPES
    if torch.tensor(1e30, device="cpu").to(dtype).float().isfinite().item()
)


def saturating_cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds `values` to `dtype`. A number outside the range of an 8-bit float, or an infinity,
    becomes the largest finite number (448 or 57344). NaN stays NaN. Wider dtypes keep their
    infinities."""
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def overflowing_cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds `values` to `dtype`. A number outside the range of an 8-bit float becomes infinity, or
    NaN in float8_e4m3fn, which has no infinity."""
    rounded = saturating_cast(values, dtype)
    if dtype not in FP8_DTYPES:
        return rounded
    codes = rounded.view(torch.uint8)
    nothing = 0x7F if dtype == torch.float8_e4m3fn else 0x7C
    return torch.where(fits(values, dtype), codes, codes & 0x80 | nothing).view(dtype)


def fits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether each number, rounded to nearest even, is in the range of an 8-bit float. Numbers up
    to half a step above the largest finite number are rounded down to it. The last bit of the
    largest number decides whether exactly half a step is rounded down, too. The result is True for
    NaN."""
    if dtype == torch.float8_e4m3fn:
        return ~(values.abs() > 464.0)
    return ~(values.abs() >= 61440.0)
