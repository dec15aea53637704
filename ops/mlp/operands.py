"""Converts the arguments of linears to the static problem of their kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import INT32_MAX
from tilewright.codegen.mlp.problem import LinearProblem, codes_obstacle
from tilewright.codegen.operand import ALIGNMENT
from tilewright.ops.checks import given
from tilewright.ops.formats.code_operands import code_words, quantization_of, scales_fill_words
from tilewright.ops.formats.weight import Weight
from tilewright.ops.mlp.arguments import (
    LinearActivationArguments,
    LinearArguments,
    LinearResidualArguments,
    ScaledLinearArguments,
)
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.norms import row_norm_of
from tilewright.ops.runtime.scaled_products import ScaledOperands


def activation_unsupported(a: LinearActivationArguments) -> str | None:
    """Returns why no kernel can compute a call of `linear_activation`; None if a kernel can. Reads
    only metadata."""
    if a.rms_norm and a.x.dtype == torch.float16:
        return "float16 may overflow: the kernel normalises after the product"
    return residual_unsupported(a)


def residual_unsupported(a: LinearArguments) -> str | None:
    """Returns why no kernel can compute a call of `linear_residual`; None if a kernel can. Reads
    only metadata."""
    if a.x.shape[1] == 0:
        return "x has no columns"
    obstacle = _far if a.linear.is_coded else _scattered
    found = (obstacle(weight) for weight in a.weights if weight is not None)
    first = next((one for one in found if one is not None), None)
    return _codes_obstacle(a) if first is None and a.linear.is_coded else first


def _codes_obstacle(a: LinearArguments) -> str | None:
    """Returns why no kernel can read these codes; None if a kernel can. This assumes that bytes of
    nibbles are aligned, so that they can be read as 32-bit words."""
    found = quantization_of(a.weights, a.weight.dtype)
    words = found.format.packed_axis == -1 and scales_fill_words(a.weights)
    per_word = 8 if words else found.per_word
    return codes_obstacle(replace(found, per_word=per_word), a.x.shape[1])


def _far(weight: Weight) -> str | None:
    """Returns why a kernel cannot address the columns of a weight; None if it can."""
    if weight.data.stride(1) * weight.data.shape[1] <= INT32_MAX:
        return None
    return f"{weight.named('data')}: the offsets of columns do not fit into 32 bits"


def _scattered(weight: Weight) -> str | None:
    """Returns why a weight cannot be loaded 16 bytes at a time; None if it can."""
    name, strides = weight.named("data"), weight.data.stride()
    row, column = strides
    if column != 1 and row != 1:
        return f"{name}: with strides {strides}, neither rows nor columns are contiguous"
    if (row if column == 1 else column) * weight.data.element_size() % ALIGNMENT:
        return f"{name}: strides {strides} are not multiples of {ALIGNMENT} bytes"
    return _far(weight) if column != 1 else None


def scaled_operands(a: ScaledLinearArguments) -> ScaledOperands:
    """Returns the operands with which the library computes a call of `scaled_linear`."""
    return ScaledOperands(a.x, a.x_scale, a.weight, a.weight_scale, a.scale_block)


def activation_problem(a: LinearActivationArguments) -> LinearProblem:
    """Returns the problem of a call of `linear_activation`. Reads only metadata and addresses."""
    gated = a.up_weight is not None
    return _problem(a, gated=gated, norm=row_norm_of(a.norm), activation=a.activation)


def residual_problem(a: LinearResidualArguments) -> LinearProblem:
    """Returns the problem of a call of `linear_residual`. Reads only metadata and addresses."""
    return _problem(a, gated=False, scale=a.scale, post_norm=row_norm_of(a.norm))


def _problem(a: LinearArguments, **options: Any) -> LinearProblem:
    words, quantization, (n, k) = a.weight, None, a.weight.shape
    if a.weight_format != "dense":
        weights = a.weights
        words = given(code_words(weights)[0])
        quantization, (n, k) = quantization_of(weights, words.dtype), weights[0].shape
    dtype, k_major = TRITON_TYPES[words.dtype], words.stride(1) == 1
    return LinearProblem(n, k, dtype, k_major=k_major, quantization=quantization, **options)
