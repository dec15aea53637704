"""A norm between a linear for few tokens and the sum behind it, in a form that no op takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import InexpressibleError, Size
from tilewright.patterns.language import Reject, Stage, register_code, reject
from tilewright.patterns.mlp.linears import bare_product, match_few_tokens, weighed
from tilewright.patterns.recognise.norm import Norm, match_norm
from tilewright.patterns.recognise.row_norm import rms_norm_of

register_code(
    "SUM_PATH",
    "between a linear for few tokens and the sum behind it stands a norm that the op does not take",
    "advice",
)


@dataclass(frozen=True)
class Between:
    """A linear for few tokens, and the norm that stands between it and a sum, for people."""

    product: Value
    norm: str

    def refuse(self) -> NoReturn:
        """Ends the attempt: SUM_PATH."""
        message = f"{self.norm} stands between {self.product} and the sum behind it"
        reject("SUM_PATH", Stage.ACTIVATION, message, self.product)


def norms_between(end: Value) -> Iterator[Between]:
    """What stands between the sides of a sum and their linears, where that is a norm."""
    if end.op != "aten.add":
        return
    for side in end.operands:
        norm = _norm_of(side) if side.shape == end.shape else None
        product = None if norm is None else bare_product(norm.x.value)
        if norm is None or product is None:
            continue
        linear = match_few_tokens(product.whole)
        if linear is not None and effects.product(product.shape) == effects.product(end.shape):
            yield Between(linear.product, _described(norm, side, product.shape[-1]))


def _norm_of(side: View) -> Norm | None:
    """The norm that one side of a sum is, but for casts and a number."""
    try:
        return match_norm(weighed(side)[0], Stage.ACTIVATION, biased=True)
    except (Reject, InexpressibleError):
        return None


def _described(norm: Norm, side: View, columns: Size) -> str:
    if norm.kind == "layer":
        return "a layer norm"
    if norm.width != columns:
        return f"an RMS norm of {norm.width} columns at a time"
    whole = rms_norm_of(weighed(side)[0]) is not None
    return "an RMS norm that others read, too," if whole else "an RMS norm of another form"
