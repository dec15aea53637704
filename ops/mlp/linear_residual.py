"""`linear_residual`: a linear whose result is added to a residual."""

from __future__ import annotations

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    HALVES,
    check_number,
    check_operand,
)
from tilewright.ops.contract import FusedOp, Tolerance, emitted_kernel, register
from tilewright.ops.mlp.arguments import LinearResidualArguments
from tilewright.ops.mlp.cases import RESIDUAL_CASES, sample_residual
from tilewright.ops.mlp.gains import slower, slower_on
from tilewright.ops.mlp.operands import residual_unsupported
from tilewright.ops.reference import tolerances
from tilewright.ops.reference.linear import apply_linear
from tilewright.ops.sampling import sampler_of

NAME = "linear_residual"

ERROR_MODEL = (
    f"{tolerances.ONE_ROUNDING} For many tokens, the sum of residual and bias is rounded as well. "
    "If the weight is quantised, each dequantised number of the weight is rounded instead, as in a "
    "graph that dequantises the weight. This adds an error to each of the K terms of a sum."
)
TOLERANCES = tolerances.TOLERANCES | {
    torch.bfloat16: Tolerance(relative=2.0**-8, of_rms=2.0**-8),
    torch.float16: Tolerance(relative=2.0**-11, of_rms=2.0**-11),
}


def validate(a: LinearResidualArguments) -> None:
    check_operand(NAME, "x", a.x, "[T, K]", (None, None), FLOAT_DTYPES, dense=True)
    a.linear.check(NAME, a.x)
    rows, x = a.linear.rows, a.x
    form = "[T, N]", (x.shape[0], rows), (x.dtype,), x.device
    check_operand(NAME, "residual", a.residual, *form, dense=True)
    check_number(NAME, "scale", a.scale)
    a.norm.check(NAME, a.x, "[N]", rows)


def fake(a: LinearResidualArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.linear.rows))


def reference(a: LinearResidualArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 x), and rounds the result once:

        out = residual + scale * (x @ weight^T + bias)

    Without bias, nothing is added to the product. With rms_norm, the sum in brackets is normalised
    before it is scaled. Quantised weights are dequantised first.
    """
    compute = torch.promote_types(a.x.dtype, torch.float32)
    made = apply_linear(a.x.to(compute), a.linear.dequantize(compute), a.bias)
    return (a.residual.to(compute) + a.scale * a.norm.apply(made)).to(a.x.dtype)


sample_inputs = sampler_of(LinearResidualArguments, sample_residual)

OP = register(
    FusedOp(
        name=NAME,
        arguments=LinearResidualArguments,
        validate=validate,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel(
                "tilewright.ops.mlp.lowering:linear_residual_steps", residual_unsupported, HALVES
            ),
        ),
        cases=RESIDUAL_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"x", "residual"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        slower=slower,
        slower_on=slower_on,
    )
)
