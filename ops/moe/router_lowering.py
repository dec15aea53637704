"""The CUDA lowering of `moe_router`: one launch for a few tokens, product and choice for many."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.moe.router_plan import router_config, uses_library
from tilewright.codegen.moe.router_specs import (
    RouterConfig,
    RouterProblem,
    choose_grid,
    choose_spec,
    parts_size,
    router_grid,
    router_spec,
    token_tiles,
)
from tilewright.codegen.operand import Operand
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.moe.router import MoeRouterArguments, fake
from tilewright.ops.moe.router_operands import router_problem
from tilewright.ops.runtime.products import linear
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, SplitK, Step, Steps

_plan = cache(router_config)
_router_spec = cache(router_spec)
_choose_spec = cache(choose_spec)


def moe_router_steps(
    a: MoeRouterArguments, target: Target, config: RouterConfig | None = None
) -> Steps:
    """The steps of a call. config: in place of the planner's."""
    problem, num_tokens = router_problem(a), a.x.shape[0]
    weights, ids = fake(a)
    results = ((yield Buffer.like(weights)), (yield Buffer.like(ids)))
    if num_tokens == 0:
        return Outcome(results, "nothing", "no tokens, nothing is launched")
    covered = next_power_of_2(num_tokens)
    library = config is None and uses_library(problem, covered)
    config = config or _plan(problem, covered, target)
    values = {
        "bias_ptr": a.bias,
        "correction_ptr": a.correction,
        "weights_ptr": results[0],
        "ids_ptr": results[1],
        "num_tokens": num_tokens,
    }
    if a.weight is None:
        yield from _choose(problem, config, target, values | {"logits_ptr": a.x})
        return Outcome(results, "choice kernel", "logits are given")
    if library:
        logits = yield from _library_logits(a.x, a.weight)
        given = _of_logits(problem)
        yield from _choose(given, config, target, values | {"logits_ptr": logits})
        return Outcome(results, "library GEMM, choice kernel", "fp32 numbers of many tokens")
    tiles = token_tiles(config, num_tokens)
    workspace, counters = yield SplitK(tiles, parts_size(problem, config))
    spec = _router_spec(problem, config, target.name)
    product = {
        "x_ptr": a.x,
        "weight_ptr": a.weight,
        "workspace_ptr": workspace,
        "counters_ptr": counters,
    }
    yield Launch(spec, router_grid(problem, config, num_tokens), values | product)
    if not config.chooses:
        yield from _choose(problem, config, target, values | {"logits_ptr": workspace})
    return Outcome(results, "router kernel", config)


def _choose(
    problem: RouterProblem, config: RouterConfig, target: Target, values: dict[str, Any]
) -> Generator[Step, Any, None]:
    spec: KernelSpec = _choose_spec(problem, config, target.name)
    yield Launch(spec, choose_grid(config, values["num_tokens"]), values)


@cache
def _of_logits(problem: RouterProblem) -> RouterProblem:
    """The choice alone, of fp32 logits that follow each other."""
    return replace(problem, x=Operand("fp32", (problem.num_experts,)), weight=None)


def _library_logits(x: torch.Tensor, weight: torch.Tensor) -> Generator[Step, Any, torch.Tensor]:
    """x @ weight^T of fp32 numbers, as the graph has it."""
    wide = []
    for tensor in (x, weight):
        if tensor.dtype != torch.float32:
            copy = yield Buffer(tensor.shape, torch.float32)
            yield Library(torch.Tensor.copy_, (copy, tensor))
            tensor = copy
        wide.append(tensor)
    return (yield from linear(*wide))
