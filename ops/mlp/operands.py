"""From the arguments of linears to a static problem of their kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.arithmetic import INT32_MAX
from tilewright.codegen.formats import Quantization
from tilewright.codegen.mlp.problem import LinearProblem, codes_obstacle
from tilewright.ops.formats.code_operands import Blocks, code_words, differences, quantization_of
from tilewright.ops.formats.quantized_weight import dequantize, logical_shape
from tilewright.ops.mlp.checks import BLOCKS
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.norms import row_norm_of
from tilewright.ops.runtime.operands import ALIGNMENT

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def activation_unsupported(a: Any) -> str | None:
    """Why no kernel takes a call of `linear_activation`, from metadata; None where one does."""
    if a.rms_norm and a.x.dtype == torch.float16:
        return "float16 has no range for numbers that are normed after they are multiplied"
    return _unsupported(a, ("weight", "up_weight"))


def residual_unsupported(a: Any) -> str | None:
    """The same of `linear_residual`."""
    return _unsupported(a, ("weight",))


def _unsupported(a: Any, names: tuple[str, ...]) -> str | None:
    if a.x.dtype not in KERNEL_DTYPES:
        return f"no kernel for {a.x.dtype}"
    if a.x.shape[1] == 0:
        return "no inner columns"
    weights = {name: getattr(a, name) for name in names}
    if a.weight_format != "dense":
        far = [name for name, weight in weights.items() if weight is not None and _is_far(weight)]
        return _TOO_FAR.format(far[0]) if far else _codes_obstacle(a)
    for name, weight in weights.items():
        if weight is not None and (obstacle := _scattered(name, weight)) is not None:
            return obstacle
    return None


def _codes_obstacle(a: Any) -> str | None:
    """Why there is no kernel for these codes. Bytes of nibbles count as the words that their
    address may make of them."""
    rows, columns = logical_shape(a.weight, a.weight_format)
    found = quantization_of(a, a.weight.dtype, a.weight.dtype, [])
    per_word = 8 if a.weight_format == "int4_k" else found.per_word
    kinds = differences(filter(None, _blocks(a, rows)), a.scale_block)
    return codes_obstacle(replace(found, per_word=per_word, differs=kinds), columns)


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


def activation_problem(a: Any) -> LinearProblem:
    """The problem of a call; `a` is a LinearActivationArguments. Metadata and addresses only."""
    return _problem(a, gated=a.up_weight is not None, norm=row_norm_of(a), activation=a.activation)


def residual_problem(a: Any) -> LinearProblem:
    """The problem of a call of a LinearResidualArguments, as `activation_problem`."""
    return _problem(a, gated=False, scale=a.scale, post_norm=row_norm_of(a))


def _problem(a: Any, **options: Any) -> LinearProblem:
    n, k = logical_shape(a.weight, a.weight_format)
    weight, _ = kernel_weights(a)
    dtype, k_major = TRITON_TYPES[weight.dtype], weight.stride(1) == 1
    quantization = _quantization(a, n, weight)
    return LinearProblem(n, k, dtype, k_major=k_major, quantization=quantization, **options)


def kernel_weights(a: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and the up weight as kernels read them."""
    given = [a.weight, getattr(a, "up_weight", None)]
    if a.weight_format != "dense":
        given = code_words(given, a.weight_format, a.nibble_order)
    weight, up_weight = given
    return weight, up_weight


def _quantization(a: Any, rows: int, words: torch.Tensor) -> Quantization | None:
    if a.weight_format == "dense":
        return None
    return quantization_of(a, a.weight.dtype, words.dtype, _blocks(a, rows))


def _blocks(a: Any, rows: int) -> list[Blocks | None]:
    """The scales and zeros of the weight and of the up weight."""
    there = [getattr(a, name, None) is not None for name in BLOCKS]
    return [
        Blocks(getattr(a, scale), getattr(a, zero), rows) if given else None
        for given, (scale, zero) in zip(there, BLOCKS.values(), strict=True)
    ]


def dense_weight(a: Any, name: str, compute: torch.dtype) -> torch.Tensor:
    """A weight of a call as numbers [N, K] in `compute` precision."""
    weight = getattr(a, name)
    if a.weight_format == "dense":
        return weight.to(compute)
    scale, zero = (getattr(a, of) for of in BLOCKS[name])
    code = (a.zero_point, a.scale_block, a.nibble_order, compute)
    return dequantize(weight, a.weight_format, scale, zero, *code)
