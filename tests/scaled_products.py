"""Scaled products on a CPU: a check whether PyTorch can scale each row, and a stand-in for the
product with scales of blocks."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional


def scales_rows() -> bool:
    """Whether this PyTorch's `torch._scaled_mm` supports a scale for each row on a CPU."""
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


@contextmanager
def blocks_on_a_cpu():
    """Makes `F.scaled_mm` multiply by blocks on a CPU, for operands with the layouts that a GPU
    needs."""
    known = getattr(functional, "scaled_mm", None)

    def scaled_mm(x, weight, **options):
        if x.device.type != "cpu":
            return known(x, weight, **options)
        return _by_blocks(x, weight, **options)

    with patch.object(functional, "scaled_mm", scaled_mm, create=known is None):
        yield


def _by_blocks(
    x,
    weight,
    *,
    scale_a,
    scale_recipe_a,
    scale_b,
    scale_recipe_b,
    bias,
    output_dtype,
    use_fast_accum,
):
    """Multiplies codes with scales by blocks. Raises AssertionError for arguments that cuBLAS
    refuses."""
    recipes = functional.ScalingType
    assert (scale_recipe_a, scale_recipe_b) == (recipes.BlockWise1x128, recipes.BlockWise128x128)
    (tokens, columns), rows = x.shape, weight.shape[1]
    blocks, padded = columns // 128, -(-columns // 512) * 4
    assert (tokens % 4, columns % 128, rows % 128) == (0, 0, 0)
    assert not use_fast_accum
    assert (scale_a.dtype, scale_a.shape) == (torch.float32, (tokens, blocks))
    assert scale_a.stride() == (1, tokens)
    assert (scale_b.dtype, scale_b.shape) == (torch.float32, (padded, rows // 128))
    assert scale_b.stride() == (1, padded)
    assert weight.stride(0) == 1
    assert bias is None or bias.is_contiguous()
    a = x.float() * scale_a.repeat_interleave(128, 1)
    spread = scale_b[:blocks].repeat_interleave(128, 0).repeat_interleave(128, 1)
    made = a @ (weight.float() * spread)
    return (made if bias is None else made + bias).to(output_dtype)
