"""What the arguments of linears have in common, and their checks."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    check_device,
    check_operand,
    check_tensor,
)
from tilewright.ops.formats.weight import Weight
from tilewright.ops.mlp.arguments import LinearArguments


def check_weight(op: str, x: torch.Tensor, weight: Weight, rows: Any = None) -> None:
    """Checks a weight [N, K] of x [T, K], of any strides, numbers or codes, with its scale and
    zero, and its bias. Raises ArgumentError."""
    argument = weight.named("data")
    check_tensor(op, argument, weight.data)
    weight.check_dtype(op, x.dtype)
    weight.check_shape(op, "[N, K]", (rows, x.shape[1]))
    check_device(op, argument, weight.data, x.device)
    weight.check_blocks(op, x.device)
    if weight.bias is not None:
        dtypes = (x.dtype, torch.float32)
        check_operand(
            op, weight.named("bias"), weight.bias, "[N]", (weight.rows,), dtypes, x.device
        )


def check_linear(op: str, a: LinearArguments) -> Any:
    """Checks x [T, K], the weight and its bias, and how weights are stored. Returns N; raises
    ArgumentError."""
    check_operand(op, "x", a.x, "[T, K]", (None, None), FLOAT_DTYPES, dense=True)
    a.linear.check_format(op)
    check_weight(op, a.x, a.linear)
    return a.linear.rows
