"""How one checked call of an attention op becomes kernel launches, by each lowering there is.

Plans and specs are kept per problem, so a step that looks like the last one only looks them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.qkv.plan import (
    LoweringChoice,
    LoweringPlan,
    epilogue_config,
    plan_fused_qkv,
)
from tilewright.codegen.qkv.quantized_specs import order_grid, ordered_width
from tilewright.codegen.qkv.specs import (
    EpilogueConfig,
    EpilogueProblem,
    HeadFinish,
    QkvProblem,
    SwappedConfig,
    TiledConfig,
    epilogue_grid,
    epilogue_spec,
    swapped_grid,
    tiled_grid,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, Target
from tilewright.ops.qkv.cache_store import KvStoreArguments
from tilewright.ops.qkv.library import (
    WeightRows,
    project,
    project_packed,
    weight_places,
    weight_rows,
)
from tilewright.ops.qkv.operands import (
    epilogue_problem,
    finish_values,
    head_finish,
    projection_values,
    qkv_problem,
    window_views,
)
from tilewright.ops.qkv.qkv_cache import FusedQkvArguments, fake
from tilewright.ops.qkv.quantized_numbers import numbers_rows, weight_numbers, x_numbers
from tilewright.ops.runtime.device import device_target as device_target
from tilewright.ops.runtime.launch import launch, split_k_scratch


@dataclass(frozen=True)
class FusedCall:
    """One checked call: its arguments, its result to be filled, and what a lowering needs.

    rows: set where the three weights are rows of one tensor.
    """

    a: FusedQkvArguments
    q: torch.Tensor
    values: dict[str, Any]
    problem: QkvProblem
    rows: WeightRows | None


def prepare(a: FusedQkvArguments) -> FusedCall:
    """The problem of a call, and its tensors by the kernels' parameter names."""
    q = fake(a)
    k_window, v_window = window_views(a, writes_v=a.v_weight is not None)
    values = finish_values(a, a.x.shape[0], k_window, v_window, q)
    values |= projection_values(a)
    problem = qkv_problem(a, values, head_finish(a, q.dtype, q.shape[1], k_window, v_window))
    if problem.quantization is None:
        rows = weight_rows(a.q_weight, a.k_weight, a.v_weight)
    else:
        rows = numbers_rows(a)
    return FusedCall(a, q, values, problem, rows)


def run(call: FusedCall, choice: LoweringChoice) -> None:
    """Computes a call by one lowering; each call is run once."""
    _RUN[choice.name](call, choice)


@cache
def cached_plan(problem: QkvProblem, target: Target | None, packed: bool) -> LoweringPlan:
    # A chip without a record runs the plain kernels of the library lowering.
    return plan_fused_qkv(problem, target or SM90, packed, library_only=target is None)


def _run_swapped(call: FusedCall, choice: LoweringChoice) -> None:
    a, problem, values = call.a, call.problem, call.values
    config = choice.config
    assert isinstance(config, SwappedConfig)
    grid = swapped_grid(problem, config, a.x.shape[0])
    if config.split_k > 1:
        tiles = grid[0] // config.split_k * grid[1]
        elements = config.split_k * 2 * config.block_p * config.block_t
        workspace, counters = split_k_scratch(tiles, elements, a.x.device)
        values |= {"workspace_ptr": workspace, "counters_ptr": counters}
    if config.ordered_x:
        ordered = a.x.new_empty((a.x.shape[0], ordered_width(problem, config)))
        before = {**values, "ordered_ptr": ordered}
        launch(choice.specs[1], order_grid(problem, config, a.x.shape[0]), before, a.x.device)
        values["x_ptr"] = ordered
    launch(choice.specs[0], grid, values, a.x.device)


def _run_tiled(call: FusedCall, choice: LoweringChoice) -> None:
    a, problem, values = call.a, call.problem, call.values
    config = choice.config
    assert isinstance(config, TiledConfig)
    sms = torch.cuda.get_device_properties(a.x.device).multi_processor_count
    values |= weight_places(a.q_weight, a.k_weight, a.v_weight)
    grid = (tiled_grid(problem, config, a.x.shape[0], sms),)
    launch(choice.specs[0], grid, values, a.x.device)


def _run_library(call: FusedCall, choice: LoweringChoice) -> None:
    spec, problem = project_and_plan(call, choice)
    assert choice.epilogue is not None
    grid = epilogue_grid(problem, choice.epilogue, call.a.x.shape[0])
    launch(spec, grid, call.values, call.a.x.device)


def project_and_plan(call: FusedCall, choice: LoweringChoice) -> tuple[KernelSpec, EpilogueProblem]:
    """Runs the library's GEMMs (nothing, on meta tensors); what the epilogue over them is."""
    a, problem, values = call.a, call.problem, call.values
    x = a.x
    weights = [weight for weight in (a.q_weight, a.k_weight, a.v_weight) if weight is not None]
    if problem.quantization is not None:
        x, weights = x_numbers(a), weight_numbers(a, problem, values, choice.specs[0].target)
    if call.rows is not None:
        q, k, *rest = project_packed(x, weights, call.rows)
    else:
        q, k, *rest = (project(x, weight) for weight in weights)
    v = rest[0] if rest else None
    done = epilogue_problem(q, k, v, values, problem.finish, a.static_tokens)
    values |= {"q_ptr": q, "k_ptr": k, "v_ptr": v}
    return cached_epilogue_spec(done, choice.epilogue, choice.specs[0].target), done


_RUN: dict[str, Callable[..., None]] = {
    "swapped": _run_swapped,
    "tiled": _run_tiled,
    "library": _run_library,
}


@cache
def cached_epilogue_spec(
    problem: EpilogueProblem, config: EpilogueConfig | None, target: str
) -> KernelSpec:
    assert config is not None
    return epilogue_spec(problem, config, target)


def prepare_store(a: KvStoreArguments) -> tuple[EpilogueProblem, dict[str, Any]]:
    """The problem of a store, and its tensors by the kernel's parameter names."""
    k_window, v_window = window_views(a, writes_v=a.v is not None)
    values = finish_values(a, a.k.shape[0], k_window, v_window, None)
    values |= {"k_ptr": a.k, "v_ptr": a.v}
    finish = head_finish(a, a.k.dtype, 0, k_window, v_window)
    return epilogue_problem(None, a.k, a.v, values, finish, a.static_tokens), values


def store_config(finish: HeadFinish, num_tokens: int, target: Target) -> EpilogueConfig:
    """The tiles of a store: one kernel serves all token counts up to the next power of two."""
    return _store_config(finish, next_power_of_2(num_tokens), target)


@cache
def _store_config(finish: HeadFinish, num_tokens: int, target: Target) -> EpilogueConfig:
    return epilogue_config(finish, num_tokens, target)
