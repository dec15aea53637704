"""Recognises norms, of attention heads or of any value, fused or spelled out, with or without casts
in between: RMS norms and layer norms over the last dimension, with a weight, with `1 + weight`, or
with none; with a bias where the caller can have one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.recognise.constants import given_number, number_of
from tilewright.patterns.recognise.equality import equal_values
from tilewright.patterns.recognise.steps import reduced_dims


@dataclass(frozen=True)
class Norm:
    """(x - mean) / sqrt(mean((x - mean)²) + eps) * (offset + weight) + bias, by the last dimension.

    kind: `layer`, or `rms`, which subtracts no mean. x: what is normalised, dimensions as the
    result's. weight, bias: dimensions as x's, those that they do not vary along of length one; None
    where there is none. factor: `offset + weight` as the graph computes it. width: length of the
    normalised dimension.
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


def is_float_cast(value: Value) -> bool:
    """Whether a value is a cast between floating types that fp32 arithmetic may leave out.

    A detour through eight bits is a quantisation the user asked for, and stays.
    """
    if value.op != "cast":
        return False
    types = (value.dtype, *(v.value.dtype for v in value.operands))
    return all(t.is_floating_point and t.itemsize > 1 for t in types)


def strip_casts(view: View) -> tuple[View, tuple[Value, ...]]:
    """The view before any casts between floating types, and the casts."""
    if view.value.op != "cast":
        return view, ()  # nearly all
    stripped: list[Value] = []
    while is_float_cast(view.value):
        inner = view.value.args[0]
        stripped.append(view.value)
        view = inner.through(view.effect)
    return view, tuple(stripped)


def before_widening(view: View) -> View:
    """The view before casts to wider floating types: those change no number."""
    while is_float_cast(view.value):
        inner = view.value.args[0]
        if inner.value.dtype.itemsize >= view.value.dtype.itemsize:
            break
        view = inner.through(view.effect)
    return view


def match_norm(head: View, stage: Stage = Stage.K_PATH, biased: bool = False) -> Norm | None:
    """The norm whose result is `head`, heads of a projection or any other value, or None.

    biased: it may have a bias; else Reject (UNSUPPORTED) is raised at `stage` for one that has.
    """
    found = _match_norm(head)
    if found is not None and found.bias is not None and not biased:
        reject(
            "UNSUPPORTED",
            stage,
            "the norm has a bias",
            found.absorbed[0],
            hint="norms with a weight, or with none, are fused; LayerNorm(bias=False) where it is "
            "zero",
        )
    return found


def _match_norm(head: View) -> Norm | None:
    value = head.value
    if not head.is_whole:
        return None
    if value.op in _FUSED:
        return _fused(value)
    outer, casts = strip_casts(head)
    if not outer.is_whole:
        return None  # a cast of what lies in another order, of the same shape or not
    if outer.value.op in _FUSED:
        found = _fused(outer.value)
        return None if found is None else replace(found, absorbed=(*casts, *found.absorbed))
    if outer.value.op == "aten.add" and (found := _biased(outer.value)) is not None:
        return replace(found, absorbed=(*casts, *found.absorbed))
    inner = _normalised(outer)
    if inner is not None:
        return replace(inner, absorbed=(*casts, *inner.absorbed))
    found = _weighted(outer.value)
    return None if found is None else replace(found, absorbed=(*casts, *found.absorbed))


@dataclass(frozen=True)
class JoinedNorms:
    """Norms of neighbouring heads, each with its own weight, joined again.

    norm: of all of them, without a weight. weights: [D] of each, in order; () where none has one.
    """

    norm: Norm
    weights: tuple[View, ...]


def match_joined_norms(value: Value, stage: Stage = Stage.K_PATH) -> JoinedNorms | None:
    """The norms whose results `value` joins along a dimension before the last, or None."""
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


# --- one operation --------------------------------------------------------------------------------

_FUSED = ("aten.rms_norm", "aten.layer_norm", "aten.native_layer_norm")


def _fused(value: Value) -> Norm | None:
    layer = value.op != "aten.rms_norm"
    if value.kwargs.get("output", 0) != 0:
        return None  # mean or inverse root, of the native layer norm
    names = ["input", "normalized_shape", "weight", *(["bias"] if layer else []), "eps"]
    given = dict(zip(names, value.args, strict=False)) | dict(value.kwargs)
    x, normalized = given["input"], given.get("normalized_shape")
    width = x.shape[-1]
    if normalized is None or len(normalized) != 1 or not isinstance(width, int):
        return None
    eps = given.get("eps", 1e-5 if layer else None)
    if eps is None:
        # PyTorch computes in float32 at least, and takes that type's epsilon.
        eps = torch.finfo(torch.promote_types(x.value.dtype, torch.float32)).eps
    weight, offset, factor = given.get("weight"), 0.0, None
    if weight is not None:
        weight, offset, factor = _plus_number(weight)
        weight, factor = (_aligned(v, len(x.shape)) for v in (weight, factor))
    bias = given.get("bias")
    bias = None if bias is None else _aligned(strip_casts(bias)[0], len(x.shape))
    inner, casts = strip_casts(x)
    kind = "layer" if layer else "rms"
    absorbed = (value, *casts)
    return Norm(kind, inner, weight, offset, factor, number_of(eps), width, absorbed, bias)


