"""The CUDA implementation of `fused_moe`: sort the routes, two grouped GEMMs, combine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes_specs import (
    WORD_BYTES,
    CodesConfig,
    order_of,
    scale_bytes,
)
from tilewright.codegen.grouped.scaled_specs import (
    SCALED_K,
    QuantizeConfig,
    ScaledConfig,
    down_scaled_problem,
    grouped_scaled_spec,
    quantize_rows_grid,
    quantize_rows_spec,
    up_scaled_spec,
)
from tilewright.codegen.grouped.specs import GemmConfig, GroupedProblem
from tilewright.codegen.moe import specs as kernels
from tilewright.codegen.moe.decode import (
    decode_grids,
    decode_specs,
    decoded_elements,
    decoded_problem,
)
from tilewright.codegen.moe.plan import MoePlan, plan_moe
from tilewright.codegen.moe.specs import MoeProblem
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, TARGETS, Target
from tilewright.ops.contract import LoweringReport
from tilewright.ops.formats.row_groups import dense
from tilewright.ops.moe.moe import FusedMoeArguments, reference
from tilewright.ops.moe.operands import (
    lower_weight,
    moe_problem,
    out_of_reach,
    unsupported,
    up_distance,
)
from tilewright.ops.runtime.device import device_target
from tilewright.ops.runtime.launch import launch
from tilewright.ops.runtime.recording import noted_scratch, noting_launches
from tilewright.ops.runtime.replay import Again, call_again

# Parts of scratch memory begin at whole multiples of this.
SCRATCH_ALIGNMENT = 256
QUANTIZE = QuantizeConfig()
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Step:
    """One launch of a call."""

    spec: KernelSpec
    grid: tuple[int, ...]
    values: dict[str, Any]

    def run(self, device: torch.device) -> None:
        launch(self.spec, self.grid, self.values, device)


@cache
def specs(problem: MoeProblem, plan: MoePlan, target: str) -> dict[str, KernelSpec]:
    """The kernels of a call by step, in order."""
    if problem.coded_rows:
        return _scaled_specs(problem, plan, target)
    decode = decode_specs(problem, target) if plan.decode else {}
    problem = decoded_problem(problem) if plan.decode else problem
    order = order_of(kernels.down_problem(problem), plan.down)
    sort = {} if plan.by_route else kernels.sort_specs(problem, plan.order, target)
    return (
        decode
        | sort
        | {
            "up": kernels.up_spec(problem, plan.up, target, order),
            "down": kernels.down_spec(problem, plan.down, target),
            "combine": kernels.combine_spec(problem, plan.combine, target),
        }
    )


def _scaled_specs(problem: MoeProblem, plan: MoePlan, target: str) -> dict[str, KernelSpec]:
    """The same where activations are quantised."""
    up, down = plan.up, plan.down
    assert isinstance(up, ScaledConfig)
    assert isinstance(down, ScaledConfig)
    made = {
        "quantize": quantize_rows_spec(
            problem.dtype, problem.hidden, problem.x_stride, QUANTIZE, target,
            aligned="x_ptr" not in problem.unaligned,
        ),
        **kernels.sort_specs(problem, plan.order, target),
        "up": up_scaled_spec(problem, up, target),
    }  # fmt: skip
    if not up.codes:
        made["quantize_hidden"] = quantize_rows_spec(
            problem.dtype, problem.inner, problem.inner, QUANTIZE, target
        )
    made["down"] = grouped_scaled_spec(down_scaled_problem(problem), down, target)
    return made | {"combine": kernels.combine_spec(problem, plan.combine, target)}


@cache
def cached_plan(problem: MoeProblem, bucket: int, target: Target) -> MoePlan:
    return plan_moe(problem, bucket, target)


def launch_fused_moe(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`fused_moe` on CUDA tensors; see FusedMoeArguments."""
    return repeatable_fused_moe(*args, **kwargs)[0]


