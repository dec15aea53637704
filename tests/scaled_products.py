"""What `torch._scaled_mm` takes on a CPU, which not every PyTorch has."""

from __future__ import annotations

import pytest
import torch


def scales_rows() -> bool:
    """Whether it takes a scale for each row."""
    codes, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(
            codes, codes.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True


ROW_SCALES = pytest.mark.skipif(
    not scales_rows(), reason="this PyTorch's CPU has no fp8 product with a scale for each row"
)
