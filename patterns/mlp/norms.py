"""Finds norms that no op supports, either in front of a linear for few tokens, or between such a
linear and the sum after it."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.language import Missed, Stage, miss_at
from tilewright.patterns.mlp.linears import FewTokens, bare_product, match_few_tokens, weighed
from tilewright.patterns.recognise.activation import match_activation
from tilewright.patterns.recognise.dtypes import dtype_name
from tilewright.patterns.recognise.norm import Norm, norm_of
from tilewright.patterns.recognise.row_norm import rms_norm_of, row_norm_of


def norms_before(linear: FewTokens) -> Iterator[Missed]:
    """Yields a miss for the norm that a linear reads, if no op supports this norm because it is
    gated or normalises parts of rows."""
    normed = linear.x.value
    norm = norm_of(normed.whole)
    described = None if norm is None else _described(norm)
    if described is not None and row_norm_of(normed.whole) is None:
        message = f"{linear.product} reads {described}"
        yield Missed(miss_at("NORM_FORM", Stage.ACTIVATION, message, normed), (normed,))


def norms_between(end: Value) -> Iterator[Missed]:
    """Yields the misses for norms between an addition and the linears that it adds."""
    for side in end.operands:
        norm = norm_of(weighed(side)[0]) if side.shape == end.shape else None
        product = None if norm is None else bare_product(norm.x.value)
        if norm is None or product is None:
            continue
        linear = match_few_tokens(product.whole)
        if linear is not None and effects.product(product.shape) == effects.product(end.shape):
            between = _described_between(norm, side, product.shape[-1])
            message = f"{between} is between {linear.product} and the sum after it"
            miss = miss_at("SUM_PATH", Stage.ACTIVATION, message, linear.product)
            yield Missed(miss, products=(linear.product,))


def _described(norm: Norm) -> str | None:
    """Returns a description of a norm in front of a linear. Returns None for a plain norm of whole
    rows."""
    kind = "an RMS norm" if norm.kind == "rms" else "a layer norm"
    gated = match_activation(norm.x)
    of = "" if gated is None or gated.up is None else " of a product that is gated"
    if norm.width != norm.x.shape[-1]:
        return f"{kind}{of}, {norm.width} columns at a time"
    return f"{kind}{of}, in {dtype_name(norm.x.value.dtype)}" if of else None


def _described_between(norm: Norm, side: View, columns: Size) -> str:
    if norm.kind == "layer":
        return "a layer norm"
    if norm.width != columns:
        return f"an RMS norm of {norm.width} columns at a time"
    whole = rms_norm_of(weighed(side)[0]) is not None
    return "an RMS norm with other readers" if whole else "an RMS norm of another form"
