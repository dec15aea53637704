"""Activations between the two GEMMs of an MLP, gated or not, recognised by their formula."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isclose, pi, sqrt

from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.recognise.constants import given_number
from tilewright.patterns.recognise.norm import strip_casts
from tilewright.patterns.recognise.steps import clamp_bounds

_NAMES = {"aten.silu": "silu", "aten.relu": "relu"}
# The last step of any.
_LAST = {*_NAMES, "aten.gelu", "aten.square", "aten.pow", "aten.mul", "aten.addcmul"}
_DEFAULT_ALPHA = 1.702


@dataclass(frozen=True)
class Activation:
    """`name(gate, up)`; see ops.moe.ACTIVATIONS. up None: not gated.

    gate, up: what enters. alpha: clamped_swiglu's. limit: gate is clamped to at most that, up to
    -limit .. limit, of those that are gated; 0: unclamped.
    """

    name: str
    gate: View
    up: View | None
    absorbed: tuple[Value, ...]
    alpha: float = _DEFAULT_ALPHA
    limit: float = 0.0


def match_activation(view: View) -> Activation | None:
    """The activation whose result is `view`, or None."""
    bare, casts = strip_casts(view)
    if bare.value.op not in _LAST or not bare.is_whole:
        return None
    for rule in (_clamped_swiglu, _gated, _plain):
        found = rule(bare.value)
        if found is not None:
            return replace(found, absorbed=(*casts, *found.absorbed))
    return None


def _plain(value: Value) -> Activation | None:
    found = _unary(value)
    return None if found is None else Activation(found[0], found[1], None, found[2])


def _gated(value: Value) -> Activation | None:
    """act(gate) * up, either way round, gate clamped above and up on both sides, or neither."""
    for acted, up in _factors(value):
        bare, casts = strip_casts(acted)
        found = _unary(bare.value) if bare.is_whole else None
        if found is None:
            continue
        name, gate, absorbed = found
        up, more = strip_casts(up)
        if up.value.op in _NAMES:
            continue
        inner, limit, steps = _clamp(gate, both=False)
        inner_up, up_limit, up_steps = _clamp(up, both=True)
        if limit and limit == up_limit:
            gate, up, more = inner, inner_up, (*more, *steps, *up_steps)
        else:
            limit = 0.0
        return Activation(name, gate, up, (value, *casts, *absorbed, *more), limit=limit)
    return None


def _unary(value: Value) -> tuple[str, View, tuple[Value, ...]] | None:
    """(name, argument, values) of an activation of one argument."""
    if not value.args or not isinstance(value.args[0], View):  # 2 ** x
        return None
    if value.op in _NAMES:
        gate, casts = strip_casts(value.args[0])
        return _NAMES[value.op], gate, (value, *casts)
    if value.op == "aten.gelu":
        given = value.kwargs.get("approximate") or next(iter(value.args[1:]), "none")
        gate, casts = strip_casts(value.args[0])
        return ("gelu_tanh" if given == "tanh" else "gelu"), gate, (value, *casts)
    if value.op in ("aten.square", "aten.pow"):
        inner, casts = strip_casts(value.args[0])
        squares = value.op == "aten.square" or value.args[1] in (2, 2.0)
        if squares and inner.value.op == "aten.relu" and inner.is_whole:
            gate, more = strip_casts(inner.value.args[0])
            return "relu_squared", gate, (value, *casts, inner.value, *more)
        return None
    swish = _swish(value)
    if swish is not None and swish[1] == 1.0:
        return "silu", swish[0], swish[2]
    gelu = _gelu_by_tanh(value)
    return None if gelu is None else ("gelu_tanh", *gelu)


def _gelu_by_tanh(value: Value) -> tuple[View, tuple[Value, ...]] | None:
    """(x, values) of 0.5 x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    for one_more, half in _factors(value):
        shifted, halved = _step(one_more, "aten.add"), times_number(half)
        if shifted is None or halved is None or halved[1] != 0.5:
            continue
        if 1 not in _numbers(shifted[0]) or len(shifted[0].operands) != 1:
            continue
        tanh = _step(shifted[0].operands[0], "aten.tanh")
        outer = tanh and times_number(tanh[0].operands[0])
        inner = outer and _step(outer[0], "aten.add")
        if not tanh or not outer or not inner or not isclose(outer[1], sqrt(2 / pi), rel_tol=1e-6):
            continue
        for cubic, other in inner[0].either_way:
            scaled = times_number(cubic)
            cube = scaled and _step(scaled[0], "aten.pow")
            if not scaled or not cube or cube[0].args[1] not in (3, 3.0):
                continue
            if not isclose(scaled[1], 0.044715, rel_tol=1e-6):
                continue
            ends = [strip_casts(x) for x in (halved[0], other, cube[0].operands[0])]
            if len({x for x, _ in ends}) == 1:
                steps = (shifted, tanh, inner, cube)
                values = [
                    v for part in (*(s[1] for s in steps), *(e[1] for e in ends)) for v in part
                ]
                return ends[0][0], (value, *values, *halved[2], *outer[2], *scaled[2])
    return None


