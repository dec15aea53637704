"""From the arguments of linears to a static problem of their kernel."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.arithmetic import INT32_MAX
from tilewright.codegen.mlp.problem import LinearProblem, Norm
from tilewright.ops.runtime.operands import ALIGNMENT, operand, operand_of

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
    for name in names:
        weight = getattr(a, name)
        if weight is not None and (obstacle := _scattered(name, weight)) is not None:
            return obstacle
    return None


def _scattered(name: str, weight: torch.Tensor) -> str | None:
    """Why a weight cannot be loaded 16 bytes at a time; None where it can."""
    row, column = weight.stride()
    if column != 1 and row != 1:
        return f"{name}: strides {weight.stride()} leave neither rows nor columns contiguous"
    if (row if column == 1 else column) * weight.element_size() % ALIGNMENT:
        return f"{name}: strides {weight.stride()} are not whole {ALIGNMENT} bytes"
    if column != 1 and column * weight.shape[1] > INT32_MAX:
        return f"{name}: columns reach further than 32 bits count"
    return None


def activation_problem(a: Any) -> LinearProblem:
    """The problem of a call; `a` is a LinearActivationArguments. Metadata and addresses only."""
    norm = None
    if a.rms_norm:
        norm = Norm(operand_of(a.norm_weight, 0), a.norm_eps, a.norm_offset)
    return LinearProblem(
        **_product(a),
        up_weight=operand_of(a.up_weight, 0, 1),
        up_bias=operand_of(a.up_bias, 0),
        norm=norm,
        activation=a.activation,
    )


def residual_problem(a: Any) -> LinearProblem:
    """The same of a LinearResidualArguments."""
    residual = operand(a.residual, a.residual.stride(0))
    return LinearProblem(**_product(a), residual=residual, scale=a.scale)


def _product(a: Any) -> dict[str, Any]:
    n, k = a.weight.shape
    return {
        "n": n,
        "k": k,
        "x": operand(a.x, a.x.stride(0)),
        "weight": operand(a.weight, *a.weight.stride()),
        "bias": operand_of(a.bias, 0),
    }
