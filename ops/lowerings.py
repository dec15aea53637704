"""How one checked call of an attention op becomes kernel launches, by each lowering there is.

Plans and specs are kept per problem, so a step that looks like the last one only looks them up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tilewright.codegen.qkv_kernels import (
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
from tilewright.codegen.qkv_plan import (
    LoweringChoice,
    LoweringPlan,
    epilogue_config,
    plan_fused_qkv,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90, Target, detect_target
from tilewright.ops.cache_store import KvStoreArguments
from tilewright.ops.kernel_launch import launch, split_k_scratch
from tilewright.ops.qkv_cache import FusedQkvArguments
from tilewright.ops.qkv_problems import (
    epilogue_problem,
    finish_values,
    head_finish,
    qkv_problem,
    window_views,
)


@dataclass(frozen=True)
class WeightRows:
    """Where q, k and v weights lie as rows of one tensor: a single GEMM makes all three.

    total: rows of that tensor. firsts: its row of q's, k's and v's first row. head_steps: rows from
    one head to the next.
    """

    total: int
    firsts: tuple[int, int, int]
    head_steps: tuple[int, int, int]


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
    num_heads, head_dim, _ = a.q_weight.shape
    q = a.x.new_empty((a.x.shape[0], num_heads, head_dim))
    k_window, v_window = window_views(a, writes_v=True)
    values = finish_values(a, k_window, v_window, q)
    values |= {
        "x_ptr": a.x,
        "q_weight_ptr": a.q_weight,
        "k_weight_ptr": a.k_weight,
        "v_weight_ptr": a.v_weight,
    }
    problem = qkv_problem(a, values, head_finish(a, num_heads, k_window, v_window))
    return FusedCall(a, q, values, problem, weight_rows(a.q_weight, a.k_weight, a.v_weight))


def run(call: FusedCall, choice: LoweringChoice) -> None:
    """Computes a call by one lowering; each call is run once."""
    _RUN[choice.name](call, choice)


@cache
def device_target(device: torch.device) -> Target | None:
    """The target of a CUDA device; None for a chip without a record."""
    return detect_target(device.index)


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
    launch(choice.specs[0], grid, values, a.x.device)


def _run_tiled(call: FusedCall, choice: LoweringChoice) -> None:
    a, problem, values = call.a, call.problem, call.values
    config = choice.config
    assert isinstance(config, TiledConfig)
    sms = torch.cuda.get_device_properties(a.x.device).multi_processor_count
    values |= weight_places(a.q_weight, a.k_weight, a.v_weight)
    grid = (tiled_grid(problem, config, a.x.shape[0], sms),)
    launch(choice.specs[0], grid, values, a.x.device)


def weight_places(
    q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor
) -> dict[str, Any]:
    """The three weights as the one descriptor of `qkv_projection` reaches them."""
    weights = {"q": q_weight, "k": k_weight, "v": v_weight}
    order = sorted(weights, key=lambda name: weights[name].data_ptr())
    lowest = weights[order[0]].data_ptr()
    size = q_weight.element_size()
    return {
        "weight_ptr": weights[order[0]],
        "second_distance": (weights[order[1]].data_ptr() - lowest) // size,
        "third_distance": (weights[order[2]].data_ptr() - lowest) // size,
        **{f"{name}_place": order.index(name) for name in weights},
    }


def _run_library(call: FusedCall, choice: LoweringChoice) -> None:
    spec, problem = project_and_plan(call, choice)
    assert choice.epilogue is not None
    grid = epilogue_grid(problem, choice.epilogue, call.a.x.shape[0])
    launch(spec, grid, call.values, call.a.x.device)


def project_and_plan(call: FusedCall, choice: LoweringChoice) -> tuple[KernelSpec, EpilogueProblem]:
    """Runs the library's GEMMs (nothing, on meta tensors); what the epilogue over them is."""
    a, problem, values = call.a, call.problem, call.values
    weights = (a.q_weight, a.k_weight, a.v_weight)
    if call.rows is not None:
        q, k, v = project_packed(a.x, weights, call.rows)
    else:
        q, k, v = (project(a.x, weight) for weight in weights)
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


def weight_rows(
    q_weight: torch.Tensor, k_weight: torch.Tensor, v_weight: torch.Tensor
) -> WeightRows | None:
    """How the weights tile the rows of one tensor without a gap; None where they do not."""
    weights = (q_weight, k_weight, v_weight)
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    row_strides = {weight.stride(1) for weight in weights}
    if len(storages) != 1 or len(row_strides) != 1:
        return None
    (step,) = row_strides
    lowest = min(weight.storage_offset() for weight in weights)
    offsets = [weight.storage_offset() - lowest for weight in weights]
    if step < q_weight.shape[2] or any(offset % step for offset in offsets):
        return None
    if any(weight.stride(0) % step for weight in weights):
        return None
    head_dim = q_weight.shape[1]
    total = sum(weight.shape[0] for weight in weights) * head_dim
    firsts = tuple(offset // step for offset in offsets)
    head_steps = tuple(weight.stride(0) // step for weight in weights)
    heads = [
        first + head * head_step
        for weight, first, head_step in zip(weights, firsts, head_steps, strict=True)
        for head in range(weight.shape[0])
    ]
    if sorted(heads) != list(range(0, total, head_dim)):
        return None
    return WeightRows(total, firsts, head_steps)  # type: ignore[arg-type]


def project_packed(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...], rows: WeightRows
) -> list[torch.Tensor]:
    """One GEMM over all rows; q, k and v [T, H, D] are strided views of its result."""
    lowest = min(weights, key=lambda weight: weight.storage_offset())
    step = lowest.stride(1)
    whole = lowest.as_strided((rows.total, x.shape[1]), (step, 1))
    out = torch.nn.functional.linear(x, whole)
    return [
        out.as_strided(
            (x.shape[0], weight.shape[0], weight.shape[1]), (rows.total, head_step, 1), first
        )
        for weight, first, head_step in zip(weights, rows.firsts, rows.head_steps, strict=True)
    ]


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] by weight [H, D, K] to [T, H, D], without copying the weight."""
    heads, head_dim, hidden = weight.shape
    if weight.stride(0) == head_dim * weight.stride(1):
        rows = weight.as_strided((heads * head_dim, hidden), (weight.stride(1), 1))
        return torch.nn.functional.linear(x, rows).view(-1, heads, head_dim)
    return torch.matmul(x, weight.transpose(1, 2)).transpose(0, 1)


def prepare_store(a: KvStoreArguments) -> tuple[EpilogueProblem, dict[str, Any]]:
    """The problem of a store, and its tensors by the kernel's parameter names."""
    k_window, v_window = window_views(a, writes_v=a.v is not None)
    values = finish_values(a, k_window, v_window, None) | {"k_ptr": a.k, "v_ptr": a.v}
    finish = head_finish(a, 0, k_window, v_window)
    return epilogue_problem(None, a.k, a.v, values, finish, a.static_tokens), values


def store_config(finish: HeadFinish, num_tokens: int, target: Target) -> EpilogueConfig:
    """The tiles of a store: one kernel serves all token counts up to the next power of two."""
    return _store_config(finish, _bucket(num_tokens), target)


@cache
def _store_config(finish: HeadFinish, num_tokens: int, target: Target) -> EpilogueConfig:
    return epilogue_config(finish, num_tokens, target)


def _bucket(num_tokens: int) -> int:
    return 1 << (num_tokens - 1).bit_length()
