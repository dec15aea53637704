"""The CUDA lowering of `fused_moe`: sort the routes, two grouped GEMMs, combine."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes_specs import order_of
from tilewright.codegen.grouped.scaled_specs import (
    SCALED_K,
    QuantizeConfig,
    ScaledConfig,
    grouped_scaled_spec,
    quantize_rows_grid,
    quantize_rows_spec,
)
from tilewright.codegen.grouped.specs import (
    DequantizeConfig,
    dequantize_grid,
    dequantize_spec,
    gemm_grid,
)
from tilewright.codegen.moe.decode import decoded_elements, decoded_problem, decoded_weights
from tilewright.codegen.moe.plan import MoePlan, plan_moe
from tilewright.codegen.moe.problem import MoeProblem, address_obstacle
from tilewright.codegen.moe.scaled_specs import down_scaled_problem, up_scaled_spec
from tilewright.codegen.moe.specs import (
    combine_grid,
    combine_spec,
    down_spec,
    sort_grids,
    sort_specs,
    up_spec,
)
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.grouped.lowering import as_words, reference_steps
from tilewright.ops.moe.arguments import FusedMoeArguments
from tilewright.ops.moe.moe import reference
from tilewright.ops.moe.operands import moe_problem, up_distance
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Step, Steps

# Parts of scratch memory begin at whole multiples of this.
SCRATCH_ALIGNMENT = 256
QUANTIZE = QuantizeConfig()

Kernels = dict[str, KernelSpec]
# Parts of a call's scratch memory by name.
Memory = dict[str, torch.Tensor]
Sizes = dict[str, tuple[int, torch.dtype]]
# Arguments of launches by parameter name.
Values = dict[str, Any]
Launches = Generator[Step, Any, None]


@cache
def _chosen(
    problem: MoeProblem, num_tokens: int, target: Target, plan: MoePlan | None
) -> tuple[MoePlan, Kernels, str | None]:
    """For up to `num_tokens` tokens: plan, kernels, and why they cannot take the call after all.
    plan: in place of the planner's."""
    plan = plan or plan_moe(problem, num_tokens, target)
    obstacle = address_obstacle(problem, decoded=plan.decode is not None)
    return plan, _kernels(problem, plan, target.name), obstacle


def _kernels(problem: MoeProblem, plan: MoePlan, target: str) -> Kernels:
    """The kernels of a plan, by what they do."""
    made = {}
    if plan.decode:
        for name, weight in decoded_weights(problem).items():
            made[f"decode {name}"] = dequantize_spec(weight, plan.decode, target)
        problem = decoded_problem(problem)
    if not plan.by_route:
        made |= sort_specs(problem, plan.order, target)
    made["combine"] = combine_spec(problem, plan.combine, target)
    up, down = plan.up, plan.down
    if isinstance(up, ScaledConfig) and isinstance(down, ScaledConfig):
        hidden = Operand(problem.dtype, (problem.inner,))
        return made | {
            "quantize x": quantize_rows_spec(problem.x, problem.hidden, QUANTIZE, target),
            "up": up_scaled_spec(problem, up, target),
            "quantize hidden": quantize_rows_spec(hidden, problem.inner, QUANTIZE, target),
            "down": grouped_scaled_spec(down_scaled_problem(problem), down, target),
        }
    made["up"] = up_spec(problem, up, target, order_of(problem.down, down))
    return made | {"down": down_spec(problem, down, target)}


