"""The steps of linears: one kernel for few tokens, the library's GEMM for more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.mlp.plan import linear_config, most_tokens, takes_norm
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.mlp.specs import (
    CODE_NAMES,
    LinearConfig,
    activate_grid,
    activate_spec,
    linear_grid,
    linear_spec,
    norm_rows_spec,
    workspace_elements,
)
from tilewright.codegen.targets import Target
from tilewright.ops.mlp.arguments import (
    LinearActivationArguments,
    LinearArguments,
    LinearResidualArguments,
)
from tilewright.ops.mlp.operands import activation_problem, kernel_weights, residual_problem
from tilewright.ops.runtime.norms import normed, without_norm
from tilewright.ops.runtime.products import linear
from tilewright.ops.runtime.program import (
    Buffer,
    Launch,
    Library,
    Outcome,
    SplitK,
    Steps,
    chooser,
)

_TENSORS = ("x", "norm_weight", "norm_bias", *CODE_NAMES, "bias", "up_bias", "residual")


# The arguments that kernels take, by parameter name.
_POINTERS = {f"{name}_ptr": name for name in _TENSORS}
_chosen = chooser(linear_config, linear_spec)


def linear_activation_steps(
    a: LinearActivationArguments, target: Target, config: LinearConfig | None = None
) -> Steps:
    """The steps of a call. config: the tiles; None: what the plan chooses."""
    problem = activation_problem(a)
    if config is None and problem.norm is not None and not _norms_x(problem, a.x.shape[0]):
        x = yield from normed(a.x, a.norm)
        a = replace(a, **without_norm(x, a.norm))
        problem = activation_problem(a)
    if config is None and _are_many(problem, a.x.shape[0]):
        return (yield from _activation_by_library(problem, a, target))
    return (yield from _streamed(problem, a, target, config))


def linear_residual_steps(
    a: LinearResidualArguments, target: Target, config: LinearConfig | None = None
) -> Steps:
    """The steps of a call. config: the tiles; None: what the plan chooses."""
    problem = residual_problem(a)
    if config is None and _are_many(problem, a.x.shape[0]):
        return (yield from _residual_by_library(a))
    return (yield from _streamed(problem, a, target, config))


def _norms_x(problem: LinearProblem, num_tokens: int) -> bool:
    """Whether the kernel norms x itself, where that is the faster way."""
    assert problem.norm is not None
    return not _are_many(problem, num_tokens) and takes_norm(
        problem.norm.kind, num_tokens, problem.k
    )


def _are_many(problem: LinearProblem, num_tokens: int) -> bool:
    """Whether the library's GEMM is the faster one; of codes it would want the numbers first, and
    round before a norm."""
    alone = problem.quantization is None and problem.post_norm is None
    return alone and num_tokens > most_tokens(problem.num_weights)


def _streamed(
    problem: LinearProblem, a: LinearArguments, target: Target, config: LinearConfig | None
) -> Steps:
    num_tokens = a.x.shape[0]
    config, spec = _chosen(problem, next_power_of_2(num_tokens), target, config=config)
    behind = problem.post_norm is not None
    out = yield Buffer((num_tokens, problem.n), torch.float32 if behind else a.x.dtype)
    given = vars(a)
    values: dict[str, Any] = {pointer: given.get(name) for pointer, name in _POINTERS.items()}
    values["weight_ptr"], values["up_weight_ptr"] = kernel_weights(a)
    values |= {"out_ptr": out, "num_tokens": num_tokens}
    grid = linear_grid(problem, config, num_tokens)
    if config.split_k > 1:
        tiles = grid[0] // config.split_k * grid[1]
        scratch = yield SplitK(tiles, workspace_elements(problem, config))
        values["workspace_ptr"], values["counters_ptr"] = scratch
    yield Launch(spec, grid, values)
    if behind:
        made, out = out, (yield Buffer((num_tokens, problem.n), a.x.dtype))
        rows = values | {"made_ptr": made, "out_ptr": out}
        yield Launch(norm_rows_spec(problem, target.name), (num_tokens,), rows)
    return Outcome(out, "streaming kernel", config)


# --- many tokens ----------------------------------------------------------------------------------

_MANY = "many tokens: the library's GEMM"


def _residual_by_library(a: LinearResidualArguments) -> Steps:
    """The GEMM adds to the residual what it has summed."""
    start = a.residual
    if a.bias is not None:
        start = yield Buffer.like(a.residual)
        yield Library(partial(_add_scaled, scale=a.scale), (start, a.residual, a.bias))
    out = yield Buffer.like(a.residual)
    yield Library(partial(_add_product, scale=a.scale), (out, start, a.x, a.weight))
    return Outcome(out, "library", _MANY)


def _activation_by_library(
    problem: LinearProblem, a: LinearActivationArguments, target: Target
) -> Steps:
    out = yield from linear(a.x, a.weight, a.bias)
    up = None
    if a.up_weight is not None:
        up = yield from linear(a.x, a.up_weight, a.up_bias)
    values = {"gate_ptr": out, "up_ptr": up, "out_ptr": out, "num_elements": out.numel()}
    spec = activate_spec(problem, target.name)
    yield Launch(spec, activate_grid(out.numel()), values)
    return Outcome(out, "library", _MANY)


def _add_scaled(out: torch.Tensor, start: torch.Tensor, bias: torch.Tensor, scale: float) -> None:
    torch.add(start, bias, alpha=scale, out=out)


def _add_product(
    out: torch.Tensor, start: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: float
) -> None:
    torch.addmm(start, x, weight.t(), alpha=scale, out=out)
