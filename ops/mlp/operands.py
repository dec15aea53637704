"""From the arguments of linears to a static problem of their kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import INT32_MAX
from tilewright.codegen.mlp.problem import LinearProblem, codes_obstacle
from tilewright.ops.formats.code_operands import code_words, quantization_of
from tilewright.ops.formats.weight import Weight
from tilewright.ops.mlp.arguments import (
    LinearActivationArguments,
    LinearArguments,
    LinearResidualArguments,
)
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.norms import row_norm_of
from tilewright.ops.runtime.operands import ALIGNMENT

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def activation_unsupported(a: LinearActivationArguments) -> str | None:
    """Why no kernel takes a call of `linear_activation`, from metadata; None where one does."""
    if a.rms_norm and a.x.dtype == torch.float16:
        return "float16 has no range for numbers that are normed after they are multiplied"
    return residual_unsupported(a)


def residual_unsupported(a: LinearArguments) -> str | None:
    """The same of `linear_residual`."""
    if a.x.dtype not in KERNEL_DTYPES:
        return f"no kernel for {a.x.dtype}"
    if a.x.shape[1] == 0:
        return "no inner columns"
    weights = [("weight", a.weight)]
    if isinstance(a, LinearActivationArguments) and a.up_weight is not None:
        weights.append(("up_weight", a.up_weight))
    if a.weight_format != "dense":
        far = [name for name, data in weights if _is_far(data)]
        return _TOO_FAR.format(far[0]) if far else _codes_obstacle(a)
    return next((found for one in weights if (found := _scattered(*one)) is not None), None)


def _codes_obstacle(a: LinearArguments) -> str | None:
    """Why there is no kernel for these codes. Bytes of nibbles count as the words that their
    address may make of them."""
    found = quantization_of(a.weights, a.weight.dtype)
    per_word = 8 if found.format.packed_axis == -1 else found.per_word
    return codes_obstacle(replace(found, per_word=per_word), a.x.shape[1])


def _is_far(weight: torch.Tensor) -> bool:
    return weight.stride(1) * weight.shape[1] > INT32_MAX


_TOO_FAR = "{}: columns reach further than 32 bits count"


def _scattered(name: str, weight: torch.Tensor) -> str | None:
    """Why a weight cannot be loaded 16 bytes at a time; None where it can."""
    row, column = weight.stride()
    if column != 1 and row != 1:
        return f"{name}: strides {weight.stride()} leave neither rows nor columns contiguous"
    if (row if column == 1 else column) * weight.element_size() % ALIGNMENT:
        return f"{name}: strides {weight.stride()} are not whole {ALIGNMENT} bytes"
    return _TOO_FAR.format(name) if column != 1 and _is_far(weight) else None


def activation_problem(a: LinearActivationArguments) -> LinearProblem:
    """The problem of a call. Metadata and addresses only."""
    gated = a.up_weight is not None
    return _problem(a, gated=gated, norm=row_norm_of(a.norm), activation=a.activation)


def residual_problem(a: LinearResidualArguments) -> LinearProblem:
    """The problem of a call of `linear_residual`, as `activation_problem`."""
    return _problem(a, gated=False, scale=a.scale, post_norm=row_norm_of(a.norm))


def _problem(a: LinearArguments, **options: Any) -> LinearProblem:
    coded = None if a.weight_format == "dense" else a.weights
    weight, _ = kernel_weights(a) if coded is None else _words(coded)
    n, k = weight.shape if coded is None else coded[0].shape
    dtype, k_major = TRITON_TYPES[weight.dtype], weight.stride(1) == 1
    quantization = None if coded is None else quantization_of(coded, weight.dtype)
    return LinearProblem(n, k, dtype, k_major=k_major, quantization=quantization, **options)


def kernel_weights(a: LinearArguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and the up weight as kernels read them."""
    if a.weight_format != "dense":
        return _words(a.weights)
    return a.weight, a.up_weight if isinstance(a, LinearActivationArguments) else None


def _words(weights: tuple[Weight, Weight | None]) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight, up_weight = code_words(weights)
    assert weight is not None
    return weight, up_weight
