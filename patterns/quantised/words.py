"""Finds the bits of stored words from which the elements of unpacked integer weights are computed.

Unpacking consists of masks, shifts and changes of layout, in any order. A view that selects one
element of every word is followed back to the words. The result is the first bit and the number of
bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.constants import constant_of
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Effect, InexpressibleError
from tilewright.patterns.recognise.gemm import piece_of

_WORDS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_GATHERS = ("aten.index", "aten.index_select")


@dataclass(frozen=True)
class Bits:
    """The bits `shift` to `shift + width` of every word of a view, as a signed or unsigned
    number."""

    word: View
    shift: int
    width: int
    signed: bool


def follow(view: View) -> View:
    """Returns a view of the tensor from which concatenations and constant gathers take all elements
    of the given view. Returns the given view if there is no such tensor."""
    while True:
        if view.value.op == "aten.cat":
            piece = piece_of(view)
            if piece is view:
                return view
            view = piece
        elif view.value.op in _BEFORE:
            before = _BEFORE[view.value.op](view)
            if before is None:
                return view
            view = before
        else:
            return view


def bits_of(view: View) -> Bits | None:
    """Returns the elements of a view as bits of words. Returns None if they are not bits of
    words."""
    view = follow(view)
    value = view.value
    if value.op in _RULES and value.operands:
        return _RULES[value.op](view)
    if value.dtype not in _WORDS or value.op in ("store", "aten.cat", *_GATHERS):
        return None
    width = value.dtype.itemsize * 8
    return Bits(view, 0, width, value.dtype.is_signed)


def _shifted(view: View) -> Bits | None:
    """Reads `word >> n`, which is arithmetic for signed words, and `word // 2^n`, which rounds down
    in the same way."""
    inner, by = _with_number(view)
    if by is not None and view.value.op == "aten.floor_divide":
        by = by.bit_length() - 1 if by > 0 and not by & (by - 1) else None
    if inner is None or by is None or not 0 <= by < inner.width:
        return None
    return replace(inner, shift=inner.shift + by, width=inner.width - by)


def _masked(view: View) -> Bits | None:
    """Reads `word & (2^n - 1)`, and `word % 2^n`, which is never negative in PyTorch."""
    modulo = view.value.op == "aten.remainder"
    inner, number = _with_number(view, either=not modulo)
    size = 0 if number is None else number + (not modulo)
    if inner is None or size < 2 or size & (size - 1):
        return None
    width = size.bit_length() - 1
    if width > inner.width:
        return None if inner.signed else inner
    return replace(inner, width=width, signed=False)


def _cast(view: View) -> Bits | None:
    """Reads a cast between integer types, which keeps the low bits."""
    target = view.value.dtype
    if target not in _WORDS:
        return None
    inner = bits_of(view.of_operand(view.value.operands[0]))
    room = target.itemsize * 8
    if inner is None:
        return None
    if inner.width >= room:
        return replace(inner, width=room, signed=target.is_signed)
    # A wider unsigned type cannot represent a negative number.
    return inner if target.is_signed or not inner.signed else None


def _bitcast(view: View) -> Bits | None:
    """Reads a bitcast. A field that has fewer bits than the dtype does not change in another dtype
    of the same size. Other results are treated as words, such as the bytes of larger words."""
    value = view.value
    (operand,) = value.operands
    room = value.dtype.itemsize * 8
    if operand.value.dtype.itemsize == value.dtype.itemsize:
        inner = bits_of(view.of_operand(operand))
        if inner is None:
            return None
        if inner.width < room:
            return inner if value.dtype.is_signed or not inner.signed else None
    return Bits(view, 0, room, value.dtype.is_signed) if value.dtype in _WORDS else None


_RULES = {
    "bitcast": _bitcast,
    "aten.bitwise_right_shift": _shifted,
    "aten.floor_divide": _shifted,
    "aten.bitwise_and": _masked,
    "aten.remainder": _masked,
    "cast": _cast,
}


def _with_number(view: View, either: bool = False) -> tuple[Bits | None, int | None]:
    """Returns (bits of the first operand, the second operand) if the second operand is one integer
    for all elements; else (None, None).

    The dtype of the result must be able to represent this integer, because PyTorch wraps other
    integers: for an int32 word, `word & 0xFFFFFFFF` is `word`.

    either: whether the operands may be swapped.
    """
    first, second = view.value.args[:2]
    for word, other in ((first, second), (second, first)):
        number = _number(view, other) if isinstance(word, View) else None
        if number is not None and view.value.dtype in _WORDS:
            if number > torch.iinfo(view.value.dtype).max:
                break
            return bits_of(view.of_operand(word)), number
        if not either:
            break
    return None, None


def _number(view: View, item: Any) -> int | None:
    if isinstance(item, int):
        return item
    if not isinstance(item, View):
        return None
    numbers = constant_of(view.of_operand(item))
    if numbers is None or not np.issubdtype(numbers.dtype, np.integer):
        return None
    return int(numbers.flat[0]) if np.all(numbers == numbers.flat[0]) else None


# --- ranges of numbers ----------------------------------------------------------------------------

_KEPT = ("cast", "bitcast", "aten.cat", *_GATHERS)
_SHIFTS = ("aten.bitwise_right_shift", "aten.floor_divide")


def fits(value: Value) -> bool:
    """Whether all elements of an integer value fit the range of its dtype."""
    return _are_within(_integers(value), value.dtype)


def _are_within(found: tuple[int, int], dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return bool(limits.min <= found[0] and found[1] <= limits.max)


def _integers(value: Value) -> tuple[int, int]:
    """Returns the smallest and the largest possible element, before the elements wrap around in
    their dtype."""
    limits = torch.iinfo(value.dtype)
    second = value.args[1] if len(value.args) > 1 else 0
    number = second if isinstance(second, int) else 0
    if value.op in ("aten.add", "aten.sub") and value.kwargs.get("alpha", 1) == 1:
        one, other = (_held(item) for item in value.args[:2])
        low, high = other if value.op == "aten.add" else (-other[1], -other[0])
        return one[0] + low, one[1] + high
    if number > 0 and value.op in ("aten.bitwise_and", "aten.remainder"):
        return 0, number - (value.op == "aten.remainder")
    if number > 0 and value.op in _SHIFTS:
        by = 2**number if value.op == "aten.bitwise_right_shift" else number
        low, high = _held(value.args[0])
        return low // by, high // by
    same = value.op != "bitcast" or value.operands[0].value.dtype.itemsize == value.dtype.itemsize
    if value.op not in _KEPT or not value.operands or not same:
        return limits.min, limits.max
    of = [_held(v) for v in (value.operands[:1] if value.op in _GATHERS else value.operands)]
    return min(low for low, _ in of), max(high for _, high in of)


def _held(item: Any) -> tuple[int, int]:
    """Returns the smallest and the largest element of a view. If `item` is a number, returns this
    number as both. Returns the limits of the dtype if some elements may have wrapped around."""
    if not isinstance(item, View) or item.value.dtype not in _WORDS:
        return (item, item) if isinstance(item, int) else (-(2**63), 2**63)
    limits, found = torch.iinfo(item.value.dtype), _integers(item.value)
    return found if _are_within(found, item.value.dtype) else (limits.min, limits.max)


# --- strided writes into fresh memory ------------------------------------------------------------


def _before_store(view: View) -> View | None:
    """Rewrites a view of memory after one write as a view of the written data, or of the memory
    before the write.

    Returns None if the view has elements of both. The write must be a plain write to memory that
    the graph allocated.
    """
    store = view.value.store
    before = view.value.args[0]
    if store is None or store.source is None or store.index or store.accumulate:
        return None
    same = {store.source.value.dtype, store.dtype} == {store.memory.dtype}
    whole = view.value.node.args[:1] == (store.memory.root,)
    if store.memory.is_input or not same or not whole or not isinstance(before, View):
        return None
    try:
        inside = _inside(view.effect, store.target)
        if inside is None:
            return before.through(view.effect)
        return store.source.through(inside)
    except InexpressibleError:
        return None


def _inside(effect: Effect, target: Effect) -> Effect | None:
    """Returns `effect` as an effect on the selection `target` of the same base. Returns None if the
    two have no common element.

    Raises InexpressibleError if they overlap only in part, or if the overlap is unknown.
    """
    walked = {dim[0].axis: (i, dim[0]) for i, dim in enumerate(target.dims) if len(dim) == 1}
    if sum(len(dim) for dim in target.dims) != len(walked) or None in walked:
        raise InexpressibleError("a write goes through a view that is not made of slices")
    moved: dict[int | None, tuple[int | None, int]] = {None: (None, 1)}
    start = [0] * len(target.dims)
    for axis, first in enumerate(effect.start):
        place, atom = walked.get(axis, (None, Atom(axis, 1, 1)))
        offset = _offset_inside(effect, axis, first - target.start[axis], atom)
        if offset is None:
            return None
        moved[axis] = place, atom.step
        if place is not None:
            start[place] = offset
    dims = tuple(
        tuple(Atom(moved[a.axis][0], a.step // moved[a.axis][1], a.length) for a in dim)
        for dim in effect.dims
    )
    return Effect(dims, tuple(start))


def _offset_inside(effect: Effect, axis: int, offset: Any, atom: Atom) -> int | None:
    """Returns the index along `atom` at which a selection on an axis begins. Returns None if they
    have no common element. offset: the distance from the first element of the atom to the first
    element of the selection."""
    taken = [a for dim in effect.dims for a in dim if a.axis == axis]
    numbers = [offset, atom.length, *(n for a in taken for n in (a.step, a.length))]
    if not all(isinstance(n, int) for n in numbers):
        raise InexpressibleError("the size of a write is symbolic")
    last = offset + sum(a.step * (a.length - 1) for a in taken)
    strides = all(a.step % atom.step == 0 for a in taken)
    if (strides and offset % atom.step) or last < 0 or offset > atom.step * (atom.length - 1):
        return None
    if not strides or offset < 0 or last > atom.step * (atom.length - 1):
        raise InexpressibleError("a view has elements inside and outside of a write")
    return int(offset // atom.step)


# --- gathers by constants -------------------------------------------------------------------------


def _before_gather(view: View) -> View | None:
    """Returns a view of `x[index]` as a view of x, if the index selects along one dimension and is
    constant in the graph; else None."""
    if view.value.op == "aten.index_select":
        base, dim, index = view.value.args
        indices = ((dim % len(base.shape), index),)
    else:
        base, indices = view.value.args
    if len(indices) != 1:
        return None
    ((dim, index),) = indices
    rows = np.array(index) if isinstance(index, tuple) else constant_of(index)
    if rows is None or rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        return None
    size = base.shape[dim]
    rows = np.where(rows < 0, rows + size, rows) if isinstance(size, int) else rows
    try:
        return base.through(_gathered(view.effect, dim, rows))
    except InexpressibleError:
        return None


def _gathered(effect: Effect, dim: int, rows: np.ndarray) -> Effect:
    """Returns an effect on x[rows] as an effect on x. The rows that it selects must form runs with
    one stride."""
    first = rows[int(effect.start[dim])]
    dims = []
    reach = np.array([int(effect.start[dim])])
    total = np.array([first])
    for place in effect.dims:
        atoms: list[Atom] = []
        for atom in place:
            if atom.axis != dim:
                atoms.append(atom)
                continue
            at = effect.start[dim] + np.arange(int(atom.length)) * atom.step
            runs = _runs(rows[at] - first, dim)
            atoms += runs
            reach = (reach[:, None] + (at - effect.start[dim])).reshape(-1)
            total = (total[:, None] + rows[at] - first).reshape(-1)
        dims.append(effects.coalesce(atoms))
    # The strides of the runs of a dimension must add up: each row number must be the sum of the
    # offsets of its runs.
    if not np.array_equal(rows[reach], total):
        raise InexpressibleError("the gathered rows do not form runs of equal stride")
    start = tuple(int(first) if a == dim else s for a, s in enumerate(effect.start))
    return Effect(tuple(dims), start)


def _runs(rows: np.ndarray, axis: int) -> list[Atom]:
    """Returns row numbers as one run, or as runs of equal length, outermost first."""
    if len(rows) == 1:
        return []
    steps = np.diff(rows)
    if np.all(steps == steps[0]):
        return [_run(int(steps[0]), len(rows), axis)]
    length = int(np.argmax(steps != steps[0])) + 1
    if len(rows) % length:
        raise InexpressibleError("the gathered rows do not form runs of equal stride")
    by_run = rows.reshape(-1, length)
    outer = np.diff(by_run[:, 0])
    if np.any(by_run - by_run[:, :1] != by_run[0]) or np.any(outer != outer[0]):
        raise InexpressibleError("the gathered rows do not form runs of equal stride")
    inner = _run(int(steps[0]), length, axis)
    return [_run(int(outer[0]), len(by_run), axis), inner]


def _run(step: int, length: int, axis: int) -> Atom:
    if step < 0:
        raise InexpressibleError("the rows are gathered in descending order")
    return Atom(axis if step else None, step, length)


_BEFORE = {**dict.fromkeys(_GATHERS, _before_gather), "store": _before_store}


# Operations that do not multiply. They keep, move or add numbers.
_UNSCALED = frozenset(
    ("cast", "bitcast", "store", *_GATHERS, *(f"aten.{n}" for n in ("cat", "add", "sub")))
)


def holds_codes(value: Value, known: dict[Value, bool] | None = None) -> bool:
    """Whether a value is computed from stored integers or 8-bit floats, or from stored data that
    the graph reinterprets as such.

    known: the results for other values. The call adds its own results.
    """
    known = {} if known is None else known
    if value not in known:
        known[value] = False
        if value.op in ("input", "constant") or not value.operands:
            known[value] = value.op in ("input", "constant") and is_code(value.dtype)
        elif not value.projected:
            looks_up = value.op in _GATHERS and not _has_small_table(value)
            of = value.operands[:1] if looks_up else value.operands
            of_stored = value.op == "bitcast" and of[0].value.op in ("input", "constant")
            known[value] = (of_stored and is_code(value.dtype)) or any(
                holds_codes(v.value, known) for v in of
            )
    return known[value]


def _has_small_table(index: Value) -> bool:
    """Whether a look-up uses a table that the graph computes, and that has one entry for each code
    of 4 or 8 bits."""
    table = index.args[0]
    small = table.shape in ((16,), (256,))
    return small and not table.value.projected and constant_of(table) is not None


def is_scaled(weight: Value) -> bool:
    """Whether decoded codes are multiplied, or changed in an unknown way, before they become
    `weight`."""
    if not weight.dtype.is_floating_point or is_code(weight.dtype):
        return False
    if weight.op not in _UNSCALED:
        return True
    known: dict[Value, bool] = {}
    return any(is_scaled(v.value) for v in weight.operands if holds_codes(v.value, known))


def is_code(dtype: torch.dtype) -> bool:
    """Whether a dtype is a dtype in which codes are stored."""
    eight_bits = dtype.is_floating_point and dtype.itemsize == 1
    return eight_bits or dtype in (torch.int8, torch.uint8, torch.int32)
