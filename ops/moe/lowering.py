"""The CUDA lowering of `fused_moe`: sort the routes, two grouped GEMMs, combine."""

from __future__ import annotations

from collections.abc import Generator, Mapping
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
from tilewright.codegen.moe import specs
from tilewright.codegen.moe.decode import decoded_elements, decoded_problem, decoded_weights
from tilewright.codegen.moe.plan import MoePlan, plan_moe
from tilewright.codegen.moe.problem import MoeProblem, address_obstacle
from tilewright.codegen.moe.scaled_specs import down_scaled_problem, up_scaled_spec
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.grouped.lowering import as_words, reference_steps
from tilewright.ops.moe.moe import FusedMoeArguments, reference
from tilewright.ops.moe.operands import moe_problem, up_distance
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Step, Steps

# Parts of scratch memory begin at whole multiples of this.
SCRATCH_ALIGNMENT = 256
QUANTIZE = QuantizeConfig()

Kernels = dict[str, KernelSpec]
# Parts of a call's scratch memory by name.
Memory = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Chosen:
    """A plan and its kernels by what they do. obstacle: why they cannot take a call after all."""

    plan: MoePlan
    kernels: Kernels
    obstacle: str | None


@cache
def chosen(
    problem: MoeProblem, num_tokens: int, target: Target, plan: MoePlan | None = None
) -> Chosen:
    """The kernels for up to `num_tokens` tokens. plan: in place of the planner's."""
    plan = plan or plan_moe(problem, num_tokens, target)
    obstacle = address_obstacle(problem, decoded=plan.decode is not None)
    return Chosen(plan, kernels_of(problem, plan, target.name), obstacle)


def kernels_of(problem: MoeProblem, plan: MoePlan, target: str) -> Kernels:
    """The kernels of a plan."""
    made = {}
    if plan.decode:
        for name, weight in decoded_weights(problem).items():
            made[f"decode {name}"] = dequantize_spec(weight, plan.decode, target)
        problem = decoded_problem(problem)
    if not plan.by_route:
        made |= specs.sort_specs(problem, plan.order, target)
    made["combine"] = specs.combine_spec(problem, plan.combine, target)
    up, down = plan.up, plan.down
    if isinstance(up, ScaledConfig) and isinstance(down, ScaledConfig):
        hidden = Operand(problem.dtype, (problem.inner,))
        return made | {
            "quantize x": quantize_rows_spec(problem.x, problem.hidden, QUANTIZE, target),
            "up": up_scaled_spec(problem, up, target),
            "quantize hidden": quantize_rows_spec(hidden, problem.inner, QUANTIZE, target),
            "down": grouped_scaled_spec(down_scaled_problem(problem), down, target),
        }
    order = order_of(problem.down, down)
    made["up"] = specs.up_spec(problem, up, target, order)
    return made | {"down": specs.down_spec(problem, down, target)}


def fused_moe_steps(a: FusedMoeArguments, target: Target, plan: MoePlan | None = None) -> Steps:
    """The steps of a call. plan: in place of the planner's."""
    result = Buffer(a.x.shape, a.x.dtype)
    if a.expert_ids.numel() == 0 or a.x.numel() == 0:
        out = yield result
        yield Library(torch.Tensor.zero_, (out,))
        return Outcome(out, "nothing", "no routes, nothing is launched")
    problem, num_routes = moe_problem(a), a.expert_ids.numel()
    made = chosen(problem, next_power_of_2(a.x.shape[0]), target, plan)
    plan, kernels = made.plan, made.kernels
    if made.obstacle is not None:
        return (yield from reference_steps(partial(reference, a), result, made.obstacle))
    out = yield result
    memory = yield from _scratch(_sizes(a, problem, plan, target))
    gate_up, down = _weights(a, problem)
    if plan.decode:
        decoded = yield from _dequantize(a, problem, plan.decode, kernels, memory["decoded"])
        gate_up["weight_ptr"], down["weight_ptr"] = decoded
    routes = {
        "ids_ptr": contiguous(a.expert_ids),
        "order_ptr": memory["order"],
        "ends_ptr": memory["ends"],
        "num_routes": num_routes,
        "num_rows": num_routes,
    }
    if problem.coded_rows:
        yield _quantize(kernels["quantize x"], a.x, memory, "x")
    if not plan.by_route:
        yield from _sort(problem, plan, kernels, memory, routes)
    coded_by_up = isinstance(plan.up, ScaledConfig) and plan.up.codes
    first = {
        **_rows(memory, "x", a.x),
        **routes,
        **as_words(gate_up, problem.gate, plan.up),
        "hidden_ptr": memory["hidden_codes" if coded_by_up else "hidden"],
        "hidden_scale_ptr": memory.get("hidden_scale"),
        "tile_ptr": memory.get("tile"),
    }
    yield Launch(kernels["up"], gemm_grid(plan.up, target.num_sms), first)
    if problem.coded_rows and not coded_by_up:
        hidden = memory["hidden"].view(num_routes, -1)
        yield _quantize(kernels["quantize hidden"], hidden, memory, "hidden")
    second = {
        **_rows(memory, "hidden", memory["hidden"]),
        **routes,
        **as_words(down, problem.down, plan.down),
        "y_ptr": memory["y"],
    }
    yield Launch(kernels["down"], gemm_grid(plan.down, target.num_sms), second)
    last = {
        **routes,
        "y_ptr": memory["y"],
        "weights_ptr": a.expert_weights,
        "out_ptr": out,
        "num_tokens": a.x.shape[0],
    }
    grid = specs.combine_grid(problem, plan.combine, a.x.shape[0])
    yield Launch(kernels["combine"], grid, last)
    return Outcome(out, "grouped kernels", plan.reason)


