"""Activations that the graph quantises to e4m3 before a GEMM with expert weights.

    blocks = x.float().view(M, K / 128, 128)
    scale  = blocks.abs().amax(-1, keepdim=True) / 448           or clamped from below
    codes  = (blocks / scale).clamp(-448, 448).to(float8_e4m3fn)
    rows   = (codes.float() * scale).view(M, K).to(x.dtype)      ⇒   x, activation_format="fp8"

with the division, or a product with the reciprocal. The op's zero blocks are zero, where the graph
may divide by zero; a block below the graph's lower bound keeps its own scale. Dimension letters: M
rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from tilewright.ops.formats.fp8_block import BLOCK, E4M3_MAX
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View, upstream
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Stage, register_code, reject
from tilewright.patterns.recognise.casts import is_float_cast
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm
from tilewright.patterns.recognise.steps import clamp_bounds, reduced_dims

register_code(
    "ACTIVATION_FORMAT",
    "activations are rounded to eight bits between the GEMMs in a way that the op does not do",
)

# The largest lower bound of a scale that counts as a guard against dividing by zero.
LARGEST_BOUND = 1e-2
# Relative difference allowed to 448 or 1 / 448 as rounded to fp32.
CLOSE = 1e-6
_DECODING = {"cast", "bitcast", "aten.mul", "aten.div", "aten.clone"}
_CODES = (torch.float8_e4m3fn, torch.int8)
# How many values the search goes back from rows to their codes.
_REACH = 24
_LARGEST = {("aten.amax", 0), ("aten.max", 0)}


@dataclass(frozen=True)
class QuantisedRows:
    """source [M, K]: the numbers that are quantised. absorbed: what quantises and decodes them."""

    source: View
    absorbed: tuple[Value, ...]


def match_quantised_rows(rows: View) -> QuantisedRows | None:
    """What the rows [M, K] of a GEMM are quantised from; None where they are not, or otherwise."""
    try:
        return _match(rows)
    except InexpressibleError:
        return None


def holds_codes(rows: View) -> bool:
    """Whether rows are decoded from codes of eight bits, a few element-wise steps back."""
    return any(
        value.op in _DECODING and value.dtype in _CODES
        for value in upstream(rows.value, _REACH, lambda v: v.op in _DECODING)
    )


def before_quantisation(gemm: ExpertGemm) -> tuple[ExpertGemm, bool]:
    """The GEMM with its rows before the graph quantised them, and whether it did."""
    found = match_quantised_rows(gemm.x)
    if found is None:
        return gemm, False
    return replace(gemm, x=found.source, absorbed=(*gemm.absorbed, *found.absorbed)), True


def check_formats(
    hidden_coded: bool, rows_coded: bool, x: View, hidden: View, layer: dict[str, Any]
) -> None:
    """Rejects (ACTIVATION_FORMAT) what the op does not quantise, or not together. layer: the op's
    arguments for the weights."""
    if not (hidden_coded and rows_coded):
        which = "the activation's result" if hidden_coded else "the tokens"
        refuse_format(x, f"are not all quantised: of both GEMMs' rows only {which}")
    if hidden.value.dtype != x.value.dtype:
        refuse_format(hidden, f"are quantised from {hidden.value.dtype}")
    if layer.get("weight_format") != "fp8" or layer["scale_block"][1] != BLOCK:
        refuse_format(x, f"are quantised, the weights are not, by blocks of {BLOCK} columns")


def refuse_format(view: View, why: str) -> NoReturn:
    """Ends the attempt: ACTIVATION_FORMAT."""
    message = f"activations of the experts {why}"
    hint = "fused are e4m3 codes with amax / 448 per row and 128 columns, in front of both GEMMs"
    reject("ACTIVATION_FORMAT", Stage.GUARDS, message, view, hint=hint)


@dataclass
class _Walk:
    """The values passed on the way."""

    passed: list[Value] = field(default_factory=list)

    def before_casts(self, view: View) -> View:
        while is_float_cast(view.value):
            view = self.before(view)
        return view

    def before(self, view: View) -> View:
        """The same elements of an element-wise value's first operand."""
        self.passed.append(view.value)
        return view.of_operand(view.value.args[0])


def _match(rows: View) -> QuantisedRows | None:
    walk = _Walk()
    product = walk.before_casts(rows)
    if product.value.op != "aten.mul" or len(rows.shape) != 2:
        return None
    walk.passed.append(product.value)
    for codes, scale in _both_ways(product):
        own = _Walk(list(walk.passed))
        source = _quantised(own, own.before_casts(codes), scale)
        if source is not None:
            return QuantisedRows(source, tuple(dict.fromkeys(own.passed)))
    return None