def _biased(value: Value) -> Norm | None:
    """The norm to whose result the sum `value` adds a vector."""
    if value.kwargs.get("alpha", 1) != 1:
        return None
    for bias, other in value.either_way:
        inner, casts = strip_casts(other)
        scaled = inner.value.op in ("aten.mul", "aten.div", *_FUSED)
        if not scaled or not _may_be_weight(bias) or inner.shape != value.shape:
            continue
        found = _match_norm(inner)
        if found is not None and found.bias is None:
            aligned = _aligned(strip_casts(bias)[0], len(value.shape))
            return replace(found, bias=aligned, absorbed=(value, *casts, *found.absorbed))
    return None


# --- the weight -----------------------------------------------------------------------------------


def _weighted(value: Value) -> Norm | None:
    """The norm with a weight whose last step is the product `value`."""
    if value.op != "aten.mul":
        return None
    for factor, normalised in value.either_way:
        weight, offset, total = _plus_number(factor)
        if not _may_be_weight(weight):
            continue
        bare, casts = strip_casts(normalised)
        inner = _match_norm(bare) if bare.value.op in _FUSED else _normalised(bare)
        if inner is None or inner.weight is not None or inner.bias is not None:
            continue
        if inner.x.shape == value.shape:
            weight, total = (_aligned(v, len(value.shape)) for v in (weight, total))
            absorbed = (value, *casts, *inner.absorbed)
            return replace(inner, weight=weight, offset=offset, factor=total, absorbed=absorbed)
    return None


def _may_be_weight(view: View) -> bool:
    """Whether a factor belongs to a norm: a vector, or a parameter; cos and sin are neither."""
    dims = view.effect.dims
    vector = bool(dims and dims[-1]) and (view.value.op == "constant" or len(dims) == 1)
    return vector and not view.value.projected


def _plus_number(view: View) -> tuple[View, float, View]:
    """(weight, offset, their sum) of a weight that may be spelled `offset + weight`."""
    bare, _ = strip_casts(view)
    value = bare.value
    numbers = [number for a in value.args if (number := given_number(a)) is not None]
    plain = len(value.operands) == 1 and len(numbers) == 1 and value.kwargs.get("alpha", 1) == 1
    if value.op != "aten.add" or not plain:
        return bare, 0.0, bare
    inner, _ = strip_casts(value.operands[0].through(bare.effect))
    return inner, numbers[0], bare


def _aligned(weight: View, rank: int) -> View:
    """A weight with leading dimensions of one, up to `rank`."""
    missing = rank - len(weight.effect.dims)
    return weight.with_dims(*((),) * missing + weight.effect.dims)


# --- spelled out ----------------------------------------------------------------------------------


def _normalised(view: View) -> Norm | None:
    """The norm without a weight that a view is, where it is spelled out."""
    value = view.value
    if not view.is_whole or len(value.operands) != 2 or _rounds(value):
        return None
    pairs, root = value.either_way, _inverse_root
    if value.op == "aten.div":
        pairs, root = pairs[:1], _root
    elif value.op != "aten.mul":
        return None
    for numerator, denominator in pairs:
        if (radicand := root(denominator)) is not None:
            found = _quotient(numerator, *radicand)
            if found is not None:
                return replace(found, absorbed=(value, *found.absorbed))
    return None


def _quotient(numerator: View, under: View, values: tuple[Value, ...]) -> Norm | None:
    """The norm numerator / sqrt(under)."""
    epsilon = _plus_epsilon(under)
    if epsilon is None:
        return None
    power, eps, added = epsilon
    top, casts = strip_casts(numerator)
    centred = _centred(top)
    squared = _mean_square(power)
    variance = _variance(power)
    if squared is not None:
        of, steps = squared
        bottom, more = strip_casts(of)
        if not equal_values(top, bottom):
            return None
        kept = (*steps, *casts, *more)
        if centred is not None and bottom.value is not top.value:
            again = _centred(bottom)
            kept += () if again is None else (bottom.value, *again[1])
    elif variance is not None and centred is not None:
        of, steps = variance
        bottom, more = strip_casts(of)
        if not equal_values(centred[0], bottom):
            return None
        kept = (*steps, *casts, *more)
    else:
        return None
    kind, x = "rms", top
    if centred is not None:
        kind, x = "layer", centred[0]
        kept += (top.value, *centred[1])
    width = x.shape[-1] if x.shape else None
    if not isinstance(width, int):
        return None
    absorbed = tuple(dict.fromkeys((*values, *added, *kept)))
    return Norm(kind, x, None, 0.0, None, eps, width, absorbed)


