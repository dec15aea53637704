"""Sample quantised weights of linears, in all formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS, WeightFormat
from tilewright.ops.formats import e8m0
from tilewright.ops.formats.quantized_weight import pack_nibbles
from tilewright.ops.runtime.dtypes import torch_types
from tilewright.ops.sampling import Sampler

_FACTOR = 1 / 64


@dataclass(frozen=True, kw_only=True)
class CodedCase:
    """How the weights of a case are stored.

    Attributes:
        dtype: The dtype of the values.
        weight_format, scale_block, nibble_order, zero_point: The fields of `Weight` with the same
            names.
        words: The dtype of the words in which nibbles are packed. For the format "int8", uint8
            makes the codes unsigned.
        zeros: "none", "float", "int" (an integer for each scale) or "packed" (in words of eight
            rows).
        scale_dtype: The dtype of the scales of nibbles. If it is None, the scales have `dtype`, or
            the first dtype that the format allows.
        factor: Whether each weight has a factor of about `_FACTOR`.
    """

    dtype: torch.dtype = torch.bfloat16
    weight_format: str = "dense"
    scale_block: tuple[int, ...] = ()
    nibble_order: tuple[int, ...] = ()
    words: torch.dtype = torch.int32
    zeros: str = "none"
    scale_dtype: torch.dtype | None = None
    zero_point: int = 0
    factor: bool = False

    @property
    def format_options(self) -> dict[str, Any]:
        """The arguments that say how all weights are stored, by name."""
        return {
            "weight_format": self.weight_format,
            "scale_block": list(self.scale_block),
            "nibble_order": list(self.nibble_order),
            "zero_point": self.zero_point,
        }


def sample_codes(
    case: CodedCase, sampler: Sampler, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the stored rows, scales and zeros of one weight. If the case has no zeros, integer
    zeros are returned nevertheless."""
    shape, form = (rows, columns), WEIGHT_FORMATS[case.weight_format]
    grid = tuple(-(-n // size) for n, size in zip(shape, case.scale_block, strict=True))
    dtype, *others = torch_types(form.stored)
    dtype = case.words if case.words in others else dtype
    if form.packed_axis is not None:
        codes, size = sampler.integers(0, 16, *shape), 4.0
        stored = pack_nibbles(codes, case.words, form.packed_axis, case.nibble_order)
    elif dtype.is_floating_point:
        stored, size = sampler.normal(*shape, dtype=dtype, scale=8.0), 8.0
    else:
        bits = torch.iinfo(dtype)
        stored, size = sampler.integers(bits.min, bits.max + 1, *shape).to(dtype), 64.0
    if case.factor:
        size *= _FACTOR
    scale_dtype = torch.float32 if dtype.is_floating_point else case.scale_dtype or case.dtype
    scales = sampler.scales(*grid, size=columns**-0.5 / size, dtype=scale_dtype)
    if form.scales:
        scales = stored_scales(form, scales, case.scale_dtype)
    zeros = sampler.integers(0, 16, *grid)
    if case.zeros == "packed":
        zeros = pack_nibbles(zeros, torch.int32, 0, case.nibble_order)
    elif case.zeros == "float":
        zeros = zeros.to(scale_dtype)
    if form.added_zeros:
        zeros = sampler.normal(*grid, dtype=scale_dtype, scale=columns**-0.5)
    return stored, scales, zeros


def sample_factors(sampler: Sampler, number: int) -> torch.Tensor:
    """Returns a factor for each of `number` weights."""
    return sampler.scales(number, size=_FACTOR)


def stored_scales(
    form: WeightFormat, scales: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """Returns scales as a format stores them. For e8m0, they are rounded down to powers of two."""
    dtype = dtype or torch_types(form.scales)[0]
    if dtype != torch.uint8:
        return scales.to(dtype)
    return (torch.frexp(scales.float()).exponent - 1 + e8m0.BIAS).to(torch.uint8)
