"""The CUDA lowering of `fused_moe`. It sorts the routes, launches two grouped GEMMs, and combines
the results of each token."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.grouped.codes import order_of
from tilewright.codegen.grouped.kernels import (
    DEQUANTIZE,
    QUANTIZE_ROWS,
    dequantize_grid,
    dequantize_statics,
    gemm_kernel,
    quantize_rows_grid,
    quantize_rows_statics,
)
from tilewright.codegen.grouped.tiles import (
    SCALED_K,
    CodesConfig,
    DequantizeConfig,
    GemmConfig,
    QuantizeConfig,
    ScaledConfig,
)
from tilewright.codegen.kernel import Kernel, Statics
from tilewright.codegen.moe.dots import (
    DotsPlan,
    codes_a_word,
    down_dots,
    down_dots_grid,
    plan_dots,
    up_dots,
    up_dots_grid,
)
from tilewright.codegen.moe.kernels import (
    COMBINE,
    combine_grid,
    sort_grids,
    sort_kernels,
    up_kernel,
)
from tilewright.codegen.moe.plan import MoePlan, plan_moe
from tilewright.codegen.moe.problem import (
    MoeProblem,
    address_obstacle,
    decoded_elements,
    decoded_problem,
    down_problem,
    gemms,
)
from tilewright.codegen.targets import Target
from tilewright.ops.formats.row_groups import contiguous
from tilewright.ops.grouped.lowering import as_words, reference_steps
from tilewright.ops.moe.arguments import FusedMoeArguments
from tilewright.ops.moe.moe import reference
from tilewright.ops.moe.operands import moe_problem, up_distance
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, Step, Steps

# The alignment of the parts of scratch memory, in bytes.
SCRATCH_ALIGNMENT = 256
QUANTIZE = QuantizeConfig()

# The kernels of a call with their constants. The keys are names such as "combine".
Kernels = dict[str, tuple[Kernel, Statics]]
# The parts of a call's scratch memory, by name.
Memory = dict[str, torch.Tensor]
Sizes = dict[str, tuple[int, torch.dtype]]
# Tensors and numbers, by the names of the kernel's parameters.
Values = dict[str, Any]
Launches = Generator[Step, Any, None]


@cache
def _chosen(
    problem: MoeProblem, num_tokens: int, target: Target, plan: MoePlan | DotsPlan | None
) -> tuple[MoePlan | DotsPlan, Kernels, str | None]:
    """Returns three things for up to `num_tokens` tokens: the plan; its kernels; and the reason why
    the kernels cannot compute the call, or None if they can. plan: a plan to use instead of the
    planner's."""
    plan = plan or plan_dots(problem, num_tokens) or plan_moe(problem, num_tokens, target)
    if isinstance(plan, DotsPlan):
        kernels = {"up": up_dots(problem, plan.up), "down": down_dots(problem, plan.down)}
        return plan, kernels, address_obstacle(problem, decoded=False)
    obstacle = address_obstacle(problem, decoded=plan.decode is not None)
    return plan, _kernels(problem, plan), obstacle


def _kernels(problem: MoeProblem, plan: MoePlan) -> Kernels:
    """Returns the kernels of a plan with their constants, by name."""
    made: Kernels = {}
    if plan.decode:
        for name, weight in gemms(problem).items():
            made[f"decode {name}"] = DEQUANTIZE, dequantize_statics(weight, plan.decode)
        problem = decoded_problem(problem)
    if not plan.by_route:
        made |= sort_kernels(problem, plan.order)
    for name, columns in (("x", problem.hidden), ("hidden", problem.inner)):
        made[f"quantize {name}"] = QUANTIZE_ROWS, quantize_rows_statics(columns, QUANTIZE)
    made["up"] = up_kernel(problem, plan.up, order_of(problem.down, plan.down))
    made["down"] = gemm_kernel(down_problem(problem), plan.down)
    made["combine"] = COMBINE, Statics(plan.combine, problem)
    return made


