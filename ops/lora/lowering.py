"""The CUDA implementations of the LoRA ops: one kernel each; rows in any order, where there are
many, are sorted first, and of one adapter a library's product may be faster."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.lora import plan as lora_plan
from tilewright.codegen.lora.expand_specs import (
    ExpandConfig,
    ExpandProblem,
    expand_grid,
    expand_spec,
)
from tilewright.codegen.lora.shrink_specs import (
    ShrinkConfig,
    ShrinkProblem,
    shrink_grid,
    shrink_scratch,
    shrink_spec,
)
from tilewright.codegen.lora.specs import OrderConfig, RowCounts, RowForm, order_grid, order_spec
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, TARGETS, Target
from tilewright.ops.contract import LoweringReport
from tilewright.ops.lora.expand import ExpandArguments, Outputs
from tilewright.ops.lora.expand import fake as fake_expand
from tilewright.ops.lora.library import library_choice, library_specs, run_library
from tilewright.ops.lora.operands import (
    Values,
    expand_problem,
    row_counts,
    shrink_problem,
)
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.lora.shrink import fake as fake_shrink
from tilewright.ops.runtime.device import device_target
from tilewright.ops.runtime.launch import launch, split_k_scratch
from tilewright.ops.runtime.recording import noted_scratch, noting_launches
from tilewright.ops.runtime.replay import Again, call_again


@cache
def chosen_shrink(
    problem: ShrinkProblem, bucket: int, target: Target
) -> tuple[ShrinkConfig, KernelSpec]:
    """Tiles and kernel for up to `bucket` rows."""
    config = lora_plan.plan_shrink(problem, bucket, target)
    return config, shrink_spec(problem, config, target.name)


@cache
def chosen_expand(
    problem: ExpandProblem, bucket: int, target: Target
) -> tuple[ExpandConfig, KernelSpec]:
    """Tiles and kernel for up to `bucket` rows."""
    config = lora_plan.plan_expand(problem, bucket, target)
    return config, expand_spec(problem, config, target.name)


def launch_shrink(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`shrink_qkv_permute_3mn` on CUDA tensors; see ShrinkArguments."""
    return repeatable_shrink(*args, **kwargs)[0]


def repeatable_shrink(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Again | None]:
    """Also what makes the same call again."""
    a = ShrinkArguments(*args, **kwargs)
    out = fake_shrink(a)
    if out.numel() == 0:
        return out, None
    device = a.a.device
    counts = row_counts(a, out.shape[1], out.shape[1])
    problem, values = shrink_problem(a, counts)
    values["out_ptr"] = out
    target = device_target(device) or SM90
    library = library_choice(a, problem, counts)
    with noting_launches() as noted:
        if library is not None:
            run_library(a, library, problem, counts, out, target.name)
        else:
            _run_shrink(problem, counts, values, target, device)
    return out, call_again(noted, args, kwargs, out)


def _run_shrink(
    problem: ShrinkProblem, counts: RowCounts, values: Values, target: Target, device: torch.device
) -> None:
    config, spec = chosen_shrink(problem, lora_plan.planned_rows(counts.num_rows), target)
    elements, places = shrink_scratch(problem, config, counts)
    if places:
        workspace, counters = split_k_scratch(places, cdiv(elements, places), device)
        values |= {"workspace_ptr": workspace, "counters_ptr": counters}
    order = _sorted_rows(problem.form, counts, values, target, device)
    launch(spec, shrink_grid(problem, config, counts), values | order, device)


def launch_expand(*args: Any, **kwargs: Any) -> Outputs:
    """`lora_expand_add` on CUDA tensors; see ExpandArguments."""
    return repeatable_expand(*args, **kwargs)[0]


def repeatable_expand(*args: Any, **kwargs: Any) -> tuple[Outputs, Again | None]:
    """Also what makes the same call again."""
    a = ExpandArguments(*args, **kwargs)
    outputs = fake_expand(a)
    if not any(out.numel() for out in outputs):
        return outputs, None
    device = a.s.device
    counts = row_counts(a, a.s.shape[1], a.num_tokens)
    problem, values = expand_problem(a, counts, outputs)
    target = device_target(device) or SM90
    config, spec = chosen_expand(problem, next_power_of_2(a.num_tokens), target)
    with noting_launches() as noted:
        order = _sorted_rows(problem.form, counts, values, target, device)
        launch(spec, expand_grid(problem, config, counts), values | order, device)
    return outputs, call_again(noted, args, kwargs, outputs)


def _sorted_rows(
    form: RowForm, counts: RowCounts, values: Values, target: Target, device: torch.device
) -> Values:
    """What the sort of a "sorted" form gives, by parameter name; nothing for other forms."""
    if form.addressing != "sorted":
        return {}
    order = noted_scratch(torch.empty(counts.total_rows, dtype=torch.int32, device=device))
    ends = noted_scratch(torch.empty(form.num_adapters, dtype=torch.int32, device=device))
    spec, config = sort_kernel(form, target.name)
    given = {**values, "order_ptr": order, "ends_ptr": ends}
    launch(spec, order_grid(config, counts.total_rows), given, device)
    return {"order_ptr": order, "offsets_ptr": ends, "num_groups": form.num_adapters}


@cache
def sort_kernel(form: RowForm, target: str) -> tuple[KernelSpec, OrderConfig]:
    config = OrderConfig()
    return order_spec(form, config, target), config


def _kernels(form: RowForm, spec: KernelSpec, target: str) -> tuple[KernelSpec, ...]:
    return (sort_kernel(form, target)[0], spec) if form.addressing == "sorted" else (spec,)


NOTHING = LoweringReport("nothing", "there are no rows, so nothing is launched")


def plan_shrink(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    if fake_shrink(a).numel() == 0:
        return NOTHING
    counts = row_counts(a, a.rows, a.rows)
    problem, _ = shrink_problem(a, counts)
    library = library_choice(a, problem, counts)
    if library is not None:
        specs = library_specs(library, problem, target)
        return LoweringReport("library GEMM", str(library), specs)
    config, spec = chosen_shrink(problem, lora_plan.planned_rows(a.rows), TARGETS[target])
    return LoweringReport("shrink kernel", str(config), _kernels(problem.form, spec, target))


def plan_expand(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    outputs = fake_expand(a)
    if not any(out.numel() for out in outputs):
        return NOTHING
    counts = row_counts(a, a.s.shape[1], a.num_tokens)
    problem, _ = expand_problem(a, counts, outputs)
    config, spec = chosen_expand(problem, next_power_of_2(a.num_tokens), TARGETS[target])
    return LoweringReport("expand kernel", str(config), _kernels(problem.form, spec, target))
