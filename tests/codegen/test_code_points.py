"""Every code, and every scale that is stored as a code, becomes the number that torch makes of it:
also NaN, infinity, -0 and subnormal numbers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tilewright.codegen.attention.templates.loads import converted
from tilewright.codegen.build.interpreter import interpret
from tilewright.codegen.moe.templates.dotted import load_run_scales
from tilewright.codegen.templates.codes import codes_in_order, number_unit, scaled_numbers
from tilewright.codegen.templates.dots import number_sums
from tilewright.codegen.templates.expert_weights import dequantize_tile, e2m1_codes
from tilewright.codegen.templates.fp4 import e8m0_value
from tilewright.codegen.templates.scale_numbers import bfloat16_parts, bfloat16_powers
from tilewright.ops.formats import fp4

ALL_CODES = torch.arange(256).to(torch.uint8)
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
HALVES = [torch.bfloat16, torch.float16]
# One word of the codes 0 to 7, and one of 8 to 15.
WORDS = torch.tensor([0x76543210, -0x01234568], dtype=torch.int32)


def assert_same(made, wanted):
    """Compares numbers exactly. NaN equals NaN, and -0 equals 0."""
    torch.testing.assert_close(made.double(), wanted.double(), rtol=0, atol=0, equal_nan=True)


def times(codes, scales, dtype):
    """Returns the products of E2M1 codes [16] with each scale, [scales, 16], rounded to `dtype`."""
    numbers = fp4.decode(codes, torch.float64)
    return (numbers[None, :] * scales.double()[:, None]).to(dtype)


@triton.jit
def convert(values_ptr, out_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(out_ptr + places, converted(tl.load(values_ptr + places), out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("stored", [E4M3, E5M2])
def test_floats_of_eight_bits_are_converted(stored, dtype):
    values, out = ALL_CODES.view(stored), torch.empty(256, dtype=dtype)
    interpret(convert)[(1,)](values, out, 256)
    assert_same(out, values.float().to(dtype))


@triton.jit
def powers(codes_ptr, out_ptr):
    places = tl.arange(0, 256)
    codes = tl.load(codes_ptr + places)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptr + places, bfloat16_powers(codes))
    else:
        tl.store(out_ptr + places, e8m0_value(codes.to(tl.int32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e8m0_scales_are_powers_of_two_and_nan(dtype):
    out = torch.empty(256, dtype=dtype)
    interpret(powers)[(1,)](ALL_CODES, out)
    assert_same(out, ALL_CODES.view(E8M0).float())


@triton.jit
def split(numbers_ptr, high_ptr, low_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    high, low = bfloat16_parts(tl.load(numbers_ptr + places))
    tl.store(high_ptr + places, high)
    tl.store(low_ptr + places, low)


def test_two_parts_of_a_number_are_nearer_to_it_than_one():
    """The second part of a number that bfloat16 rounds to infinity is zero, so that their sum is
    not NaN."""
    edges = [0.0, -0.0, 1.1, -1.1, 65504.0, 2.0**-149, 2.0**-126, 2.0**-133, torch.inf, -torch.inf]
    numbers = torch.tensor([*edges, torch.nan, 3.4e38, 3.3e38, -3.4e38, 1 / 3, 448.0])
    high, low = (torch.empty(len(numbers), dtype=torch.bfloat16) for _ in range(2))
    interpret(split)[(1,)](numbers, high, low, len(numbers))
    assert_same(high, numbers.bfloat16())
    finite = high.isfinite()
    assert not low[~finite].any()
    error = (high.double() + low.double() - numbers.double()).abs()[finite]
    assert (error <= (2.0**-17 * numbers.double().abs() + 2.0**-134)[finite]).all()


@triton.jit
def run_scales(scales_ptr, out_ptr, N: tl.constexpr):
    zero = tl.zeros((1,), tl.int32)
    scales = load_run_scales(
        scales_ptr, zero, zero == 0, 0, N, 0, 1, N, 1, N, (0, 0, 1), (1, 1)
    )  # fmt: skip
    tl.store(out_ptr + tl.arange(0, N)[None, :], scales)


@pytest.mark.parametrize("stored", [E4M3, torch.uint8])
def test_scales_of_runs(stored):
    out = torch.empty(256)
    interpret(run_scales)[(1,)](ALL_CODES.view(stored), out, 256)
    assert_same(out, ALL_CODES.view(E8M0 if stored == torch.uint8 else stored).float())


@triton.jit
def first_numbers(words_ptr, x_ptr, out_ptr):
    words = tl.load(words_ptr + tl.arange(0, 256))[:, None]
    x = tl.load(x_ptr + tl.arange(0, 4))[None, :]
    sums = number_sums(words, x, False, "", 1)
    tl.store(out_ptr + tl.arange(0, 256)[:, None], sums)


@pytest.mark.parametrize("place", range(4))
def test_float8_codes_in_dot_products(place):
    """Tests rows of four equal codes; x is 1 for one of the four, and 0 for the others."""
    words, out = ALL_CODES.repeat_interleave(4).view(torch.int32), torch.empty(256)
    interpret(first_numbers)[(1,)](words, torch.eye(4)[place], out)
    assert_same(out, ALL_CODES.view(E4M3).float())


@triton.jit
def times_scales(words_ptr, scales_ptr, out_ptr, unit_ptr):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    rows = tl.arange(0, 256)[:, None]
    words = tl.load(words_ptr + rows * 4 + tl.arange(0, 4)[None, :])
    scales = tl.load(scales_ptr + rows + tl.arange(0, 1)[None, :])
    numbers = scaled_numbers(words, scales, DTYPE)
    tl.store(out_ptr + rows * 32 + tl.arange(0, 32)[None, :], numbers)
    tl.store(unit_ptr, number_unit(DTYPE, 8, False, "e2m1", True))


@pytest.mark.parametrize("dtype", HALVES)
def test_e2m1_codes_by_e4m3_scales_of_linears(dtype):
    """Tests rows with all codes, in any order. The scale of row r is the number of code r, which
    may be negative or NaN."""
    out, unit = torch.empty(256, 32, dtype=dtype), torch.zeros(1)
    interpret(times_scales)[(1,)](WORDS.repeat(256, 2), ALL_CODES.view(E4M3), out, unit)
    wanted = times(torch.arange(16).repeat(2), ALL_CODES.view(E4M3), dtype)
    assert_same(out.double().sort(1).values * unit.double(), wanted.double().sort(1).values)


@triton.jit
def times_powers(words_ptr, scales_ptr, out_ptr):
    rows = tl.arange(0, 256)[:, None]
    words = tl.load(words_ptr + rows * 16 + tl.arange(0, 16)[None, :])
    scales = tl.load(scales_ptr + rows * 4 + tl.arange(0, 4)[None, :])
    codes = e2m1_codes(words, scales, out_ptr.dtype.element_ty, "mxfp4", 2, True)
    tl.store(out_ptr + rows * 128 + tl.arange(0, 128)[None, :], codes)


def test_e2m1_codes_by_e8m0_scales_of_experts():
    """Tests rows with all codes, each row with one of the 256 scales, in bfloat16, which can
    represent all these scales."""
    scales = ALL_CODES[:, None].repeat(1, 4)
    out = torch.empty(256, 128, dtype=torch.bfloat16)
    interpret(times_powers)[(1,)](WORDS.repeat(256, 8), scales, out)
    wanted = times(torch.arange(16).repeat(8), ALL_CODES.view(E8M0), out.dtype)
    assert_same(out.sort(1).values, wanted.sort(1).values)


@triton.jit
def decode_tile(stored_ptr, scales_ptr, out_ptr, BYTES: tl.constexpr, FORMAT: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    rows = tl.arange(0, ROWS)[:, None]
    stored = tl.load(stored_ptr + rows * BYTES + tl.arange(0, BYTES)[None, :])
    scales = tl.load(scales_ptr + rows + tl.arange(0, 1)[None, :])
    scales = e8m0_value(scales.to(tl.int32)) if FORMAT == "mxfp4" else scales.to(tl.float32)
    tile = dequantize_tile(stored, scales, ROWS, 16, FORMAT, out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * 16 + tl.arange(0, 16)[None, :], tile)


EDGES = torch.tensor([0.0, -1.0, 1.1, 65504.0, 2.0**-24, 2.0**-126, torch.inf, torch.nan])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["fp8", "int4", "nvfp4", "mxfp4"])
def test_tiles_of_experts(name, dtype):
    """Tests rows of codes with one scale each. The scales are the numbers of all codes if the
    format stores scales as codes, and otherwise extreme floats."""
    codes = torch.arange(16)
    packed = fp4.pack(codes)
    numbers, stored = fp4.decode(codes, torch.float64), packed
    scales = {"nvfp4": ALL_CODES.view(E4M3), "mxfp4": ALL_CODES}.get(name, EDGES)
    if name == "int4":
        numbers = (codes - 8).double()
    if name == "fp8":
        # Sixteen codes at a time, each part with all scales.
        stored = ALL_CODES.view(16, 16).repeat_interleave(len(EDGES), 0).view(E4M3)
        numbers, scales = stored.double(), EDGES.repeat(16)
    else:
        stored = packed.repeat(len(scales), 1)
        numbers = numbers.repeat(len(scales), 1)
    out = torch.empty(len(scales), 16, dtype=dtype)
    interpret(decode_tile)[(1,)](stored, scales, out, stored.shape[1], name, len(scales))
    known = scales.view(E8M0) if name == "mxfp4" else scales
    wanted = numbers.float() * known.float()[:, None]
    assert_same(out, wanted.to(dtype))


@triton.jit
def integers(words_ptr, out_ptr, unit_ptr, PER: tl.constexpr, OFFSET: tl.constexpr,
             COLUMNS: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    rows = tl.arange(0, 16)[:, None]
    words = tl.load(words_ptr + rows * (COLUMNS // PER) + tl.arange(0, COLUMNS // PER)[None, :])
    numbers = codes_in_order(words, DTYPE, PER, False, OFFSET, 1, "")
    tl.store(out_ptr + rows * COLUMNS + tl.arange(0, COLUMNS)[None, :], numbers)
    tl.store(unit_ptr, number_unit(DTYPE, PER, False, ""))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("stored", "zero"),
    [
        *((torch.int32, zero) for zero in (0, 8, 15)),
        *((torch.uint8, zero) for zero in (0, 8, 15)),
        *((torch.int8, zero) for zero in (0, 127, 128)),
    ],
)
def test_integers_less_their_zero(stored, zero, dtype):
    """All codes of a row, in whatever order. An element of int8 is a code, others have nibbles."""
    nibbles = stored != torch.int8
    codes = torch.arange(16 if nibbles else 256).repeat(16, 16 if nibbles else 1)
    words = fp4.pack(codes.to(torch.uint8)).view(stored) if nibbles else (codes - 128).to(stored)
    per = codes.shape[1] // words.shape[1]
    out, unit = torch.empty(codes.shape, dtype=dtype), torch.zeros(1)
    interpret(integers)[(1,)](words, out, unit, per, zero, codes.shape[1])
    wanted = (codes if nibbles else codes - 128) - zero
    assert_same(out.double().sort(1).values * unit.double(), wanted.double().sort(1).values)
