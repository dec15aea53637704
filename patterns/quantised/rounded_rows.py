"""Activations that the graph rounds to e4m3 codes, and the values that the graph computes with
these codes.

    largest = x.abs().amax(-1, keepdim=True)
    scale   = where(s == 0, e, s), s = largest.clamp(min=least) / 448        or a stored number
    codes   = (x / scale.clamp(min=least_divisor)).clamp(-448, 448).to(float8_e4m3fn)
    numbers = (codes.to(dtype) * scale).to(dtype)

x is [..., K], or [..., K / 128, 128]. `largest` may also be the larger one of x.amax().clamp(min=0)
and -x.amin().clamp(max=0). All steps may be absent, except the division by the scale. All
arithmetic has one dtype, which is the dtype of x or float32. No other step rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from tilewright.ops.checks import HALVES
from tilewright.ops.formats.activation_codes import ACTIVATION_CODES
from tilewright.ops.formats.fp8_block import E4M3_MAX
from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, strip_widening
from tilewright.patterns.arithmetic.constants import given_number
from tilewright.patterns.arithmetic.steps import (
    chosen_by_mask,
    clamp_bounds,
    filled_with,
    keeps_dim,
    reduced_dims,
)
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.quantised.activations import DECODED_ROWS
from tilewright.patterns.recognise.dtypes import dtype_name

_HINT = (
    "the known scales are amax / 448 of a token, or of 128 columns, computed in the "
    "activation's dtype or in float32, as in compressed-tensors and finegrained-fp8"
)


@dataclass(frozen=True)
class RoundedRows:
    """The rounding of activations to codes.

    Attributes:
        x: All numbers of a value before they are rounded, [..., width]. `width` columns share a
            scale.
        codes: The value that has the codes.
        scale: The scale, [..., 1].
        options: Arguments of `round_rows` by name.
        absorbed: The values between x and the codes, including the scale.
    """

    x: View
    codes: Value
    scale: Value
    options: dict[str, Any]
    absorbed: tuple[Value, ...]

    @property
    def is_given(self) -> bool:
        """Whether the model stores one scale for all numbers."""
        return "scale" in self.options

    @property
    def width(self) -> Size:
        return self.x.shape[-1]


def is_rounded(value: Value) -> bool:
    """Whether a value is a quotient that is cast to codes of activations. The quotient may be
    clamped."""
    if value.op != "cast" or value.dtype != ACTIVATION_CODES:
        return False
    (view,) = value.operands
    before = view.value
    if clamp_bounds(before) is not None and before.operands:
        before = before.operands[0].value
    return before.op == "aten.div" and len(before.operands) == 2


def match_rounded_rows(codes: Value) -> RoundedRows:
    """Returns the rounding that computes `codes`. :func:`is_rounded` must be true for `codes`.
    Raises Reject (ACTIVATION_FORMAT) if the rounding has another form."""
    found = _Walk(codes)
    quotient = found.whole(codes.args[0], "the codes")
    bounds = clamp_bounds(quotient)
    if bounds is not None:
        if [given_number(bound) for bound in bounds] != [-E4M3_MAX, E4M3_MAX]:
            found.refuse(quotient, f"are clamped to {bounds}")
        found.take(quotient)
        quotient = found.whole(quotient.args[0], "the quotient")
    if quotient.op != "aten.div" or quotient.kwargs or len(quotient.args) != 2:
        found.refuse(quotient, f"come from {quotient}")
    numbers, divisor = quotient.args
    found.take(quotient)
    dtype = quotient.dtype
    x, casts = strip_widening(numbers)
    found.take(*casts)
    if x.value.dtype not in HALVES or not x.is_regrouped:
        found.refuse(x.value, f"are rounded from {x.value} in {dtype_name(x.value.dtype)}")
    if dtype not in (x.value.dtype, torch.float32) or codes.args[0].value.dtype != dtype:
        found.refuse(quotient, f"are divided in {dtype_name(dtype)}")
    if is_given_scale(divisor):
        scale = divisor.value
        options = {"scale": divisor.reshape(1), "rounded": dtype == x.value.dtype}
        # If the division is in the dtype of x, a scale in float32 would be rounded first.
        if scale.dtype not in (x.value.dtype, dtype):
            found.refuse(scale, f"have a scale in {dtype_name(scale.dtype)}")
        if bounds is None:  # a quotient out of range gives NaN, not the largest code
            found.refuse(quotient, "have a given scale and no clamp")
        return RoundedRows(x, codes, scale, options, tuple(dict.fromkeys(found.taken)))
    scale, options = _scale_of(found, divisor, x, dtype)
    if (*numbers.shape[:-1], 1) != scale.shape:
        found.refuse(scale, f"have scales of shape {list(scale.shape)}")
    options |= {"rounded": dtype == x.value.dtype}
    return RoundedRows(x, codes, scale, options, tuple(dict.fromkeys(found.taken)))


@dataclass
class _Walk:
    """The search from codes back to the numbers that were rounded. `taken` are the values that the
    search passed."""

    codes: Value
    taken: list[Value]

    def __init__(self, codes: Value) -> None:
        self.codes, self.taken = codes, []

    def take(self, *values: Value) -> None:
        self.taken.extend(values)

    def refuse(self, value: Value, why: str) -> NoReturn:
        message = f"{self.codes}: rounded activations {why}"
        reject("ACTIVATION_FORMAT", Stage.GUARDS, message, value, hint=_HINT, weight="advice")

    def whole(self, item: Any, what: str) -> Value:
        """Returns the value of a view. Raises Reject if the view is only a part of this value.
        what: the name of the view in the message."""
        if not isinstance(item, View) or not item.is_whole:
            self.refuse(self.codes, f"use only a part of {what}")
        return item.value


def is_given_scale(view: View) -> bool:
    """Whether a view is one number that the model stores."""
    return view.value.op in ("input", "constant") and effects.product(view.value.shape) == 1


def _scale_of(
    found: _Walk, divisor: View, x: View, dtype: torch.dtype
) -> tuple[Value, dict[str, Any]]:
    """Returns the scale by which a quotient divides, and the options for the bounds on the
    scale."""
    scale, options = found.whole(divisor, "the scales"), dict[str, Any]()
    if (least := _lower_bound(scale)) is not None:
        options["least_divisor"] = least
        found.take(scale)
        scale = found.whole(scale.args[0], "the scales")
    found.take(scale)
    computed = scale
    if (chosen := chosen_by_mask(scale)) is not None:
        mask, at_zero, other = chosen
        computed = found.whole(other, "the scales")
        number = filled_with(at_zero)
        if number is None or number <= 0 or not _is_zero(mask.value, computed):
            found.refuse(scale, "have scales that a condition chooses")
        options["zero_scale"] = _held(number, scale.dtype)
        found.take(mask.value, computed)
    if computed.op != "aten.div" or len(computed.args) != 2 or computed.kwargs:
        found.refuse(computed, f"have scales that {computed} computes")
    largest, most = computed.args
    if given_number(most) != E4M3_MAX or {scale.dtype, computed.dtype} != {dtype}:
        found.refuse(computed, "have scales other than amax / 448, or in another dtype")
    before, casts = strip_widening(largest)
    found.take(*casts)
    value = found.whole(before, "the largest magnitudes")
    if (least := _lower_bound(value)) is not None:
        options["least"] = least
        found.take(value)
        value = found.whole(value.args[0], "the largest magnitudes")
    if not _is_largest(found, value, x):
        found.refuse(value, f"have scales that {value} computes")
    return scale, options


def _lower_bound(value: Value) -> float | None:
    """Returns the bound of a clamp from below, if the bound is 0 or larger. Returns None for every
    other value."""
    bounds = clamp_bounds(value)
    if bounds is None or bounds[1] is not None:
        return None
    number = given_number(bounds[0])
    return None if number is None or number < 0 else _held(number, value.dtype)


def _held(number: float, dtype: torch.dtype) -> float:
    """Returns a number after rounding to a dtype."""
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def _is_zero(mask: Value, scale: Value) -> bool:
    if mask.op != "aten.eq" or len(mask.args) != 2 or mask.kwargs:
        return False
    return mask.args[0] == scale.whole and given_number(mask.args[1]) == 0


def _is_largest(found: _Walk, value: Value, x: View) -> bool:
    """Whether a value is the largest magnitude of each run of x."""
    if value.op == "aten.amax":
        (inner,) = value.operands
        if inner.value.op != "aten.abs" or not inner.is_regrouped or not _is_by_run(value):
            return False
        found.take(value, inner.value)
        (source,) = inner.value.operands
        return _same(found, source.through(inner.effect), x)
    if value.op != "aten.maximum":
        return False
    found.take(value)
    sides = [_extreme(found, view.value, x) for view in value.operands if view.is_whole]
    return sorted(sides) == ["aten.amax", "aten.amin"]


def _extreme(found: _Walk, value: Value, x: View) -> str:
    """Returns "aten.amax" for the largest number of each run of x, clamped to at least 0. Returns
    "aten.amin" for the negated smallest number, clamped to at most 0. Returns "" for every other
    value."""
    wanted = "aten.amax"
    if value.op == "aten.neg":
        wanted = "aten.amin"
        found.take(value)
        value = value.operands[0].value if value.operands[0].is_whole else value
    bounds = clamp_bounds(value)
    if bounds is None or not value.operands or not value.operands[0].is_whole:
        return ""
    at, other = bounds if wanted == "aten.amax" else bounds[::-1]
    inner = value.operands[0].value
    if given_number(at) != 0 or other is not None or inner.op != wanted or not _is_by_run(inner):
        return ""
    found.take(value, inner)
    return wanted if _same(found, inner.operands[0], x) else ""


def _is_by_run(value: Value) -> bool:
    """Whether a value reduces only the last dimension, and keeps this dimension with length 1."""
    rank = len(value.operands[0].shape)
    return reduced_dims(value) == (rank - 1,) and keeps_dim(value)


def _same(found: _Walk, view: View, x: View) -> bool:
    """Whether a view, without casts to wider types, is x."""
    before, casts = strip_widening(view)
    found.take(*casts)
    return before == x


# --- the readers of codes -------------------------------------------------------------------------


def decoded_from(rows: RoundedRows, flow: Dataflow) -> tuple[Value, ...]:
    """Returns the values that decode the codes, in order. The last value is the decoded numbers in
    the dtype of x. Returns () if any other value reads the codes."""
    path: list[Value] = []
    value = flow.only_user(rows.codes)
    if value is not None and value.op == DECODED_ROWS:
        codes, scale = value.operands
        own = codes.is_regrouped and scale.value is rows.scale and scale.is_regrouped
        return (value,) if own and value.dtype == rows.x.value.dtype else ()
    while value is not None and value.op == "cast" and value.operands[0].is_whole:
        path.append(value)
        value = flow.only_user(value)
    if not path or value is None or not _multiplies(value, path[-1], rows):
        return ()
    if not all(cast.dtype.is_floating_point and cast.dtype.itemsize > 1 for cast in path):
        return ()
    path += [*_widened_scales(value, rows.scale), value]
    if value.dtype == rows.x.value.dtype:
        return tuple(path)
    last = flow.only_user(value)
    if value.dtype != torch.float32 or last is None or not is_float_cast(last):
        return ()
    # Only the shape may change between the product and the cast.
    whole = last.operands[0].is_regrouped and last.dtype == rows.x.value.dtype
    return (*path, last) if whole else ()


def _multiplies(value: Value, codes: Value, rows: RoundedRows) -> bool:
    """Whether a value is the product of the codes and their scales, in the groups in which the
    graph rounded them."""
    if value.op != "aten.mul" or value.kwargs:
        return False
    each = value.shape[-1] == rows.width, (*value.shape[:-1], 1)
    for one, other in value.either_way:
        scale = strip_widening(other)[0]
        if one.value is codes and one.is_regrouped and one.shape == value.shape:
            own = scale.value is rows.scale and scale.is_regrouped
            return own and (rows.is_given or each == (True, other.shape))
    return False


def _widened_scales(product: Value, scale: Value) -> Iterator[Value]:
    for view in product.operands:
        before, casts = strip_widening(view)
        if before.value is scale:
            yield from casts
