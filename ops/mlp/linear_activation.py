"""`linear_activation`: the first half of an MLP, gated or not, behind a norm or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.checks import (
    check_absent,
    check_choice,
    check_dtype,
)
from tilewright.ops.contract import FusedOp, Tolerance, emitted_kernel, register
from tilewright.ops.mlp.cases import ACTIVATION_CASES, sample_activation
from tilewright.ops.mlp.checks import (
    check_linear,
    check_vector,
    check_weight,
    num_rows,
)
from tilewright.ops.mlp.operands import activation_unsupported, dense_weight
from tilewright.ops.reference.activation import ACTIVATIONS
from tilewright.ops.reference.linear import apply_linear
from tilewright.ops.reference.norm import apply_row_norm, check_row_norm
from tilewright.ops.sampling import sampler_of

NAME = "linear_activation"
ERROR_MODEL = (
    "fp32 accumulation and one rounding of the result; before it the normed x is rounded to its "
    "dtype, or, of many tokens, both products are: half a unit in the last place of each factor of "
    "the result, and an error in each term of a sum that has as many as x has columns, measured "
    "against the rms of the output"
)
TOLERANCES = {
    torch.bfloat16: Tolerance(relative=2.0**-7, of_rms=2.0**-6),
    torch.float16: Tolerance(relative=2.0**-10, of_rms=2.0**-9),
    torch.float32: Tolerance(relative=2.0**-20, of_rms=2.0**-18),
    torch.float64: Tolerance(relative=2.0**-49, of_rms=2.0**-46),
}


@dataclass(frozen=True)
class LinearActivationArguments:
    """The arguments of `linear_activation`: T tokens, K columns of x, N rows of each weight.

    x [T, K]; weight [N, K], the gate's where there is an up_weight [N, K]: any strides, so that a
    joint weight, concatenated or interleaved, is two views of one tensor. Biases [N], of x's dtype
    or float32. activation: one of ops.reference.activation.ACTIVATIONS. rms_norm: x is divided by
    the root of the mean of its squares plus norm_eps, and multiplied by norm_offset + norm_weight
    [K] where that is given. layer_norm, instead: the row's mean is subtracted from x before that,
    and norm_bias [K], where that is given, added behind. Result [T, N] of x's dtype.

    weight_format "dense", or "int8", "fp8", "int4_k", "int4_n": codes as in `fused_qkv_paged`,
    with scale_block, zero_point and nibble_order as there. A weight is [N, K], or words of two
    (uint8) or eight (int32) nibbles along K ("int4_k") or N ("int4_n"), of any strides.
    weight_scale, and weight_zero where given: [ceil(N / bn), ceil(K / bk)], zeros also as int32
    words of eight rows. up_scale, up_zero: those of the up_weight.
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


def validate(a: LinearActivationArguments) -> None:
    rows = check_linear(NAME, a)
    if a.up_weight is not None:
        check_dtype(NAME, "up_weight", a.up_weight, (a.weight.dtype,))
        check_weight(NAME, a, "up_weight", rows)
    else:
        check_absent(NAME, a, ("up_bias", "up_scale", "up_zero"), "up_weight is None")
    check_vector(NAME, "up_bias", a.x, a.up_bias, "[N]", rows)
    check_choice(NAME, "activation", a.activation, tuple(ACTIVATIONS))
    check_row_norm(NAME, a, "[K]", a.x.shape[1])


def fake(a: LinearActivationArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], num_rows(a)))


def reference(a: LinearActivationArguments) -> torch.Tensor:
    """In fp32 (float64 for float64 x), rounded once:

        y = x / sqrt(mean(x^2) + norm_eps) * (norm_offset + norm_weight)
        out = activation(y @ weight^T + bias) * (y @ up_weight^T + up_bias)

    layer_norm: x - mean(x) in place of x, and y + norm_bias of y. y = x without a norm; norm_weight
    None: y is not multiplied. up_weight None: out = activation(y @ weight^T + bias). Codes are
    dequantised before.
    """
    compute = torch.promote_types(a.x.dtype, torch.float32)
    y = apply_row_norm(a.x.to(compute), a)
    out = ACTIVATIONS[a.activation](apply_linear(y, dense_weight(a, "weight", compute), a.bias))
    if a.up_weight is not None:
        out = out * apply_linear(y, dense_weight(a, "up_weight", compute), a.up_bias)
    return out.to(a.x.dtype)


sample_inputs = sampler_of(LinearActivationArguments, sample_activation)

OP = register(
    FusedOp(
        name=NAME,
        arguments=LinearActivationArguments,
        validate=validate,
        validate_values=lambda a: None,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel(
                "tilewright.ops.mlp.lowering:linear_activation_steps", activation_unsupported
            ),
        ),
        cases=ACTIVATION_CASES,
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
    )
)


def linear_activation(
    x: torch.Tensor, weight: torch.Tensor, up_weight: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """The op, called by hand: activation(x @ weight^T) * (x @ up_weight^T), [T, N].

    The options are those of LinearActivationArguments. Raises ArgumentError. Not differentiable.
    """
    return OP.torch_op(x, weight, up_weight, **options)
