"""The static part of a linear for few tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.codegen.arithmetic import ELEMENT_BYTES
from tilewright.codegen.formats import Quantization
from tilewright.codegen.row_norm import RowNorm


@dataclass(frozen=True)
class LinearProblem:
    """The static part of a linear, out [T, n] = residual + scale * activation(norm(x) @ weight^T +
    bias) * (norm(x) @ up_weight^T + up_bias).

    Attributes:
        n: The number of output features.
        k: The number of input features.
        weight: The dtype of the stored weight. If the weight is quantised, it is the dtype of the
            words that hold the codes.
        gated: Whether there is an up weight.
        k_major: Whether K is the contiguous dimension of the weights.
        norm: The norm of x; None if x is not normalised.
        activation: The name of the activation; "" for none.
        scale: The factor of the product.
        quantization: How the weights are quantised; None if they are not.
        post_norm: The norm of the product; None if the product is not normalised. It is applied
            before the scale and the residual.
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
        """The number of bytes that one number of a weight takes in shared memory."""
        q = self.quantization
        return ELEMENT_BYTES[self.weight] if q is None else q.staged_bytes


def codes_obstacle(q: Quantization, columns: int) -> str | None:
    """Returns why `streamed_linear` cannot compute quantised weights of this many columns; None if
    it can."""
    if q.differs:
        return q.differs
    if not q.known_order:
        return f"the nibbles are in the order {list(q.order)}"
    if code_step(q, columns) == 0:
        return f"the number of columns that share a scale is {q.block[1]}"
    return None


def code_step(q: Quantization, columns: int, most: int = 128) -> int:
    """Returns how many columns a step over codes has, at most `most`. Returns 0 if no step would
    cover whole scales."""
    longest = q.longest_step(columns)
    longer = (most,) if longest == 128 and columns >= most else ()
    return next((size for size in (*longer, longest, 64, 32) if q.step_fits(columns, size)), 0)
