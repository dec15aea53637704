"""Linears that no other pattern matches, and whose activation and weight are both float8 codes.

    x   = (e4m3 codes) * x_scale, rounded; weight = (e4m3 codes) * weight_scale, rounded
    out = linear(x, weight, bias)     ⇒   scaled_linear(codes, codes, weight_scale, x_scale, ...)

The pattern matches any number of tokens, and any way to round x. The codes and the scale of x stay
in the graph. Inductor computes them in one kernel, together with the operations before them. For
many tokens, the pattern also replaces an operator of a library that multiplies such codes
(`compiler/quantised/operators.py`). If the graph itself calls a scaled product, the pattern leaves
this call unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tilewright.ops.checks import HALVES
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Dataflow, Value, once
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import (
    Match,
    Missed,
    Reject,
    Result,
    Sought,
    Stage,
    miss_at,
    register,
)
from tilewright.patterns.mlp.linears import LEAST_COLUMNS, WEIGHT_NAMES, is_stored_as_is
from tilewright.patterns.quantised.coded_rows import (
    CodedRows,
    UnknownRows,
    first_alike,
    match_coded_rows,
)
from tilewright.patterns.quantised.scales import weight_arguments
from tilewright.patterns.quantised.weights import DequantizedWeight, match_scaled_weight
from tilewright.patterns.recognise.dtypes import check_dtypes, rows_fact
from tilewright.patterns.recognise.gemm import Gemm, match_gemm, piece_of

_HINT = (
    "the known format is float8_e4m3fn codes with one scale for the tensor, for each "
    "token, or for 128 columns"
)
_ARGUMENTS = ("weight", "weight_scale", "scale_block", "weight_format")
# The largest number of tokens for which an operator of a quantisation library stays in the graph,
# if no other pattern matches it.
_MOST_OF_OPERATOR = 16


@dataclass(frozen=True)
class ScaledLinear:
    """Matches linears whose activation and weight are both float8 codes, if no other pattern
    matches them."""

    name: str = "scaled_linear"
    op: str = "scaled_linear"
    takes_leftovers: bool = True
    asked_last: ClassVar[bool] = True  # after the patterns whose kernels compute more operations
    asked_before: ClassVar[tuple[str, ...]] = ("coded_linear",)
    optional: ClassVar[bool] = True  # without a kernel, PyTorch's product is good enough
    sought: ClassVar[Sought] = Sought(
        "linears of activations and weights that are both float8 codes",
        frozenset({"aten.linear", "aten.addmm", "aten.mm", "aten.matmul"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value | Missed]:
        """Yields the products of a weight of float8 codes with an activation of float8 codes. Also
        yields misses for products whose activation is rounded in another way."""
        for value in flow.values:
            gemm = match_gemm(value)
            if gemm is None or not _is_linear(gemm):
                continue
            rows = _rows_of(gemm)
            if rows is None or _weight_of(gemm) is None:
                continue
            if isinstance(rows, UnknownRows):
                yield _missed(gemm, rows)
            else:
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        gemm = match_gemm(anchor)
        assert gemm is not None
        rows, weight = _rows_of(gemm), _weight_of(gemm)
        assert isinstance(rows, CodedRows)
        assert weight is not None
        check_dtypes([anchor.dtype], "results", anchor, HALVES)
        rows = first_alike(rows, flow)
        given = weight_arguments([weight], [WEIGHT_NAMES])
        tokens, columns = rows.codes.shape
        made = tokens, gemm.weight.shape[0]
        return Match(
            anchor=anchor,
            arguments={
                "x": rows.codes,
                "x_scale": rows.x_scale,
                "bias": gemm.bias,
                "out_dtype": anchor.dtype,
                **{name: given[name] for name in _ARGUMENTS},
            },
            results=(Result.of_rows(anchor, made),),
            absorbed=(anchor,),
            facts={
                "x": rows_fact(rows.codes.value.dtype, tokens, columns),
                "n": gemm.weight.shape[0],
                "bias": "yes" if gemm.bias is not None else "no",
            },
            scope=anchor.scope,
        )


def _is_linear(gemm: Gemm) -> bool:
    """Whether a product multiplies [tokens..., K] with a large enough matrix. Returns False for a
    product in a mixture of experts. Also returns False for a product that multiplies codes
    themselves, unless it replaces a library's operator for more than `_MOST_OF_OPERATOR` tokens, or
    for a symbolic number of tokens."""
    value, (rows, columns) = gemm.value, gemm.weight.shape
    if not all(isinstance(n, int) and n >= LEAST_COLUMNS for n in (rows, columns)):
        return False
    if gemm.shape != value.shape or not effects.is_identity(gemm.layout, gemm.shape):
        return False
    tokens = effects.product(gemm.shape[:-1])
    if effects.only_data_tell(tokens):  # the product belongs to a mixture of experts
        return False
    if gemm.x_scale is None:
        return True
    few = isinstance(tokens, int) and tokens <= _MOST_OF_OPERATOR
    return value.stands_in and not few


@once
def _rows_of(gemm: Gemm) -> CodedRows | UnknownRows | None:
    """Returns the codes that a product multiplies as its activation, or that this activation is
    decoded from."""
    try:
        rows = gemm.flat_x
    except InexpressibleError:
        return None
    return match_coded_rows(rows) if gemm.x_scale is None else CodedRows(rows, gemm.x_scale)


@once
def _weight_of(gemm: Gemm) -> DequantizedWeight | None:
    """Returns the weight of a product if the model stores it as float8 codes with scales; else
    None."""
    try:
        found = match_scaled_weight(piece_of(gemm.weight), gemm.weight_scale)
    except (Reject, InexpressibleError):
        return None
    if found is None or found.format != "fp8" or found.has_factors or found.scale is None:
        return None
    return found if is_stored_as_is(found.codes.value) else None


def _missed(gemm: Gemm, rows: UnknownRows) -> Missed:
    message = (
        f"{gemm.value}: its weight is float8 codes, but its activation is decoded from {rows.why}"
    )
    code, stage = "ACTIVATION_FORMAT", Stage.GUARDS
    miss = miss_at(code, stage, message, gemm.value, hint=_HINT, weight="advice")
    return Missed(miss, products=(gemm.value,))


register(ScaledLinear())
