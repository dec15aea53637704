"""Linears for few tokens as plain data: what is static about one call site."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES
from tilewright.codegen.formats import Quantization
from tilewright.codegen.row_norm import RowNorm


@dataclass(frozen=True)
class LinearProblem:
    """out [T, n] = residual + scale * activation(norm(x) @ weight^T + bias) * (norm(x) @
    up_weight^T + up_bias).

    weight: dtype of what is stored, which is words where there is a quantization. gated: there is
    an up weight. k_major: K is the contiguous dimension of the weights. activation "": none.
    post_norm: of what is multiplied by the scale and added to the residual.
    """

    n: int
    k: int
    weight: str
    gated: bool
    k_major: bool
    norm: RowNorm | None = None
    activation: str = ""
    scale: float = 1.0
    quantization: Quantization | None = None
    post_norm: RowNorm | None = None

    @property
    def num_weights(self) -> int:
        return 2 if self.gated else 1

    @property
    def weight_bytes(self) -> float:
        """Bytes that one number of a weight takes in shared memory."""
        q = self.quantization
        return ELEMENT_BYTES[self.weight] if q is None else q.staged_bytes


def codes_obstacle(q: Quantization, columns: int) -> str | None:
    """Why `streamed_linear` cannot take weights of so many columns; None when it can."""
    if q.differs:
        return q.differs
    if not q.known_order:
        return f"nibbles in the order {list(q.order)}"
    if code_step(q, columns) == 0:
        return f"scales of {q.block[1]} columns"
    return None


def code_step(q: Quantization, columns: int, most: int = 128) -> int:
    """The columns of a step over codes, up to `most`; 0 where none meets whole scales."""
    longest = q.longest_step(columns)
    longer = (most,) if longest == 128 and columns >= most else ()
    return next((size for size in (*longer, longest, 64, 32) if q.step_fits(columns, size)), 0)