def _weights(a: FusedMoeArguments, problem: MoeProblem) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the two GEMMs read of the weights, by the kernels' parameter names. Of gate and up that
    at the lower address is given; the other's rows lie at a distance from it."""
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


def _rows(memory: Memory, name: str, rows: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Rows as a GEMM reads them: their codes where the call quantises them."""
    codes = memory.get(f"{name}_codes")
    return {"x_ptr": rows if codes is None else codes, "x_scale_ptr": memory.get(f"{name}_scale")}


def _quantize(spec: KernelSpec, rows: torch.Tensor, memory: Memory, name: str) -> Launch:
    num_rows, columns = rows.shape
    values = {
        "x_ptr": rows,
        "codes_ptr": memory[f"{name}_codes"],
        "scale_ptr": memory[f"{name}_scale"],
        "num_rows": num_rows,
    }
    return Launch(spec, quantize_rows_grid(columns, QUANTIZE, num_rows), values)


def _sort(
    problem: MoeProblem, plan: MoePlan, kernels: Kernels, memory: Memory, routes: dict[str, Any]
) -> Generator[Step, Any, None]:
    """Fills order and ends: the routes of each expert, one expert after the other."""
    grids = specs.sort_grids(problem, plan.order, routes["num_routes"])
    values = {
        **routes,
        "counts_ptr": memory.get("counts"),
        "total_ptr": memory.get("total"),
        "num_chunks": grids["count"][0],
    }
    for name, grid in grids.items():
        if name in kernels:
            yield Launch(kernels[name], grid, values)


def _dequantize(
    a: FusedMoeArguments,
    problem: MoeProblem,
    config: DequantizeConfig,
    kernels: Kernels,
    memory: torch.Tensor,
) -> Generator[Step, Any, tuple[torch.Tensor, torch.Tensor]]:
    """The dequantised weights of gate, which up's follow without a gap, and of down."""
    weights = decoded_weights(problem)
    parts = memory.view(len(weights), -1)
    for (name, weight), part in zip(weights.items(), parts, strict=True):
        data, scale = getattr(a, f"{name}_weight"), getattr(a, f"{name}_scale")
        values = {"weight_ptr": data, "scale_ptr": scale, "out_ptr": part}
        yield Launch(kernels[f"decode {name}"], dequantize_grid(weight, config), values)
    return parts[0], parts[-1]


# --- scratch memory -------------------------------------------------------------------------------


def _sizes(
    a: FusedMoeArguments, problem: MoeProblem, plan: MoePlan, target: Target
) -> dict[str, tuple[int, torch.dtype]]:
    """Elements of each part of a call's scratch memory."""
    num_routes, dtype, up = a.expert_ids.numel(), a.x.dtype, plan.up
    made = {
        "order": (num_routes, torch.int32),
        # The second half is for the first block of each expert.
        "ends": (2 * problem.num_experts, torch.int32),
        "hidden": (num_routes * problem.inner, dtype),
        "y": (num_routes * problem.hidden, dtype),
    }
    if plan.order.counted:
        (num_chunks,) = specs.sort_grids(problem, plan.order, num_routes)["count"]
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


def _scratch(
    sizes: Mapping[str, tuple[int, torch.dtype]],
) -> Generator[Step, Any, dict[str, torch.Tensor]]:
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
