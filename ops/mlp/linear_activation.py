"""`linear_activation`: the first half of an MLP, gated or not, with or without a norm before it; or
a linear alone."""

from __future__ import annotations

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    HALVES,
    check_absent,
    check_choice,
    check_dtype,
    check_operand,
)
from tilewright.ops.contract import FusedOp, Tolerance, emitted_kernel, register
from tilewright.ops.mlp.arguments import LinearActivationArguments
from tilewright.ops.mlp.cases import ACTIVATION_CASES, sample_activation
from tilewright.ops.mlp.gains import slower, slower_on
from tilewright.ops.mlp.operands import activation_unsupported
from tilewright.ops.reference.activation import ACTIVATIONS
from tilewright.ops.reference.linear import apply_linear
from tilewright.ops.sampling import sampler_of

NAME = "linear_activation"
ERROR_MODEL = (
    "Sums are accumulated in fp32, and the result is rounded once. Before that, the normalised x "
    "is rounded to its dtype or, for many tokens, both products are rounded. The rounding of a "
    "product changes each factor of the result by up to half a unit in the last place. The "
    "rounding of x adds an error to each of the K terms of a sum; this error is measured against "
    "the rms of the output. For many tokens, the numbers of a quantised weight are rounded after "
    "they are scaled, as in a graph that dequantises the weight. This adds an error to each of the"
    " K terms, too."
)
TOLERANCES = {
    torch.bfloat16: Tolerance(relative=2.0**-7, of_rms=2.0**-6),
    torch.float16: Tolerance(relative=2.0**-10, of_rms=2.0**-9),
    torch.float32: Tolerance(relative=2.0**-20, of_rms=2.0**-18),
    torch.float64: Tolerance(relative=2.0**-49, of_rms=2.0**-46),
}


def validate(a: LinearActivationArguments) -> None:
    check_operand(NAME, "x", a.x, "[T, K]", (None, None), FLOAT_DTYPES, dense=True)
    a.linear.check(NAME, a.x)
    if a.up_linear is not None:
        check_dtype(NAME, "up_weight", a.up_linear.data, (a.weight.dtype,))
        a.up_linear.check(NAME, a.x, a.linear.rows)
    else:
        absent = ("up_bias", "up_scale", "up_zero", "up_factor")
        check_absent(NAME, a, absent, "up_weight is None")
    check_choice(NAME, "activation", a.activation, ("", *ACTIVATIONS))
    if not a.activation:
        check_absent(NAME, a, ("up_weight",), "activation is empty")
    a.norm.check(NAME, a.x, "[K]", a.x.shape[1])


def fake(a: LinearActivationArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.linear.rows))


def reference(a: LinearActivationArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 x), and rounds the result once:

        y = x / sqrt(mean(x^2) + norm_eps) * (norm_offset + norm_weight)
        out = activation(y @ weight^T + bias) * (y @ up_weight^T + up_bias)

    With layer_norm, x - mean(x) replaces x and norm_bias is added to y. Without a norm, y = x.
    Without norm_weight, the quotient is not multiplied. Without up_weight, out = activation(y @
    weight^T + bias). If there is no activation either, out = y @ weight^T + bias. Quantised weights
    are dequantised first.
    """
    compute = torch.promote_types(a.x.dtype, torch.float32)
    y = a.norm.apply(a.x.to(compute))
    out = apply_linear(y, a.linear.dequantize(compute), a.bias)
    if a.activation:
        out = ACTIVATIONS[a.activation](out)
    if a.up_linear is not None:
        out = out * apply_linear(y, a.up_linear.dequantize(compute), a.up_bias)
    return out.to(a.x.dtype)


sample_inputs = sampler_of(LinearActivationArguments, sample_activation)

OP = register(
    FusedOp(
        name=NAME,
        arguments=LinearActivationArguments,
        validate=validate,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel(
                "tilewright.ops.mlp.lowering:linear_activation_steps",
                activation_unsupported,
                HALVES,
            ),
        ),
        cases=ACTIVATION_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"x"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        slower=slower,
        slower_on=slower_on,
    )
)
