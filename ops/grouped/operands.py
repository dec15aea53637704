"""Converts the arguments of `grouped_matmul` to the static problem of its kernel."""

from __future__ import annotations

import torch

from tilewright.codegen.grouped.plan import block_k_obstacle
from tilewright.codegen.grouped.problem import (
    TMA_BYTES,
    GroupedProblem,
    WeightOperands,
    weight_obstacle,
)
from tilewright.ops.checks import HALVES
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.grouped.arguments import GroupedMatmulArguments
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.operands import operand


def unsupported(a: GroupedMatmulArguments) -> str | None:
    """Returns why the emitted kernel cannot compute a call; None if it can. Reads only metadata."""
    if a.x_scale is None and a.x.dtype not in HALVES:
        return f"no kernel for {a.x.dtype}"
    if a.result_dtype == torch.float64:
        return f"no kernel that stores {a.result_dtype}"
    if a.x.shape[1] == 0:
        return "x has no columns"
    if (obstacle := no_kernel_for(a.experts)) is not None:
        return obstacle
    weight, stride = grouped_problem(a).weight, a.x.stride(0)
    if stride * a.x.element_size() % TMA_BYTES:
        return f"x: the stride of rows, {stride} elements, is not a multiple of {TMA_BYTES} bytes"
    obstacle = scattered("weight", a.weight) or weight_obstacle("weight", weight)
    return obstacle or block_k_obstacle(weight)


def scattered(name: str, weight: torch.Tensor, row_step: int = 1) -> str | None:
    """Returns why a kernel cannot step through a weight [E, N, K]; None if it can. row_step: if N
    is the contiguous dimension, the number of elements from one row to the next."""
    _, row, column = weight.stride()
    if column == 1 or row == row_step or weight.shape[1] <= 1:
        return None
    return f"{name}: with strides {weight.stride()}, neither rows nor columns are contiguous"


def no_kernel_for(weight: ExpertWeight) -> str | None:
    """Returns why no kernel can decode a weight. Returns None if a kernel can, or if the weight is
    dense."""
    if weight.format is None or weight.format.expert_kernel:
        return None
    return f"no kernel for {weight.weight_format} weights"


def grouped_problem(a: GroupedMatmulArguments) -> GroupedProblem:
    """Returns the problem of a call. Reads only metadata and addresses."""
    weight = a.experts
    num_experts, rows, inner = weight.shape
    return GroupedProblem(
        num_groups=a.ends.shape[0],
        num_experts=num_experts,
        rows=rows,
        inner=inner,
        x=TRITON_TYPES[a.x.dtype],
        weight=weight_operands(weight),
        coded=a.x_scale is not None,
        named=a.expert_ids is not None,
    )


def weight_operands(weight: ExpertWeight) -> WeightOperands:
    """Returns the operands of a weight [E, N, K]. If both N and K are contiguous, the operands
    describe K as the contiguous dimension."""
    data, scale = weight.data, weight.scale
    expert, row, column = data.stride()
    return WeightOperands(
        operand(data, *((expert, row, 1) if column == 1 else (expert, 1, column))),
        weight.weight_format,
        weight.block,
        None if scale is None else operand(scale, *scale.stride()),
    )
