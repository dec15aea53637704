"""Tests codes and scales at the limits of their dtypes, in the kernels of linears, on Triton's
interpreter. `tests/codegen/test_code_points.py` has every code and scale, decoder by decoder."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.interpreted import interpret
from tilewright.codegen.formats import TABLES, WEIGHT_FORMATS
from tilewright.codegen.targets import SM100
from tilewright.ops.checks import HALVES
from tilewright.ops.formats.quantized_weight import pack_nibbles
from tilewright.ops.formats.weight import scale_numbers
from tilewright.ops.mlp import linear_residual
from tilewright.ops.mlp.linear_residual import LinearResidualArguments

COLUMNS = 128
ALL_BYTES = torch.arange(256).to(torch.uint8)
E4M3 = torch.float8_e4m3fn
# Bytes of codes and scales. As e4m3 they are zeros, small and large numbers, 1 and NaN. As e8m0
# they are powers of two and NaN.
EDGES = torch.tensor([0, 1, 7, 8, 56, 126, 127, 128, 129, 225, 255], dtype=torch.uint8)
# Dot products multiply scales by sums of integers of 22 bits and codes, so that larger scales give
# infinity. Kernels of tensor cores take scales up to 2 ** 119.
_ANY = [0.0, -1.0, 1.1, torch.inf, -torch.inf, torch.nan]
FP32_SCALES = torch.tensor([*_ANY, 2.0**-126, 2.0**-130, 1.9 * 2.0**98])
BF16_SCALES = FP32_SCALES.bfloat16()
FP16_SCALES = torch.tensor([*_ANY, 2.0**-14, 2.0**-24, 65504.0]).half()


@dataclass(frozen=True)
class Points:
    """All pairs of a code and a scale of a format. zero: a zero for each block, in addition to
    zero_point."""

    name: str
    codes: torch.Tensor
    scales: torch.Tensor
    columns: int = 32
    words: torch.dtype = torch.uint8
    zero_point: int = 0
    zero: int | None = None
    order: tuple[int, ...] = ()

    @property
    def numbers(self) -> torch.Tensor:
        """Returns, in float64, the numbers that torch computes for each code and scale, in the
        order of `rows`."""
        form = WEIGHT_FORMATS[self.name]
        codes = self.codes.repeat_interleave(len(self.scales))
        scales = self.scales.repeat(len(self.codes))
        values = codes.double()
        if form.number in TABLES:
            values = torch.tensor(TABLES[form.number], dtype=torch.float64)[codes.long()]
        elif form.number == "e2m1":
            magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
            values = torch.cat((magnitudes, -magnitudes))[codes.long()]
        return (values - self.zero_point - (self.zero or 0)) * scale_numbers(scales, torch.float64)

    def arguments(self, tokens: int, dtype: torch.dtype) -> LinearResidualArguments:
        """Returns a linear whose rows have one code and one scale each. Each token selects one
        column."""
        form, number = WEIGHT_FORMATS[self.name], len(self.scales)
        rows = self.codes.view(-1, 1, 1).expand(-1, number, COLUMNS).flatten(0, 1)
        if form.packed_axis is not None:
            rows = pack_nibbles(rows, self.words, -1, self.order)
        scales = self.scales.repeat(len(self.codes))[:, None].repeat(1, COLUMNS // self.columns)
        zero = None if self.zero is None else torch.full_like(scales, self.zero, dtype=torch.uint8)
        return LinearResidualArguments(
            torch.eye(COLUMNS, dtype=dtype)[(37 * torch.arange(tokens)) % COLUMNS],
            rows.contiguous(),
            torch.zeros(tokens, len(rows), dtype=dtype),
            weight_format=self.name,
            weight_scale=scales,
            weight_zero=zero,
            zero_point=self.zero_point,
            nibble_order=list(self.order),
            scale_block=[1, self.columns],
        )


NIBBLES = torch.arange(16)
POINTS = {
    "fp8": Points("fp8", ALL_BYTES.view(E4M3), FP32_SCALES[2:6]),
    "fp8 of rows": Points("fp8", EDGES.view(E4M3), BF16_SCALES, columns=COLUMNS),
    "fp8, fp16 scales": Points("fp8", EDGES.view(E4M3), FP16_SCALES),
    "fp8, exponents": Points("fp8", EDGES.view(E4M3), EDGES),
    "int8": Points("int8", ALL_BYTES.view(torch.int8), FP32_SCALES[2:6]),
    "int8, highest zero": Points("int8", EDGES.view(torch.int8), BF16_SCALES, zero_point=128),
    "uint8": Points("int8", EDGES, FP16_SCALES, zero=255),
    "int4": Points("int4_k", NIBBLES, BF16_SCALES, words=torch.int32, zero_point=8),
    "int4, lowest zero": Points("int4_k", NIBBLES, FP32_SCALES, words=torch.int32),
    "int4, highest zero": Points("int4_k", NIBBLES, FP16_SCALES, zero=15),
    "nvfp4": Points("nvfp4", NIBBLES, EDGES.view(E4M3), columns=16),
    "mxfp4": Points("mxfp4", NIBBLES, EDGES),
    "nf4": Points("nf4", NIBBLES, FP32_SCALES, order=(1, 0)),
    "fp4": Points("fp4", NIBBLES, FP32_SCALES, order=(1, 0)),
}  # fmt: skip
# The kernel that the plan chooses for this many tokens: with dot products, or with tensor cores.
KERNELS = {1: "dotted_linear", 3: "streamed_linear"}


@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        (name, tokens, HALVES[(row + column) % 2])
        for row, name in enumerate(POINTS)
        for column, tokens in enumerate(KERNELS)
    ],
)
def test_numbers(name, tokens, dtype):
    points = POINTS[name]
    a = points.arguments(tokens, dtype)
    program = interpret(linear_residual.OP, a, SM100)
    assert KERNELS[tokens] in [spec.kernel for spec in program.specs]
    check(program.outcome.result, points.numbers, dtype)
    check(linear_residual.reference(a), points.numbers, dtype)


def check(made, exact, dtype):
    """Checks that each number is off by at most two roundings (of the weight and of the result).
    NaN, infinity and numbers beyond the range of the result must not become finite numbers. If
    scales are infinite, a kernel that scales sums gives infinity in place of some NaN."""
    for row in made.double():
        assert torch.equal(row.isfinite(), exact.to(dtype).isfinite())
        finite = row.isfinite()
        info = torch.finfo(dtype)
        error = (row - exact).abs()[finite]
        least = 2 * info.smallest_normal * info.eps
        assert (error <= 1.01 * info.eps * exact.abs()[finite] + least).all()
    assert made[:, exact.isnan()].isfinite().sum() == 0
