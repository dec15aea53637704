"""Factors around an adapter's GEMMs: numbers, a number per adapter, masks of rows.

Dimension letters: T rows, B sequences of equal length, G adapters, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.constants import given_number
from tilewright.patterns.arithmetic.steps import chosen_by_mask, is_filled
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Atom, Effect
from tilewright.patterns.recognise.outside import LOOKUPS, REFUSED, Outside
from tilewright.patterns.recognise.routing import flat, gathered, strip_integer_casts


@dataclass(frozen=True)
class RowMask:
    """Which rows have an adapter: those where view [T or B] bool is true, or with `hides` false."""

    view: View
    hides: bool = False

    def chosen(self, index: Any) -> Computed:
        """The index of rows that have an adapter, and -1 for others."""
        sides = (-1, index) if self.hides else (index, -1)
        return Computed("where", (self.view, *sides))


@dataclass(frozen=True)
class Factors:
    """scale * table[index] * view, rows zero that a mask hides; all but the view optional.

    table [G] with index [T or B], of which `outside` says what it makes of numbers that name none.
    absorbed: the values of the products.
    """

    view: View
    scale: float = 1.0
    table: View | None = None
    index: View | None = None
    outside: Outside = REFUSED
    mask: RowMask | None = None
    absorbed: tuple[Value, ...] = ()


def peel(view: View, casts: bool = True) -> Factors:
    """What is multiplied by factors to give a view [..., W], casts between floats left out."""
    found = Factors(view)
    while True:
        value = found.view.value
        if casts and is_float_cast(value):
            step: Factors | None = Factors(value.args[0])
        else:
            step = _step(value, found.view.effect)
        inner = None if step is None else _through(found.view, step.view)
        if step is None or inner is None:
            return found
        again = (found.table is not None, found.mask is not None)
        if (again[0] and step.table is not None) or (again[1] and step.mask is not None):
            return found
        found = replace(
            found,
            view=inner,
            scale=found.scale * step.scale,
            table=found.table if step.table is None else step.table,
            index=found.index if step.table is None else step.index,
            outside=found.outside if step.table is None else step.outside,
            mask=found.mask if step.mask is None else step.mask,
            absorbed=(*found.absorbed, value, *step.absorbed),
        )


def _through(view: View, inner: View) -> View | None:
    """`view` of an elementwise result, as a view of the operand."""
    if inner.shape != view.value.shape:
        return None
    try:
        return inner.through(view.effect)
    except effects.InexpressibleError:
        return None


def _step(value: Value, effect: Effect) -> Factors | None:
    """One factor of a value that is read through `effect` [..., W], what goes beside the value
    absorbed; None for another value."""
    if value.op in ("aten.where", "aten.masked_fill"):
        return _chosen(value, effect)
    if value.op not in ("aten.mul", "aten.div") or value.kwargs or len(value.args) < 2:
        return None
    operands = value.args[:2]
    one, other = (i if isinstance(i, View) else given_number(i) for i in operands)
    if value.op == "aten.div":
        if not isinstance(one, View) or not isinstance(other, float) or other == 0:
            return None
        return Factors(one, 1 / other)
    for operand, factor in ((one, other), (other, one)):
        if not isinstance(operand, View):
            continue
        if isinstance(factor, float):
            return Factors(operand, factor)
        found = _by_row(factor, value, effect)
        if found is not None:
            return replace(found, view=operand)
    return None


def _chosen(value: Value, effect: Effect) -> Factors | None:
    """where(mask, operand, 0), where(mask, 0, operand), masked_fill(operand, mask, 0)."""
    chosen = chosen_by_mask(value)
    if chosen is None:
        return None
    condition, one, other = chosen
    if hides := is_filled(one, 0):
        one, other = other, one
    if not isinstance(one, View) or not is_filled(other, 0) or one.shape != value.shape:
        return None
    mask = _rows_of(condition, value, effect)
    # zeros_like(delta) reads the delta, for its shape.
    shaped = isinstance(other, View) and other.value.op in ("aten.zeros_like", "aten.new_zeros")
    beside = (other.value,) if shaped else ()
    return None if mask is None else Factors(one, mask=RowMask(mask, hides), absorbed=beside)


def _by_row(factor: Any, value: Value, effect: Effect) -> Factors | None:
    """A factor table[index], or a mask, with one number for each row of what is read."""
    if not isinstance(factor, View):
        return None
    factor, _ = strip_casts(factor)
    rows = _rows_of(factor, value, effect)
    if rows is None:
        return None
    source = rows.value
    if source.dtype == torch.bool:
        return Factors(factor, mask=RowMask(rows))
    if source.op == "cast" and source.args[0].value.dtype == torch.bool:
        return Factors(factor, mask=RowMask(source.args[0].through(rows.effect)))
    taken = gathered(source.whole)
    if taken is None or effects.product(taken[0].shape[1:]) != 1 or rows != flat(source.whole):
        return None
    if len(taken[0].shape) < 1 or not is_index(taken[1]):
        return None
    index, outside = flat(strip_integer_casts(taken[1])), LOOKUPS.get(source.op, REFUSED)
    return Factors(factor, table=flat(taken[0]), index=index, outside=outside)


def is_index(view: View) -> bool:
    """Whether a tensor can index rows: bool and uint8 would be masks."""
    dtype = view.value.dtype
    return not dtype.is_floating_point and dtype not in (torch.bool, torch.uint8)


def _rows_of(factor: View, value: Value, effect: Effect) -> View | None:
    """What a broadcast factor of `value` holds for each row of `effect` [..., W]: [T], or [B] where
    rows in sequence share it; None where it varies along the columns."""
    width = factor.effect.dims[-1:]
    varies = width not in ((), ((),)) and all(atom.axis is not None for atom in width[0])
    if varies and any(atom.axis == len(value.shape) - 1 for atom in effect.dims[-1]):
        return None  # nearly all
    try:
        read = factor.expand(*value.shape).through(effect)
    except effects.InexpressibleError:
        return None
    *lead, columns = read.effect.dims
    if any(atom.axis is not None for atom in columns):
        return None
    atoms: tuple[Atom, ...] = effects.coalesce(atom for dim in lead for atom in dim)
    while atoms and atoms[-1].axis is None:
        atoms = atoms[:-1]
    if any(atom.axis is None for atom in atoms):
        return None
    return View(factor.value, Effect((atoms,), read.effect.start))
