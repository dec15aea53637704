"""Compares E2M1, NVFP4, MXFP4 and the 128x4 scale layout with their written definitions, bit for
bit."""

from __future__ import annotations

import pytest
import torch

from tilewright.ops.formats import fp4, mxfp4, nvfp4, scale_layout

ALL_CODES = torch.arange(16, dtype=torch.uint8)


def nearest_code(x: float) -> int:
    """Rounds to E2M1 by search: returns the nearest magnitude, and the even code in a tie."""
    gaps = [(abs(abs(x) - m), code % 2, code) for code, m in enumerate(fp4.MAGNITUDES)]
    return min(gaps)[2] | (8 if torch.signbit(torch.tensor(x)) else 0)


def test_every_code_survives_a_round_trip():
    assert torch.equal(fp4.encode(fp4.decode(ALL_CODES)), ALL_CODES)
    assert torch.equal(fp4.unpack(fp4.pack(ALL_CODES)), ALL_CODES)


def test_rounding_is_to_the_nearest_with_ties_to_even():
    values = torch.cat(
        [torch.arange(-8, 8, 0.0625), torch.tensor([0.2500001, 4.9999995, 5.0, -0.0])]
    )
    expected = [nearest_code(float(v)) for v in values]
    assert fp4.encode(values).tolist() == expected


def test_what_is_not_finite_saturates():
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e30])
    assert fp4.decode(fp4.encode(values)).tolist() == [6.0, -6.0, 6.0, 6.0]


def test_packing_is_that_of_torch():
    codes = torch.randint(0, 16, (4, 32), dtype=torch.uint8)
    packed = fp4.pack(codes)
    assert torch.equal(packed & 15, codes[:, 0::2])
    assert torch.equal(packed.view(torch.float4_e2m1fn_x2).view(torch.uint8), packed)


def test_an_odd_length_cannot_be_packed():
    with pytest.raises(ValueError, match="even last dimension"):
        fp4.pack(torch.zeros(3, 5, dtype=torch.uint8))


# --- NVFP4 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_scale", [1.0, 0.43, 0.5, 2688.0])
def test_nvfp4_follows_its_formula_element_by_element(tensor_scale):
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * 3
    packed, scales = nvfp4.quantize(x, tensor_scale)
    codes = fp4.unpack(packed)
    ts = torch.tensor(tensor_scale)
    for row in range(5):
        for block in range(3):
            part = x[row, block * 16 : block * 16 + 16]
            scale = (ts * part.abs().max() / 6).clamp_max(448).to(torch.float8_e4m3fn)
            assert scales[row, block].view(torch.uint8) == scale.view(torch.uint8)
            factor = ts / scale.float()
            expected = [nearest_code(float(v * factor)) for v in part]
            assert codes[row, block * 16 : block * 16 + 16].tolist() == expected


def test_nvfp4_values_requantise_to_themselves():
    codes = torch.randint(0, 16, (7, 64), dtype=torch.uint8)
    codes[:, ::16] = 7  # every block contains the largest code, so its scale can be computed again
    scales = (torch.rand(7, 4) * 400 + 1).to(torch.float8_e4m3fn)
    x = nvfp4.dequantize(fp4.pack(codes), scales)
    packed, again = nvfp4.quantize(x)
    assert torch.equal(again.float(), scales.float())
    assert torch.equal(nvfp4.dequantize(packed, again), x)


def test_a_dequantised_value_is_exact_in_bfloat16():
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    packed = fp4.pack(ALL_CODES).expand(127, 8).contiguous()
    exact = nvfp4.dequantize(packed, scales[:, None], dtype=torch.float64)
    assert torch.equal(exact.to(torch.bfloat16).double(), exact)


@pytest.mark.parametrize("value", [0.0, 1e-30, 2.0**-12])
def test_a_block_below_the_resolution_is_zero_and_finite(value):
    packed, scales = nvfp4.quantize(torch.full((2, 32), value))
    assert scales.float().eq(0).all()
    assert nvfp4.dequantize(packed, scales).eq(0).all()


def test_blocks_beyond_the_range_saturate():
    x = torch.full((1, 16), 1e6)
    x[0, 1] = float("inf")
    packed, scales = nvfp4.quantize(x)
    assert nvfp4.dequantize(packed, scales).eq(448 * 6).all()


@pytest.mark.parametrize("k", [704, 352, 2944, 16])
def test_nvfp4_error_is_half_a_step(k):
    x = torch.randn(9, k)
    packed, scales = nvfp4.quantize(x)
    error = (nvfp4.dequantize(packed, scales) - x).abs().unflatten(-1, (-1, 16)).amax(-1)
    # The bound is the widest step, from 4 to 6, times the scale. The scale itself may be rounded
    # down by 1/16.
    assert (error <= scales.float() * 1.5).all()


