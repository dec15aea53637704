"""The steps of a `fused_qkv_paged` call, for each lowering that a plan can choose."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.qkv.kernels import (
    EPILOGUE,
    SWAPPED,
    SWAPPED_CODES,
    TILED,
    DotsConfig,
    SwappedConfig,
    TiledConfig,
    epilogue_grid,
    order_of,
    swapped_grid,
    tiled_grid,
    workspace_elements,
)
from tilewright.codegen.qkv.plan import LoweringChoice
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.formats.code_operands import dot_words
from tilewright.ops.qkv.arguments import FusedQkvArguments
from tilewright.ops.qkv.library import (
    dequantized_weights,
    dequantized_x,
    project,
    project_codes,
    project_packed,
    scaled_operands,
)
from tilewright.ops.qkv.operands import FusedCall, input_strides, prepare, result_buffer
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.norms import normed, ordered, without_norm
from tilewright.ops.runtime.program import (
    Machine,
    Outcome,
    Planner,
    SplitK,
    Step,
    Steps,
    drive,
)

Part = Generator[Step, Any, None]
WEIGHTS = ("q_weight", "k_weight", "v_weight")


def choice_steps(call: FusedCall, choice: LoweringChoice, target: Target) -> Steps:
    """Performs the steps of a `fused_qkv_paged` call with the given lowering, whatever a plan would
    choose. If the kernel does not normalise x, an earlier step does."""
    q = yield result_buffer(call.a)
    if call.problem.input_norm is not None and not choice.norms_x:
        call = yield from _normed(call.a, target)
    yield from _PARTS[choice.name](call, choice, {**call.values, "q_out": q}, target)
    return Outcome(q, choice.name, choice.reason)


def specs_of(call: FusedCall, choice: LoweringChoice, target: Target) -> tuple[KernelSpec, ...]:
    """Returns the kernels of a call with one lowering, in the order of their launches."""
    return drive(choice_steps(call, choice, target), Planner(target), keep=True).specs


def _normed(a: FusedQkvArguments, target: Target) -> Generator[Step, Any, FusedCall]:
    """Normalises x and returns the remaining call."""
    x = yield from normed(a.x, a.input_norm, target)
    return prepare(replace(a, **without_norm(x, a.input_norm)))


def run(
    a: FusedQkvArguments, choice: LoweringChoice, machine: Machine | None = None
) -> torch.Tensor:
    """Returns the result of a call, computed with one lowering. machine: None for the GPU of the
    call's tensors."""
    machine = machine or machine_of(a.x.device)
    result = drive(choice_steps(prepare(a), choice, machine.target), machine).outcome.result
    assert isinstance(result, torch.Tensor)
    return result


def _swapped(
    call: FusedCall, choice: LoweringChoice, values: dict[str, Any], target: Target
) -> Part:
    config, num_tokens = choice.config, call.a.x.shape[0]
    assert isinstance(config, SwappedConfig | DotsConfig)
    grid = swapped_grid(call.problem, config, num_tokens)
    if config.split_k > 1:
        tiles = grid[0] // config.split_k * grid[1]
        workspace, counters = yield SplitK(tiles, workspace_elements(call.problem, config))
        values |= {"workspace": workspace, "counters": counters}
    if isinstance(config, DotsConfig):
        per = call.problem.codes.per_int32
        values |= {name: dot_words(values[name], per) for name in WEIGHTS}
        yield launch(SWAPPED, target, grid, values, choice.statics[0], **call.known)
        return
    if config.ordered_x:
        order = order_of(call.problem, config)
        values["x"] = yield from ordered(call.a.x, order, target, call.a.static_tokens)
    kernel = SWAPPED if call.problem.quantization is None else SWAPPED_CODES
    yield launch(kernel, target, grid, values, choice.statics[0], **call.known)


def _tiled(call: FusedCall, choice: LoweringChoice, values: dict[str, Any], target: Target) -> Part:
    config = choice.config
    assert isinstance(config, TiledConfig)
    grid = tiled_grid(call.problem, config, call.a.x.shape[0], target.num_sms)
    values |= weight_places(call.a)
    yield launch(TILED, target, (grid,), values, choice.statics[0], **call.known)


def weight_places(a: FusedQkvArguments) -> dict[str, Any]:
    """Returns how the single descriptor of `qkv_projection` addresses the three weights. The result
    has the weight at the lowest address, the distances in elements to the other two weights, and
    the indices of q, k and v in the order of addresses."""
    last = a.k_weight if a.v_weight is None else a.v_weight
    weights = {"q": a.q_weight, "k": a.k_weight, "v": last}
    order = sorted(weights, key=lambda name: weights[name].data_ptr())
    first, second, third = (weights[name].data_ptr() for name in order)
    size = a.q_weight.element_size()
    return {
        "weight": weights[order[0]],
        "second_distance": (second - first) // size,
        "third_distance": (third - first) // size,
        **{f"{name}_place": order.index(name) for name in weights},
    }


def _library(
    call: FusedCall, choice: LoweringChoice, values: dict[str, Any], target: Target
) -> Part:
    a, problem, x = call.a, call.problem, call.a.x
    weights = [weight for weight in (a.q_weight, a.k_weight, a.v_weight) if weight is not None]
    operands = scaled_operands(a) if problem.multiplies_codes(target) else None
    if problem.quantization is not None and operands is None:
        assert call.rows is not None
        x = yield from dequantized_x(a)
        weights = yield from dequantized_weights(a, values, call.rows, choice.statics[1:], target)
    if operands is not None:
        made = yield from project_codes(a, operands, target)
    elif call.rows is not None:
        made = yield from project_packed(x, weights, call.rows)
    else:
        made = []
        for weight in weights:
            made.append((yield from project(x, weight)))
    q, k, v = made[0], made[1], made[2] if len(made) == 3 else None
    assert choice.epilogue is not None
    grid = epilogue_grid(call.epilogue, choice.epilogue, a.x.shape[0])
    known = call.known | input_strides(q, k, v)
    values |= {"q": q, "k": k, "v": v}
    yield launch(EPILOGUE, target, grid, values, choice.statics[0], **known)


_PARTS: dict[str, Callable[..., Part]] = {
    "dots": _swapped,
    "swapped": _swapped,
    "tiled": _tiled,
    "library": _library,
}
