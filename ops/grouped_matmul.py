"""`grouped_matmul`: rows sorted by group times the weight of each group's expert.

    out[m] = x[m] @ weight[expert of m]^T (+ bias[expert of m])

fp32 accumulation over exactly dequantised weights, bias and expert factor in fp32, one rounding.
Rows of no group, and of a group whose expert is -1, are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from tilewright.ops.checks import (
    ArgumentError,
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
)
from tilewright.ops.formats.expert_weight import ExpertWeight, check_expert_weight
from tilewright.ops.grouping import check_group_values, check_groups, expert_of_rows

NAME = "grouped_matmul"
SCHEMA = (
    "(Tensor x, Tensor weight, Tensor group_ends, *, Tensor? expert_ids=None, Tensor? bias=None, "
    'str weight_format="dense", Tensor? weight_scale=None, int[] scale_block=[], '
    "Tensor? weight_expert_scale=None, Tensor? x_scale=None, ScalarType? out_dtype=None) -> Tensor"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
X_SCALE_BLOCK = 128


@dataclass(frozen=True)
class GroupedMatmulArguments:
    """The arguments of `grouped_matmul`: M rows, K inner, N outer, E experts, G groups.

    x [M, K]; weight: see ops.formats.expert_weight ([E, N, K], any strides). group_ends int [G]
    and expert_ids int [G] or None (group g is expert g): see ops.grouping. bias [E, N].
    x float8_e4m3fn needs fp8 weights, x_scale fp32 [M, 1] or [M, ceil(K/128)] and out_dtype.
    out_dtype: of the result [M, N]; None: x's.
    """

    x: torch.Tensor
    weight: torch.Tensor
    group_ends: torch.Tensor
    _: KW_ONLY
    expert_ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    weight_format: str = "dense"
    weight_scale: torch.Tensor | None = None
    scale_block: Sequence[int] = ()
    weight_expert_scale: torch.Tensor | None = None
    x_scale: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def experts(self) -> ExpertWeight:
        return ExpertWeight(
            self.weight, self.weight_format, self.weight_scale, self.scale_block,
            self.weight_expert_scale,
        )  # fmt: skip


def validate(a: GroupedMatmulArguments) -> None:
    quantised_x = a.x.dtype == torch.float8_e4m3fn
    check_dtype(NAME, "x", a.x, (*DTYPES, torch.float8_e4m3fn))
    check_shape(NAME, "x", a.x, "[M, K]", (None, None))
    check_last_dim_dense(NAME, "x", a.x)
    check_expert_weight(NAME, "weight", a.experts, a.x.dtype)
    check_device(NAME, "weight", a.weight, a.x.device)
    num_experts, rows, inner = a.experts.shape
    if inner != a.x.shape[1]:
        raise ArgumentError(NAME, "weight", f"K = {a.x.shape[1]}, x's", inner)
    if quantised_x != (a.x_scale is not None):
        expected = "scales with float8 activations, and only with them"
        raise ArgumentError(NAME, "x_scale", expected, "none" if quantised_x else "a tensor")
    if quantised_x and (a.weight_format != "fp8" or a.out_dtype not in DTYPES):
        expected = "weight_format 'fp8' and an out_dtype with float8 activations"
        raise ArgumentError(NAME, "x", expected, f"{a.weight_format!r}, {a.out_dtype}")
    if a.x_scale is not None:
        _check_x_scale(a)
    if a.bias is not None:
        check_shape(NAME, "bias", a.bias, "[E, N]", (num_experts, rows))
        check_dtype(NAME, "bias", a.bias, (result_dtype(a), torch.float32))
        check_device(NAME, "bias", a.bias, a.x.device)
    check_groups(NAME, a.group_ends, a.expert_ids, num_experts, a.x.device)


def _check_x_scale(a: GroupedMatmulArguments) -> None:
    assert a.x_scale is not None
    blocks = -(-a.x.shape[1] // X_SCALE_BLOCK)
    if a.x_scale.dim() == 2 and a.x_scale.shape[1] == 1:
        blocks = 1
    check_shape(NAME, "x_scale", a.x_scale, "[M, K/128] or [M, 1]", (a.x.shape[0], blocks))
    check_dtype(NAME, "x_scale", a.x_scale, (torch.float32,))
    check_device(NAME, "x_scale", a.x_scale, a.x.device)


def validate_values(a: GroupedMatmulArguments) -> None:
    if a.group_ends.device.type == "cpu":
        check_group_values(NAME, a.group_ends, a.expert_ids, a.experts.shape[0], a.x.shape[0])


def result_dtype(a: GroupedMatmulArguments) -> torch.dtype:
    return a.x.dtype if a.out_dtype is None else a.out_dtype


def fake(a: GroupedMatmulArguments) -> torch.Tensor:
    return a.x.new_empty((a.x.shape[0], a.experts.shape[1]), dtype=result_dtype(a))


def reference(a: GroupedMatmulArguments) -> torch.Tensor:
    """The meaning of the op, in plain PyTorch."""
    out_dtype = result_dtype(a)
    compute = torch.promote_types(out_dtype, torch.float32)
    x = a.x.to(compute)
    if a.x_scale is not None:
        block = -(-x.shape[1] // a.x_scale.shape[1])
        x = x * a.x_scale.to(compute).repeat_interleave(block, 1)[:, : x.shape[1]]
    expert = expert_of_rows(a.group_ends, a.expert_ids, x.shape[0])
    return multiply_by_expert(x, expert, a.experts, a.bias).to(out_dtype)


def multiply_by_expert(
    x: torch.Tensor, expert: torch.Tensor, weight: ExpertWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] times the weight of each row's expert (-1: zeros), in x's precision: [M, N]."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for index in range(weight.shape[0]):
        rows = (expert == index).nonzero().flatten()
        if rows.numel() == 0:
            continue
        which = torch.tensor([index], device=x.device)
        product = x[rows] @ weight.dequantize(which, x.dtype)[0].T
        out[rows] = product if bias is None else product + bias[index].to(x.dtype)
    return out
