"""The arguments of the ops for linears of dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import torch

from tilewright.ops.formats.activation_codes import ACTIVATION_CODES, RowRounding
from tilewright.ops.formats.weight import Weight
from tilewright.ops.groups import Group, OptionalGroup
from tilewright.ops.reference.norm import RowNorm

_OF_WEIGHT = {
    "data": "weight",
    "scale": "weight_scale",
    "zero": "weight_zero",
    "factor": "weight_factor",
}


@dataclass(frozen=True)
class LinearActivationArguments:
    """The arguments of `linear_activation`, for T tokens, K columns of x, and N rows of each
    weight.

    - `x` [T, K]: the input.
    - `weight` [N, K], `up_weight` [N, K] or None. If up_weight is given, `weight` is the weight of
      the gate. Weights may have any strides, so that a joint weight, concatenated or interleaved,
      can be passed as two views of one tensor.
    - `bias`, `up_bias` [N], of x's dtype or float32.
    - `activation`: one of ops.reference.activation.ACTIVATIONS. Without an up weight, it may be "",
      which means that there is no activation.
    - `rms_norm`, `layer_norm`, `norm_weight`, `norm_bias`, `norm_eps`, `norm_offset`: a RowNorm of
      x.
    - `weight_format`, `scale_block`, `zero_point`, `nibble_order`, `weight_scale`, `weight_zero`,
      `weight_factor`: the fields of a Weight of one head of N rows.
    - `up_scale`, `up_zero`, `up_factor`: the same fields of the up weight.

    The result is [T, N] of x's dtype.
    """

    x: torch.Tensor
    weight: torch.Tensor
    up_weight: torch.Tensor | None = None
    _: KW_ONLY
    bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    activation: str = "silu"
    rms_norm: bool = False
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    weight_format: str = "dense"
    weight_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    weight_zero: torch.Tensor | None = None
    up_zero: torch.Tensor | None = None
    zero_point: int = 0
    scale_block: Sequence[int] = ()
    nibble_order: Sequence[int] = ()
    layer_norm: bool = False
    norm_bias: torch.Tensor | None = None
    weight_factor: torch.Tensor | None = None
    up_factor: torch.Tensor | None = None

    linear = Group(Weight, **_OF_WEIGHT)
    norm = Group(RowNorm)
    up_linear = OptionalGroup(
        Weight,
        data="up_weight",
        scale="up_scale",
        zero="up_zero",
        factor="up_factor",
        bias="up_bias",
    )

    @property
    def weights(self) -> tuple[Weight, Weight | None]:
        """The weight and, if the activation is gated, the up weight."""
        return self.linear, self.up_linear


@dataclass(frozen=True)
class LinearResidualArguments:
    """The arguments of `linear_residual`, for T tokens, K columns of x, and N rows of the weight.

    - `x` [T, K]: the input.
    - `weight` [N, K], with any strides.
    - `residual` [T, N] of x's dtype.
    - `bias` [N], of x's dtype or float32.
    - `rms_norm`: whether the result of the linear is divided by sqrt(mean of its squares +
      norm_eps). If norm_weight [N] is given, the quotient is also multiplied by norm_offset +
      norm_weight.
    - `scale`: multiplies the result of the linear, after its norm and before it is added to the
      residual.
    - `weight_format`, `weight_scale`, `weight_zero`, `weight_factor`, `zero_point`, `scale_block`,
      `nibble_order`: as in `linear_activation`.

    The result is a new tensor [T, N] of x's dtype.
    """

    x: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor
    _: KW_ONLY
    bias: torch.Tensor | None = None
    scale: float = 1.0
    rms_norm: bool = False
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    weight_format: str = "dense"
    weight_scale: torch.Tensor | None = None
    weight_zero: torch.Tensor | None = None
    zero_point: int = 0
    scale_block: Sequence[int] = ()
    nibble_order: Sequence[int] = ()
    weight_factor: torch.Tensor | None = None

    linear = Group(Weight, **_OF_WEIGHT)
    norm = Group(RowNorm)

    @property
    def weights(self) -> tuple[Weight, Weight | None]:
        """The weight, and None in place of an up weight."""
        return self.linear, None


@dataclass(frozen=True)
class ScaledLinearArguments:
    """The arguments of `scaled_linear`, for T tokens, K columns of x, and N rows of the weight.

    - `x` [T, K] float8_e4m3fn, with a contiguous last dimension.
    - `x_scale` [T or 1, 1 or ceil(K / 128)], of a floating dtype. There is one scale for all
      tokens, or one for each token; and one for all columns, or one for each 128 columns. If
      x_scale is None, the scale is 1.
    - `weight` [N, K] float8_e4m3fn, with any strides.
    - `weight_scale`, `scale_block`: fields of a Weight. `weight_format` is "fp8".
    - `bias` [N] of out_dtype.
    - `out_dtype`: the dtype of the result [T, N]: bfloat16, float16 or float32.
    """

    x: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    _: KW_ONLY
    x_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
    out_dtype: torch.dtype | None = None
    weight_format: str = "fp8"

    linear = Group(Weight, data="weight", scale="weight_scale")


@dataclass(frozen=True)
class RoundRowsArguments:
    """The arguments of `round_rows`, for T tokens and K columns.

    - `x` [T, K]: the input.
    - `up` [T, K] of x's dtype. If it is given, the numbers that are rounded are activation(x) * up.
    - `activation`: "" for none, or one of ops.reference.activation.ACTIVATIONS.
    - `rms_norm`, `norm_weight`, `norm_eps`, `norm_offset`: a RowNorm of the numbers.
    - `scale`: a tensor with one element, which is the scale of all numbers. It has x's dtype or,
      without `rounded`, may be float32. If it is None, scales are computed.
    - `group`, `rounded`, `zero_scale`, `least`, `least_divisor`: a RowRounding of the numbers.
    - `decoded`: whether the result has the numbers that codes stand for, in x's dtype, instead of
      float8_e4m3fn codes.

    The results are new tensors: codes or numbers [T, K], and fp32 scales [K / group or 1, T], or
    [1, 1] if the scale is given. The scales of one group of columns are contiguous, as the
    library's product of codes expects.
    """

    x: torch.Tensor
    up: torch.Tensor | None = None
    _: KW_ONLY
    activation: str = ""
    rms_norm: bool = False
    norm_weight: torch.Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    scale: torch.Tensor | None = None
    group: int = 0
    rounded: bool = False
    zero_scale: float = 0.0
    least: float = 0.0
    least_divisor: float = 0.0
    decoded: bool = False

    norm = Group(RowNorm)
    rounding = Group(RowRounding)

    @property
    def columns_of_scale(self) -> int:
        """The number of columns that share a scale."""
        return self.group or self.x.shape[1]

    @property
    def results(self) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
        """The shape and dtype of each result."""
        tokens, columns = self.x.shape
        made = self.x.dtype if self.decoded else ACTIVATION_CODES
        scales = (1, 1) if self.scale is not None else (columns // self.columns_of_scale, tokens)
        return ((tokens, columns), made), (scales, torch.float32)


LinearArguments: TypeAlias = LinearActivationArguments | LinearResidualArguments
