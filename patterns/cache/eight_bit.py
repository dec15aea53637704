"""Traces the bytes that are written to an FP8 cache back to the heads, and finds their scale.

    k ─ [/ scale or * scale] ─ [clamp] ─ to(float8) ─ [view(uint8)] ─▶ cache

The op rounds once. If there is a clamp, the op saturates. If not, a number out of range becomes the
same number as in PyTorch's cast. For float8_e5m2, this is infinity. For float8_e4m3fn, it is NaN or
the largest number, depending on the release of PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.ops.checks import FLOAT32
from tilewright.ops.formats.fp8 import FP8_DTYPES, SATURATED_BY_TORCH, fits
from tilewright.patterns import effects
from tilewright.patterns.arithmetic.steps import clamp_bounds
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Effect
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.recognise.dtypes import dtype_name

#: The dtypes in which heads are computed.
WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Written:
    """The values that a write stores, before they are scaled and rounded to the cache's dtype.

    Attributes:
        view: The values before they are scaled and rounded.
        scale: A number, or a view that has the shape of `view` and repeats along the dimensions in
            which the scale does not vary.
        multiplies: Whether values are multiplied by the scale. If not, they are divided by it.
        held: Two bools: whether the graph clamps the values to the cache's range from below, and
            whether it clamps them from above.
        between: The graph's values between `view` and the cache.
    """

    view: View
    scale: View | float | None = None
    multiplies: bool = False
    held: tuple[bool, bool] = (False, False)
    between: tuple[Value, ...] = ()

    def through(self, effect: Effect) -> Written:
        """Returns a selection of the written values."""
        scale = self.scale.through(effect) if isinstance(self.scale, View) else self.scale
        return replace(self, view=self.view.through(effect), scale=scale)


def before_rounding(written: Written, dtype: torch.dtype) -> Written:
    """Returns the written values before they are scaled and rounded to `dtype`. If they are not
    scaled or rounded, returns `written`."""
    while (earlier := _earlier(written, dtype)) is not None:
        written = earlier
    return written


def _earlier(written: Written, dtype: torch.dtype) -> Written | None:
    """Returns the written values before their last operation; None if that operation cannot be
    undone."""
    value = written.view.value
    if value.op == "bitcast":
        return _there_and_back(written)
    if dtype not in FP8_DTYPES:
        return None
    if value.op == "cast":
        return _before(written, value.args[0]) if _is_rounding(written, dtype) else None
    if value.dtype not in WIDE or written.scale is not None:
        return None
    if (bounds := clamp_bounds(value)) is not None:
        held = _holds(bounds, dtype)
        earlier = None if held is None else _before(written, value.args[0])
        if held is None or earlier is None:
            return None
        low, high = (a or b for a, b in zip(written.held, held, strict=True))
        return replace(earlier, held=(low, high))
    return _unscaled(written)


def _is_rounding(written: Written, dtype: torch.dtype) -> bool:
    """Whether a cast of the graph may disappear. Three casts may: the cast to `dtype`, because the
    op rounds to `dtype` itself; a rounding directly before that cast; and a cast to a wider
    dtype."""
    value = written.view.value
    before = value.args[0].value.dtype
    if before not in WIDE:
        return False
    widens = value.dtype in WIDE and before.itemsize < value.dtype.itemsize
    return value.dtype == dtype or widens or (value.dtype in WIDE and written.scale is None)


def _before(written: Written, operand: View) -> Written | None:
    value = written.view.value
    if operand.shape != value.shape:
        return None
    view = operand.through(written.view.effect)
    return replace(written, view=view, between=(*written.between, value))


def _there_and_back(written: Written) -> Written | None:
    """Skips `x.view(torch.uint8).view(dtype)`, which is equal to x."""
    value = written.view.value
    inner = value.args[0]
    if inner.value.op != "bitcast" or inner.value.args[0].value.dtype != value.dtype:
        return None
    earlier = _before(written, inner)
    return None if earlier is None else _before(earlier, inner.value.args[0])


def _holds(bounds: tuple[Any, Any], dtype: torch.dtype) -> tuple[bool, bool] | None:
    """Returns two bools: whether a clamp moves numbers below the range of a dtype into this range,
    and whether the clamp moves numbers above the range into the range. A bound outside of the range
    moves no numbers into it. Returns None if the clamp changes numbers inside the range."""
    limit = torch.finfo(dtype).max
    if not all(bound is None or isinstance(bound, (int, float)) for bound in bounds):
        return None
    low, high = (math.inf if b is None else b * s for b, s in zip(bounds, (-1, 1), strict=True))
    if not (low >= limit and high >= limit):
        return None
    return bool(fits(torch.tensor(low), dtype)), bool(fits(torch.tensor(high), dtype))


def saturates(written: Written, dtype: torch.dtype) -> bool:
    """Whether numbers outside the range of a cache dtype become its largest number.

    Raises Reject (CAST) if this holds on one side of the range only.
    """
    if dtype not in FP8_DTYPES or dtype in SATURATED_BY_TORCH:
        return True
    low, high = written.held
    if low != high:
        message = f"values are clamped to the range of {dtype_name(dtype)} on one side only"
        hint = "clamp them from below and from above, or not at all"
        reject("CAST", Stage.ANCHORED, message, written.view, hint=hint)
    return low


def _unscaled(written: Written) -> Written | None:
    """Handles `x / scale` or `x * scale`, if the scale does not depend on a GEMM with a weight."""
    value = written.view.value
    if value.op not in ("aten.mul", "aten.div") or len(value.args) != 2 or value.kwargs:
        return None
    x, scale = value.args
    if value.op == "aten.mul" and not (isinstance(x, View) and x.value.projected):
        x, scale = scale, x
    if not isinstance(x, View) or not _is_scale(scale):
        return None
    earlier = _before(written, x)
    if earlier is None:
        return None
    if isinstance(scale, View):
        wide = scale.expand(*value.shape)
        scale = wide.through(written.view.effect)
    return replace(earlier, scale=scale, multiplies=value.op == "aten.mul")


def _is_scale(item: Any) -> bool:
    if isinstance(item, View):
        return item.value.dtype in WIDE and not item.value.projected
    return isinstance(item, (int, float)) and not isinstance(item, bool) and can_scale(item)


def can_scale(number: float) -> bool:
    """Whether a number can be the scale of a cache in float32. Such a number is not 0, not
    infinite, and not so small that it loses digits."""
    return FLOAT32.tiny <= abs(number) <= FLOAT32.max


def scale_argument(written: Written, device: torch.device) -> View | Computed | None:
    """Returns the scale of a write in the form that the op expects; None if there is none.

    Raises Reject (CAST) if the scale varies from token to token or along head_dim.
    """
    if written.scale is None:
        return None
    made = scale_of_heads(written.scale, device)
    if made is None:
        assert isinstance(written.scale, View)
        message = "the scale of the cache differs between tokens, or along head_dim"
        hint = "use one scale for the whole cache, or one for each head"
        reject("CAST", Stage.ANCHORED, message, written.scale, hint=hint)
    return made


def scale_of_heads(scale: View | float, device: torch.device) -> View | Computed | None:
    """Returns the scale of heads [..., H, D] in the form that ops expect: fp32, [] or [H]. Returns
    None if the scale varies from token to token or along head_dim."""
    if not isinstance(scale, View):
        options = (("dtype", torch.float32), ("device", device))
        return Computed("full", ((), float(scale)), options)
    *tokens, heads, elements = scale.effect.dims
    if not all(_repeats(dim) for dim in (*tokens, elements)):
        return None
    view = scale.with_dims(*(() if _repeats(heads) else (heads,)))
    if view.value.dtype == torch.float32:
        return view
    return Computed("to", (view,), (("dtype", torch.float32),))


def _repeats(dim: effects.Dim) -> bool:
    return all(atom.axis is None for atom in dim)
