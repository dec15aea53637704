"""The CUDA implementation of `grouped_matmul`: one persistent kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.grouped_kernels import (
    TMA_BYTES,
    GemmConfig,
    GroupedProblem,
    gemm_grid,
    grouped_spec,
)
from tilewright.codegen.grouped_plan import plan_grouped
from tilewright.codegen.qkv_heads import cdiv, next_power_of_2
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, TARGETS, Target
from tilewright.ops.contract import LoweringReport
from tilewright.ops.grouped_matmul import GroupedMatmulArguments, fake
from tilewright.ops.grouped_problems import grouped_problem, unsupported
from tilewright.ops.kernel_launch import launch
from tilewright.ops.lowerings import device_target


@cache
def chosen(problem: GroupedProblem, num_rows: int, target: Target) -> tuple[GemmConfig, KernelSpec]:
    """Tiles and kernel for up to `num_rows` rows."""
    config = plan_grouped(problem, num_rows, target)
    return config, grouped_spec(problem, config, target.name)


def launch_grouped_matmul(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`grouped_matmul` on CUDA tensors; see GroupedMatmulArguments."""
    a = GroupedMatmulArguments(*args, **kwargs)
    a = replace(a, x=_for_tma(a.x), weight=_for_tma(a.weight))
    out = fake(a)
    if out.numel() == 0:
        return out
    if a.ends.shape[0] == 0:
        return out.zero_()
    target = device_target(a.x.device) or SM90
    config, spec = chosen(grouped_problem(a), next_power_of_2(a.x.shape[0]), target)
    sms = torch.cuda.get_device_properties(a.x.device).multi_processor_count
    launch(spec, gemm_grid(config, sms), kernel_values(a, out), a.x.device)
    return out


def _for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in memory of its own where TMA cannot start where it does."""
    return tensor.clone() if tensor.data_ptr() % TMA_BYTES else tensor


def kernel_values(a: GroupedMatmulArguments, out: torch.Tensor) -> dict[str, Any]:
    """The run-time arguments of the kernel by name."""
    return {
        "x_ptr": a.x,
        "ends_ptr": a.ends,
        "expert_ids_ptr": a.expert_ids,
        "weight_ptr": a.weight,
        "scale_ptr": a.weight_scale,
        "factor_ptr": a.weight_expert_scale,
        "bias_ptr": a.bias,
        "y_ptr": out,
        "num_rows": a.x.shape[0],
    }


def plan_grouped_matmul(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    reason = unsupported(a)
    if reason is not None:
        return LoweringReport("reference", reason)
    problem = grouped_problem(a)
    num_rows = max(a.x.shape[0], 1)
    config, spec = chosen(problem, next_power_of_2(num_rows), TARGETS[target])
    rows = cdiv(num_rows, max(problem.num_groups, 1))
    return LoweringReport("grouped kernel", f"{rows} rows per group, {config}", (spec,))