def repeatable_fused_moe(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Again | None]:
    """Also what makes the same call again."""
    a = FusedMoeArguments(*args, **kwargs)
    if a.expert_ids.numel() == 0 or a.x.numel() == 0:
        return torch.zeros_like(a.x), None
    out = torch.empty_like(a.x)
    problem = moe_problem(a)
    target = device_target(a.x.device) or SM90
    plan = cached_plan(problem, next_power_of_2(a.x.shape[0]), target)
    if out_of_reach(a, problem, decoded=plan.decode):
        return reference(a), None
    with noting_launches() as noted:
        for step in moe_steps(a, problem, plan, target, out).values():
            step.run(a.x.device)
    return out, call_again(noted, args, kwargs, out)


def moe_steps(
    a: FusedMoeArguments, problem: MoeProblem, plan: MoePlan, target: Target, out: torch.Tensor
) -> dict[str, Step]:
    """The launches of a call with at least one route, in order, over scratch of their own."""
    num_routes, num_tokens = a.expert_ids.numel(), a.x.shape[0]
    grids = kernels.sort_grids(problem, plan.order, num_routes)
    sms = torch.cuda.get_device_properties(a.x.device).multi_processor_count
    values = {**_tensors(a, problem, plan, grids["count"][0]), "out_ptr": out}
    grids |= {
        "up": kernels.gemm_grid(plan.up, sms),
        "down": kernels.gemm_grid(plan.down, sms),
        "combine": kernels.combine_grid(problem, plan.combine, num_tokens),
        "quantize": quantize_rows_grid(problem.hidden, QUANTIZE, num_tokens),
        "quantize_hidden": quantize_rows_grid(problem.inner, QUANTIZE, num_routes),
        **(decode_grids(problem) if plan.decode else {}),
    }
    own = _own_values(a, problem, plan, values)
    return {
        name: Step(spec, grids[name], own.get(name, values))
        for name, spec in specs(problem, plan, target.name).items()
    }


