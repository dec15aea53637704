"""What the arguments of linears have in common, and their checks."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    check_choice,
    check_device,
    check_dtype,
    check_operand,
    check_tensor,
)
from tilewright.ops.formats.code_checks import (
    check_blocks,
    check_code_shape,
    check_format_options,
)
from tilewright.ops.formats.quantized_weight import WEIGHT_FORMATS, logical_shape

# The arguments that hold the scale and the zero of a weight of codes.
BLOCKS = {"weight": ("weight_scale", "weight_zero"), "up_weight": ("up_scale", "up_zero")}


def num_rows(a: Any) -> Any:
    """N of the weight."""
    return logical_shape(a.weight, a.weight_format)[0]


def check_weight(op: str, a: Any, argument: str, rows: Any = None) -> None:
    """Checks a weight [N, K] of x [T, K], of any strides, numbers or codes, with its scale and
    zero. Raises ArgumentError."""
    weight, stored = getattr(a, argument), WEIGHT_FORMATS.get(a.weight_format)
    check_tensor(op, argument, weight)
    check_dtype(op, argument, weight, (a.x.dtype,) if stored is None else stored.dtypes)
    check_code_shape(op, a, argument, "[N, K]", (rows, a.x.shape[1]))
    check_device(op, argument, weight, a.x.device)
    check_blocks(op, a, BLOCKS[argument], *logical_shape(weight, a.weight_format))


def check_linear(op: str, a: Any) -> Any:
    """Checks x [T, K], the weight and its bias, and how weights are stored. Returns N; raises
    ArgumentError."""
    check_operand(op, "x", a.x, "[T, K]", (None, None), FLOAT_DTYPES, dense=True)
    check_choice(op, "weight_format", a.weight_format, ("dense", *WEIGHT_FORMATS))
    check_format_options(op, a, a.weight.dtype)
    check_weight(op, a, "weight")
    rows = num_rows(a)
    check_vector(op, "bias", a.x, a.bias, "[N]", rows)
    return rows


def check_vector(
    op: str, argument: str, x: torch.Tensor, vector: torch.Tensor | None, letters: str, size: Any
) -> None:
    """Checks a bias or a norm's weight, where there is one. Raises ArgumentError."""
    if vector is None:
        return
    check_operand(op, argument, vector, letters, (size,), (x.dtype, torch.float32), x.device)
