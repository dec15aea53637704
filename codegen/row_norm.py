"""An RMS norm of rows, as a part of a problem."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.operand import Operand


@dataclass(frozen=True)
class RowNorm:
    """x / rms(x) * (offset + weight). weight: strides (column,), None for a norm without one."""

    weight: Operand | None
    eps: float
    offset: float
