"""A norm, gated or of parts of rows, that linears for few tokens read and that no op takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from tilewright.patterns.dataflow import Value
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Reject, Stage, as_advice, register_code, reject
from tilewright.patterns.mlp.linears import FewTokens
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.dtypes import dtype_name
from tilewright.patterns.recognise.norm import Norm, match_norm
from tilewright.patterns.recognise.row_norm import row_norm_of

register_code(
    "NORM_FORM", "a linear for few tokens reads a norm in a form that no op takes", "advice"
)


@dataclass(frozen=True)
class NormBefore:
    """An anchor for a miss. stores: the norm's result. what: the norm and its reader, for
    people."""

    stores: tuple[Value]
    what: str

    def refuse(self) -> NoReturn:
        """Ends the attempt: NORM_FORM."""
        with as_advice(self.stores[0]):
            reject("NORM_FORM", Stage.ACTIVATION, self.what, self.stores[0])


def norms_before(linear: FewTokens) -> Iterator[NormBefore]:
    """The norm that a linear reads, where no op has one like it."""
    normed = linear.x.value
    try:
        norm = match_norm(normed.whole, Stage.ACTIVATION, biased=True)
    except (Reject, InexpressibleError):
        return
    described = None if norm is None else _described(norm)
    if described is not None and row_norm_of(normed.whole) is None:
        yield NormBefore((normed,), f"{linear.product} reads {described}")


def _described(norm: Norm) -> str | None:
    """What is said of a norm; None for a plain one of whole rows."""
    kind = "an RMS norm" if norm.kind == "rms" else "a layer norm"
    gated = match_activation(norm.x)
    of = "" if gated is None or gated.up is None else " of a product that is gated"
    if norm.width != norm.x.shape[-1]:
        return f"{kind}{of}, {norm.width} columns at a time"
    return f"{kind}{of}, in {dtype_name(norm.x.value.dtype)}" if of else None
