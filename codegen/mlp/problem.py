"""The static part of a linear for few tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES
from tilewright.codegen.formats import Quantization
from tilewright.codegen.row_norm import RowNorm


@dataclass(frozen=True)
class LinearProblem:
    """The static part of out [T, n] = residual + scale * activation(norm(x) @ weight^T + bias) *
    (norm(x) @ up_weight^T + up_bias).

    weight: dtype of the stored weight; that of the stored words with a quantization. gated: whether
    there is an up weight. k_major: whether K is the contiguous dimension of the weights.
    activation: its name, "" for none. post_norm: the norm of the product, applied before it is
    multiplied by the scale and added to the residual.
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
        """Bytes of one number of a weight in shared memory."""
        q = self.quantization
        return ELEMENT_BYTES[self.weight] if q is None else q.staged_bytes


def codes_obstacle(q: Quantization, columns: int) -> str | None:
    """Returns why `streamed_linear` cannot take weights with this many columns; None if it can."""
    if q.differs:
        return q.differs
    if not q.known_order:
        return f"nibbles in the order {list(q.order)}"
    if code_step(q, columns) == 0:
        return f"scales of {q.block[1]} columns"
    return None


def code_step(q: Quantization, columns: int, most: int = 128) -> int:
    """Returns the columns of a step over codes, up to `most`; 0 if no step covers whole scales."""
    longest = q.longest_step(columns)
    longer = (most,) if longest == 128 and columns >= most else ()
    return next((size for size in (*longer, longest, 64, 32) if q.step_fits(columns, size)), 0)
