"""Recognises the dequantisation of a linear's weight, from the stored codes to the GEMM, by its
result.

    w[n, k] = (code[n, k] - zero[n / bn, k / bk]) * scale[n / bn, k / bk]

Each position within a word is examined separately. The view of the elements at one position is
followed back to the words that contain their bits, and to the zero and the scale of these elements.
All positions together determine the format.

Dimension letters: N rows (`h * D + d` of one projection), K hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.ops.formats.quantized_weight import nibbles_per_word
from tilewright.ops.runtime.dtypes import torch_types
from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.quantised.experts import match_packed
from tilewright.patterns.quantised.factors import MAGNITUDE, Steps, match_coded, repeats
from tilewright.patterns.quantised.positions import every, joined
from tilewright.patterns.quantised.words import (
    Bits,
    bits_of,
    fits,
    follow,
    holds_codes,
    is_code,
)

# Pairs of a format that linears support and a dtype in which this format is stored.
_STORED = [
    (name, dtype)
    for name, form in WEIGHT_FORMATS.items()
    if form.linears
    for dtype in torch_types(form.stored)
]
# For each dtype, the format whose stored numbers are one code each.
_WHOLE = {dtype: name for name, dtype in _STORED if WEIGHT_FORMATS[name].packed_axis is None}
# The formats whose codes are floats of four bits.
_FLOATS = {name for name, _ in _STORED if WEIGHT_FORMATS[name].number}
# The formats in which several integers share a word, with the dtype of the word.
_PACKED = [one for one in _STORED if one[0] not in {*_WHOLE.values(), *_FLOATS}]


@dataclass(frozen=True)
class DequantizedWeight:
    """A quantised weight, (codes - zero - zero_point) * scale, in one of the formats of
    `codegen/formats.py`. If the format has `added_zeros`, the weight is (codes - zero_point) *
    scale + zero.

    Attributes:
        codes: The codes, [H, D, K]. They are packed along K in the format `int4_k`, and along D in
            the format `int4_n`.
        format: The name of the format.
        scale: The scale, [N, K], or None. Its numbers repeat over blocks, and `weight_arguments`
            (`patterns/quantised/scales.py`) reduces them to one number per block.
        zero: The zero, [N, K], or None. Its numbers repeat over blocks like those of the scale.
        zero_point: The zero point.
        nibble_order: The order of the nibbles in a word.
        steps: The steps that are applied to the scale after it is cut to blocks.
        factors: Further scales [N, K] that multiply the weight. Their blocks are larger than those
            of `scale`.
        divisors: Further scales [N, K] that divide the weight. Their blocks, too, are larger than
            those of `scale`.
        number: A factor for the whole weight.
    """

    codes: View
    format: str
    scale: View | None
    zero: View | None
    zero_point: int
    nibble_order: tuple[int, ...]
    steps: Steps = ()
    factors: tuple[View, ...] = ()
    divisors: tuple[View, ...] = ()
    number: float = 1.0

    @property
    def has_factors(self) -> bool:
        return bool(self.factors or self.divisors or self.number != 1)


def match_weight(weight: View) -> DequantizedWeight | None:
    """Returns the quantised weight from which a view [H, D, K] (or [groups, G, D, K]) of a
    product's weight is computed. Returns None if the weight is not computed from codes.

    Raises Reject (WEIGHT_FORMAT) for codes that are used in another way.
    """
    if not holds_codes(weight.value):
        return None
    found = _decoded(weight.matrix)
    if found is None and len(weight.value.shape) == 2 and _decoded(weight.value.whole) is not None:
        reject(
            "SCALE_BLOCK",
            Stage.GUARDS,
            f"{weight.value}: the boundaries of its heads are not boundaries of blocks of scales",
            weight,
            hint=(
                "store q, k and v separately, or one after the other, and quantise them in "
                "this form"
            ),
        )
    if found is None:
        refuse(weight, "in no format that the op knows")
    shape = list(weight.shape[:-1])
    if WEIGHT_FORMATS[found.format].packed_axis == -2:
        per = len(found.nibble_order)
        if not isinstance(shape[-1], int) or shape[-1] % per:
            refuse(weight, f"{per} rows share a word, and head_dim, {shape[-1]}, is no multiple")
        shape[-1] //= per
    return replace(found, codes=found.codes.reshape(*shape, found.codes.shape[1]))


def _decoded(rows: View) -> DequantizedWeight | None:
    try:
        found = _whole_codes(rows) or _nibbles(rows)
        # Codes that repeat may be the scales of other codes.
        if found is None or repeats(found.codes.effect):
            return _floats(rows) or found
        return found
    except InexpressibleError:
        return None


def match_scaled_weight(weight: View, *outside: View | None) -> DequantizedWeight | None:
    """Returns the quantised weight of a product whose result or operands may be scaled too.

    outside: the scales of the result and the operands, [N, K]. Raises Reject (WEIGHT_FORMAT) in the
    cases of :func:`match_weight`, and if there is more than one scale.
    """
    found = match_weight(weight)
    if found is None:
        return None
    given = [scale for scale in (found.scale, *outside) if scale is not None]
    if len(given) > 1:
        refuse(weight, "the codes are scaled twice")
    return replace(found, scale=given[0] if given else None)


def repeated(rows: View, hidden: int) -> View:
    """Expands one number for each row [H, D] to one number for each element [N, K]."""
    flat = effects.reshape(rows.effect, (effects.product(rows.shape), 1))
    return View(rows.value, effects.expand(flat, (flat.shape[0], hidden)))


def refuse(weight: View, why: str) -> NoReturn:
    """Raises Reject with the code WEIGHT_FORMAT."""
    message = f"{weight.value} is computed from codes of eight bits or fewer, but {why}"
    hint = (
        "the known formats are (code - zero) * scale with int8, uint8, float8_e4m3fn, or two "
        "or eight nibbles in a word of uint8 or int32; code * scale + offset with nibbles "
        "along K; NVFP4, MXFP4, and bitsandbytes' NF4 and FP4"
    )
    reject("WEIGHT_FORMAT", Stage.GUARDS, message, weight, hint=hint)


# --- the format -----------------------------------------------------------------------------------


def _whole_codes(rows: View) -> DequantizedWeight | None:
    """Matches one code per stored number."""
    element = _element(rows)
    if element is None or not isinstance(element.code, View):
        return None
    stored = None if element.added else _WHOLE.get(element.code.value.dtype)
    has_zero = element is not None and (element.zero or element.zero_point)
    if stored is None or (has_zero and not WEIGHT_FORMATS[stored].zeros):
        return None
    return DequantizedWeight(
        element.code, stored, element.scale, element.zero, element.zero_point, ()
    )


def _nibbles(rows: View) -> DequantizedWeight | None:
    """Matches two or eight codes per word, along K or along the rows."""
    for name, dtype in _PACKED:
        axis = 2 + (WEIGHT_FORMATS[name].packed_axis or 0)
        found = packed(rows, axis, nibbles_per_word(dtype), dtype)
        if found is not None:
            words, order, elements = found
            points = {e.zero_point for e in elements}
            if len(points) != 1:
                return None
            form = WEIGHT_FORMATS[name]
            others = [e.zero if form.added_zeros else e.added for e in elements]
            if any(others) or form.added_zeros != any(e.added for e in elements):
                continue
            scale = joined([e.scale for e in elements], axis)
            zero = joined([e.added if form.added_zeros else e.zero for e in elements], axis)
            return DequantizedWeight(words, name, scale, zero, points.pop(), order)
    return None


def _floats(rows: View) -> DequantizedWeight | None:
    """Matches two codes per byte, where each code is decoded to a float."""
    hidden = rows.shape[1]
    found = match_packed(rows) if isinstance(hidden, int) else None
    if found is None or found.format not in _FLOATS or not isinstance(found.data, View):
        return None
    return DequantizedWeight(
        found.data,
        found.format,
        found.scale,
        None,
        0,
        WEIGHT_FORMATS[found.format].order,
        (*found.steps, *(MAGNITUDE if found.unsigned else ())),
        tuple(repeated(view, hidden) for view in found.factors),
        tuple(repeated(view, hidden) for view in found.divisors),
        found.number,
    )


def packed(
    rows: View, axis: int, per: int, dtype: torch.dtype
) -> tuple[View, tuple[int, ...], list[Element]] | None:
    """Returns (words, nibble order, the elements at each position of a word) along `axis`, or
    None."""
    size = rows.shape[axis]
    if not isinstance(size, int) or size % per:
        return None
    elements: list[Element] = []
    order: list[int] = []
    words: set[View] = set()
    for position in range(per):
        element = _element(every(rows, axis, per, position))
        code = None if element is None else element.code
        if element is None or not isinstance(code, Bits) or code.word.value.dtype != dtype:
            return None
        if (code.width, code.signed) != (4, False) or code.shift % 4:
            return None
        elements.append(element)
        order.append(code.shift // 4)
        words.add(code.word)
    if len(words) != 1 or sorted(order) != list(range(per)):
        return None
    return words.pop(), tuple(order), elements


# --- one element ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Element:
    """The formula (code - zero - zero_point) * scale + added. `code` is bits of words, or stored
    numbers."""

    code: Bits | View
    scale: View | None = None
    zero: View | None = None
    zero_point: int = 0
    added: View | None = None


def _element(view: View) -> Element | None:
    """Returns the formula that dequantises the elements of a view. Returns None for another
    formula."""
    return _scaled(view) or _shifted(view)


def _shifted(view: View) -> Element | None:
    """Matches a product of codes and a scale, to which one number for each block is added."""
    view = follow(view)
    while is_float_cast(view.value):
        view = follow(view.of_operand(view.value.operands[0]))
    if view.value.op != "aten.add" or view.value.kwargs.get("alpha", 1) != 1:
        return None
    for product, added in view.value.either_way:
        found = _scaled(view.of_operand(product))
        if found is not None and found.scale is not None:
            return replace(found, added=_bare(view.of_operand(added)))
    return None


def _scaled(view: View) -> Element | None:
    """Matches (code - zero) * scale, to which nothing is added."""
    found = match_coded(view, _unscaled)
    if found is None or found.number != 1 or len(found.factors) > 1:
        return None
    if any(factor.kind != "times" for factor in found.factors):
        return None
    scales = [_bare(factor.view) for factor in found.factors]
    return replace(found.code, scale=scales[0] if scales else None)


def _unscaled(view: View) -> Element | None:
    """Returns the elements of a view as code - zero. Returns None for every other formula."""
    view = follow(view)
    value = view.value
    if value.op == "cast" and (is_float_cast(value) or _from_code(value)):
        return _unscaled(view.of_operand(value.operands[0]))
    if value.op in ("aten.sub", "aten.add"):
        return _offset(view)
    if value.dtype.is_floating_point and value.dtype in _WHOLE:
        return Element(view)
    bits = None if value.op == "aten.mul" else bits_of(view)
    if bits is None:
        return None
    stored = bits.word.value.dtype
    whole = bits.shift == 0 and bits.width == 8 and bits.signed == stored.is_signed
    return Element(bits.word if whole and stored in _WHOLE else bits)


def _from_code(value: Value) -> bool:
    """Whether a cast converts codes, or integers that are unpacked from codes, to floats
    exactly."""
    source = value.operands[0].value.dtype
    whole = not source.is_floating_point and not source.is_complex and source != torch.bool
    return value.dtype.is_floating_point and value.dtype.itemsize > 1 and (whole or is_code(source))


def _offset(view: View) -> Element | None:
    """Matches code - zero, code - n or code + n, where n is an integer."""
    value = view.value
    if value.kwargs.get("alpha", 1) != 1 or not isinstance(value.args[0], View):
        return None
    inner = _unscaled(view.of_operand(value.args[0]))
    if inner is None:
        return None
    other = value.args[1]
    if not _has_room(value):
        return None
    if isinstance(other, (int, float)) and float(other).is_integer():
        sign = 1 if value.op == "aten.sub" else -1
        return replace(inner, zero_point=inner.zero_point + sign * int(other))
    if not isinstance(other, View) or value.op == "aten.add" or inner.zero is not None:
        return None
    return replace(inner, zero=_bare(view.of_operand(other)))


def _has_room(difference: Value) -> bool:
    """Whether a difference cannot wrap around in its integer dtype."""
    dtype = difference.dtype
    wide = dtype.is_floating_point or (dtype.is_signed and dtype.itemsize > 1)
    return wide or fits(difference)


def _bare(view: View) -> View:
    """Returns a scale or zero point before gathers and casts. Arithmetic in float32 may omit these
    casts."""
    view = follow(view)
    while is_float_cast(view.value):
        view = follow(view.of_operand(view.value.operands[0]))
    return view
