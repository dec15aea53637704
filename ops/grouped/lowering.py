"""The CUDA lowering of `grouped_matmul`: one persistent kernel, or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.codes import scale_bytes
from tilewright.codegen.grouped.kernels import (
    DEQUANTIZE,
    dequantize_grid,
    dequantize_statics,
    gemm_kernel,
)
from tilewright.codegen.grouped.plan import GroupedPlan, plan_grouped
from tilewright.codegen.grouped.problem import WORD_BYTES, GroupedProblem, WeightOperands
from tilewright.codegen.grouped.tiles import CodesConfig, GemmConfig
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.grouped.arguments import GroupedMatmulArguments
from tilewright.ops.grouped.matmul import reference
from tilewright.ops.grouped.operands import grouped_problem, unsupported
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.operands import is_aligned
from tilewright.ops.runtime.program import Buffer, Library, NotRepeatable, Outcome, Steps

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@cache
def _chosen(
    problem: GroupedProblem, num_rows: int, target: Target, plan: GroupedPlan | None
) -> tuple[GroupedPlan, Statics | None, tuple[Kernel, Statics]]:
    """Returns three things for up to `num_rows` rows: the plan; the constants of the kernel that
    dequantises the weights first, or None if there is no such kernel; and the GEMM's kernel with
    its constants. plan: a plan to use instead of the planner's."""
    plan, decode = plan or plan_grouped(problem, num_rows, target), None
    if plan.decode is not None:
        decode = dequantize_statics(problem, plan.decode)
        problem = problem.dequantized()
    return plan, decode, gemm_kernel(problem, plan.gemm)


def grouped_matmul_steps(
    a: GroupedMatmulArguments, target: Target, plan: GroupedPlan | None = None
) -> Steps:
    """Performs the steps of a `grouped_matmul` call. plan: a plan to use instead of the
    planner's."""
    result = Buffer((a.x.shape[0], a.weight.shape[1]), a.result_dtype)
    # This op copies its weight if TMA cannot read it. `fused_moe` does not copy its two or three
    # weights, because the copies could fill the GPU's memory.
    if not (is_aligned(a.x) and is_aligned(a.weight)):
        a = replace(a, x=_for_tma(a.x), weight=_for_tma(a.weight))
        obstacle = unsupported(a)  # a copy has other strides
        if obstacle is not None:
            return (yield from reference_steps(partial(reference, a), result, obstacle))
    out = yield result
    if out.numel() == 0 or a.ends.shape[0] == 0:
        yield Library(torch.Tensor.zero_, (out,))
        return Outcome(
            out, "nothing", "there are no rows, columns or groups, so nothing is launched"
        )
    problem = grouped_problem(a)
    plan, decode, (kernel, statics) = _chosen(problem, next_power_of_2(a.x.shape[0]), target, plan)
    weight = {"weight": a.weight, "scale": a.weight_scale}
    if decode is not None and plan.decode is not None:
        decoded = yield Buffer(a.experts.shape, a.x.dtype)
        blocks = dequantize_grid(problem, plan.decode)
        yield launch(DEQUANTIZE, target, blocks, weight | {"out": decoded}, decode)
        weight = {"weight": decoded, "scale": None}
    values = {
        "x": a.x,
        "x_scale": a.x_scale,
        "ids": None,
        "order": None,
        "ends": contiguous(a.ends),
        "expert_ids": contiguous(a.expert_ids),
        **as_words(weight, problem.weight, plan.gemm),
        "factor": contiguous(a.weight_expert_scale),
        "bias": a.bias,
        "y": out,
        "num_rows": a.x.shape[0],
    }
    yield launch(kernel, target, plan.gemm.grid(target.num_sms), values, statics)
    return Outcome(out, "grouped kernel", plan.reason)


def _for_tma(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if TMA cannot read from its address."""
    return tensor if is_aligned(tensor) else tensor.clone()


def reference_steps(reference: Callable[[], torch.Tensor], result: Buffer, reason: str) -> Steps:
    """Computes a call with the op's reference, because of the addresses of its tensors. The call is
    not recorded, because other calls with the same metadata may have other addresses."""
    yield NotRepeatable(reason)
    out = yield Library(reference, (), makes=result)
    return Outcome(out, "reference", reason)


def as_words(
    values: Mapping[str, Any], weight: WeightOperands, config: GemmConfig
) -> dict[str, Any]:
    """Returns a weight, its scales and the distance from gate to up, in the form in which a kernel
    with these tile sizes reads them. If the kernel reads codes as they are stored, it reads 32-bit
    words."""
    made = dict(values)
    if not isinstance(config, CodesConfig):
        return made
    made["weight"] = made["weight"].view(torch.int32)
    if "distance" in made:
        made["distance"] //= WORD_BYTES
    for name in ("scale", "gate_scale", "up_scale"):
        if weight.format != "int4" and made.get(name) is not None:
            made[name] = made[name].view(_INTEGERS[scale_bytes(weight, config)])
    return made
