"""`scaled_linear`: a linear whose x and weight are both float8 codes with scales."""

from __future__ import annotations

import torch

from tilewright.codegen.targets import Target
from tilewright.ops.checks import check_choice, check_operand
from tilewright.ops.contract import FusedOp, Lowering, Tolerance, register
from tilewright.ops.formats.activation_codes import (
    ACTIVATION_CODES,
    check_out_dtype,
    check_x_scale,
    scaled_numbers,
)
from tilewright.ops.mlp.arguments import ScaledLinearArguments
from tilewright.ops.mlp.cases import SCALED_CASES, sample_scaled
from tilewright.ops.mlp.operands import scaled_operands
from tilewright.ops.reference.linear import apply_linear
from tilewright.ops.runtime.scaled_products import chip_obstacle
from tilewright.ops.sampling import sampler_of

NAME = "scaled_linear"
ERROR_MODEL = (
    "The result is rounded once. A tensor core adds up to 128 products of 8-bit floats with about "
    "14 bits of precision; this error is measured against the rms of the output."
)
TOLERANCES = {
    torch.bfloat16: Tolerance(relative=2.0**-8, of_rms=2.0**-8),
    torch.float16: Tolerance(relative=2.0**-11, of_rms=2.0**-8),
    torch.float32: Tolerance(relative=2.0**-20, of_rms=2.0**-8),
}


def validate(a: ScaledLinearArguments) -> None:
    check_operand(NAME, "x", a.x, "[T, K]", (None, None), (ACTIVATION_CODES,), dense=True)
    check_choice(NAME, "weight_format", a.weight_format, ("fp8",))
    check_out_dtype(NAME, a.x.dtype, a.out_dtype)
    check_x_scale(NAME, a.x, a.x_scale)
    a.linear.check(NAME, a.x, bias_dtypes=(given_dtype(a),))


def fake(a: ScaledLinearArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.linear.rows), dtype=a.out_dtype)


def reference(a: ScaledLinearArguments) -> torch.Tensor:
    """Computes the following in fp32, and rounds the result once:

        out = (x * x_scale) @ (weight * weight_scale)^T + bias

    A number of x_scale applies to one token or to all tokens, and to 128 columns or to all columns.
    A number of weight_scale applies to a block of scale_block rows and columns.
    """
    compute = torch.promote_types(given_dtype(a), torch.float32)
    x = scaled_numbers(a.x.to(compute), a.x_scale)
    return apply_linear(x, a.linear.dequantize(compute), a.bias).to(given_dtype(a))


def given_dtype(a: ScaledLinearArguments) -> torch.dtype:
    """Returns the dtype of the result."""
    assert a.out_dtype is not None
    return a.out_dtype


def library_obstacle(a: ScaledLinearArguments) -> str | None:
    """Returns why the library cannot multiply these operands; None if it can. Reads only
    metadata."""
    return scaled_operands(a).obstacle(given_dtype(a))


def obstacle_on(a: ScaledLinearArguments, target: Target) -> str | None:
    """Returns why the library cannot multiply these operands on a chip; None if it can."""
    return chip_obstacle(scaled_operands(a).kind, target)


OP = register(
    FusedOp(
        name=NAME,
        arguments=ScaledLinearArguments,
        validate=validate,
        fake=fake,
        reference=reference,
        lowerings=(
            Lowering(
                "library",
                None,
                frozenset({"cuda"}),
                library_obstacle,
                build="tilewright.ops.mlp.lowering:scaled_linear_steps",
            ),
        ),
        cases=SCALED_CASES,
        sample_inputs=sampler_of(ScaledLinearArguments, sample_scaled),
        moving=frozenset({"x"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        chip_obstacle=obstacle_on,
    )
)
