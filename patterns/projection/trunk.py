"""A product with what follows it feature by feature, before heads are told apart: bias, clamp."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Effect
from tilewright.patterns.language import Reject, Stage, reject
from tilewright.patterns.lora.delta import LoraDelta, match_delta
from tilewright.patterns.quantised.words import holds_codes
from tilewright.patterns.recognise.equality import equal_values
from tilewright.patterns.recognise.gemm import Gemm, bias_rows, match_gemm
from tilewright.patterns.recognise.norm import is_float_cast, strip_casts

_CLAMPS = {"aten.clamp": ("min", "max"), "aten.hardtanh": ("min_val", "max_val")}


@dataclass(frozen=True)
class Trunk:
    """clamp(x @ weight^T * scale + bias + deltas, -clip, clip), all but the product optional.

    value: the last of these. layout: its dimensions on the gemm's axes [tokens..., N].
    bias, scale: [n], of the rows from `bias_first` or `scale_first` on. clip: 0 for none.
    """

    gemm: Gemm
    value: Value
    layout: Effect
    bias: View | None
    bias_first: int
    clip: float
    absorbed: tuple[Value, ...]
    scale: View | None = None
    scale_first: int = 0
    deltas: tuple[LoraDelta, ...] = ()

    @property
    def bare(self) -> Trunk:
        """The product alone."""
        return _of_gemm(self.gemm)


def match_trunk(value: Value, stage: Stage) -> Trunk:
    """The trunk that ends at `value`; raises Reject at `stage`, naming what stands in the way."""
    gemm = match_gemm(value)
    if gemm is not None:
        return _of_gemm(gemm)
    if is_float_cast(value):
        return _through(match_trunk(value.args[0].value, stage), value.args[0], value)
    if value.op in _CLAMPS:
        return _clamped(value, stage)
    if value.op == "aten.add" and value.kwargs.get("alpha", 1) == 1 and len(value.operands) == 2:
        left, right = value.operands
        for product, other in ((left, right), (right, left)):
            found = _biased(value, product, other, stage) or _adapted(value, product, other, stage)
            if found is not None:
                return found
    if value.op == "aten.mul" and len(value.operands) == 2:
        left, right = value.operands
        for product, scale in ((left, right), (right, left)):
            found = _scaled(value, product, scale, stage)
            if found is not None:
                return found
    reject(*_explain(value, stage), value, hint=_HINTS.get(value.op, ""))


def _of_gemm(gemm: Gemm) -> Trunk:
    return Trunk(gemm, gemm.value, gemm.layout, gemm.bias, 0, 0.0, (gemm.value,))


def _through(inner: Trunk, operand: View, value: Value) -> Trunk:
    layout = effects.compose(operand.effect, inner.layout)
    return replace(inner, value=value, layout=layout, absorbed=(value, *inner.absorbed))


def _with_vector(
    value: Value, product: View, vector: View, stage: Stage
) -> tuple[Trunk, View, int] | None:
    """The trunk of a product up to `value`, which joins it with a number per output feature; those
    numbers [n], and the first feature that they belong to."""
    try:
        inner = match_trunk(product.value, stage)
        trunk = _through(inner, product, value)
        found = bias_rows(vector, trunk.layout, trunk.gemm.feature)
    except (Reject, effects.InexpressibleError):
        return None
    return None if found is None or value.shape != product.shape else (trunk, *found)


def _biased(value: Value, product: View, bias: View, stage: Stage) -> Trunk | None:
    found = _with_vector(value, product, bias, stage)
    if found is None or found[0].bias is not None or found[0].clip:
        return None
    trunk, rows, first = found
    return replace(trunk, bias=rows, bias_first=first)


def _adapted(value: Value, product: View, other: View, stage: Stage) -> Trunk | None:
    """The delta of a low-rank adapter of the same activation is added, column by column."""
    delta = match_delta(other)
    if delta is None or value.shape != product.shape or product.shape != other.shape:
        return None
    try:
        inner = match_trunk(product.value, stage)
    except Reject:
        return None
    gemm = inner.gemm
    *lead, width = product.shape
    whole = effects.identity(gemm.shape)
    if effects.compose(product.effect, inner.layout) != whole or width != delta.expand.shape[1]:
        return None
    if inner.clip or gemm.x_scale is not None:
        return None
    if effects.product(lead) != delta.x.shape[0] or not same_floats(gemm.flat_x, delta.x):
        return None
    trunk = _through(inner, product, value)
    absorbed = (*trunk.absorbed, *delta.absorbed)
    return replace(trunk, deltas=(*inner.deltas, delta), absorbed=absorbed)


def same_floats(one: View, other: View) -> bool:
    """Whether two tensors are the same but for casts between floating types."""
    return equal_values(strip_casts(one)[0], strip_casts(other)[0])


def _scaled(value: Value, product: View, scale: View, stage: Stage) -> Trunk | None:
    """Codes are multiplied as they are, and their sums scaled by output feature."""
    found = _with_vector(value, product, scale, stage)
    if found is None:
        return None
    trunk, rows, first = found
    summed = trunk.bias is not None or trunk.deltas
    plain = trunk.scale is None and not summed and not trunk.clip
    if not plain or not holds_codes(trunk.gemm.weight.value, {}):
        return None
    return replace(trunk, scale=rows, scale_first=first)


_ONE_CLAMP = "clamp once, to -c .. c with one number c"


def _clamped(value: Value, stage: Stage) -> Trunk:
    if str(value.node.target).endswith("_"):
        reject(
            "UNSUPPORTED",
            stage,
            "the projection is clamped in place",
            value,
            hint="use clamp instead of clamp_",
        )
    inner = _through(match_trunk(value.operands[0].value, stage), value.operands[0], value)
    low, high = _bounds(value)
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    if not numbers or low != -high or high <= 0 or inner.clip:
        bounds = " .. ".join(str(b.value if isinstance(b, View) else b) for b in (low, high))
        reject(
            "UNSUPPORTED",
            stage,
            f"the projection is clamped to {bounds}; one clamp to -c .. c can be fused",
            value,
            hint=_ONE_CLAMP,
        )
    return replace(inner, clip=float(high))


def _bounds(value: Value) -> tuple[Any, Any]:
    names = _CLAMPS[value.op]
    given = [*value.args[1:], *([None] * 2)][:2]
    return tuple(  # type: ignore[return-value]
        value.kwargs.get(name) if item is None else item
        for name, item in zip(names, given, strict=True)
    )


_NORM_LAST = "bias and clamp are fused right after the projection, a norm after them"
_HINTS = {
    "aten.clamp_min": _ONE_CLAMP,
    "aten.clamp_max": _ONE_CLAMP,
    "aten.layer_norm": _NORM_LAST,
    "aten.rms_norm": _NORM_LAST,
}


def _explain(value: Value, stage: Stage) -> tuple[str, Stage, str]:
    code = {Stage.K_PATH: "K_PATH", Stage.V_PATH: "V_PATH"}.get(stage, "Q_PATH")
    if "_c10d_functional" in value.op or "c10d" in value.op:
        return "COLLECTIVE", stage, f"{value.op} lies between the projection and the cache"
    if value.op == "cast":
        steps = (value.operands[0].value.dtype, value.dtype)
        names = " to ".join(str(d).removeprefix("torch.") for d in steps)
        return "CAST", stage, f"cast from {names} between the projection and the cache"
    masks = value.op == "aten.index"
    if masks and any(str(v.value.dtype) == "torch.bool" for v in value.operands):
        return "MASKED_WRITE", stage, "a boolean mask selects the tokens that are written"
    return code, stage, f"expected a linear, a norm or a rotation, found {value}"