#: What a step of a norm reads, and the values that compute it.
_Read = tuple[View, tuple[Value, ...]]


def _step(view: View, *ops: str) -> tuple[Value, tuple[Value, ...]] | None:
    """(value, it and the casts after it) where a view is the whole result of one of `ops`."""
    bare, casts = strip_casts(view)
    value = bare.value
    known = bare.is_whole and value.op in ops and value.operands and not _rounds(value)
    return (value, (value, *casts)) if known else None


def _rounds(value: Value) -> bool:
    """Whether a value is a quotient that is rounded to an integer."""
    return value.kwargs.get("rounding_mode") is not None


def _inverse_root(view: View) -> _Read | None:
    """y of 1 / sqrt(y): rsqrt, a power of -1/2, or a reciprocal of a root."""
    step = _step(view, "aten.rsqrt", "aten.pow", "aten.reciprocal", "aten.div")
    if step is None:
        return None
    value, values = step
    inner = value.operands[0]
    if value.op == "aten.rsqrt" or (value.op == "aten.pow" and value.args[1:] == (-0.5,)):
        return inner, values
    one = value.op == "aten.div" and len(value.operands) == 1 and value.args[0] == 1
    root = _root(inner) if one or value.op == "aten.reciprocal" else None
    return None if root is None else (root[0], (*values, *root[1]))


def _root(view: View) -> _Read | None:
    """y of sqrt(y)."""
    step = _step(view, "aten.sqrt", "aten.pow")
    if step is None or (step[0].op == "aten.pow" and step[0].args[1:] != (0.5,)):
        return None
    return step[0].operands[0], step[1]


def _plus_epsilon(view: View) -> tuple[View, float, tuple[Value, ...]] | None:
    """(y, eps, values) of y + eps."""
    add = view.value
    if add.op != "aten.add" or len(add.operands) != 1 or not view.is_whole:
        return None
    eps = next((a for a in add.args if isinstance(a, (int, float, fx.Node))), None)
    if eps is None or add.kwargs.get("alpha", 1) != 1:
        return None
    return add.operands[0], number_of(eps), (add,)


def _mean_square(view: View) -> _Read | None:
    """y of the mean of y² over the last dimension, which stays."""
    mean = _mean(view)
    step = None if mean is None else _step(mean[0], "aten.square", "aten.pow", "aten.mul")
    if mean is None or step is None:
        return None
    value, values = step
    of = value.operands[0]
    if value.op == "aten.mul" and value.operands != (of, of):
        return None
    if value.op == "aten.pow" and value.args[1] != 2:
        return None
    return of, (*mean[1], *values)


def _mean(view: View) -> _Read | None:
    """y of the mean of y over the last dimension, which stays; or sum(y) / length."""
    step = _step(view, "aten.mean", "aten.div")
    if step is None:
        return None
    value, values = step
    of = value.operands[0]
    if value.op == "aten.mean":
        return (of, values) if _over_last(value) else None
    total = of.value
    if len(value.operands) != 1 or value.args[0] is not of or not of.is_whole:
        return None
    if total.op != "aten.sum" or not _over_last(total):
        return None
    inner, by = total.operands[0], value.args[1]
    length = isinstance(by, (int, float)) and by == inner.shape[-1]
    return (inner, (*values, total)) if length else None


def _variance(view: View) -> _Read | None:
    """y of the variance of y over the last dimension, not corrected."""
    step = _step(view, "aten.var")
    if step is None or not _over_last(step[0]):
        return None
    positional = step[0].args[2] if len(step[0].args) > 2 else None
    named = step[0].kwargs.get("unbiased", step[0].kwargs.get("correction"))
    corrected = positional if named is None else named
    return (step[0].operands[0], step[1]) if corrected is not None and corrected == 0 else None


def _centred(view: View) -> _Read | None:
    """y of y - mean(y)."""
    value = view.value
    if value.op != "aten.sub" or len(value.operands) != 2 or not view.is_whole:
        return None
    if value.kwargs.get("alpha", 1) != 1 or not isinstance(value.args[0], View):
        return None
    mean = _mean(value.operands[1])
    if mean is None:
        return None
    x, casts = strip_casts(value.operands[0])
    of, more = strip_casts(mean[0])
    return (x, (*casts, *more, *mean[1])) if equal_values(x, of) else None


def _over_last(value: Value) -> bool:
    """Whether a reduction is over the last dimension, keeps it, and is of floats: a sum given an
    integer type is rounded."""
    shape = value.operands[0].shape
    kept = value.shape == (*shape[:-1], 1) and value.dtype.is_floating_point
    return kept and reduced_dims(value) == (len(shape) - 1,)
