"""The CUDA lowering of `moe_router`. For few tokens, one kernel computes the logits and chooses the
experts. For many tokens, there are two steps: a product, and a kernel that chooses."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from tilewright.codegen.arithmetic import cdiv, next_power_of_2
from tilewright.codegen.moe.router_kernels import (
    CHOOSE,
    ROUTER,
    RouterConfig,
    RouterProblem,
    expert_tiles,
    router_grid,
)
from tilewright.codegen.moe.router_plan import router_config, uses_library
from tilewright.codegen.targets import Target
from tilewright.ops.moe.router import MoeRouterArguments, fake, router_problem
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.products import linear
from tilewright.ops.runtime.program import Buffer, Launch, Library, Outcome, SplitK, Step, Steps

# Kernel parameters that the launch of the product does not use if another launch chooses the
# experts.
_UNCHOSEN = dict.fromkeys(("bias", "correction", "weights", "ids", "counters"))


def moe_router_steps(
    a: MoeRouterArguments, target: Target, config: RouterConfig | None = None
) -> Steps:
    """Performs the steps of a `moe_router` call. config: tile sizes to use instead of the
    planner's."""
    problem, num_tokens = router_problem(a), a.x.shape[0]
    weights, ids = fake(a)
    results = ((yield Buffer.like(weights)), (yield Buffer.like(ids)))
    if num_tokens == 0:
        return Outcome(results, "nothing", "there are no tokens, so nothing is launched")
    covered = next_power_of_2(num_tokens)
    library = config is None and uses_library(problem, covered)
    config = config or router_config(problem, covered, target)
    values = {
        "bias": a.bias,
        "correction": a.correction,
        "weights": results[0],
        "ids": results[1],
        "num_tokens": num_tokens,
    }
    strides = {
        "BIAS_STRIDE": 0 if a.bias is None else a.bias.stride(0),
        "CORRECTION_STRIDE": 0 if a.correction is None else a.correction.stride(0),
    }
    if a.weight is None:
        yield _choose(problem, config, target, values | {"logits": a.x}, strides)
        return Outcome(results, "choice kernel", "logits are given")
    if library:
        logits = yield from _library_logits(a.x, a.weight)
        yield _choose(problem, config, target, values | {"logits": logits}, strides)
        reason = "there are many tokens, and x is float32"
        return Outcome(results, "library GEMM, choice kernel", reason)
    tiles, row = expert_tiles(problem, config), expert_tiles(problem, config) * config.block_e
    part = config.splits * config.block_t * row
    workspace, counters = yield SplitK(cdiv(num_tokens, config.block_t), part)
    product = {"x": a.x, "weight": a.weight, "workspace": workspace, "counters": counters}
    yield launch(
        ROUTER,
        target,
        router_grid(problem, config, num_tokens),
        values | product | ({} if config.chooses else _UNCHOSEN),
        problem,
        config,
        EXPERT_TILES=tiles,
        STEPS=cdiv(cdiv(problem.hidden, config.block_k), config.splits),
        **strides,
    )
    if not config.chooses:
        parts = config.splits, config.block_t, row
        yield _choose(problem, config, target, values | {"logits": workspace}, strides, parts)
    return Outcome(results, "router kernel", config)


def _choose(
    problem: RouterProblem,
    config: RouterConfig,
    target: Target,
    values: dict[str, Any],
    strides: dict[str, int],
    parts: tuple[int, int, int] | None = None,
) -> Launch:
    """Returns the launch of the kernel that only chooses. parts: the number of parts into which the
    product divides K, the number of tokens of a tile of the product, and the number of elements of
    a row of partial logits; None for complete logits [T, E]."""
    splits, run, row = parts or (1, 1, values["logits"].stride(0))
    grid = (cdiv(values["num_tokens"], config.rows),)
    own = {"SPLITS": splits, "RUN": run, "ROW": row}
    return launch(CHOOSE, target, grid, values, problem, config.choice, **own, **strides)


def _library_logits(x: torch.Tensor, weight: torch.Tensor) -> Generator[Step, Any, torch.Tensor]:
    """Returns x @ weight^T in fp32, computed in the same way as in the graph."""
    wide = []
    for tensor in (x, weight):
        if tensor.dtype != torch.float32:
            copy = yield Buffer(tensor.shape, torch.float32)
            yield Library(torch.Tensor.copy_, (copy, tensor))
            tensor = copy
        wide.append(tensor)
    return (yield from linear(*wide))
