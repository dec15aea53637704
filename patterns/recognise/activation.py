"""Recognises the activation function between the two GEMMs of an MLP by its formula. It may be
gated or not."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt

from tilewright.patterns.arithmetic.formula import ABSENT, Found, call, clamp, number, tensor
from tilewright.patterns.dataflow import Value, View, once

_DEFAULT_ALPHA = 1.702


@dataclass(frozen=True)
class Activation:
    """The activation function `name(gate, up)`. The names are in `ops.moe.ACTIVATIONS`.

    Attributes:
        gate, up: The inputs. `up` is None if the activation is not gated.
        absorbed: The values that the op replaces.
        alpha: The factor in the sigmoid of clamped_swiglu.
        limit: A gated activation clamps `gate` to at most `limit`, and clamps `up` to the range
            from -limit to limit. 0 means that there is no clamp.
    """

    name: str
    gate: View
    up: View | None
    absorbed: tuple[Value, ...]
    alpha: float = _DEFAULT_ALPHA
    limit: float = 0.0


def _by_tanh(gelu: Value) -> bool:
    return (gelu.kwargs.get("approximate") or next(iter(gelu.args[1:]), "none")) == "tanh"


def _is_not_activated(view: View) -> bool:
    return view.value.op not in ("aten.silu", "aten.relu")


# --- the formulas ---------------------------------------------------------------------------------

_GATE, _UP, _ALPHA = tensor("gate"), tensor("up"), number("alpha")
_RELU = call("relu", _GATE)
_CUBIC = _GATE + number(0.044715, within=1e-6) * _GATE**3
_TANH = call("tanh", number(sqrt(2 / pi), within=1e-6) * _CUBIC)
_SWISH = _GATE * call("sigmoid", _GATE) | _GATE * call("sigmoid", _ALPHA * _GATE)
_SILU = call("silu", _GATE) | _GATE * call("sigmoid", _GATE) | _GATE * call("sigmoid", 1 * _GATE)
_UNARY = (
    _SILU.giving(name="silu")
    | _RELU.giving(name="relu")
    | (call("square", _RELU) | _RELU**2).giving(name="relu_squared")
    | call("gelu", _GATE, holds=lambda gelu: not _by_tanh(gelu)).giving(name="gelu")
    | call("gelu", _GATE, holds=_by_tanh).giving(name="gelu_tanh")
    | ((0.5 * _GATE) * (1 + _TANH)).giving(name="gelu_tanh")
)
_CLAMPED_SWIGLU = (
    (_UP + 1) * _SWISH | call("addcmul", _SWISH, _SWISH, _UP) | call("addcmul", _SWISH, _UP, _SWISH)
).giving(name="clamped_swiglu")
_ACTIVATION = _CLAMPED_SWIGLU | _UNARY * tensor("up", holds=_is_not_activated) | _UNARY


def match_activation(view: View) -> Activation | None:
    """Returns the activation function whose result is `view`, or None."""
    return _match_activation(view) if _ACTIVATION.may_match(view) else None


@once
def _match_activation(view: View) -> Activation | None:
    found: Activation | None = _ACTIVATION.match(view, _clamped)
    return found


# --- clamps ---------------------------------------------------------------------------------------


def _clamped(found: Found) -> Activation | None:
    """Returns the activation with its limit. If gate and up have different limits, both clamps stay
    in the graph."""
    name, gate, up = found.bound["name"], found.bound["gate"], found.bound.get("up")
    if up is None:
        return Activation(name, gate, None, found.absorbed)
    default = 1.0 if name == "clamped_swiglu" else _DEFAULT_ALPHA
    alpha, steps = found.bound.get("alpha", default), tuple[Value, ...]()
    inner, limit, gate_steps = _clamp(gate, both=False)
    inner_up, up_limit, up_steps = _clamp(up, both=True)
    if limit == up_limit:
        gate, up, steps = inner, inner_up, (*gate_steps, *up_steps)
    elif name == "clamped_swiglu":
        return None
    else:
        limit = 0.0
    return Activation(name, gate, up, (*found.absorbed, *steps), alpha, limit)


def _clamp(view: View, both: bool) -> tuple[View, float, tuple[Value, ...]]:
    """Returns (x, limit, values) for clamps of x to at most `limit`, and also to at least -limit if
    `both` is true. A limit of 0 means that there is no clamp.

    Consecutive clamps are combined: the largest lower bound and the smallest upper bound apply.
    """
    inner, values = view, tuple[Value, ...]()
    lows: list[float] = []
    highs: list[float] = []
    while (found := _CLAMP.match(inner)) is not None:
        bounds = {name: found.bound.get(name) for name in ("low", "high")}
        if any(bound != bound for bound in bounds.values()):
            break  # NaN is not a bound
        lows += [] if bounds["low"] is None else [bounds["low"]]
        highs += [] if bounds["high"] is None else [bounds["high"]]
        inner, values = found.bound["x"], (*values, *found.absorbed)
    low, high = max(lows, default=None), min(highs, default=None)
    if high is None or high <= 0 or low != (-high if both else None):
        return view, 0.0, ()
    return inner, float(high), values


_CLAMP = clamp(tensor("x"), number("low") | ABSENT, number("high") | ABSENT)
