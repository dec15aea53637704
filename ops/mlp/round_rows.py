"""`round_rows`: rounds activations to float8 codes, and computes the scales of the codes. A norm or
an activation function may come first."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.mlp.plan import MOST_ROUNDED_COLUMNS, MOST_ROUNDED_TOKENS
from tilewright.ops.checks import (
    FLOAT_DTYPES,
    HALVES,
    ArgumentError,
    check_absent,
    check_choice,
    check_operand,
)
from tilewright.ops.contract import FusedOp, Tolerance, emitted_kernel, register
from tilewright.ops.formats.activation_codes import ACTIVATION_CODES
from tilewright.ops.mlp.arguments import RoundRowsArguments
from tilewright.ops.mlp.cases import ROUND_CASES, sample_round
from tilewright.ops.reference.activation import ACTIVATIONS
from tilewright.ops.sampling import sampler_of

NAME = "round_rows"
ERROR_MODEL = (
    "Norm and activation are computed in fp32 and rounded once to x's dtype; all later steps give "
    "the same bits as the graph. If the kernel rounds a number differently, the number may cross "
    "the middle between two codes and get the other code. The error is then an eighth of the "
    "number, or 2^-9 times its scale."
)
_ONE_CODE = {"relative": 2.0**-3 + 2.0**-7}
TOLERANCES = {
    ACTIVATION_CODES: Tolerance(**_ONE_CODE, of_rms=0.0, absolute=2.0**-8),
    torch.bfloat16: Tolerance(**_ONE_CODE, of_rms=2.0**-8),
    torch.float16: Tolerance(**_ONE_CODE, of_rms=2.0**-8),
    torch.float32: Tolerance(relative=2.0**-6, of_rms=0.0),
    torch.float64: Tolerance(relative=2.0**-6, of_rms=0.0),
}


def validate(a: RoundRowsArguments) -> None:
    check_operand(NAME, "x", a.x, "[T, K]", (None, None), FLOAT_DTYPES, dense=True)
    form = "[T, K]", tuple(a.x.shape), (a.x.dtype,), a.x.device
    if a.up is not None:
        check_operand(NAME, "up", a.up, *form, dense=True)
    check_choice(NAME, "activation", a.activation, ("", *ACTIVATIONS))
    if not a.activation:
        check_absent(NAME, a, ("up",), "activation is empty")
    a.norm.check(NAME, a.x, "[K]", a.x.shape[1])
    if a.scale is not None:
        dtypes = (a.x.dtype,) if a.rounded else (a.x.dtype, torch.float32)
        check_operand(NAME, "scale", a.scale, "[1]", (1,), dtypes, a.x.device)
        computed = [name for name in ("group", "zero_scale", "least") if getattr(a, name)]
        if computed:
            raise ArgumentError(NAME, computed[0], "0, since scale is given", "another number")
    a.rounding.check(NAME, "x", a.x.shape[1])


def fake(a: RoundRowsArguments) -> tuple[torch.Tensor, torch.Tensor]:
    made, scales = (a.x.new_empty(shape, dtype=dtype) for shape, dtype in a.results)
    return made, scales


def reference(a: RoundRowsArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the following in fp32 (float64 for float64 x), and rounds y once to x's dtype:

        y = activation(x) * up
        y = y / sqrt(mean(y^2) + norm_eps) * (norm_offset + norm_weight)
        scale = max(largest |y| of the group, least) / 448          zero_scale where it is 0
        codes = e4m3(clamp(y / max(scale, least_divisor), -448, 448))

    Without an activation, y = x. Without a norm, the second line is omitted. If a scale is given,
    no scale is computed. With `rounded`, scales and quotients are rounded to x's dtype. Decoded
    numbers are codes * scale, rounded to x's dtype.
    """
    compute = torch.promote_types(a.x.dtype, torch.float32)
    groups = a.rounding.in_groups(_numbers(a, compute), compute)
    given = None if a.scale is None else a.scale.to(groups.dtype).reshape(1, 1, 1)
    scale = a.rounding.scales(groups) if given is None else given
    made = a.rounding.codes(groups, scale)
    if a.decoded:
        made = (made.to(compute) * scale.to(compute)).to(a.x.dtype)
    numbers, scales = fake(a)
    return numbers.copy_(made.flatten(-2)), scales.copy_(scale.squeeze(-1).t())


def _numbers(a: RoundRowsArguments, compute: torch.dtype) -> torch.Tensor:
    """Returns the numbers that are to be rounded, in x's dtype."""
    y = a.x
    if a.activation:
        y = ACTIVATIONS[a.activation](y.to(compute))
        y = (y if a.up is None else y * a.up.to(compute)).to(a.x.dtype)
    return a.norm.apply(y.to(compute)).to(a.x.dtype)


def unsupported(a: RoundRowsArguments) -> str | None:
    """Returns why no kernel can compute a call; None if a kernel can. Reads only metadata."""
    columns = a.x.shape[1]
    if columns > MOST_ROUNDED_COLUMNS:
        return f"{columns} columns are more than {MOST_ROUNDED_COLUMNS}"
    if a.group > next_power_of_2(columns):
        return f"the number of columns that share a scale is {a.group}"
    return None


def slower(*, tokens: Any, norm: str = "", columns: int = 0) -> str | None:
    """Returns why the graph's own rounding is as fast as the kernel for `tokens` rows; None if the
    kernel is faster. norm: the kind of norm that the kernel would compute first."""
    if isinstance(tokens, int) and tokens > MOST_ROUNDED_TOKENS:
        return f"more than {MOST_ROUNDED_TOKENS} tokens: the graph rounds them in the same time"
    return f"the kernel computes no {norm} norm" if norm not in ("", "rms") else None


OP = register(
    FusedOp(
        name=NAME,
        arguments=RoundRowsArguments,
        returns="(Tensor, Tensor)",
        validate=validate,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel(
                "tilewright.ops.mlp.rounding_lowering:round_rows_steps", unsupported, HALVES
            ),
        ),
        cases=ROUND_CASES,
        sample_inputs=sampler_of(RoundRowsArguments, sample_round),
        moving=frozenset({"x", "up"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        slower=slower,
    )
)
