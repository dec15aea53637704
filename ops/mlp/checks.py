"""What the arguments of linears have in common, and their checks."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.checks import (
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_rows(op: str, argument: str, tensor: torch.Tensor, letters: str, sizes: Any) -> None:
    """Checks x or what is like it. Raises ArgumentError."""
    check_shape(op, argument, tensor, letters, sizes)
    check_last_dim_dense(op, argument, tensor)


def check_weight(
    op: str, argument: str, x: torch.Tensor, weight: torch.Tensor, num_rows: Any = None
) -> None:
    """Checks a weight [N, K] of x [T, K], of any strides. Raises ArgumentError."""
    check_shape(op, argument, weight, "[N, K]", (num_rows, x.shape[1]))
    check_dtype(op, argument, weight, (x.dtype,))
    check_device(op, argument, weight, x.device)


def check_vector(
    op: str, argument: str, x: torch.Tensor, vector: torch.Tensor | None, letters: str, size: Any
) -> None:
    """Checks a bias or a norm's weight, where there is one. Raises ArgumentError."""
    if vector is None:
        return
    check_shape(op, argument, vector, letters, (size,))
    check_dtype(op, argument, vector, (x.dtype, torch.float32))
    check_device(op, argument, vector, x.device)
