"""Factors around the GEMMs of an adapter: numbers, a number for each adapter, and masks of rows.

Dimension letters: T rows, B sequences of equal length, G adapters, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.formula import Found, call, number, tensor
from tilewright.patterns.arithmetic.steps import is_filled
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Atom
from tilewright.patterns.recognise.outside import LOOKUPS, REFUSED, Outside
from tilewright.patterns.recognise.routing import flat, gathered, strip_integer_casts


@dataclass(frozen=True)
class RowMask:
    """The rows that have an adapter.

    Attributes:
        view: A bool view [T or B], which differs between the rows that have an adapter and the
            others.
        hides: Whether the view is false for the rows that have an adapter, and true for the others.
            If not, it is true for the rows that have an adapter.
    """

    view: View
    hides: bool = False

    def chosen(self, index: Any) -> Computed:
        """Returns the index for rows that have an adapter, and -1 for other rows."""
        sides = (-1, index) if self.hides else (index, -1)
        return Computed("where", (self.view, *sides))


@dataclass(frozen=True)
class Lookup:
    """The factor table[index].

    Attributes:
        table: [G], a number for each adapter.
        index: [T or B], the adapter of each row.
        outside: The meaning of an index that is outside of the table.
    """

    table: View
    index: View
    outside: Outside


@dataclass(frozen=True)
class Factors:
    """The product scale * lookup * view, with zeros in the rows that the mask hides. All fields
    except the view are optional.

    absorbed: the values that compute the product.
    """

    view: View
    scale: float = 1.0
    lookup: Lookup | None = None
    mask: RowMask | None = None
    absorbed: tuple[Value, ...] = ()


def peel(view: View, casts: bool = True) -> Factors:
    """Splits a view [..., W] into factors and the view that they multiply, ignoring casts between
    floats.

    Raises InexpressibleError if the view cannot be expressed before a cast.
    """
    found = Factors(view)
    while True:
        step: Factors | None = None
        if not is_float_cast(found.view.value):
            step = _STEP.match(found.view, partial(_factor, found.view))
        elif casts:
            bare, cast = strip_casts(found.view)
            step = Factors(bare, absorbed=cast)
        if step is None or (found.lookup and step.lookup) or (found.mask and step.mask):
            return found
        found = Factors(
            step.view,
            found.scale * step.scale,
            found.lookup or step.lookup,
            found.mask or step.mask,
            (*found.absorbed, *step.absorbed),
        )


# --- the formulas ---------------------------------------------------------------------------------


def _as_it_is(view: View) -> tuple[View, tuple[Value, ...]]:
    return view, ()


_X, _FACTOR = (tensor(name, strip=_as_it_is) for name in ("x", "factor"))
_MASK = tensor("mask", lambda view: view.value.dtype == torch.bool)
_ZERO = number(0) | tensor("zeros", lambda view: is_filled(view, 0))
_HIDDEN = call("where", _MASK, _ZERO, _X) | call("masked_fill", _X, _MASK, _ZERO)
_STEP = (
    _X * number("scale")
    | _X / number("divisor")
    | _X * _FACTOR
    | call("where", _MASK, _X, _ZERO).giving(hides=False)
    | _HIDDEN.giving(hides=True)
)


def _factor(view: View, found: Found) -> Factors | None:
    """Returns one factor of a view [..., W]. Returns None if the view is not a product with such a
    factor. The values that compute the factor are absorbed."""
    bound, divisor = found.bound, found.bound.get("divisor", 1.0)
    # zeros_like(delta) reads only the shape of the delta.
    zeros = [bound["zeros"].value] if "zeros" in bound else []
    beside = (v for v in zeros if v.op in ("aten.zeros_like", "aten.new_zeros"))
    scale = bound.get("scale", 1.0) / divisor if divisor else 0.0
    step = Factors(bound["x"], scale, absorbed=(*found.absorbed, *beside))
    if step.view.shape != view.shape or not divisor:
        return None
    if "mask" in bound:
        rows = _rows_of(bound["mask"], view)
        return None if rows is None else replace(step, mask=RowMask(rows, bound["hides"]))
    return _by_row(step, strip_casts(bound["factor"])[0], view) if "factor" in bound else step


def _by_row(step: Factors, factor: View, view: View) -> Factors | None:
    """Returns `step` with one more factor, which has one number for each row: table[index], or a
    mask. Returns None if the factor has another form."""
    rows = _rows_of(factor, view)
    if rows is None:
        return None
    source = rows.value
    if source.dtype == torch.bool:
        return replace(step, mask=RowMask(rows))
    if source.op == "cast" and source.args[0].value.dtype == torch.bool:
        return replace(step, mask=RowMask(source.args[0].through(rows.effect)))
    taken = gathered(source.whole)
    if taken is None or effects.product(taken[0].shape[1:]) != 1 or rows != flat(source.whole):
        return None
    if len(taken[0].shape) < 1 or not is_index(taken[1]):
        return None
    index, outside = flat(strip_integer_casts(taken[1])), LOOKUPS.get(source.op, REFUSED)
    return replace(step, lookup=Lookup(flat(taken[0]), index, outside))


def is_index(view: View) -> bool:
    """Whether a tensor can be an index of rows. Tensors of bool and uint8 would be masks."""
    dtype = view.value.dtype
    return not dtype.is_floating_point and dtype not in (torch.bool, torch.uint8)


def _rows_of(factor: View, view: View) -> View | None:
    """Returns the numbers of a broadcast factor for the rows of a view [..., W], as [T], or as [B]
    if all rows of a sequence share the number. Returns None if the factor varies along the
    columns."""
    if any(atom.axis is not None for dim in factor.effect.dims[-1:] for atom in dim):
        return None  # the usual case
    try:
        *lead, _ = factor.expand(*view.shape).effect.dims
    except effects.InexpressibleError:
        return None
    atoms: tuple[Atom, ...] = effects.coalesce(atom for dim in lead for atom in dim)
    while atoms and atoms[-1].axis is None:
        atoms = atoms[:-1]
    if any(atom.axis is None for atom in atoms):
        return None
    return factor.with_dims(atoms)
