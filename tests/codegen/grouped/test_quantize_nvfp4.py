"""Compares the NVFP4 quantisation kernel with the written formulas, bit for bit, on Triton's
interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.interpreted import Interpreter
from tilewright.codegen.grouped.nvfp4_kernels import QuantizeConfig
from tilewright.codegen.targets import SM100
from tilewright.ops import ArgumentError, grouped_matmul_dynamic_scaled_nvfp4
from tilewright.ops import quantize_nvfp4 as quantize
from tilewright.ops.contract import get_op
from tilewright.ops.formats import fp4, nvfp4, scale_layout
from tilewright.ops.grouped.quantize_nvfp4 import (
    CASES,
    QuantizeCase,
    QuantizeNvfp4Arguments,
    quantize_nvfp4_steps,
    reference,
    sample_inputs,
)
from tilewright.ops.runtime.program import drive

OP = get_op("quantize_nvfp4")


def run(a, block_r=32, block_c=128):
    """Runs the kernel on memory that holds other bytes. Returns (packed, scales)."""
    steps = quantize_nvfp4_steps(a, SM100, QuantizeConfig(block_r, block_c))
    return drive(steps, Interpreter()).outcome.result


def check(a, block_r=32, block_c=128):
    for got, want in zip(run(a, block_r, block_c), reference(a), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(("block_r", "block_c"), [(32, 128), (128, 64)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_byte_is_that_of_the_formulas(case, block_r, block_c):
    check(sample_inputs(case), block_r, block_c)


def test_special_rows_of_samples_lie_at_every_place_of_a_tile():
    """Tests rows with special numbers at every place of a tile, because tiles and the layout of
    scales divide the rows by powers of two."""
    largest = sample_inputs(QuantizeCase("plain", spare=130)).x[:, 2:16].float().abs().amax(1)
    kinds = (largest == 0, (largest > 0) & (largest < 0.01), largest.isinf())
    for special in kinds:
        assert {row % 8 for row in special.nonzero().flatten().tolist()} == set(range(8))


def test_numbers_of_groups_may_lie_anywhere():
    """Tests one scale for all groups, and offsets that have other numbers between them."""
    a = sample_inputs(QuantizeCase("apart", (60, 7, 3), 64))
    offsets = torch.stack((a.group_offsets, a.group_offsets + 1), 1)[:, 0]
    check(replace(a, group_offsets=offsets, tensor_scales=torch.tensor([0.43]).expand(3)))


@pytest.mark.parametrize(
    ("inner", "sizes", "scale"),
    [(704, (13, 200), 0.43), (352, (256, 0, 3), 1.0), (2944, (3,), 0.5)],
)
def test_widths_of_models(inner, sizes, scale):
    check(sample_inputs(QuantizeCase("case", sizes, inner, scales=(scale,) * len(sizes))))


def test_rounding_of_every_boundary_and_its_neighbours():
    """The scale of these blocks is 1, because their largest magnitude is 6. Their codes are
    therefore the codes of the numbers themselves."""
    middle = torch.tensor(fp4._MIDPOINTS)
    infinity = torch.tensor(float("inf"))
    near = torch.cat([middle, middle.nextafter(-infinity), middle.nextafter(infinity)])
    values = torch.cat([near, -near, torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    x = torch.zeros(values.numel(), 16)
    x[:, 0], x[:, 5] = 6.0, values
    a = QuantizeNvfp4Arguments(x)
    check(a, 128, 64)
    packed, _ = run(a, 128, 64)
    assert torch.equal(fp4.unpack(packed)[:, 5], fp4.encode(values))


def test_all_sizes_of_a_block_from_the_smallest_to_what_saturates():
    exponents = torch.arange(-140, 120, 2)
    x = torch.ldexp(torch.linspace(-1, 1, 16).repeat(exponents.numel(), 1), exponents[:, None])
    for scale in (1.0, 0.37, 2688.0):
        check(QuantizeNvfp4Arguments(x, None, torch.tensor([scale])), 128, 64)


def test_what_is_not_finite_saturates():
    x = torch.ones(6, 16)
    x[1, 3], x[2, 3], x[3, 3], x[4] = float("inf"), float("-inf"), float("nan"), float("nan")
    x[5] = float("inf")
    a = QuantizeNvfp4Arguments(x)
    check(a, 128, 64)
    packed, scales = reference(a)
    rows = scale_layout.unswizzle(scales.view(torch.uint8), 6, 1).view(torch.float8_e4m3fn)
    assert rows[1:].float().flatten().tolist() == [448.0] * 5
    assert nvfp4.dequantize(packed, rows).isfinite().all()


def test_padding_scales_are_zero_and_groups_have_blocks_of_their_own():
    a = sample_inputs(QuantizeCase("case", (100, 60), 80, spare=9))
    packed, scales = run(a)
    deltas = scale_layout.group_scale_offsets(a.group_offsets)
    rows = scale_layout.scale_rows(a.group_offsets, deltas, 169)
    used = torch.zeros(scales.shape[0] * 128, 8, dtype=torch.bool)
    used[rows[rows >= 0], :5] = True
    space = scale_layout.unswizzle(scales.view(torch.uint8), *used.shape)
    assert not space[~used].any()
    assert not packed[160:].any()


def test_it_makes_what_the_grouped_gemm_takes():
    a = sample_inputs(QuantizeCase("case", (31, 97, 63), 160))
    x = torch.randn(a.x.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    w = torch.randn(3, 48, 160, generator=torch.Generator().manual_seed(4)) * 0.08
    packed, scales = quantize(x, a.group_offsets)
    data, block_scales = nvfp4.quantize(w)
    layout = scale_layout.swizzle(block_scales.view(torch.uint8)).view(torch.float8_e4m3fn)
    deltas = scale_layout.group_scale_offsets(a.group_offsets)
    got = grouped_matmul_dynamic_scaled_nvfp4(
        packed, data, scales, layout, a.group_offsets, deltas, torch.arange(3), torch.ones(3)
    )
    wide = nvfp4.dequantize(*nvfp4.quantize(x), dtype=torch.float64)
    weight = nvfp4.dequantize(data, block_scales, dtype=torch.float64)
    parts = wide.split((31, 97, 63))
    want = torch.cat([part @ weight[e].T for e, part in enumerate(parts)])
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)


def test_a_number_is_the_scale_of_every_group():
    a = sample_inputs(QuantizeCase("case", (3, 4), 32))
    for got, want in zip(
        quantize(a.x, a.group_offsets, 0.5),
        reference(replace(a, tensor_scales=torch.full((2,), 0.5))), strict=True,
    ):  # fmt: skip
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_a_call_is_planned_for_both_chips():
    for target in ("sm90", "sm100"):
        report = OP.plan_for(sample_inputs(CASES[2]), target)
        assert [spec.kernel for spec in report.specs] == ["quantize_nvfp4"]


BAD = {
    "x": [
        lambda a: replace(a, x=a.x[:, :40].contiguous()),
        lambda a: replace(a, x=a.x[0]),
        lambda a: replace(a, x=a.x.double()),
        lambda a: replace(a, x=a.x.T.contiguous().T),
    ],
    "group_offsets": [
        lambda a: replace(a, group_offsets=a.group_offsets.flip(0)),
        lambda a: replace(a, group_offsets=a.group_offsets * 2),
        lambda a: replace(a, group_offsets=a.group_offsets.float()),
    ],
    "tensor_scales": [
        lambda a: replace(a, tensor_scales=a.tensor_scales[:1]),
        lambda a: replace(a, tensor_scales=-a.tensor_scales),
        lambda a: replace(a, tensor_scales=a.tensor_scales.bfloat16()),
        lambda a: replace(a, tensor_scales=a.tensor_scales * float("inf")),
    ],
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_named(argument):
    a = sample_inputs(CASES[2])
    OP.call(a)
    for spoil in BAD[argument]:
        with pytest.raises(ArgumentError, match=f"^quantize_nvfp4: {argument}: "):
            OP.call(spoil(a))


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize(
    ("inner", "dtype"), [(352, torch.bfloat16), (704, torch.float16), (2944, torch.float32)]
)
@pytest.mark.parametrize("sizes", [None, (256, 128, 256), (13, 999, 0), (1, 0, 0)])
def test_the_gpu_gives_the_same_bytes(sizes, dtype, inner):
    scales = (0.43,) if sizes is None else (0.43, 1.0, 0.5)
    case = QuantizeCase("case", sizes, inner, spare=77, scales=scales, dtype=dtype)
    for got, want in zip(OP.call(sample_inputs(case, "cuda")), reference(sample_inputs(case)),
                         strict=True):  # fmt: skip
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
