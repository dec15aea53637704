"""Keys and values that the graph decodes from 8-bit floats.

    k = cache.to(dtype) * scale        ⇒   cache, k_scale

There is one scale, or one for each head. If the graph divides by a scale, the op gets the
reciprocal of the scale. Caches may be bytes that the graph views as floats, before or after it
gathers their pages. Dimension letters are explained in `patterns/recognise/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tilewright.ops.formats.fp8 import FP8_DTYPES
from tilewright.patterns.arithmetic.casts import strip_casts
from tilewright.patterns.arithmetic.constants import given_number
from tilewright.patterns.attention.shared_heads import group_of, heads_repeat, once
from tilewright.patterns.cache.eight_bit import WIDE, can_scale, scale_of_heads
from tilewright.patterns.dataflow import Computed, View


@dataclass(frozen=True)
class Decoded:
    """Keys or values, described by the 8-bit codes that they are decoded from.

    Attributes:
        codes: [B, K, H, D], bytes that stand for numbers of `dtype`.
        dtype: The 8-bit float dtype.
        scale: The factor that multiplies the decoded numbers. It is a number, or a view [B, K, H,
            D] that repeats along K and D; None for 1.
        divides: Whether the graph divides by the scale instead of multiplying by it.
    """

    codes: View
    dtype: torch.dtype
    scale: View | float | None = None
    divides: bool = False

    @property
    def tensors(self) -> tuple[View, ...]:
        return (self.codes, self.scale) if isinstance(self.scale, View) else (self.codes,)

    def once(self, group: int) -> Decoded:
        """Returns the first of every `group` equal heads."""
        scale = once(self.scale, group) if isinstance(self.scale, View) else self.scale
        return replace(self, codes=once(self.codes, group), scale=scale)

    def scale_argument(self) -> View | Computed | None:
        """Returns the scale in the form that the op expects: fp32, [] or [H]; None for 1."""
        if self.scale is None:
            return None
        made = scale_of_heads(self.scale, self.codes.value.device)
        return Computed("reciprocal", (made,)) if self.divides else made


def decoded(view: View) -> Decoded | None:
    """Returns the codes that a view [B, K, H, D] is decoded from. Returns None if the view is not
    decoded from codes, or if the scale varies from token to token or along D."""
    found = _decoded(view)
    if found is None or not isinstance(found.scale, View):
        return found
    return None if scale_of_heads(found.scale, view.value.device) is None else found


def decoded_pair(k: View, v: View) -> tuple[Decoded, Decoded] | None:
    """Returns the codes and scales of keys and values, with one head for each group of adjacent
    equal heads. Returns None if keys or values are not decoded, if their dtypes differ, or if heads
    repeat in another way or repeat without their scales."""
    keys, values = decoded(k), decoded(v)
    if keys is None or values is None or keys.dtype != values.dtype:
        return None
    group = group_of(*keys.tensors, *values.tensors)
    keys, values = keys.once(group), values.once(group)
    return None if any(heads_repeat(one.codes) for one in (keys, values)) else (keys, values)


def _decoded(view: View) -> Decoded | None:
    view, _ = strip_casts(view)
    value = view.value
    if (codes := _widened(view)) is not None:
        return codes
    if value.op not in ("aten.mul", "aten.div") or len(value.args) != 2 or value.kwargs:
        return None
    divides = value.op == "aten.div"
    for x, scale in (value.args, value.args[::-1])[: 2 - divides]:
        codes = _widened(strip_casts(view.of_operand(x))[0]) if isinstance(x, View) else None
        if codes is None:
            continue
        if isinstance(scale, View) and scale.value.dtype in WIDE:
            return replace(codes, scale=view.of_operand(scale), divides=divides)
        number = given_number(scale)
        if number is not None and can_scale(number):
            return replace(codes, scale=1 / number if divides else number)
    return None


def _widened(view: View) -> Decoded | None:
    """Returns the codes that a view casts to a dtype that represents every code exactly. Returns
    None for any other view."""
    value = view.value
    if value.op != "cast" or value.dtype not in WIDE:
        return None
    codes = value.args[0].through(view.effect)
    dtype = codes.value.dtype
    return Decoded(bytes_of(codes), dtype) if dtype in FP8_DTYPES else None


def bytes_of(item: View | Computed) -> View:
    """Returns the bytes that the graph or :func:`as_dtype` views as floats."""
    codes: View = item if isinstance(item, View) else item.operands[0]
    while codes.value.op == "bitcast" and codes.value.args[0].shape == codes.value.shape:
        codes = codes.value.args[0].through(codes.effect)
    return codes


def as_dtype(codes: View, dtype: torch.dtype) -> View | Computed:
    """Returns bytes, viewed as numbers of a dtype."""
    codes = bytes_of(codes)
    return codes if codes.value.dtype == dtype else Computed("bitcast", (codes, dtype))
