"""E2M1, the 4-bit float of NVFP4 and MXFP4: codes, packing, rounding.

A code has a sign (1 bit), an exponent (2 bits) and a mantissa (1 bit). It stands for 0, 0.5, 1,
1.5, 2, 3, 4 or 6, or for the negative of one of these numbers. Two codes share a byte, and the
element of even index is in the low nibble. `torch.float4_e2m1fn_x2`, cuBLAS and the OCP formats
have the same order.
"""

from __future__ import annotations

import torch

from tilewright.ops.formats.quantized_weight import pack_nibbles, unpack_nibbles

MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# The midpoints of neighbouring magnitudes. A tie is rounded to the even code, which is the higher
# one at every second midpoint.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Returns the nearest E2M1 code of each element, as uint8 of x's shape. Ties are rounded to
    even, and large numbers saturate.

    A NaN becomes +6, because the format has no NaN. x may have any float dtype. -0 keeps its sign.
    """
    magnitude = x.abs().nan_to_num(nan=MAX, posinf=MAX)
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for number, midpoint in enumerate(_MIDPOINTS):
        code += magnitude >= midpoint if number % 2 else magnitude > midpoint
    sign = torch.signbit(x) & ~x.isnan()
    return code | sign.to(torch.uint8) << 3


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the value of each code (uint8 0..15). The value is exact in every float dtype."""
    table = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), dtype=dtype, device=codes.device)
    return table[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes [..., K] into bytes [..., K/2], even elements in the low nibble.

    Raises ValueError for an odd K.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even last dimension, got {list(codes.shape)}")
    return pack_nibbles(codes, torch.uint8, -1)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks bytes [..., K/2] into codes [..., K]. This is the inverse of `pack`."""
    return unpack_nibbles(packed, -1).to(torch.uint8)
