"""Sample weights of codes, in every format."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.formats.quantized_weight import WEIGHT_FORMATS, pack_nibbles
from tilewright.ops.sampling import Sampler


def sample_codes(
    case: Any, sampler: Sampler, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored rows, scales and zeros (codes where the case has none) of one weight.

    words of a case: the dtype that nibbles are packed in. zeros: "none", "float", "int" (a tensor
    of its own) or "packed" in words of eight rows. dtype: of the values.
    """
    shape, axis = (rows, columns), WEIGHT_FORMATS[case.weight_format].packed_axis
    grid = tuple(-(-n // size) for n, size in zip(shape, case.scale_block, strict=True))
    if axis is not None:
        codes, size = sampler.integers(0, 16, *shape), 4.0
        stored = pack_nibbles(codes, case.words, axis, case.nibble_order)
    elif case.weight_format == "int8":
        stored, size = sampler.integers(-128, 128, *shape).to(torch.int8), 64.0
    else:
        stored, size = sampler.normal(*shape, dtype=torch.float8_e4m3fn, scale=8.0), 8.0
    scale_dtype = torch.float32 if case.weight_format == "fp8" else case.dtype
    scales = sampler.scales(*grid, size=columns**-0.5 / size, dtype=scale_dtype)
    zeros = sampler.integers(0, 16, *grid)
    if case.zeros == "packed":
        zeros = pack_nibbles(zeros, torch.int32, 0, case.nibble_order)
    elif case.zeros == "float":
        zeros = zeros.to(scale_dtype)
    return stored, scales, zeros
