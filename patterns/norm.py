"""Recognises RMS normalisation, fused or spelled out, with or without casts in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from tilewright.patterns.dataflow import Value, View


@dataclass(frozen=True)
class RmsNorm:
    """x * rsqrt(mean(x^2, last dimension) + eps) * weight; weight None where there is none.

    x: what is normalised, dimensions as the result's. width: length of the normalised dimension.
    """

    x: View
    weight: View | None
    eps: float
    width: int
    absorbed: tuple[Value, ...]


def is_float_cast(value: Value) -> bool:
    """Whether a value is a cast between floating types that fp32 arithmetic may leave out.

    A detour through eight bits is a quantisation the user asked for, and stays.
    """
    types = (value.dtype, *(v.value.dtype for v in value.operands))
    return value.op == "cast" and all(t.is_floating_point and t.itemsize > 1 for t in types)


def strip_casts(view: View) -> tuple[View, tuple[Value, ...]]:
    """The view before any casts between floating types, and the casts."""
    stripped: list[Value] = []
    while is_float_cast(view.value):
        inner = view.value.args[0]
        stripped.append(view.value)
        view = inner.through(view.effect)
    return view, tuple(stripped)


def match_rms_norm(head: View) -> RmsNorm | None:
    """The RMS norm whose result is `head`, or None."""
    value = head.value
    if not head.is_whole:
        return None
    if value.op == "aten.rms_norm":
        return _fused(value)
    outer, casts = strip_casts(head)
    weight: View | None = None
    absorbed = [*casts]
    if outer.value.op == "aten.mul" and (split := _weighted(outer.value)) is not None:
        weight, normalised = split
        absorbed.append(outer.value)
        outer, more = strip_casts(normalised)
        absorbed += more
    scaled = _scaled(outer)
    if scaled is None:
        return None
    x, eps, values = scaled
    width = x.shape[-1]
    if not isinstance(width, int) or not x.shape:
        return None
    return RmsNorm(x, weight, eps, width, (*absorbed, *values))


def _fused(value: Value) -> RmsNorm | None:
    arguments = [*value.args, *([None] * (4 - len(value.args)))]
    x = arguments[0]
    width = x.shape[-1]
    normalized = arguments[1] if arguments[1] is not None else value.kwargs.get("normalized_shape")
    weight = arguments[2] if arguments[2] is not None else value.kwargs.get("weight")
    eps = arguments[3] if arguments[3] is not None else value.kwargs.get("eps")
    if normalized is None or len(normalized) != 1 or not isinstance(width, int):
        return None
    eps = torch.finfo(x.value.dtype).eps if eps is None else eps
    return RmsNorm(x, weight, _number(eps), width, (value,))


def _weighted(value: Value) -> tuple[View, View] | None:
    """(weight, normalised) of a product with a per-channel weight."""
    if len(value.operands) != 2:
        return None
    left, right = value.operands
    for weight, other in ((left, right), (right, left)):
        bare, _ = strip_casts(weight)
        varying = [i for i, dim in enumerate(bare.effect.dims) if dim]
        per_channel = varying == [len(bare.effect.dims) - 1] and not bare.value.projected
        if per_channel and other.value.projected:
            return bare, other
    return None


def _scaled(view: View) -> tuple[View, float, tuple[Value, ...]] | None:
    """(x, eps, values) of x * rsqrt(mean(x^2) + eps)."""
    value = view.value
    if value.op != "aten.mul" or len(value.operands) != 2 or not view.is_whole:
        return None
    left, right = value.operands
    for x, scale in ((left, right), (right, left)):
        found = _inverse_rms(scale)
        if found is None:
            continue
        squared, eps, values = found
        inner, casts = strip_casts(x)
        of, more = strip_casts(squared)
        if inner == of:
            return inner, eps, (value, *values, *casts, *more)
    return None


def _inverse_rms(scale: View) -> tuple[View, float, tuple[Value, ...]] | None:
    """(x, eps, values) of rsqrt(mean(x^2, -1, keepdim) + eps)."""
    rsqrt = scale.value
    if rsqrt.op != "aten.rsqrt" or not scale.is_whole:
        return None
    add = rsqrt.operands[0].value
    if add.op != "aten.add" or len(add.operands) != 1 or add.kwargs.get("alpha", 1) != 1:
        return None
    eps = next((a for a in add.args if isinstance(a, (int, float, fx.Node))), None)
    mean = add.operands[0].value
    if eps is None or mean.op != "aten.mean" or not _over_last(mean):
        return None
    power = mean.operands[0].value
    steps = (rsqrt.operands[0], add.operands[0], mean.operands[0])
    if not all(step.is_whole for step in steps) or mean.shape != (*power.shape[:-1], 1):
        return None
    if (
        power.op == "aten.square"
        or (power.op == "aten.pow" and power.args[1] == 2)
        or (
            power.op == "aten.mul"
            and len(power.operands) == 2
            and power.operands[0] == power.operands[1]
        )
    ):
        squared = power.operands[0]
    else:
        return None
    return squared, _number(eps), (rsqrt, add, mean, power)


def _number(item: float | fx.Node) -> float:
    """A float; with `dynamic=True` Dynamo traces it as a symbol, which is specialised here."""
    return float(item.meta["example_value"] if isinstance(item, fx.Node) else item)


def _over_last(mean: Value) -> bool:
    dims = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    rank = len(mean.operands[0].shape)
    listed = dims if isinstance(dims, (tuple, list)) else (dims,)
    return len(listed) == 1 and listed[0] in (-1, rank - 1)
