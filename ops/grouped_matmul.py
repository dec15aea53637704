"""`grouped_matmul`: rows in groups, each group times the weight of its expert.

    for every row m of group g with e = expert_ids[g] >= 0:
        out[m] = x[m] @ weight[e]^T (+ bias[e])          fp32, rounded once

Rows of expert -1, and rows that belong to no group, are zero: the memory of the result is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from tilewright.ops.checks import (
    ArgumentError,
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
    holds,
)
from tilewright.ops.contract import FusedOp, Lowering, Tolerance, debug_values, register
from tilewright.ops.expert_matmul import multiply_by_expert
from tilewright.ops.formats.expert_weight import ExpertWeight, check_expert_weight
from tilewright.ops.grouped_problems import unsupported
from tilewright.ops.grouped_samples import GROUPED_CASES, GroupedCase, sample_grouped
from tilewright.ops.grouping import INDEX_DTYPES, check_group_values, expert_of_rows

NAME = "grouped_matmul"
SCHEMA = (
    "(Tensor x, Tensor weight, Tensor group_offsets, Tensor? expert_ids=None, *, "
    'Tensor? bias=None, bool end_offsets=False, str weight_format="dense", int[] scale_block=[], '
    "Tensor? weight_scale=None, Tensor? weight_expert_scale=None, ScalarType? out_dtype=None) "
    "-> Tensor"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ERROR_MODEL = (
    "fp32 accumulation, then one rounding of the result; int4 and fp8 weights are rounded to the "
    "activations' dtype after the product with their scale, which errs by its unit in the last "
    "place times a random walk over the inner dimension, measured against the rms of the output"
)
TOLERANCES = {
    torch.bfloat16: Tolerance(relative=2.0**-8, of_rms=2.0**-6),
    torch.float16: Tolerance(relative=2.0**-11, of_rms=2.0**-9),
    torch.float32: Tolerance(relative=2.0**-20, of_rms=2.0**-18),
    torch.float64: Tolerance(relative=2.0**-49, of_rms=2.0**-46),
}


@dataclass(frozen=True)
class GroupedMatmulArguments:
    """The arguments of `grouped_matmul`: M rows, K inner, N outer, E experts, G groups.

    x [M, K], rows sorted by group. weight [E, N, K], any strides with N or K contiguous.
    group_offsets int [G + 1], exclusive: group g has rows [offsets[g], offsets[g + 1]), the first
    is 0; with end_offsets int [G], where each group ends (`offs` of torch's grouped_mm).
    expert_ids int [G], -1: none; None: group g's expert is g, and G is at most E. bias [E, N].
    weight_format, scale_block, weight_scale, weight_expert_scale: see ops.formats.expert_weight.
    Result [M, N] of out_dtype (None: x's).
    """

    x: torch.Tensor
    weight: torch.Tensor
    group_offsets: torch.Tensor
    expert_ids: torch.Tensor | None = None
    _: KW_ONLY
    bias: torch.Tensor | None = None
    end_offsets: bool = False
    weight_format: str = "dense"
    scale_block: Sequence[int] = ()
    weight_scale: torch.Tensor | None = None
    weight_expert_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def experts(self) -> ExpertWeight:
        scales = (self.weight_scale, self.scale_block, self.weight_expert_scale)
        return ExpertWeight(self.weight, self.weight_format, *scales)

    @property
    def ends(self) -> torch.Tensor:
        """Where each group ends [G]."""
        return self.group_offsets if self.end_offsets else self.group_offsets[1:]

    @property
    def result_dtype(self) -> torch.dtype:
        return self.x.dtype if self.out_dtype is None else self.out_dtype


def validate(a: GroupedMatmulArguments) -> None:
    check_dtype(NAME, "x", a.x, DTYPES)
    check_shape(NAME, "x", a.x, "[M, K]", (None, None))
    check_last_dim_dense(NAME, "x", a.x)
    check_expert_weight(NAME, "weight", a.experts, a.x.dtype)
    num_experts, rows, inner = a.experts.shape
    if not holds(inner == a.x.shape[1]):
        raise ArgumentError(NAME, "weight", f"{a.x.shape[1]} columns, as x has", inner)
    check_device(NAME, "weight", a.weight, a.x.device)
    if a.bias is not None:
        check_shape(NAME, "bias", a.bias, "[E, N]", (num_experts, rows))
        check_dtype(NAME, "bias", a.bias, (a.x.dtype, torch.float32))
        check_device(NAME, "bias", a.bias, a.x.device)
    _check_groups(a, num_experts)
    if a.result_dtype not in DTYPES:
        expected = " or ".join(str(dtype) for dtype in DTYPES)
        raise ArgumentError(NAME, "out_dtype", expected, a.out_dtype)


def _check_groups(a: GroupedMatmulArguments, num_experts: int) -> None:
    check_shape(NAME, "group_offsets", a.group_offsets, "[G + 1]", (None,))
    check_dtype(NAME, "group_offsets", a.group_offsets, INDEX_DTYPES)
    check_device(NAME, "group_offsets", a.group_offsets, a.x.device)
    if not a.end_offsets and not holds(a.group_offsets.shape[0] >= 1):
        raise ArgumentError(NAME, "group_offsets", "at least the first offset, 0", "no elements")
    num_groups = a.group_offsets.shape[0] - (0 if a.end_offsets else 1)
    if a.expert_ids is not None:
        check_shape(NAME, "expert_ids", a.expert_ids, "[G]", (num_groups,))
        check_dtype(NAME, "expert_ids", a.expert_ids, INDEX_DTYPES)
        check_device(NAME, "expert_ids", a.expert_ids, a.x.device)
    elif not holds(num_groups <= num_experts):
        expected = f"at most {num_experts} groups, as there are weights, or expert_ids"
        raise ArgumentError(NAME, "group_offsets", expected, f"{num_groups} groups")


def validate_values(a: GroupedMatmulArguments) -> None:
    if a.x.device.type != "cpu" and not debug_values():
        return
    if not a.end_offsets and int(a.group_offsets[0]) != 0:
        raise ArgumentError(NAME, "group_offsets", "0 as the first", int(a.group_offsets[0]))
    num_experts, num_rows = a.weight.shape[0], a.x.shape[0]
    check_group_values(NAME, a.ends, a.expert_ids, num_experts, num_rows, "group_offsets")


def fake(a: GroupedMatmulArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.weight.shape[1]), dtype=a.result_dtype)


def reference(a: GroupedMatmulArguments) -> torch.Tensor:
    """The meaning of the op, in plain PyTorch."""
    compute = torch.promote_types(a.x.dtype, torch.float32)
    expert = expert_of_rows(a.ends, a.expert_ids, a.x.shape[0])
    out = multiply_by_expert(a.x.to(compute), expert, a.experts, a.bias)
    return out.to(a.result_dtype)


def sample_inputs(
    case: GroupedCase, device: str | torch.device = "cpu", seed: int = 0
) -> GroupedMatmulArguments:
    """Random arguments of a case."""
    return GroupedMatmulArguments(**sample_grouped(case, device, seed))


OP = register(
    FusedOp(
        name=NAME,
        schema=SCHEMA,
        arguments=GroupedMatmulArguments,
        validate=validate,
        validate_values=validate_values,
        fake=fake,
        reference=reference,
        lowerings=(
            Lowering(
                "emitted_kernel",
                "tilewright.ops.grouped_lowerings:launch_grouped_matmul",
                frozenset({"cuda"}),
                unsupported,
            ),
        ),
        cases=GROUPED_CASES,
        sample_inputs=sample_inputs,
        tolerances=TOLERANCES,
        error_model=ERROR_MODEL,
        plan="tilewright.ops.grouped_lowerings:plan_grouped_matmul",
    )
)


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_offsets: torch.Tensor,
    expert_ids: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The op, called by hand: x [M, K], sorted by group, times weight [E, N, K], [M, N].

    The arguments and options are those of GroupedMatmulArguments. Raises ArgumentError. Not
    differentiable.
    """
    return OP.torch_op(x, weight, group_offsets, expert_ids, **options)
