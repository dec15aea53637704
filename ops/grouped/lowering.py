"""The CUDA implementation of `grouped_matmul`: one persistent kernel, or two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.codes_specs import CodesConfig, down_codes_spec
from tilewright.codegen.grouped.plan import GroupedPlan, plan_grouped
from tilewright.codegen.grouped.scaled_specs import ScaledConfig, grouped_scaled_spec
from tilewright.codegen.grouped.specs import (
    TMA_BYTES,
    DequantizeConfig,
    GroupedProblem,
    dequantize_grid,
    dequantize_spec,
    dequantized,
    gemm_grid,
    grouped_spec,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, TARGETS, Target
from tilewright.ops.contract import LoweringReport
from tilewright.ops.formats.row_groups import dense
from tilewright.ops.grouped.matmul import GroupedMatmulArguments, fake, reference
from tilewright.ops.grouped.operands import grouped_problem, unsupported
from tilewright.ops.moe.lowering import as_words
from tilewright.ops.runtime.device import device_target
from tilewright.ops.runtime.launch import launch


@dataclass(frozen=True)
class Chosen:
    """The kernels of a call. decode: decodes the weights first; None: the GEMM does."""

    plan: GroupedPlan
    gemm: KernelSpec
    decode: KernelSpec | None = None

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        return (self.gemm,) if self.decode is None else (self.decode, self.gemm)


DECODE = DequantizeConfig()


@cache
def chosen(problem: GroupedProblem, num_rows: int, target: Target) -> Chosen:
    """Plan and kernels for up to `num_rows` rows."""
    plan = plan_grouped(problem, num_rows, target)
    if isinstance(plan.gemm, CodesConfig):
        return Chosen(plan, down_codes_spec(problem, plan.gemm, target.name))
    if isinstance(plan.gemm, ScaledConfig):
        return Chosen(plan, grouped_scaled_spec(problem, plan.gemm, target.name))
    if not plan.decode:
        return Chosen(plan, grouped_spec(problem, plan.gemm, target.name))
    gemm = grouped_spec(dequantized(problem), plan.gemm, target.name)
    return Chosen(plan, gemm, dequantize_spec(problem, DECODE, target.name))


def launch_grouped_matmul(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`grouped_matmul` on CUDA tensors; see GroupedMatmulArguments."""
    a = GroupedMatmulArguments(*args, **kwargs)
    if any(tensor.data_ptr() % TMA_BYTES for tensor in (a.x, a.weight)):
        a = replace(a, x=_for_tma(a.x), weight=_for_tma(a.weight))
        if unsupported(a) is not None:  # a copy has strides of its own
            return reference(a)
    out, device = fake(a), a.x.device
    if out.numel() == 0:
        return out
    if a.ends.shape[0] == 0:
        return out.zero_()
    target = device_target(device) or SM90
    problem = grouped_problem(a)
    made = chosen(problem, next_power_of_2(a.x.shape[0]), target)
    values = kernel_values(a, out)
    if made.decode is not None:
        decoded = torch.empty(a.experts.shape, dtype=a.x.dtype, device=device)
        launch(made.decode, dequantize_grid(problem, DECODE), values | {"out_ptr": decoded}, device)
        values["weight_ptr"] = decoded
    values |= as_words(values, problem, made.plan.gemm)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    launch(made.gemm, gemm_grid(made.plan.gemm, sms), values, device)
    return out


def _for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in memory of its own where TMA cannot start where it does."""
    return tensor.clone() if tensor.data_ptr() % TMA_BYTES else tensor


def kernel_values(a: GroupedMatmulArguments, out: torch.Tensor) -> dict[str, Any]:
    """The run-time arguments of the kernel by name."""
    return {
        "x_ptr": a.x,
        "x_scale_ptr": a.x_scale,
        "ends_ptr": dense(a.ends),
        "expert_ids_ptr": dense(a.expert_ids),
        "weight_ptr": a.weight,
        "scale_ptr": a.weight_scale,
        "factor_ptr": dense(a.weight_expert_scale),
        "bias_ptr": a.bias,
        "y_ptr": out,
        "num_rows": a.x.shape[0],
    }


def plan_grouped_matmul(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    reason = unsupported(a)
    if reason is not None:
        return LoweringReport("reference", reason)
    num_rows = next_power_of_2(max(a.x.shape[0], 1))
    made = chosen(grouped_problem(a), num_rows, TARGETS[target])
    return LoweringReport("grouped kernel", made.plan.reason, made.specs)
