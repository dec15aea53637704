"""A sum over ranks and what follows it as plain data: what is static about one call site."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.operand import Operand


@dataclass(frozen=True)
class ReduceProblem:
    """summed [T, n] = residual + the sum over ranks of x; normed = summed / rms(summed) *
    (norm_offset + norm_weight).

    x, residual: [T, n], strides (token,). norm_weight: [n], strides (column,); None for none.
    num_ranks: 1 where x is the sum already.
    """

    n: int
    num_ranks: int
    x: Operand
    residual: Operand
    norm_weight: Operand | None
    norm_eps: float
    norm_offset: float