def _both_ways(product: View) -> Iterator[tuple[View, View]]:
    """Its operands, each way round, as views of the product's shape."""
    one, other = product.value.args[:2]
    if isinstance(one, View) and isinstance(other, View):
        one, other = product.of_operand(one), product.of_operand(other)
        yield one, other
        yield other, one


def _quantised(walk: _Walk, codes: View, scale: View) -> View | None:
    """The numbers of which `codes`, seen as floats, are the codes with this scale."""
    value = codes.value
    if value.op != "cast" or not value.dtype.is_floating_point or value.dtype.itemsize == 1:
        return None
    rounded = walk.before(codes)
    if rounded.value.op != "cast" or rounded.value.dtype != torch.float8_e4m3fn:
        return None
    divided = walk.before(rounded)
    if divided.value.op == "aten.clamp":
        if clamp_bounds(divided.value) != (-E4M3_MAX, E4M3_MAX):
            return None
        divided = walk.before(divided)
    for numbers in _numerators(walk, divided, scale):
        source = numbers
        while is_float_cast(source.value) and _widens(source.value):
            source = walk.before(source)
        if _is_block_scale(walk, scale, source):
            return source
    return None


def _widens(value: Value) -> bool:
    before = value.operands[0].value.dtype
    return torch.promote_types(before, value.dtype) == value.dtype


def _numerators(walk: _Walk, quotient: View, scale: View) -> Iterator[View]:
    """x where the quotient is x / scale, in whichever spelling."""
    value = quotient.value
    if value.kwargs or len(value.args) != 2:
        return
    if value.op == "aten.div":
        x, by = value.args
        if isinstance(by, View) and isinstance(x, View) and quotient.of_operand(by) == scale:
            walk.passed.append(value)
            yield quotient.of_operand(x)
    elif value.op == "aten.mul":
        for x, by in _both_ways(quotient):
            inverse = by.value
            of = _reciprocal_of(inverse)
            if of is not None and by.of_operand(of) == scale:
                walk.passed += [value, inverse]
                yield x


def _reciprocal_of(value: Value) -> View | None:
    if value.op == "aten.reciprocal":
        only: View = value.args[0]
        return only
    over = value.op == "aten.div" and value.args[0] == 1 and not value.kwargs
    if over and isinstance(value.args[1], View):
        return value.args[1]
    return None


def _is_block_scale(walk: _Walk, scale: View, source: View) -> bool:
    """Whether scale [M, K] is each element's block's amax / 448 of source [M, K]."""
    scale = _unbounded(walk, scale)
    value = scale.value
    if not _divides_by_448(value):
        return False
    largest = _unbounded(walk, walk.before(scale))
    amax = largest.value
    if (amax.op, amax.kwargs.get("output", 0)) not in _LARGEST or not _over_last(amax):
        return False
    walk.passed.append(amax)
    return _sees_its_block(largest) and _is_magnitude(walk, amax.args[0], source)


def _unbounded(walk: _Walk, view: View) -> View:
    """A scale before a small lower bound."""
    while (bounds := clamp_bounds(view.value)) is not None:
        low, high = bounds
        if high is not None or not isinstance(low, (int, float)) or not low <= LARGEST_BOUND:
            break
        view = walk.before(view)
    return view


def _divides_by_448(value: Value) -> bool:
    if len(value.args) != 2 or value.kwargs or not isinstance(value.args[0], View):
        return False
    number: Any = value.args[1]
    if not isinstance(number, (int, float)):
        return False
    wanted = {"aten.div": E4M3_MAX, "aten.mul": 1 / E4M3_MAX}.get(value.op)
    return wanted is not None and abs(number / wanted - 1) < CLOSE


def _over_last(amax: Value) -> bool:
    shape = amax.args[0].shape
    return reduced_dims(amax) == (len(shape) - 1,) and shape[-1] == BLOCK


def _sees_its_block(largest: View) -> bool:
    """Whether each of [M, K] sees the amax of its own 128 columns."""
    rows, columns = largest.shape
    blocks = effects.divides(BLOCK, columns)
    apart = effects.reshape(effects.identity(largest.value.shape), (rows, blocks, 1))
    repeated = effects.expand(apart, (rows, blocks, BLOCK))
    return largest.effect == effects.reshape(repeated, (rows, columns))


def _is_magnitude(walk: _Walk, blocks: View, source: View) -> bool:
    """Whether `blocks` are the absolute values of source [M, K], 128 columns at a time."""
    magnitude = walk.before_casts(blocks)
    if magnitude.value.op != "aten.abs":
        return False
    inner = walk.before(magnitude)
    while is_float_cast(inner.value) and _widens(inner.value):
        inner = walk.before(inner)
    if inner.value is not source.value:
        return False
    return effects.reshape(inner.effect, source.shape) == source.effect
