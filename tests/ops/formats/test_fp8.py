"""Compares block-scaled fp8 with its written definition."""

from __future__ import annotations

import pytest
import torch

from tilewright.ops.formats import fp8_block


def test_rows_are_scaled_per_128_columns():
    x = torch.randn(3, 300) * torch.tensor([[1.0], [1e-3], [1e4]])
    codes, scales = fp8_block.quantize_rows(x)
    assert codes.shape == (3, 300)
    assert scales.shape == (3, 3)
    for block in range(3):
        part = x[:, block * 128 : (block + 1) * 128]
        scale = part.abs().amax(1) / 448
        assert torch.equal(scales[:, block], scale)
        expected = (part * (1 / scale)[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        got = codes[:, block * 128 : (block + 1) * 128]
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (2, 100, 128)])
def test_weights_are_scaled_per_tile(shape):
    w = torch.randn(*shape)
    codes, scales = fp8_block.quantize_blocks(w)
    rows, columns = shape[-2:]
    assert scales.shape == (*shape[:-2], -(-rows // 128), -(-columns // 128))
    back = fp8_block.dequantize(codes, scales)
    # e4m3 keeps 3 bits after the leading bit. Below its normal range, the step is fixed.
    assert ((back - w).abs() <= w.abs() / 16 + scales.max() * 2.0**-10).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-39])
def test_blocks_without_a_usable_scale_are_zero(value):
    codes, scales = fp8_block.quantize_rows(torch.full((2, 128), value))
    assert codes.float().isfinite().all()
    assert scales.isfinite().all()
    back = fp8_block.dequantize(codes, scales, (1, 128))
    assert (back - value).abs().max() <= max(value, 0.0)


def test_a_capped_scale_saturates_instead_of_making_nan():
    codes, scales = fp8_block.quantize_rows(torch.full((1, 128), 5000.0), cap=1200.0)
    assert float(scales[0, 0]) == pytest.approx(1200 / 448)
    assert codes.float().eq(448).all()
