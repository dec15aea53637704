"""Recognises norms of attention heads, or of any other value. A norm may be one fused operation or
several operations, and there may be casts between these.

The norms are RMS norms and layer norms over the last dimension. They have a weight, `1 + weight`,
or no weight. They may have a bias if the caller supports a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.constants import number_of
from tilewright.patterns.arithmetic.formula import (
    ABSENT,
    Formula,
    Found,
    aside,
    call,
    number,
    reduction,
    tensor,
)
from tilewright.patterns.dataflow import Value, View, once
from tilewright.patterns.effects import Atom, InexpressibleError
from tilewright.patterns.language import Reject, Stage, reject


@dataclass(frozen=True)
class Norm:
    """The norm (x - mean) / sqrt(mean((x - mean)²) + eps) * (offset + weight) + bias, over the last
    dimension.

    Attributes:
        kind: `layer`, or `rms`, which does not subtract the mean.
        x: The input. Its dimensions correspond to the dimensions of the result.
        weight, bias: Tensors whose dimensions correspond to the dimensions of x and have length one
            where the tensor does not vary; or None.
        offset: The number that is added to `weight`.
        factor: `offset + weight` as the graph computes it.
        eps: The epsilon of the norm.
        width: The length of the normalised dimension.
        absorbed: The values that compute the norm.
    """

    kind: str
    x: View
    weight: View | None
    offset: float
    factor: View | None
    eps: float
    width: int
    absorbed: tuple[Value, ...]
    bias: View | None = None


def match_norm(head: View, stage: Stage = Stage.K_PATH, biased: bool = False) -> Norm | None:
    """Returns the norm whose result is `head`. Returns None if `head` is not the result of a norm.

    head: the heads of a projection, or any other value. biased: whether to accept a bias. If it is
    false, a norm with a bias raises Reject (UNSUPPORTED) at `stage`.
    """
    found = _match_norm(head) if _NORM.may_match(head) else None
    if found is not None and found.bias is not None and not biased:
        reject(
            "UNSUPPORTED",
            stage,
            "the norm has a bias",
            found.absorbed[0],
            hint="a norm without a bias can be fused: use LayerNorm(bias=False) if the bias is "
            "zero",
        )
    return found


def norm_of(value: View) -> Norm | None:
    """Returns the norm whose result is `value`, with or without a bias. Returns None for every
    other value."""
    try:
        return match_norm(value, biased=True)
    except (Reject, InexpressibleError):
        return None


@once
def _match_norm(head: View) -> Norm | None:
    found: Norm | None = _NORM.match(head, lambda found: _made(found, head))
    return found


def _made(found: Found, head: View) -> Norm | None:
    """Returns the norm of a match. Returns None if the weight broadcasts the input, or if the width
    is symbolic."""
    named, rank = found.bound, len(head.shape)
    width = named["width"]
    if named["x"].shape != head.shape or not isinstance(width, (int, float)):
        return None
    weight, factor, bias = (_aligned(named.get(n), rank) for n in ("weight", "factor", "bias"))
    return Norm(
        kind=named["kind"],
        x=named["x"],
        weight=weight,
        offset=named.get("offset", 0.0),
        factor=factor,
        eps=named["eps"],
        width=int(width),
        absorbed=tuple(dict.fromkeys(found.absorbed)),
        bias=bias,
    )


def by_runs(norm: Norm) -> Norm:
    """Returns the norm with each run of `width` numbers in a separate last dimension. Returns the
    norm unchanged if its weight has no such view."""
    columns, width = norm.x.shape[-1], norm.width
    if columns == width:
        return norm
    rank = len(norm.x.shape) + 1

    def apart(vector: View | None) -> View | None:
        wide = vector and vector.reshape(*vector.shape[:-1], columns // width, width)
        return _aligned(wide, rank)

    try:
        weight, factor, bias = map(apart, (norm.weight, norm.factor, norm.bias))
        x = norm.x.reshape(*norm.x.shape[:-1], columns // width, width)
    except InexpressibleError:
        return norm
    return replace(norm, x=x, weight=weight, factor=factor, bias=bias)


@dataclass(frozen=True)
class JoinedNorms:
    """Norms of neighbouring heads, each with its own weight, whose results are joined again.

    Attributes:
        norm: One norm of all these heads, without a weight.
        weights: The weight [D] of each head, in order. It is () if the norms have no weights.
    """

    norm: Norm
    weights: tuple[View, ...]


def match_joined_norms(value: Value, stage: Stage = Stage.K_PATH) -> JoinedNorms | None:
    """Returns the norms whose results are joined by `value` along a dimension before the last one,
    or None."""
    if value.op != "aten.cat" or value.args[1] >= len(value.shape) - 1:
        return None
    pieces, axis = value.args
    norms = [match_norm(piece, stage) for piece in pieces]
    first = norms[0]
    if first is None or any(piece.shape[axis] != 1 for piece in pieces):
        return None
    step = None
    for i, norm in enumerate(norms):
        if norm is None or norm.x.value is not first.x.value or norm.offset != 0.0:
            return None
        kinds = [(n.kind, n.eps, n.width, n.weight is None) for n in (norm, first)]
        starts = zip(first.x.effect.start, norm.x.effect.start, strict=True)
        apart = [(a, y - x) for a, (x, y) in enumerate(starts) if x != y]
        if kinds[0] != kinds[1] or norm.x.effect.dims != first.x.effect.dims or len(apart) > 1:
            return None
        if i == 1:
            step = apart[0] if apart else None
        if i and (step is None or apart != [(step[0], step[1] * i)]):
            return None
    if step is None or not isinstance(step[1], int) or step[1] < 1:
        return None
    dims = list(first.x.effect.dims)
    dims[axis] = (Atom(step[0], step[1], len(norms)),)
    found = [norm for norm in norms if norm is not None]
    absorbed = (value, *(v for norm in found for v in norm.absorbed))
    whole = replace(first, x=first.x.with_dims(*dims), weight=None, factor=None, absorbed=absorbed)
    own = [n.weight.with_dims(n.weight.effect.dims[-1]) for n in found if n.weight is not None]
    plain = all(n.weight is None or not any(n.weight.effect.dims[:-1]) for n in found)
    return JoinedNorms(whole, tuple(own)) if plain else None


# --- the formulas ---------------------------------------------------------------------------------


def _given(norm: View) -> tuple[Any, ...] | None:
    """Returns (x, width, epsilon, weight, bias) of a fused norm over the last dimension; else
    None."""
    value = norm.value
    if value.kwargs.get("output", 0) != 0:
        return None  # this output of the native layer norm is the mean or the inverse root
    layer = value.op != "aten.rms_norm"
    names = ["input", "normalized_shape", "weight", *(["bias"] if layer else []), "eps"]
    given = value.named(*names)
    x, normalized, eps = given["input"], given.get("normalized_shape"), given.get("eps")
    width = x.shape[-1]
    if normalized is None or len(normalized) != 1 or not isinstance(width, int):
        return None
    run = effects.coalesce((Atom(len(value.shape) - 1, 1, width),))
    if not norm.effect.dims or norm.effect.dims[-1][-1:] != run:
        return None  # the elements of a row are not next to each other in the view
    if eps is None and layer:
        eps = 1e-5
    if eps is None:
        # PyTorch computes in float32 or a wider type, and uses the epsilon of this type.
        eps = torch.finfo(torch.promote_types(x.value.dtype, torch.float32)).eps
    return x, width, number_of(eps), given.get("weight"), given.get("bias")


def _may_be_weight(view: View) -> bool:
    """Whether a factor may be the weight of a norm. A weight is a vector or a parameter; cos and
    sin are neither."""
    dims = view.effect.dims
    varies = bool(dims) and not effects.repeats(dims[-1])
    return varies and (view.value.op == "constant" or len(dims) == 1) and not view.value.projected


def _is_uncorrected(variance: Value) -> bool:
    positional = variance.args[2] if len(variance.args) > 2 else None
    named = variance.kwargs.get("unbiased", variance.kwargs.get("correction"))
    corrected = positional if named is None else named
    return corrected is not None and corrected == 0


def _mean(of: Formula) -> Formula:
    return reduction("mean", of, "width") | reduction("sum", of, "width") / _WIDTH


def _squared(of: Formula) -> Formula:
    return call("square", of) | of**2 | of * of


def _over_root(of: Formula, radicand: Formula) -> Formula:
    root = call("sqrt", radicand) | radicand**0.5
    inverse = call("rsqrt", radicand) | radicand**-0.5 | call("reciprocal", root) | 1 / root
    return of / root | of * inverse


def _with_offset(weight: Formula) -> Formula:
    """Matches a weight, or the sum of a weight and a number. Both stay in the graph."""
    return aside((number("offset") + weight | weight).named("factor"))


_X, _EPS, _WIDTH = tensor("x"), number("eps"), number("width")
_CENTRED = _X - _mean(_X)
_VARIANCE = reduction("var", _X, "width", holds=_is_uncorrected)
_SPELLED = (
    _over_root(_CENTRED, _mean(_squared(_CENTRED)) + _EPS).giving(kind="layer")
    | _over_root(_CENTRED, _VARIANCE + _EPS).giving(kind="layer")
    | _over_root(_X, _mean(_squared(_X)) + _EPS).giving(kind="rms")
)


def _fused(weight: Formula, bias: Formula) -> Formula:
    operands = (_X, _WIDTH, _EPS, weight, bias)
    layer = call("layer_norm native_layer_norm", *operands, read=_given)
    return call("rms_norm", *operands, read=_given).giving(kind="rms") | layer.giving(kind="layer")


_FACTOR = _with_offset(tensor("weight", holds=_may_be_weight))
_ANY_FACTOR, _ANY_BIAS = _with_offset(tensor("weight")), aside(tensor("bias"))
_PLAIN = _SPELLED | _fused(ABSENT, ABSENT)
_WEIGHTED = _FACTOR * _PLAIN | _fused(_ANY_FACTOR, ABSENT)
_UNBIASED = _PLAIN | _WEIGHTED
_BIAS = aside(tensor("bias", holds=_may_be_weight))
_NORM = _UNBIASED | _fused(_ANY_FACTOR | ABSENT, _ANY_BIAS) | _BIAS + _UNBIASED


def _aligned(vector: View | None, rank: int) -> View | None:
    """Returns a weight with `rank` dimensions, which have length one where the weight does not
    vary."""
    if vector is None:
        return None
    dims = effects.once(vector.effect.dims)
    return vector.with_dims(*((),) * (rank - len(dims)), *dims)