def fused_moe_steps(a: FusedMoeArguments, target: Target, plan: MoePlan | None = None) -> Steps:
    """The steps of a call. plan: in place of the planner's."""
    result = Buffer(a.x.shape, a.x.dtype)
    if a.expert_ids.numel() == 0 or a.x.numel() == 0:
        out = yield result
        yield Library(torch.Tensor.zero_, (out,))
        return Outcome(out, "nothing", "no routes, nothing is launched")
    problem = moe_problem(a)
    plan, kernels, obstacle = _chosen(problem, next_power_of_2(a.x.shape[0]), target, plan)
    if obstacle is not None:
        return (yield from reference_steps(partial(reference, a), result, obstacle))
    out = yield result
    memory = yield from _scratch(_sizes(a, problem, plan, target))
    yield from _launches(_Call(a, problem, plan, kernels, memory), out, target.num_sms)
    return Outcome(out, "grouped kernels", plan.reason)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call with its kernels, and with scratch memory for them."""

    a: FusedMoeArguments
    problem: MoeProblem
    plan: MoePlan
    kernels: Kernels
    memory: Memory


def _launches(call: _Call, out: torch.Tensor, num_sms: int) -> Launches:
    """From tokens to `out`."""
    num_tokens, num_routes, memory = call.a.x.shape[0], call.a.expert_ids.numel(), call.memory
    gate_up, down = _weights(call.a, call.problem)
    if call.plan.decode is not None:
        yield from _dequantize(call, call.plan.decode, gate_up, down)
    if call.problem.coded_rows:
        yield _quantize(call, "x", call.a.x)
    routes = {
        "ids_ptr": contiguous(call.a.expert_ids),
        "order_ptr": memory["order"],
        "ends_ptr": memory["ends"],
        "num_routes": num_routes,
        "num_rows": num_routes,
        "num_tokens": num_tokens,
    }
    if not call.plan.by_route:
        yield from _sort(call, routes)
    coded_by_up = isinstance(call.plan.up, ScaledConfig) and call.plan.up.codes
    hidden = {
        "hidden_ptr": memory["hidden_codes" if coded_by_up else "hidden"],
        "hidden_scale_ptr": memory.get("hidden_scale"),
        "tile_ptr": memory.get("tile"),
    }
    gate_up = as_words(gate_up, call.problem.gate, call.plan.up)
    values = {**_rows(memory, "x", call.a.x), **routes, **gate_up, **hidden}
    yield Launch(call.kernels["up"], gemm_grid(call.plan.up, num_sms), values)
    if call.problem.coded_rows and not coded_by_up:
        yield _quantize(call, "hidden", memory["hidden"].view(num_routes, -1))
    down = as_words(down, call.problem.down, call.plan.down)
    y = {"y_ptr": memory["y"]}
    values = {**_rows(memory, "hidden", memory["hidden"]), **routes, **down, **y}
    yield Launch(call.kernels["down"], gemm_grid(call.plan.down, num_sms), values)
    values = {**routes, **y, "weights_ptr": call.a.expert_weights, "out_ptr": out}
    grid = combine_grid(call.problem, call.plan.combine, num_tokens)
    yield Launch(call.kernels["combine"], grid, values)


def _weights(a: FusedMoeArguments, problem: MoeProblem) -> tuple[Values, Values]:
    """What the two GEMMs read of the weights. Of gate and up that at the lower address is given:
    the other's rows lie at a distance from it."""
    gate_up = {
        "weight_ptr": a.up_weight if problem.up_first else a.gate_weight,
        "distance": abs(up_distance(a)) if problem.distance is None else problem.distance,
        "gate_scale_ptr": a.gate_scale,
        "up_scale_ptr": a.up_scale,
        "gate_factor_ptr": contiguous(a.gate_expert_scale),
        "up_factor_ptr": contiguous(a.up_expert_scale),
        "gate_bias_ptr": a.gate_bias,
        "up_bias_ptr": a.up_bias,
    }
    down = {
        "weight_ptr": a.down_weight,
        "scale_ptr": a.down_scale,
        "factor_ptr": contiguous(a.down_expert_scale),
        "bias_ptr": a.down_bias,
    }
    return gate_up, down


def _dequantize(call: _Call, config: DequantizeConfig, gate_up: Values, down: Values) -> Launches:
    """gate_up, down get the dequantised weights, of which up's follow gate's without a gap."""
    weights = decoded_weights(call.problem)
    parts = call.memory["decoded"].view(len(weights), -1)
    for (name, weight), part in zip(weights.items(), parts, strict=True):
        data, scale = getattr(call.a, f"{name}_weight"), getattr(call.a, f"{name}_scale")
        values = {"weight_ptr": data, "scale_ptr": scale, "out_ptr": part}
        yield Launch(call.kernels[f"decode {name}"], dequantize_grid(weight, config), values)
    gate_up["weight_ptr"], down["weight_ptr"] = parts[0], parts[-1]


