"""Activations [T, K] that are stored as e4m3 codes. They stand for these numbers:

    x[t, k] * x_scale[t, k // 128]

x_scale is [T or 1, 1 or ceil(K / 128)], and an axis of length one is shared. If it is None, all
scales are 1.
"""

from __future__ import annotations

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_device,
    check_dtype,
    check_shape,
    holds,
    shape_text,
)
from tilewright.ops.formats.fp8_block import BLOCK
from tilewright.ops.formats.quantized_weight import expand_blocks

#: The dtype of the codes, and the number of columns that share a scale.
ACTIVATION_CODES = torch.float8_e4m3fn
ACTIVATION_BLOCK = BLOCK


def check_x_scale(op: str, x: torch.Tensor, x_scale: torch.Tensor | None) -> None:
    """Raises ArgumentError unless the scale fits the codes x [T, K]. Reads only metadata."""
    if x_scale is None:
        return
    check_dtype(op, "x_scale", x_scale, FLOAT_DTYPES)
    check_device(op, "x_scale", x_scale, x.device)
    check_shape(op, "x_scale", x_scale, "[T or 1, 1 or K / 128]", (None, None))
    tokens, hidden = x.shape
    wanted = (tokens, -(-hidden // ACTIVATION_BLOCK))
    fits = [holds(n == 1) or holds(n == w) for n, w in zip(x_scale.shape, wanted, strict=True)]
    if not all(fits):
        expected = f"shape [{tokens} or 1, {wanted[1]} or 1]"
        raise ArgumentError(op, "x_scale", expected, f"shape {shape_text(x_scale.shape)}")


def check_out_dtype(op: str, x_dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    """Raises ArgumentError unless out_dtype is correct for x. If x has codes, out_dtype must be
    given. If not, it must be None or x's own dtype."""
    allowed = FLOAT_DTYPES[:3] if x_dtype == ACTIVATION_CODES else (None, x_dtype)
    if out_dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ArgumentError(op, "out_dtype", f"{expected} for {x_dtype}", out_dtype)


def scaled_numbers(numbers: torch.Tensor, x_scale: torch.Tensor | None) -> torch.Tensor:
    """Returns `numbers` [T, K] times their scales, in the dtype of `numbers`. numbers: the codes,
    converted to a floating dtype."""
    if x_scale is None:
        return numbers
    block = (1, numbers.shape[1] if x_scale.shape[1] == 1 else ACTIVATION_BLOCK)
    return numbers * expand_blocks(x_scale.to(numbers.dtype), numbers.shape, block)
