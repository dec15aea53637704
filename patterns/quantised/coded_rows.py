"""Activations that the graph decodes from e4m3 codes in front of a GEMM.

    rows = (codes.to(dtype) * scale).to(dtype)      codes [M, K], scale [M or 1, 1 or K / 128]

The codes and the scale may be computed in any way. An op that reads the codes and the scale, and
not the rows, does not round to dtype. Dimension letters: M rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.ops.formats.activation_codes import ACTIVATION_BLOCK, ACTIVATION_CODES
from tilewright.patterns.arithmetic.casts import before_widening
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View, once
from tilewright.patterns.effects import InexpressibleError, Size
from tilewright.patterns.quantised.blocks import Block, block_of, cut_to_blocks
from tilewright.patterns.quantised.factors import fp32, match_coded
from tilewright.patterns.quantised.words import follow

# The largest number of values that are searched for equal codes. These values are computed from the
# numbers that were rounded to codes.
_REACH = 64
# The largest number of steps from numbers to their codes.
_STEPS = 6
_ROUNDING = frozenset({"cast", "aten.clamp", "aten.div", "aten.mul"})
_INSIDE = _ROUNDING | {
    "aten.abs", "aten.amax", "aten.amin", "aten.maximum", "aten.neg", "aten.eq", "aten.where"
}  # fmt: skip


@dataclass(frozen=True)
class CodedRows:
    """The e4m3 codes [M, K], and their scale [M or 1, 1 or K / 128] in any floating-point dtype.
    The scale is None if it is 1."""

    codes: View
    scale: View | None

    @property
    def x_scale(self) -> Computed | None:
        """The scale in the form that ops expect. It is float32, so that a scale that is computed in
        float32 is not rounded."""
        return None if self.scale is None else fp32(self.scale)


@dataclass(frozen=True)
class UnknownRows:
    """Rows that are decoded from codes of eight bits but that no op supports, and the reason."""

    why: str


@once
def match_coded_rows(rows: View) -> CodedRows | UnknownRows | None:
    """Returns the codes from which the rows [M, K] of a GEMM are decoded. Returns None for other
    rows."""
    if len(rows.shape) != 2:
        return None
    try:
        found = match_coded(rows, _code)
        if found is None:
            return None
        codes, factors = found.code, found.factors
        if codes.value.dtype != ACTIVATION_CODES:
            return UnknownRows(f"codes of {_name(codes.value.dtype)}, not of float8_e4m3fn")
        if found.number != 1 or len(factors) > 1 or any(f.kind != "times" for f in factors):
            return UnknownRows("codes that more than one scale multiplies")
        if not factors:
            return CodedRows(codes, None)
        scale = before_widening(follow(factors[0].view))
        block = block_of(scale.effect.dims)
        if not _is_taken(block, rows.shape):
            return UnknownRows(f"a scale for each {_in_words(block)}")
        return CodedRows(
            codes, scale.with_dims(*cut_to_blocks(scale.effect.dims, rows.shape, block))
        )
    except InexpressibleError:
        return UnknownRows("scales with a layout that no view expresses")


def _code(view: View) -> View | None:
    """Returns the codes that a view casts to floats. Returns None if the view is not a cast of
    codes."""
    value = view.value
    if value.op != "cast" or not value.dtype.is_floating_point or value.dtype.itemsize == 1:
        return None
    (operand,) = value.operands
    source = operand.value.dtype
    return view.of_operand(operand) if source.is_floating_point and source.itemsize == 1 else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_taken(block: Block, shape: tuple[Size, ...]) -> bool:
    rows, columns = block
    whole = columns is None or columns == shape[1]
    by_block = columns == ACTIVATION_BLOCK and rows in (1, None)
    return rows in (1, None) and (whole or by_block)


def _in_words(block: Block) -> str:
    rows, columns = ("all" if size is None else size for size in block)
    return f"{rows} rows and {columns} columns"


def first_alike(rows: CodedRows, flow: Dataflow) -> CodedRows:
    """Returns the first rows in the graph whose codes and scale equal those of `rows`. (Libraries
    round an activation separately for each linear that reads it.)"""
    source = rows.codes.value
    for _ in range(_STEPS):
        if source.op not in _ROUNDING or not isinstance(source.args[0], View):
            break
        source = source.args[0].value
    made = flow.downstream(source, _REACH, lambda one: one.op in _INSIDE)
    made.sort(key=lambda one: one.position)
    scale = rows.scale and _first_equal(rows.scale, made)
    return CodedRows(_first_equal(rows.codes, made), scale)


def _first_equal(view: View, values: Sequence[Value]) -> View:
    """Returns a view of the first value, in program order, that has the same numbers as the given
    view."""
    own = view.value
    for value in values:
        if value.position >= own.position:
            break
        other = View(value, view.effect)
        if value.shape == own.shape and equal_values(other, view):
            return other
    return view