def test_bad_sizes_and_scales_are_named():
    with pytest.raises(ValueError, match="16 divides"):
        nvfp4.quantize(torch.zeros(2, 24))
    with pytest.raises(ValueError, match="tensor_scale"):
        nvfp4.quantize(torch.zeros(2, 32), 0.0)
    with pytest.raises(ValueError, match="32 divides"):
        mxfp4.quantize(torch.zeros(2, 48))


# --- MXFP4 --------------------------------------------------------------------------------------


def test_mxfp4_scale_is_the_exponent_of_the_largest():
    x = torch.zeros(6, 32)
    x[:, 3] = torch.tensor([1.0, 6.0, 0.75, -100.0, 2.0**-140, 3e38])
    _, scales = mxfp4.quantize(x)
    assert scales[:, 0].tolist() == [125, 127, 124, 131, 0, 252]


def test_mxfp4_round_trip_and_special_blocks():
    x = torch.randn(8, 96)
    packed, scales = mxfp4.quantize(x)
    values = mxfp4.dequantize(packed, scales)
    step = torch.ldexp(torch.ones(8, 3), scales.int() - 127)
    assert ((values - x).abs().unflatten(-1, (-1, 32)).amax(-1) <= 2 * step).all()
    again = mxfp4.dequantize(*mxfp4.quantize(values))
    assert torch.equal(again, values)
    x[0, 0] = float("nan")
    x[1] = 0
    packed, scales = mxfp4.quantize(x)
    values = mxfp4.dequantize(packed, scales)
    assert values[0, :32].isnan().all()
    assert values[0, 32:].isfinite().all()
    assert values[1].eq(0).all()


# --- the layout ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (129, 5), (352, 22), (2880, 180)])
def test_layout_puts_every_scale_where_the_formula_says(rows, columns):
    scales = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    layout = scale_layout.swizzle(scales)
    assert layout.shape == scale_layout.layout_shape(rows, columns)
    r = torch.arange(rows)[:, None]
    c = torch.arange(columns)[None, :]
    column_blocks = -(-columns // 4)
    linear = (r // 128 * column_blocks + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    assert torch.equal(layout.flatten()[linear], scales)
    assert torch.equal(scale_layout.unswizzle(layout, rows, columns), scales)
    # Every byte that holds no scale is zero.
    assert int(layout.long().sum()) == int(scales.long().sum())


def test_experts_are_padded_each_on_its_own():
    scales = torch.randint(1, 255, (3, 200, 6), dtype=torch.uint8)
    layout = scale_layout.swizzle(scales)
    assert layout.shape == (3, 2, 2, 32, 4, 4)
    for expert in range(3):
        assert torch.equal(layout[expert], scale_layout.swizzle(scales[expert]))


def test_a_layout_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="layout: expected"):
        scale_layout.unswizzle(torch.zeros(1, 1, 32, 4, 4), 129, 4)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0, 100, 300, 400], [0, 1, 1]),
        ([0, 0, 128, 128, 129], [0, 0, 0, 0]),
        ([0, 1, 2, 3], [0, 1, 2]),
        ([0, 65, 1092, 1478], [0, 1, 2]),
        ([0], []),
    ],
)
def test_group_scale_offsets_are_deltas(offsets, expected):
    deltas = scale_layout.group_scale_offsets(torch.tensor(offsets))
    assert deltas.tolist() == expected


@pytest.mark.parametrize("sizes", [[127, 257, 513, 1025], [31, 97, 63], [0, 1, 2, 3], [256, 0, 0]])
def test_every_group_starts_a_block_of_its_own(sizes):
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    total = int(offsets[-1])
    deltas = scale_layout.group_scale_offsets(offsets)
    rows = scale_layout.scale_rows(offsets, deltas, total + 2)
    expected, block = [], 0
    for size in sizes:
        expected += [block * 128 + i for i in range(size)]
        block += -(-size // 128)
    assert rows.tolist() == [*expected, -1, -1]
    assert block <= scale_layout.max_scale_blocks(total, len(sizes))


@pytest.mark.parametrize("sizes", [[256, 128, 256], [100, 200, 50], [13, 999], [100, 60], [0, 5]])
def test_grouped_quantisation_equals_the_plain_one_group_by_group(sizes):
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    x = torch.randn(int(offsets[-1]), 352)
    tensor_scales = torch.tensor([0.43, 1.0, 0.5])[: len(sizes)]
    packed, layout = nvfp4.quantize_grouped(x, offsets, tensor_scales)
    deltas = scale_layout.group_scale_offsets(offsets)
    scales = nvfp4.read_scales(layout, offsets, deltas, (x.shape[0], 22))
    for g, size in enumerate(sizes):
        rows = slice(int(offsets[g]), int(offsets[g]) + size)
        own_packed, own_scales = nvfp4.quantize(x[rows], float(tensor_scales[g]))
        assert torch.equal(packed[rows], own_packed)
        assert torch.equal(scales[rows], own_scales.float())
    assert int((layout.float() != 0).sum()) == int((scales != 0).sum())