def _quantize(call: _Call, name: str, rows: torch.Tensor) -> Launch:
    """name: "x" or "hidden"."""
    num_rows, columns = rows.shape
    values = {
        "x_ptr": rows,
        "codes_ptr": call.memory[f"{name}_codes"],
        "scale_ptr": call.memory[f"{name}_scale"],
        "num_rows": num_rows,
    }
    grid = quantize_rows_grid(columns, QUANTIZE, num_rows)
    return Launch(call.kernels[f"quantize {name}"], grid, values)


def _rows(memory: Memory, name: str, rows: torch.Tensor) -> Values:
    """Rows as a GEMM reads them: their codes where the call quantises them."""
    codes = memory.get(f"{name}_codes")
    return {"x_ptr": rows if codes is None else codes, "x_scale_ptr": memory.get(f"{name}_scale")}


def _sort(call: _Call, routes: Values) -> Launches:
    """Fills order and ends: the routes of each expert, one expert after the other."""
    grids = sort_grids(call.problem, call.plan.order, routes["num_routes"])
    counts = {"counts_ptr": call.memory.get("counts"), "total_ptr": call.memory.get("total")}
    values = {**routes, **counts, "num_chunks": grids["count"][0]}
    for name, grid in grids.items():
        if name in call.kernels:
            yield Launch(call.kernels[name], grid, values)


# --- scratch memory -------------------------------------------------------------------------------


def _sizes(a: FusedMoeArguments, problem: MoeProblem, plan: MoePlan, target: Target) -> Sizes:
    """Elements and dtype of each part of a call's scratch memory."""
    num_routes, dtype, up = a.expert_ids.numel(), a.x.dtype, plan.up
    made = {
        "order": (num_routes, torch.int32),
        # The second half is for the first block of each expert.
        "ends": (2 * problem.num_experts, torch.int32),
        "hidden": (num_routes * problem.inner, dtype),
        "y": (num_routes * problem.hidden, dtype),
    }
    if plan.order.counted:
        (num_chunks,) = sort_grids(problem, plan.order, num_routes)["count"]
        made["counts"] = (num_chunks * problem.experts, torch.int32)
        made["total"] = (problem.experts, torch.int32)
    if plan.decode:
        num_decoded = len(decoded_weights(problem))
        made["decoded"] = (num_decoded * decoded_elements(problem), dtype)
    if not isinstance(up, ScaledConfig):
        return made
    rows = {"x": (a.x.shape[0], problem.hidden), "hidden": (num_routes, problem.inner)}
    for name, (count, columns) in rows.items():  # in whole blocks of columns
        blocks = count * cdiv(columns, SCALED_K)
        made[f"{name}_codes"] = (blocks * SCALED_K, torch.float8_e4m3fn)
        made[f"{name}_scale"] = (blocks, torch.float32)
    if up.codes:  # a tile of every program, in place of the hidden rows
        (programs,) = gemm_grid(up, target.num_sms)
        made |= {"tile": (programs * up.block_m * up.block_n, dtype), "hidden": (0, dtype)}
    return made


def _scratch(sizes: Sizes) -> Generator[Step, Any, Memory]:
    """Flat tensors by name, all parts of one buffer."""
    bounds = [0]
    for count, dtype in sizes.values():
        units = cdiv(count * dtype.itemsize, SCRATCH_ALIGNMENT)
        bounds.append(bounds[-1] + units * SCRATCH_ALIGNMENT)
    memory = yield Buffer((bounds[-1],), torch.uint8)
    return {
        name: memory[first : first + count * dtype.itemsize].view(dtype)
        for first, (name, (count, dtype)) in zip(bounds, sizes.items(), strict=False)
    }
