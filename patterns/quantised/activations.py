"""Activations that the graph quantises to e4m3 in front of a GEMM with expert weights.

    blocks = x.float().view(M, K / 128, 128)
    scale  = blocks.abs().amax(-1, keepdim=True) / 448           or clamped from below
    codes  = (blocks / scale).clamp(-448, 448).to(float8_e4m3fn)
    rows   = (codes.float() * scale).view(M, K).to(x.dtype)      ⇒   x, activation_format="fp8"

The graph may multiply by the reciprocal instead of dividing. It may also clamp only the divisor
from below to a very small number. The op's result differs in two cases. For a block of zeros, the
op gives zeros, while the graph may divide by zero. If the graph clamps a scale from below, the op
does not. Dimension letters: M rows, K columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from tilewright.ops.formats.fp8_block import BLOCK, E4M3_MAX
from tilewright.patterns.arithmetic.casts import (
    is_float_cast,
    strip_casts,
    strip_widening,
    value_before_casts,
)
from tilewright.patterns.arithmetic.formula import (
    ABSENT,
    Formula,
    Found,
    call,
    clamp,
    largest,
    number,
    tensor,
)
from tilewright.patterns.dataflow import Value, View, upstream
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.recognise.grouped_gemm import ExpertGemm

#: The operation of a value that a call of :func:`decoded_rows` computes. Other patterns put such
#: calls into the graph.
DECODED_ROWS = "opaque:python::decoded_rows"
# The largest lower bound of a scale that is treated only as a guard against division by zero.
LARGEST_BOUND = 1e-2
# The largest bound if only the divisor is clamped. If the scale is smaller than the bound, the
# graph divides by the bound, but multiplies by the scale.
LARGEST_DIVISOR_BOUND = 1e-10
# The largest relative difference that a number may have from 448, or from 1 / 448 rounded to
# float32.
CLOSE = 1e-6
_DECODING = {"cast", "bitcast", "aten.mul", "aten.div", "aten.clone"}
_CODES = (torch.float8_e4m3fn, torch.int8)
# The largest number of values that the search visits from rows back to their codes.
_REACH = 24


@dataclass(frozen=True)
class QuantisedRows:
    """Rows that the graph quantises.

    Attributes:
        source: The numbers [M, K] that are quantised.
        absorbed: The values that quantise and decode these numbers.
    """

    source: View
    absorbed: tuple[Value, ...]


def match_quantised_rows(rows: View) -> QuantisedRows | None:
    """Returns the source from which the rows [M, K] of a GEMM are quantised. Returns None if the
    rows are not quantised, or are quantised in another way than the op quantises."""
    if len(rows.shape) != 2:
        return None
    try:
        product, casts = strip_casts(rows)
    except InexpressibleError:
        return None
    found: QuantisedRows | None = _ROWS.match(product, _taken)
    return None if found is None else replace(found, absorbed=(*casts, *found.absorbed))


def holds_codes(rows: View) -> bool:
    """Whether rows are decoded from codes of eight bits by a few element-wise steps."""
    return any(
        value.op in _DECODING and value.dtype in _CODES
        for value in upstream(rows.value, _REACH, lambda v: v.op in _DECODING)
    )


def decoded_rows(codes: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Returns the decoded activation [T, K] for codes [T, K] with scales [T or 1, K / block or 1].
    Each result is rounded once."""
    blocks = codes.float().unflatten(-1, (scale.shape[-1], -1))
    return (blocks * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def before_quantisation(gemm: ExpertGemm) -> tuple[ExpertGemm, bool]:
    """Returns (the GEMM with its rows as they were before the graph quantised them, whether the
    graph quantised them)."""
    found = match_quantised_rows(gemm.x)
    if found is None:
        return gemm, False
    return replace(gemm, x=found.source, absorbed=(*gemm.absorbed, *found.absorbed)), True


def check_formats(
    hidden_coded: bool, rows_coded: bool, x: View, hidden: View, layer: dict[str, Any]
) -> None:
    """Raises Reject (ACTIVATION_FORMAT) for combinations of formats that the op does not support.
    layer: the op's arguments for the weights."""
    if not (hidden_coded and rows_coded):
        which = "the activation's result" if hidden_coded else "the tokens"
        refuse_format(x, f"are quantised for one of the two GEMMs only: {which}")
    if hidden.value.dtype != x.value.dtype:
        refuse_format(hidden, f"are quantised from {hidden.value.dtype}")
    if layer.get("weight_format") != "fp8" or layer["scale_block"][1] != BLOCK:
        refuse_format(
            x, f"are quantised, but the weights are not quantised by blocks of {BLOCK} columns"
        )


def refuse_format(view: View, why: str) -> NoReturn:
    """Raises Reject with the code ACTIVATION_FORMAT."""
    message = f"activations of the experts {why}"
    hint = (
        "the op quantises to e4m3 codes with amax / 448 per row and 128 columns, in front "
        "of both GEMMs"
    )
    reject("ACTIVATION_FORMAT", Stage.GUARDS, message, view, hint=hint)


# --- the formulas ---------------------------------------------------------------------------------


def _bounded(of: Formula, name: str) -> Formula:
    """Matches a formula, or a clamp of this formula to a lower bound."""
    return of | clamp(of, number(name), ABSENT)


def _over_448(of: Formula) -> Formula:
    return of / number(E4M3_MAX, CLOSE) | of * number(1 / E4M3_MAX, CLOSE)


def _to(dtypes: str, of: Formula) -> Formula:
    """Matches a cast to e4m3 codes, or a cast from e4m3 codes to floats."""
    return call("cast", of, holds=_CASTS[dtypes])


_CASTS: dict[str, Callable[[Value], bool]] = {
    "codes": lambda cast: cast.dtype == torch.float8_e4m3fn,
    "floats": lambda cast: cast.dtype.is_floating_point and cast.dtype.itemsize > 1,
}

_X, _SCALE = tensor("x", strip=strip_widening), tensor("scale")
_LARGEST = largest(call("abs", _X), "block")
_BLOCK_SCALE = _bounded(_over_448(_bounded(_LARGEST, "least")), "least_scale")
_DIVISOR = _bounded(_SCALE, "least_divisor")
_QUOTIENT = _X / _DIVISOR | _X * (call("reciprocal", _SCALE) | 1 / _SCALE)
_ENCODED = _to("codes", _QUOTIENT | clamp(_QUOTIENT, number(-E4M3_MAX), number(E4M3_MAX)))
_ROWS = _to("floats", _ENCODED) * _BLOCK_SCALE.named("scale")


def _taken(found: Found) -> QuantisedRows | None:
    """Returns the rows if they are quantised as the op quantises them: in the op's blocks, and
    without rounding a scale or a quotient. Returns None otherwise."""
    least = [found.bound.get(name, 0.0) for name in ("least", "least_scale")]
    if found.bound["block"] != BLOCK or not max(least) <= LARGEST_BOUND:
        return None
    if not found.bound.get("least_divisor", 0.0) <= LARGEST_DIVISOR_BOUND:
        return None
    if any(_rounds(value) for value in found.absorbed):
        return None
    return QuantisedRows(found.bound["x"], tuple(dict.fromkeys(found.absorbed)))


def _rounds(value: Value) -> bool:
    """Whether a value is a cast to fewer bits. Casts of magnitudes and of decoded codes do not
    count."""
    if not is_float_cast(value) or value.dtype.itemsize >= value.operands[0].value.dtype.itemsize:
        return False
    return value_before_casts(value).op not in ("aten.abs", "cast")