def _step(view: View, op: str) -> tuple[Value, tuple[Value, ...]] | None:
    """(value, it and the casts after it) where a view is the whole result of `op`, unscaled."""
    bare, casts = strip_casts(view)
    value = bare.value
    known = bare.is_whole and value.op == op and value.kwargs.get("alpha", 1) == 1
    return (value, (value, *casts)) if known and value.operands else None


def _swish(value: Value) -> tuple[View, float, tuple[Value, ...]] | None:
    """(x, alpha, values) of x * sigmoid(alpha * x)."""
    for sigmoid, other in _factors(value):
        bare, casts = strip_casts(sigmoid)
        if bare.value.op != "aten.sigmoid" or not bare.is_whole:
            continue
        inner, more = strip_casts(bare.value.args[0])
        x, wider = strip_casts(other)
        alpha, scaled = 1.0, tuple[Value, ...]()
        if inner != x:
            found = times_number(inner)
            if found is None:
                continue
            inner, alpha, scaled = found
        if inner == x:
            return x, alpha, (value, bare.value, *casts, *more, *wider, *scaled)
    return None


def times_number(view: View) -> tuple[View, float, tuple[Value, ...]] | None:
    """(x, factor, values) of x * factor."""
    value = view.value
    if value.op != "aten.mul" or not view.is_whole or len(value.operands) != 1:
        return None
    factor = next(iter(_numbers(value)), None)
    if factor is None:
        return None
    x, casts = strip_casts(value.operands[0])
    return x, factor, (value, *casts)


def _clamped_swiglu(value: Value) -> Activation | None:
    """(up + 1) * swish(gate), gate clamped above and up on both sides."""
    for one_less, acted, steps in _times_one_more(value):
        swish_view, more = strip_casts(acted)
        swish = _swish(swish_view.value) if swish_view.is_whole else None
        if swish is None:
            continue
        up, up_limit, up_values = _clamp(one_less, both=True)
        gate, gate_limit, gate_values = _clamp(swish[0], both=False)
        if up_limit != gate_limit:
            return None
        absorbed = (*steps, *more, *swish[2], *up_values, *gate_values)
        return Activation("clamped_swiglu", gate, up, absorbed, swish[1], gate_limit)
    return None


def _times_one_more(value: Value) -> Iterator[tuple[View, View, tuple[Value, ...]]]:
    """(x, y, values) of (x + 1) * y, or of y + y * x, as `addcmul(y, y, x)` has it."""
    for shifted, y in _factors(value):
        one, casts = strip_casts(shifted)
        plain = one.value.op == "aten.add" and one.is_whole and len(one.value.operands) == 1
        if plain and 1 in _numbers(one.value) and one.value.kwargs.get("alpha", 1) == 1:
            yield one.value.operands[0], y, (value, *casts, one.value)
    if value.op == "aten.addcmul" and value.kwargs.get("value", 1) == 1 and len(value.args) == 3:
        added, *factors = value.args
        for y, x in (factors, factors[::-1]):
            if y == added and x.shape == value.shape:
                yield x, y, (value,)


def _clamp(view: View, both: bool) -> tuple[View, float, tuple[Value, ...]]:
    """(x, limit, values) of clamps to at most limit (and at least -limit); limit 0: none.

    Several in a row hold a number between the largest lower bound and the smallest upper one.
    """
    bare, casts = strip_casts(view)
    inner, values = bare, casts
    lows: list[float] = []
    highs: list[float] = []
    while inner.is_whole and (bounds := clamp_bounds(inner.value)) is not None:
        numbers = [bound if bound is None else given_number(bound) for bound in bounds]
        if any(n != n or (n is None) != (b is None) for n, b in zip(numbers, bounds, strict=True)):
            break  # views differ from element to element, sizes from call to call; NaN is no bound
        for number, held in zip(numbers, (lows, highs), strict=True):
            held += [] if number is None else [number]
        before, more = strip_casts(inner.value.args[0])
        inner, values = before, (*values, inner.value, *more)
    low, high = max(lows, default=None), min(highs, default=None)
    if high is None or high <= 0 or low != (-high if both else None):
        return bare, 0.0, casts
    return inner, float(high), values


def _factors(value: Value) -> Sequence[tuple[View, View]]:
    """The two factors of a product, in both orders."""
    return value.either_way if value.op == "aten.mul" else ()


def _numbers(value: Value) -> list[float]:
    return [number for a in value.args if (number := given_number(a)) is not None]
