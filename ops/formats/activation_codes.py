"""Activations [T, K] that are stored as e4m3 codes. The codes x stand for these numbers:

    x[t, k] * x_scale[t, k // 128]

x_scale is [T or 1, 1 or ceil(K / 128)], and an axis of length one is shared. If it is None, all
scales are 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_device,
    check_dtype,
    check_number,
    check_shape,
    holds,
    shape_text,
)
from tilewright.ops.formats.division import divided
from tilewright.ops.formats.fp8_block import BLOCK, E4M3_MAX
from tilewright.ops.formats.quantized_weight import expand_blocks
from tilewright.ops.groups import ArgumentGroup

#: The dtype of the codes of activations.
ACTIVATION_CODES = torch.float8_e4m3fn
#: The number of columns that share a scale of activations.
ACTIVATION_BLOCK = BLOCK


@dataclass(frozen=True)
class RowRounding(ArgumentGroup):
    """The rounding of rows [.., K] to e4m3 codes. The scales are computed from the rows.

    - `group`: the number of columns that share a scale, a power of two that divides K; 0 if all
      columns share one.
    - `rounded`: whether scales and quotients are rounded to the dtype of the rows.
    - `zero_scale`: if it is positive, it replaces a computed scale of 0.
    - `least`: if the largest magnitude that determines a scale is smaller than this number, the
      scale is computed from this number instead.
    - `least_divisor`: numbers are divided by their scale, or by this number if the scale is
      smaller.
    """

    group: int = 0
    rounded: bool = False
    zero_scale: float = 0.0
    least: float = 0.0
    least_divisor: float = 0.0

    def check(self, op: str, rows: str, columns: int) -> None:
        """Raises ArgumentError if a field is invalid. rows: the name of the argument that has the
        rows."""
        for field in ("zero_scale", "least", "least_divisor"):
            check_number(op, self.named(field), getattr(self, field), 0)
        if columns == 0:
            raise ArgumentError(op, rows, "at least one column", "none")
        fits = self.group >= 0 and self.group & (self.group - 1) == 0
        if not fits or (self.group and columns % self.group):
            expected = f"0, or a power of two dividing {columns}"
            raise ArgumentError(op, self.named("group"), expected, self.group)

    def in_groups(self, x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Returns x [.., K] as [.., K / group, group], in the dtype in which x will be divided."""
        inner = x.dtype if self.rounded else compute
        return x.to(inner).unflatten(-1, (-1, self.group or x.shape[-1]))

    def scales(self, groups: torch.Tensor) -> torch.Tensor:
        """Returns the scales [.., K / group, 1] of numbers [.., K / group, group]."""
        largest = groups.abs().amax(-1, keepdim=True).clamp(min=self.least)
        scale = divided(largest, E4M3_MAX)
        return torch.where(scale == 0, self.zero_scale, scale) if self.zero_scale else scale

    def codes(self, groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Returns the codes of numbers [.., K / group, group] with the given scales."""
        divisor = scale.clamp(min=self.least_divisor) if self.least_divisor else scale
        return (groups / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(ACTIVATION_CODES)

    def decoded(self, x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        """Returns x [.., K] after rounding to codes and decoding, in the dtype `compute`."""
        groups = self.in_groups(x, compute)
        scale = self.scales(groups)
        codes = self.codes(groups, scale)
        return (codes.to(compute) * scale.to(compute)).flatten(-2)


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
    given. Otherwise, out_dtype must be None or x's own dtype."""
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
