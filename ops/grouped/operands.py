"""From the arguments of `grouped_matmul` to a static problem of its kernel."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.grouped.plan import block_k_obstacle
from tilewright.codegen.grouped.specs import (
    TMA_BYTES,
    GroupedProblem,
    weight_obstacle,
)
from tilewright.ops.moe.operands import KERNEL_DTYPES, expert_layout, scattered
from tilewright.ops.qkv.operands import unaligned
from tilewright.ops.runtime.dtypes import TRITON_TYPES


def unsupported(a: Any) -> str | None:
    """Why the emitted kernel cannot take a call; None where it can. Metadata only."""
    if a.x_scale is None and a.x.dtype not in KERNEL_DTYPES:
        return f"no kernel for {a.x.dtype}"
    if a.result_dtype == torch.float64:
        return f"no kernel that stores {a.result_dtype}"
    if a.x.shape[1] == 0:
        return "no inner columns"
    problem = grouped_problem(a)
    if problem.x_stride * a.x.element_size() % TMA_BYTES:
        return f"x: rows {problem.x_stride} elements apart are not whole {TMA_BYTES} bytes"
    obstacle = scattered("weight", a.weight)
    obstacle = obstacle or weight_obstacle("weight", problem.weight, problem.dtype, problem.format)
    return obstacle or block_k_obstacle(problem)


def grouped_problem(a: Any) -> GroupedProblem:
    """The problem of a call; `a` is a GroupedMatmulArguments. Metadata and addresses only."""
    num_experts, rows, inner = a.experts.shape
    tensors = {
        "x_ptr": a.x, "x_scale_ptr": a.x_scale, "weight_ptr": a.weight, "bias_ptr": a.bias,
        "scale_ptr": a.weight_scale, "factor_ptr": a.weight_expert_scale,
    }  # fmt: skip
    scale = a.weight_scale
    return GroupedProblem(
        dtype=TRITON_TYPES[a.x.dtype],
        out_dtype=TRITON_TYPES[a.result_dtype],
        num_groups=a.ends.shape[0],
        num_experts=num_experts,
        rows=rows,
        inner=inner,
        x_stride=a.x.stride(0),
        x_scale=None if a.x_scale is None else a.x_scale.stride(),
        weight=expert_layout(a.weight),
        format=a.weight_format,
        scale_block=(1, 1) if scale is None else a.experts.block,
        scale_dtype="fp32" if scale is None else TRITON_TYPES[scale.dtype],
        scale_strides=(0, 0, 0) if scale is None else scale.stride(),
        factor=a.weight_expert_scale is not None,
        bias=None if a.bias is None else a.bias.stride(),
        bias_dtype="bf16" if a.bias is None else TRITON_TYPES[a.bias.dtype],
        ends_dtype=TRITON_TYPES[a.group_offsets.dtype],
        ids_dtype=None if a.expert_ids is None else TRITON_TYPES[a.expert_ids.dtype],
        unaligned=(*unaligned(tensors), "ends_ptr", "expert_ids_ptr"),
    )
