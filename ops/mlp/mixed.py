"""The steps of linears with many tokens and weights of codes: products that decode the weights."""

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
    workspace,
)
from tilewright.codegen.mlp.plan import MOST_CODED_TOKENS
from tilewright.codegen.mlp.problem import LinearProblem
from tilewright.codegen.operand import ALIGNMENT
from tilewright.codegen.targets import Target
from tilewright.ops.formats.code_operands import fills_words
from tilewright.ops.mlp.arguments import (
    LinearActivationArguments,
    LinearArguments,
    LinearResidualArguments,
)
from tilewright.ops.mlp.operands import activation_problem, residual_problem
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.norms import without_norm
from tilewright.ops.runtime.operands import tma_reaches
from tilewright.ops.runtime.program import Buffer, SplitK, Step


def decodes_many(a: LinearArguments, target: Target) -> bool:
    """Whether a call has so many tokens that products which decode the weights should compute it,
    and such products exist. Reads metadata and addresses only."""
    if a.weight_format == "dense" or a.x.shape[0] <= MOST_CODED_TOKENS:
        return False
    return decoding_obstacle(a, target) is None


def decoding_obstacle(a: LinearArguments, target: Target) -> str | None:
    """Returns why no product decodes the weights of a call; None if one does. A separate step
    computes the norm of x. Reads metadata and addresses only."""
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
    return f"{far[0]}: rows that are not whole {ALIGNMENT} bytes" if far else None


def quantization_of_call(a: LinearArguments) -> Quantization:
    """Returns the static facts about the codes of a call. Reads metadata and addresses only."""
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
    problem: LinearProblem, a: LinearArguments, index: int, target: Target
) -> Generator[Step, Any, tuple[torch.Tensor, MixedConfig]]:
    """Returns the product by the index-th weight, with its bias and the residual, and its tiles."""
    weight = a.weights[index]
    assert weight is not None
    num_tokens = a.x.shape[0]
    config = mixed_config(problem.n, problem.k, num_tokens, target)
    stored = TRITON_TYPES[weight.data.dtype]
    out = yield Buffer((num_tokens, problem.n), a.x.dtype)
    residual = a.residual if isinstance(a, LinearResidualArguments) else None
    values = {
        "x": a.x,
        "weight": weight.data.view(torch.int32),
        "scale": weight.scale,
        "zero": weight.zero,
        "factor": weight.factor,
        "bias": weight.bias,
        "residual": residual,
        "out": out,
        "workspace": None,
        "counters": None,
        "num_tokens": num_tokens,
    }
    if config.split:
        values["workspace"], values["counters"] = yield SplitK(*workspace(config))
    statics = mixed_statics(problem, config, index, stored)
    yield launch(MIXED, target, (config.programs,), values, statics)
    return out, config
