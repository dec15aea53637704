"""Linears for few tokens as plain data: what is static about one call site."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.operand import Operand


@dataclass(frozen=True)
class Norm:
    """The RMS norm in front: x / rms(x) * (offset + weight). weight: strides (column,), None for a
    norm without one."""

    weight: Operand | None
    eps: float
    offset: float


@dataclass(frozen=True)
class LinearProblem:
    """out [T, n] = residual + scale * activation(norm(x) @ weight^T + bias) * (norm(x) @
    up_weight^T + up_bias).

    x: [T, k], strides (token,). weight, up_weight: [n, k], strides (row, column); up_weight None:
    not gated. Biases: strides (row,). residual: [T, n], strides (token,). activation "": none.
    """

    n: int
    k: int
    x: Operand
    weight: Operand
    up_weight: Operand | None = None
    bias: Operand | None = None
    up_bias: Operand | None = None
    norm: Norm | None = None
    residual: Operand | None = None
    activation: str = ""
    scale: float = 1.0

    @property
    def num_weights(self) -> int:
        return 1 if self.up_weight is None else 2

    @property
    def k_major(self) -> bool:
        """Whether K is the contiguous dimension of the weights."""
        return self.weight.strides[1] == 1
