"""MXFP4 of the OCP Microscaling specification: E2M1 elements, with one scale, a power of two, for
each 32 elements along K.

    value = e2m1(code) * 2 ** (scale - 127)          scale: e8m0 as uint8; 255 is NaN

When a block is quantised, its scale is set to 2 ** (floor(log2(amax)) - 2), clamped to e8m0's
range. Elements are rounded to nearest even and saturate. A block of zeros has scale 0 (2 ** -127).
"""

from __future__ import annotations

import torch

from tilewright.ops.formats import fp4
from tilewright.ops.formats.e8m0 import BIAS, NAN_SCALE

BLOCK = 32
# floor(log2(6)), the exponent of E2M1's largest magnitude.
_ELEMENT_EXPONENT = 2


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (packed uint8 [..., K/2], e8m0 scales uint8 [..., K/32]) of x [..., K].

    A block that has a NaN or an infinity gets the NaN scale. Raises ValueError unless 32 divides K.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x: expected a last dimension that 32 divides, got {list(x.shape)}")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    finite = amax.isfinite()
    # frexp is exact: amax = mantissa * 2**exponent with 0.5 <= mantissa < 1.
    exponent = torch.frexp(torch.where(finite, amax, 1.0)).exponent - 1 - _ELEMENT_EXPONENT
    biased = torch.where(amax == 0, 0, (exponent + BIAS).clamp(0, NAN_SCALE - 1))
    scale = torch.where(finite, biased, NAN_SCALE).to(torch.uint8)
    scaled = torch.ldexp(blocks.double(), (BIAS - biased)[..., None]).float()
    scaled = torch.where(finite[..., None], scaled, 0.0)
    return fp4.pack(fp4.encode(scaled.flatten(-2))), scale


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns x [..., K] from packed [..., K/2] and e8m0 scales [..., K/32]. The result is exact in
    bfloat16 and wider dtypes, unless a very small scale moves a number below the dtype's range."""
    values = fp4.decode(fp4.unpack(packed), torch.float64).unflatten(-1, (-1, BLOCK))
    exponent = (scales.to(torch.int32) - BIAS)[..., None]
    out = torch.where(scales[..., None] == NAN_SCALE, torch.nan, torch.ldexp(values, exponent))
    return out.flatten(-2).to(dtype)
