"""Linears for few tokens as plain data: what is static about one call site."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES
from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand
from tilewright.codegen.row_norm import RowNorm


@dataclass(frozen=True)
class LinearProblem:
    """out [T, n] = residual + scale * activation(norm(x) @ weight^T + bias) * (norm(x) @
    up_weight^T + up_bias).

    x: [T, k], strides (token,). weight, up_weight: [n, k], strides (row, column); up_weight None:
    not gated. Biases: strides (row,). residual: [T, n], strides (token,). activation "": none.
    quantization: of weights of codes, whose strides count stored words. post_norm: of what is
    multiplied by the scale and added to the residual.
    """

    n: int
    k: int
    x: Operand
    weight: Operand
    up_weight: Operand | None = None
    bias: Operand | None = None
    up_bias: Operand | None = None
    norm: RowNorm | None = None
    residual: Operand | None = None
    activation: str = ""
    scale: float = 1.0
    quantization: Quantization | None = None
    post_norm: RowNorm | None = None

    @property
    def num_weights(self) -> int:
        return 1 if self.up_weight is None else 2

    @property
    def weight_bytes(self) -> float:
        """Of one number of a weight."""
        q = self.quantization
        return ELEMENT_BYTES[self.weight.dtype] if q is None else q.code_bytes

    @property
    def k_major(self) -> bool:
        """Whether K is the contiguous dimension of the weights."""
        return self.weight.strides[1] == 1


def codes_obstacle(q: Quantization, columns: int) -> str | None:
    """Why `streamed_linear` cannot take weights of so many columns; None when it can."""
    if q.differs:
        return q.differs
    if not q.known_order:
        return f"nibbles in the order {list(q.order)}"
    if code_step(q, columns) == 0:
        return f"scales of {q.block[1]} columns"
    return None


def code_step(q: Quantization, columns: int) -> int:
    """The columns of a step over codes, up to 128; 0 where none meets whole scales."""
    longest = q.longest_step(columns)
    return next((size for size in (longest, 64, 32) if q.step_fits(columns, size)), 0)
