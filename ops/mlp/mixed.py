"""The steps of linears with many tokens and quantised weights: products that decode the weights."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.formats import Quantization
from tilewright.codegen.mlp.mixed import (
    MIXED,
    MixedConfig,
    mixed_config,
    mixed_obstacle,
    mixed_statics,
    pair_config,
    workspace,
)
from tilewright.codegen.mlp.plan import MOST_CODED_TOKENS
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.operand import ALIGNMENT
from tilewright.codegen.targets import Target
from tilewright.ops.checks import given
from tilewright.ops.formats.code_operands import fills_words
from tilewright.ops.mlp.arguments import (
    LinearActivationArguments,
    LinearArguments,
    LinearResidualArguments,
    Weight,
)
from tilewright.ops.mlp.operands import activation_problem, residual_problem
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.norms import without_norm
from tilewright.ops.runtime.operands import tma_reaches
from tilewright.ops.runtime.program import Buffer, SplitK, Step

#: The names of the kernel's parameters for the tensors of a second weight.
UP_TENSORS = ("up_weight", "up_scale", "up_zero", "up_factor", "up_bias")


def decodes_many(a: LinearArguments, target: Target) -> bool:
    """Whether the op computes a call with products that decode the weights. The op does so if the
    call has too many tokens for the kernels for few tokens, and if such products exist for the
    call. Reads only metadata and addresses."""
    if a.weight_format == "dense" or a.x.shape[0] <= MOST_CODED_TOKENS:
        return False
    return decoding_obstacle(a, target) is None


def decoding_obstacle(a: LinearArguments, target: Target) -> str | None:
    """Returns why no product can decode the weights of a call; None if one can. The norm of x is
    ignored, because a separate step computes it. Reads only metadata and addresses."""
    problem = _problem(a)
    if (obstacle := mixed_obstacle(problem, TRITON_TYPES[a.x.dtype], target)) is not None:
        return obstacle
    found = {"x": _is_reached(a.x)}
    if isinstance(a, LinearResidualArguments):
        found["residual"] = _is_reached(a.residual)
    for weight in a.weights:
        if weight is not None:
            found[weight.named("data")] = fills_words(weight.data) and _is_reached(weight.data)
    far = [name for name, is_reached in found.items() if not is_reached]
    return f"the strides of {far[0]} are not multiples of {ALIGNMENT} bytes" if far else None


def quantization_of_call(a: LinearArguments) -> Quantization:
    """Returns the static facts about the quantised weights of a call. Reads only metadata and
    addresses."""
    found = _problem(a).quantization
    assert found is not None
    return found


def _problem(a: LinearArguments) -> LinearProblem:
    """Returns the problem of a call, without a norm of x."""
    if isinstance(a, LinearActivationArguments):
        return activation_problem(replace(a, **without_norm(a.x, a.norm)))
    assert isinstance(a, LinearResidualArguments)
    return residual_problem(a)


def _is_reached(tensor: torch.Tensor) -> bool:
    return tensor.stride(1) == 1 and tma_reaches(tensor, tensor.stride(0))


def decoding_product(
    problem: LinearProblem, a: LinearArguments, index: int, target: Target, activation: str = ""
) -> Generator[Step, Any, tuple[torch.Tensor, MixedConfig]]:
    """Returns the product of x with the weight a.weights[index], and the tile sizes of the kernel.
    The product includes the bias, the activation and the residual."""
    config = mixed_config(problem.n, problem.k, a.x.shape[0], target)
    values = _tensors(a.weights[index])
    return (yield from _decoded(problem, a, values, index, target, config, activation))


def decoding_pair(
    problem: LinearProblem, a: LinearActivationArguments, target: Target
) -> Generator[Step, Any, tuple[torch.Tensor, MixedConfig] | None]:
    """Computes act(x @ gate^T) * (x @ up^T) in one kernel, for the weights gate and up. Returns the
    result and the tile sizes of the kernel. Returns None if two products are
    faster or if the weights differ in their layout."""
    config = pair_config(problem.n, problem.k, a.x.shape[0], target)
    if config is None or not _is_pair(problem, a):
        return None
    values = _tensors(a.weights[0]) | _tensors(a.weights[1], "up_")
    return (yield from _decoded(problem, a, values, 0, target, config, problem.activation))


def _is_pair(problem: LinearProblem, a: LinearActivationArguments) -> bool:
    """Whether the same constants describe both weights of a call."""
    first, second = (
        {name: None if t is None else (t.dtype, t.stride()) for name, t in _tensors(weight).items()}
        for weight in a.weights
    )
    q = problem.quantization
    return q is not None and q.block_strides(0) == q.block_strides(1) and first == second


def _tensors(weight: Weight | None, prefix: str = "") -> dict[str, torch.Tensor | None]:
    """Returns the tensors of a weight by the names of the kernel's parameters. prefix: what these
    names begin with."""
    assert weight is not None
    found = {
        "weight": weight.data,
        "scale": weight.scale,
        "zero": weight.zero,
        "factor": weight.factor,
        "bias": weight.bias,
    }
    return {f"{prefix}{name}": tensor for name, tensor in found.items()}


def _decoded(
    problem: LinearProblem,
    a: LinearArguments,
    weights: dict[str, torch.Tensor | None],
    index: int,
    target: Target,
    config: MixedConfig,
    activation: str,
) -> Generator[Step, Any, tuple[torch.Tensor, MixedConfig]]:
    """Launches the kernel for the weight number `index`, or for both weights if `weights` has the
    tensors of both."""
    num_tokens = a.x.shape[0]
    stored = TRITON_TYPES[given(weights["weight"]).dtype]
    out = yield Buffer((num_tokens, problem.n), a.x.dtype)
    residual = a.residual if isinstance(a, LinearResidualArguments) else None
    values = dict.fromkeys(UP_TENSORS) | weights
    for name in ("weight", "up_weight"):
        if (words := values[name]) is not None:
            values[name] = words.view(torch.int32)
    values |= {"x": a.x, "residual": residual, "out": out, "num_tokens": num_tokens}
    values |= {"workspace": None, "counters": None}
    if config.split:
        values["workspace"], values["counters"] = yield SplitK(*workspace(config))
    has_residual = residual is not None
    statics = mixed_statics(problem, config, index, stored, activation, has_residual)
    yield launch(MIXED, target, (config.programs,), values, statics)
    return out, config