def _own_values(
    a: FusedMoeArguments, problem: MoeProblem, plan: MoePlan, values: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Values of the steps whose arguments have other steps' names."""
    storage = kernels.down_problem(problem)
    num_routes = a.expert_ids.numel()
    down = {
        "x_ptr": values["hidden_ptr"],
        "num_rows": num_routes,
        "weight_ptr": a.down_weight,
        "scale_ptr": a.down_scale,
        "factor_ptr": dense(a.down_expert_scale),
    }
    if plan.decode:
        names = [name.removeprefix("decode_") for name in decode_grids(problem)]
        parts = values["numbers_ptr"].view(len(names), -1)
        numbers = dict(zip(names, parts, strict=True))
        decode = {
            f"decode_{name}": {
                "weight_ptr": getattr(a, f"{name}_weight"),
                "scale_ptr": getattr(a, f"{name}_scale"),
                "out_ptr": out,
            }
            for name, out in numbers.items()
        }
        up = values | {"weight_ptr": numbers["gate"]}
        return decode | {"up": up, "down": values | down | {"weight_ptr": numbers["down"]}}
    if not problem.coded_rows:
        return {
            "up": values | as_words(values, storage, plan.up),
            "down": values | down | as_words(down, storage, plan.down),
        }
    x = {"codes_ptr": values["x_codes_ptr"], "scale_ptr": values["x_scale_ptr"]}
    hidden = {"codes_ptr": values["hidden_codes_ptr"], "scale_ptr": values["hidden_scale_ptr"]}
    rows = {"x_ptr": hidden["codes_ptr"], "x_scale_ptr": hidden["scale_ptr"]}
    return {
        "quantize": x | {"x_ptr": a.x, "num_rows": a.x.shape[0]},
        "up": values | {"x_ptr": x["codes_ptr"], "hidden_ptr": values["up_result_ptr"]},
        "quantize_hidden": hidden | {"x_ptr": values["hidden_ptr"], "num_rows": num_routes},
        "down": values | down | rows,
    }


def as_words(
    values: Mapping[str, Any], storage: GroupedProblem, config: GemmConfig
) -> dict[str, Any]:
    """Weights and scales as a kernel that streams codes reads them."""
    if not isinstance(config, CodesConfig):
        return {}
    made = {"weight_ptr": values["weight_ptr"].view(torch.int32)}
    if "distance" in values:
        made["distance"] = values["distance"] // WORD_BYTES
    for name in ("scale_ptr", "gate_scale_ptr", "up_scale_ptr"):
        if storage.format != "int4" and values.get(name) is not None:
            made[name] = values[name].view(_INTEGERS[scale_bytes(storage, config)])
    return made


def scratch_tensors(
    device: torch.device, sizes: Mapping[str, tuple[int, torch.dtype]]
) -> dict[str, torch.Tensor]:
    """Flat tensors by name, all parts of one new tensor of torch's allocator."""
    bounds = [0]
    for count, dtype in sizes.values():
        units = cdiv(count * dtype.itemsize, SCRATCH_ALIGNMENT)
        bounds.append(bounds[-1] + units * SCRATCH_ALIGNMENT)
    memory = noted_scratch(torch.empty(bounds[-1], dtype=torch.uint8, device=device))
    return {
        name: memory[first : first + count * dtype.itemsize].view(dtype)
        for first, (name, (count, dtype)) in zip(bounds, sizes.items(), strict=False)
    }


def _scaled_sizes(
    problem: MoeProblem, up: ScaledConfig, x: torch.Tensor
) -> dict[str, tuple[int, torch.dtype]]:
    """Scratch for codes and scales of x and of the hidden rows, in whole blocks of columns, and
    for a tile of every program."""
    counts = {"x": (x.shape[0], problem.hidden)}
    counts["hidden"] = (x.shape[0] * problem.num_slots, problem.inner)
    made = {}
    for name, (rows, columns) in counts.items():
        blocks = cdiv(columns, SCALED_K)
        made[f"{name}_codes_ptr"] = (rows * blocks * SCALED_K, torch.float8_e4m3fn)
        made[f"{name}_scale_ptr"] = (rows * blocks, torch.float32)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    (programs,) = kernels.gemm_grid(up, sms) if up.codes else (0,)
    made["tile_ptr"] = (programs * up.block_m * up.block_n, x.dtype)
    return made


def _tensors(
    a: FusedMoeArguments, problem: MoeProblem, plan: MoePlan, num_chunks: int
) -> dict[str, Any]:
    """Tensors and counts by the kernels' parameter names."""
    num_routes = a.expert_ids.numel()
    num_decoded = len(decode_grids(problem)) if plan.decode else 0
    scaled = plan.up if isinstance(plan.up, ScaledConfig) else None
    fused = scaled is not None and scaled.codes
    sizes = {
        "counts_ptr": (num_chunks * problem.experts, torch.int32),
        "total_ptr": (problem.experts, torch.int32),
        "order_ptr": (num_routes, torch.int32),
        # The second half is for the first block of each expert.
        "ends_ptr": (2 * problem.num_experts, torch.int32),
        "hidden_ptr": (0 if fused else num_routes * problem.inner, a.x.dtype),
        "y_ptr": (num_routes * problem.hidden, a.x.dtype),
        **(_scaled_sizes(problem, scaled, a.x) if scaled else {}),
        "numbers_ptr": (num_decoded * decoded_elements(problem), a.x.dtype),
    }
    scratch = scratch_tensors(a.x.device, sizes)
    return {
        **scratch,
        "up_result_ptr": scratch["hidden_codes_ptr" if fused else "hidden_ptr"],
        "x_ptr": a.x,
        "ids_ptr": dense(a.expert_ids),
        "weights_ptr": a.expert_weights,
        "weight_ptr": lower_weight(a),
        "distance": abs(up_distance(a)),
        "gate_scale_ptr": a.gate_scale,
        "up_scale_ptr": a.up_scale,
        "gate_factor_ptr": dense(a.gate_expert_scale),
        "up_factor_ptr": dense(a.up_expert_scale),
        "gate_bias_ptr": a.gate_bias,
        "up_bias_ptr": a.up_bias,
        "bias_ptr": a.down_bias,
        "num_routes": num_routes,
        "num_tokens": a.x.shape[0],
        "num_chunks": num_chunks,
    }


def plan_fused_moe(a: Any, target: str) -> LoweringReport:
    """What a call will run on a target; `a` may hold meta tensors."""
    reason = unsupported(a)
    if reason is not None:
        return LoweringReport("reference", reason)
    problem = moe_problem(a)
    plan = plan_moe(problem, max(a.x.shape[0], 1), TARGETS[target])
    kinds = specs(problem, plan, target)
    return LoweringReport("grouped kernels", plan.reason, tuple(kinds.values()))
