"""`grouped_matmul`: multiplies groups of rows, each group by the weight of its expert.

x may have float8_e4m3fn codes with a scale for each row and 128 columns, if weights have fp8
blocks. Rows of expert -1, and rows that belong to no group, are set to zero.
"""

from __future__ import annotations

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_choice,
    check_operand,
    holds,
    readable,
)
from tilewright.ops.contract import FusedOp, emitted_kernel, register, rounded_once
from tilewright.ops.formats.row_groups import (
    INDEX_DTYPES,
    check_expert_values,
    check_offset_values,
    check_offsets,
    expert_of_rows,
    last_expert_of_rows,
)
from tilewright.ops.grouped.arguments import GroupedMatmulArguments
from tilewright.ops.grouped.cases import GROUPED_CASES, sample_grouped
from tilewright.ops.grouped.operands import unsupported
from tilewright.ops.reference.expert_matmul import multiply_by_expert
from tilewright.ops.sampling import sampler_of

NAME = "grouped_matmul"
X_BLOCK = 128
ERROR_MODEL = (
    "Sums are accumulated in fp32, then the result is rounded once. int4 and fp8 weights are "
    "multiplied by their scale and rounded to the activations' dtype first. The errors of these "
    "roundings add up over the inner dimension like a random walk, and are measured against the rms"
    " of the output."
)
TOLERANCES = rounded_once(2.0**-6, 2.0**-9, 2.0**-18, 2.0**-46)


def validate(a: GroupedMatmulArguments) -> None:
    allowed = FLOAT_DTYPES if a.x_scale is None else (torch.float8_e4m3fn,)
    check_operand(NAME, "x", a.x, "[M, K]", (None, None), allowed, dense=True)
    dtypes = (a.result_dtype, a.x.dtype, torch.float32)
    a.experts.check(NAME, a.x, (None, None, a.x.shape[1]), dtypes)
    if a.x_scale is not None:
        _check_codes(a, a.x_scale)
    _check_groups(a, a.weight.shape[0])
    check_choice(NAME, "out_dtype", a.out_dtype, (None, *FLOAT_DTYPES))


def _check_codes(a: GroupedMatmulArguments, scale: torch.Tensor) -> None:
    if a.weight_format != "fp8" or a.scale_block[1] != X_BLOCK:
        expected = f"fp8 with blocks of {X_BLOCK} columns, because x has codes"
        given = f"{a.weight_format} with {list(a.scale_block)}"
        raise ArgumentError(NAME, "weight_format", expected, given)
    blocks = -(-a.x.shape[1] // X_BLOCK)
    sizes, dtypes = (a.x.shape[0], blocks), (torch.float32,)
    check_operand(NAME, "x_scale", scale, "[M, K/128]", sizes, dtypes, a.x.device)


def _check_groups(a: GroupedMatmulArguments, num_experts: int) -> None:
    offsets, ids, device = a.group_offsets, a.expert_ids, a.x.device
    check_offsets(NAME, "group_offsets", offsets, INDEX_DTYPES, device, ends=a.end_offsets)
    num_groups = offsets.shape[0] - (0 if a.end_offsets else 1)
    if ids is not None:
        check_operand(NAME, "expert_ids", ids, "[G]", (num_groups,), INDEX_DTYPES, device)
    elif not holds(num_groups <= num_experts):
        expected = f"at most {num_experts} groups (the number of weights), or expert_ids"
        raise ArgumentError(NAME, "group_offsets", expected, f"{num_groups} groups")


def validate_values(a: GroupedMatmulArguments) -> None:
    if not readable([a.group_offsets, a.expert_ids]):
        return
    if not a.end_offsets:
        check_offset_values(NAME, "group_offsets", a.group_offsets, a.x.shape[0])
    check_expert_values(NAME, "expert_ids", a.expert_ids, a.weight.shape[0])


def fake(a: GroupedMatmulArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.weight.shape[1]), dtype=a.result_dtype)


def reference(a: GroupedMatmulArguments) -> torch.Tensor:
    """Computes the following in fp32 (float64 for float64 x) for each row m of group g:

        out[m] = x[m] @ weight[e]^T + bias[e]

    e = expert_ids[g] is the expert of group g. Quantised x and weights are dequantised first. Rows
    of expert -1, and rows that belong to no group, are set to zero.
    """
    given = a.x.dtype if a.x_scale is None else a.x_scale.dtype
    compute = torch.promote_types(given, torch.float32)
    x = a.x.to(compute)
    if a.x_scale is not None:
        x = x * a.x_scale.repeat_interleave(X_BLOCK, 1)[:, : x.shape[1]]
    num_rows = a.x.shape[0]
    if a.end_offsets:
        expert = last_expert_of_rows(a.ends, a.expert_ids, num_rows)
    else:
        expert = expert_of_rows(a.ends, a.expert_ids, num_rows)
    return multiply_by_expert(x, expert, a.experts).to(a.result_dtype)


sample_inputs = sampler_of(GroupedMatmulArguments, sample_grouped)


OP = register(
    FusedOp(
        name=NAME,
        arguments=GroupedMatmulArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            emitted_kernel("tilewright.ops.grouped.lowering:grouped_matmul_steps", unsupported),
        ),
        cases=GROUPED_CASES,
        sample_inputs=sample_inputs,
        moving=frozenset({"x", "group_offsets", "expert_ids"}),
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
    )
)