def fused_moe_steps(
    a: FusedMoeArguments, target: Target, plan: MoePlan | DotsPlan | None = None
) -> Steps:
    """Performs the steps of a `fused_moe` call. plan: a plan to use instead of the planner's."""
    result = Buffer(a.x.shape, a.x.dtype)
    if a.expert_ids.numel() == 0 or a.x.numel() == 0:
        out = yield result
        yield Library(torch.Tensor.zero_, (out,))
        return Outcome(out, "nothing", "there are no routes, so nothing is launched")
    problem = moe_problem(a)
    plan, kernels, obstacle = _chosen(problem, next_power_of_2(a.x.shape[0]), target, plan)
    if obstacle is not None:
        return (yield from reference_steps(partial(reference, a), result, obstacle))
    out = yield result
    if isinstance(plan, DotsPlan):
        yield from _dot_launches(a, problem, plan, kernels, target, out)
        return Outcome(out, "dot products", plan.reason)
    memory = yield from _scratch(_sizes(a, problem, plan, target))
    yield from _launches(_Call(a, problem, plan, kernels, memory, target), out)
    return Outcome(out, "grouped kernels", plan.reason)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call, with its kernels and their scratch memory."""

    a: FusedMoeArguments
    problem: MoeProblem
    plan: MoePlan
    kernels: Kernels
    memory: Memory
    target: Target

    def launch(self, name: str, grid: Sequence[int], values: Values, **known: Any) -> Launch:
        """Returns the launch of the kernel of this name."""
        kernel, statics = self.kernels[name]
        return launch(kernel, self.target, grid, values, statics, **known)


def _launches(call: _Call, out: torch.Tensor) -> Launches:
    """Launches all kernels that compute `out` from the tokens."""
    num_tokens, num_routes, memory = call.a.x.shape[0], call.a.expert_ids.numel(), call.memory
    plan, num_sms = call.plan, call.target.num_sms
    gate_up, down = _weights(call.a, call.problem)
    if plan.decode is not None:
        yield from _dequantize(call, plan.decode, gate_up, down)
    if call.problem.coded_rows:
        yield _quantize(call, "x", call.a.x)
    routes = {
        "ids": contiguous(call.a.expert_ids),
        "order": memory["order"],
        "ends": memory["ends"],
        "expert_ids": None,
        "num_routes": num_routes,
        "num_rows": num_routes,
        "num_tokens": num_tokens,
    }
    if not plan.by_route:
        yield from _sort(call, routes)
    coded_by_up = isinstance(plan.up, ScaledConfig) and plan.up.codes
    hidden = {
        "hidden": memory["hidden_codes" if coded_by_up else "hidden"],
        "hidden_scale": memory.get("hidden_scale") if coded_by_up else None,
        "tile": memory.get("tile"),
    }
    gate_up = as_words(gate_up, call.problem.gate, plan.up)
    rows = _routes_of(routes, plan.up)
    values = {**_rows(memory, "x", call.a.x), **rows, **gate_up, **hidden}
    distance = call.kernels["up"][1].distance
    known = {} if distance is None else {"distance": distance}
    yield call.launch("up", plan.up.grid(num_sms), values, **known)
    if call.problem.coded_rows and not coded_by_up:
        inner = call.problem.inner
        hidden_rows = memory["hidden"][: num_routes * inner].view(num_routes, inner)
        yield _quantize(call, "hidden", hidden_rows)
    down = as_words(down, call.problem.down, plan.down)
    rows = _routes_of(routes, plan.down)
    values = {**_rows(memory, "hidden", memory["hidden"]), **rows, **down, "y": memory["y"]}
    yield call.launch("down", plan.down.grid(num_sms), values)
    values = {**routes, "y": memory["y"], "weights": call.a.expert_weights, "out": out}
    yield call.launch("combine", combine_grid(call.problem, plan.combine, num_tokens), values)


def _dot_launches(
    a: FusedMoeArguments,
    problem: MoeProblem,
    plan: DotsPlan,
    kernels: Kernels,
    target: Target,
    out: torch.Tensor,
) -> Launches:
    """Launches the kernels that compute `out` from the tokens, with separate dot products for each
    route."""
    num_routes = a.expert_ids.numel()
    values = {"x": a.x, "ids": contiguous(a.expert_ids), "weights": a.expert_weights, "out": out}
    values["hidden"] = yield Buffer((num_routes, problem.inner), a.x.dtype)
    for name in ("gate", "up", "down"):
        weight = getattr(a, f"{name}_weight")
        words = weight is not None and codes_a_word(problem.gate) > 1
        values[f"{name}_weight"] = weight.view(torch.int32) if words else weight
        values[f"{name}_scale"] = getattr(a, f"{name}_scale")
        values[f"{name}_factor"] = contiguous(getattr(a, f"{name}_expert_scale"))
        values[f"{name}_bias"] = getattr(a, f"{name}_bias")
    grids = {
        "up": up_dots_grid(problem, plan.up, num_routes),
        "down": down_dots_grid(problem, plan.down, a.x.shape[0]),
    }
    for name, grid in grids.items():
        kernel, statics = kernels[name]
        yield launch(kernel, target, grid, values, statics)


def _routes_of(routes: Values, config: GemmConfig) -> Values:
    """Returns the values that say which rows an expert has. A kernel that processes each route
    separately gets the experts of the routes. Other kernels get the sorted rows."""
    if not isinstance(config, CodesConfig):
        return routes
    if config.by_route:
        return routes | {"order": None, "ends": None}
    return routes | {"ids": None, "num_routes": None}


def _weights(a: FusedMoeArguments, problem: MoeProblem) -> tuple[Values, Values]:
    """Returns the weights that the two GEMMs read. `weight` is gate or up, whichever has the lower
    address. Each row of the other weight is `distance` elements after the same row of `weight`."""
    gate_up = {
        "weight": a.up_weight if problem.up_first else a.gate_weight,
        "distance": abs(up_distance(a)) if problem.distance is None else problem.distance,
        "gate_scale": a.gate_scale,
        "up_scale": a.up_scale,
        "gate_factor": contiguous(a.gate_expert_scale),
        "up_factor": contiguous(a.up_expert_scale),
        "gate_bias": a.gate_bias,
        "up_bias": a.up_bias,
    }
    down = {
        "weight": a.down_weight,
        "scale": a.down_scale,
        "factor": contiguous(a.down_expert_scale),
        "bias": a.down_bias,
    }
    return gate_up, down


def _dequantize(call: _Call, config: DequantizeConfig, gate_up: Values, down: Values) -> Launches:
    """Dequantises the weights, and adds them to the values gate_up and down. The rows of up follow
    the rows of gate without a gap."""
    weights = gemms(call.problem)
    parts = call.memory["decoded"].split(decoded_elements(call.problem))[: len(weights)]
    for (name, weight), part in zip(weights.items(), parts, strict=True):
        data, scale = getattr(call.a, f"{name}_weight"), getattr(call.a, f"{name}_scale")
        values = {"weight": data, "scale": scale, "out": part}
        yield call.launch(f"decode {name}", dequantize_grid(weight, config), values)
    gate_up |= {"weight": parts[0], "gate_scale": None, "up_scale": None}
    down |= {"weight": parts[-1], "scale": None}


def _quantize(call: _Call, name: str, rows: torch.Tensor) -> Launch:
    """Returns the launch that quantises rows. name: "x" or "hidden"."""
    num_rows, columns = rows.shape
    values = {
        "x": rows,
        "codes": call.memory[f"{name}_codes"],
        "scale": call.memory[f"{name}_scale"],
        "num_rows": num_rows,
    }
    grid = quantize_rows_grid(columns, QUANTIZE, num_rows)
    return call.launch(f"quantize {name}", grid, values)


def _rows(memory: Memory, name: str, rows: torch.Tensor) -> Values:
    """Returns rows in the form in which a GEMM reads them. If the call quantises the rows, the
    result is the codes of the rows."""
    codes = memory.get(f"{name}_codes")
    return {"x": rows if codes is None else codes, "x_scale": memory.get(f"{name}_scale")}


def _sort(call: _Call, routes: Values) -> Launches:
    """Launches the kernels that sort the routes. `order` gets the routes of one expert after
    another, and `ends` gets the places in `order` where the routes of each expert end."""
    grids = sort_grids(call.problem, call.plan.order, routes["num_routes"])
    counts = {"counts": call.memory.get("counts"), "total": call.memory.get("total")}
    values = {**routes, **counts, "num_chunks": grids["count"][0]}
    for name, grid in grids.items():
        if name in call.kernels:
            yield call.launch(name, grid, values)


# --- scratch memory -------------------------------------------------------------------------------


def _sizes(a: FusedMoeArguments, problem: MoeProblem, plan: MoePlan, target: Target) -> Sizes:
    """Returns the number of elements and the dtype of each part of a call's scratch memory."""
    num_routes, dtype, up = a.expert_ids.numel(), a.x.dtype, plan.up
    made = {
        "order": (num_routes, torch.int32),
        # The second half has the index of each expert's first block of rows.
        "ends": (2 * problem.num_experts, torch.int32),
        "hidden": (num_routes * problem.inner, dtype),
        "y": (num_routes * problem.hidden, dtype),
    }
    if plan.order.counted:
        (num_chunks,) = sort_grids(problem, plan.order, num_routes)["count"]
        made["counts"] = (num_chunks * problem.experts, torch.int32)
        made["total"] = (problem.experts, torch.int32)
    if plan.decode:
        num_decoded = len(gemms(problem))
        made["decoded"] = (num_decoded * decoded_elements(problem), dtype)
    if not isinstance(up, ScaledConfig):
        return made
    rows = {"x": (a.x.shape[0], problem.hidden), "hidden": (num_routes, problem.inner)}
    for name, (count, columns) in rows.items():  # codes are padded to whole blocks of columns
        blocks = count * cdiv(columns, SCALED_K)
        made[f"{name}_codes"] = (blocks * SCALED_K, torch.float8_e4m3fn)
        made[f"{name}_scale"] = (blocks, torch.float32)
    if up.codes:  # each program keeps only one tile of the hidden rows, before it is quantised
        (programs,) = up.grid(target.num_sms)
        made |= {"tile": (programs * up.block_m * up.block_n, dtype), "hidden": (0, dtype)}
    return made


def _scratch(sizes: Sizes) -> Generator[Step, Any, Memory]:
    """Allocates one buffer, and returns its parts as flat tensors by name. Each part ends where the
    next part begins."""
    units = [cdiv(count * dtype.itemsize, SCRATCH_ALIGNMENT) for count, dtype in sizes.values()]
    lengths = [unit * SCRATCH_ALIGNMENT for unit in units]
    memory = yield Buffer((sum(lengths),), torch.uint8)
    parts = zip(sizes.items(), memory.split_with_sizes(lengths), strict=True)
    return {name: part.view(dtype) for (name, (_, dtype)), part in parts}
