"""Expresses each element of a rotated head as a sum of products `sign * x[j] * coefficient[c]`.

The head dimension is small and static. Therefore all ways to write a rotation (`rotate_half`,
chunked halves, strided pairs with stack and flatten, complex numbers) give the same table of
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.casts import is_float_cast, strip_casts
from tilewright.patterns.arithmetic.constants import offsets
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.arithmetic.steps import keeps_dim, reduced_dims
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Dim, Effect, InexpressibleError, Size
from tilewright.patterns.quantised.words import holds_codes, is_scaled
from tilewright.patterns.recognise.gemm import match_gemm
from tilewright.patterns.recognise.linear import match_columns
from tilewright.patterns.recognise.norm import match_norm

_CONJUGATES = {"aten.conj", "aten._conj", "aten.conj_physical", "aten.resolve_conj"}
_MAX_TERMS = 8
# The largest length of an axis that is read element by element. The axis of a pair has length two.
_MOST_SUMMED = 2


class NotRotation(Exception):
    """Raised for a value that is not a sum of products of a head's elements with coefficients."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that the rotation multiplies or adds, whose last dimension is left open, so that
    columns can be chosen later.

    Attributes:
        value: The value of the tensor.
        rest: The effect of the other dimensions.
        axis: The axis of the base that the open dimension selects along.
        part: `real` or `imag` of a complex tensor; else "".
    """

    value: Value
    rest: Effect
    axis: int
    part: str = ""

    def columns(self, first: Size, count: int, step: int = 1) -> View:
        """Returns the view whose last dimension has `count` places of the open axis."""
        start = list(self.rest.start)
        start[self.axis] = first
        last = effects.coalesce([Atom(self.axis, step, count)])
        return View(self.value, Effect((*self.rest.dims, last), tuple(start)))


@dataclass(frozen=True)
class Term:
    """The product factor[i] * prod(leaf[index[i]]) for every element i of the head. The factor is 0
    for elements that lack this term."""

    factor: np.ndarray
    leaves: tuple[tuple[Leaf, np.ndarray], ...]

    @property
    def present(self) -> np.ndarray:
        return self.factor != 0


IsAddend = Callable[[View], bool]
_Complex = tuple[list[Term], list[Term]]


def never(view: View) -> bool:
    """Returns False, because no view is added before the rotation."""
    return False


@dataclass(frozen=True)
class _Walk:
    """The state of the search from a head back to the terms of its rotation.

    Attributes:
        is_addend: The function that :func:`head_terms` got as its argument of this name.
        absorbed: The arithmetic operations that the search passed.
    """

    is_addend: IsAddend
    absorbed: list[Value] = field(default_factory=list)


def head_terms(head: View, is_addend: IsAddend) -> tuple[list[Term], tuple[Value, ...]]:
    """Returns the terms of a view [..., head_dim], and the values that compute them.

    is_addend: a function that returns True for a view that is added before the rotation; such a sum
    is treated as one leaf. Raises NotRotation if the terms are not sums of products.
    """
    walk = _Walk(is_addend)
    try:
        terms = _terms(head, walk)
    except InexpressibleError as error:
        raise NotRotation from error
    return terms, tuple(walk.absorbed)


def is_arithmetic(value: Value) -> bool:
    """Whether a value can be the last step of a rotation."""
    return value.op in _RULES or value.op in _JOINS


def _terms(view: View, walk: _Walk) -> list[Term]:
    """Returns the terms whose sum is the last dimension of a view of projected data."""
    value = view.value
    if not is_arithmetic(value) or not value.projected or _is_boundary(view, walk):
        # A cast gives the same numbers before and after elements are moved or negated. The parts of
        # a head may therefore be cast at different steps, and casts are removed here.
        view, casts = strip_casts(view)
        walk.absorbed.extend(cast for cast in casts if cast not in walk.absorbed)
        leaf, index = _leaf(view)
        return [Term(np.ones(len(index)), ((leaf, index),))]
    if value.op in _JOINS:
        parts = _JOINS[value.op](value, walk)
        index = _joined_index(view, joined_axes(value))
        parts = [_take(term, index) for term in parts]
    else:
        parts = _RULES[value.op](view, walk)
    if value not in walk.absorbed:
        walk.absorbed.append(value)
    if len(parts) > _MAX_TERMS:
        raise NotRotation
    return parts


def _is_boundary(view: View, walk: _Walk) -> bool:
    """Whether a step belongs to the tensor that is rotated, and not to the rotation. Such steps are
    a bias, the weight of a norm, a sum of projections, and joined heads."""
    value = view.value
    if value.op == "aten.cat":
        axis = value.args[1]
        within = any(atom.axis == axis for atom in view.effect.dims[-1]) if view.shape else False
        return not within and axis < len(value.shape) - 1
    if value.op in ("aten.add", "aten.sub"):
        if len(value.operands) < 2 or not all(v.value.projected for v in value.operands):
            return True
        return any(walk.is_addend(v) for v in value.operands)
    if value.op == "aten.mul":
        projected = [v for v in value.operands if v.value.projected]
        if len(projected) != 1 or len(value.operands) != 2:
            return True
        return _scales_codes(value, projected[0]) or match_norm(value.whole) is not None
    if value.op == "aten.sum":
        return summed_axis(value) is None
    if value.op == "cast":
        return not is_float_cast(value) or not is_arithmetic(value.operands[0].value)
    return False


def summed_axis(value: Value) -> int | None:
    """Returns the axis of a sum over one short axis. Returns None for every other sum."""
    dims = reduced_dims(value)
    if len(dims) != 1 or keeps_dim(value) or value.dtype != value.operands[0].value.dtype:
        return None
    length = value.operands[0].shape[dims[0]]
    return dims[0] if isinstance(length, int) and 0 < length <= _MOST_SUMMED else None


def _scales_codes(value: Value, product: View) -> bool:
    """Whether a multiplication scales a product of unscaled codes by one number for each row of the
    weight. The rotation of a single token also multiplies by one number for each row."""
    gemm = match_gemm(strip_casts(product)[0].value)
    if gemm is None or gemm.weight_scale is not None:
        return False
    weight = gemm.weight.value
    if not holds_codes(weight) or is_scaled(weight):
        return False
    columns = match_columns(value.whole)
    return columns is not None and columns.linear.scale is not None


def _leaf(view: View) -> tuple[Leaf, np.ndarray]:
    """Returns a view with an open last dimension, and the indices on the base that this dimension
    selects. Raises NotRotation if the last dimension selects along several axes, or starts at a
    symbolic place."""
    view = _one_piece(view)
    places = _places(view)
    if len(places) != 1:
        raise NotRotation
    ((axis, index),) = places.items()
    leaf, first = _opened(view, axis, {})
    return leaf, index + first


def _opened(view: View, axis: int, others: Mapping[int, int]) -> tuple[Leaf, int]:
    """Returns the view as a leaf in which `axis` of its last dimension is open, and the start of
    the last dimension on this axis. Raises NotRotation if this start is a symbol.

    others: further axes that the last dimension selects along. Each axis has an index at which it
    is fixed.
    """
    start = list(view.effect.start)
    first, start[axis] = start[axis], 0
    if not isinstance(first, int):
        raise NotRotation
    for other, place in others.items():
        start[other] = start[other] + place
    rest = Effect(effects.once(view.effect.dims[:-1]), tuple(start))
    return Leaf(view.value, rest, axis), first


def _one_piece(view: View) -> View:
    """Rewrites a view of a table that repeats each element, `stack([cos, cos], -1)`, as a view of
    `cos`. Returns every other view unchanged."""
    value = view.value
    if value.op != "aten.cat":
        return view
    (first, *others), axis = value.args
    if first.shape[axis] != 1 or not all(equal_values(first, other) for other in others):
        return view
    try:
        return first.expand(*value.shape).through(view.effect)
    except effects.InexpressibleError:
        return view


def joined_axes(value: Value) -> int:
    """Returns the number of trailing axes that form one row of elements. It is two for a stack, and
    for pieces that are joined along the axis before the last."""
    if value.op == "aten.view_as_real":
        return 2
    pieces, dim = value.args
    stacked = dim == len(value.shape) - 1 and all(p.effect.dims[-1] == () for p in pieces)
    return 2 if stacked or dim == len(value.shape) - 2 else 1


def _joined_index(view: View, depth: int) -> np.ndarray:
    """Returns the index of each element of a view's last dimension in the last `depth` axes of the
    value, which are read as one row. Raises NotRotation if the view changes other axes of the
    value."""
    value, effect = view.value, view.effect
    rank = len(value.shape)
    inner = range(rank - depth, rank)
    sizes = value.shape[rank - depth :]
    *lead, last = effect.dims
    outer = effects.identity(value.shape).dims[: rank - depth]
    if rank < depth or not all(isinstance(n, int) for n in sizes):
        raise NotRotation
    if [d for d in lead if d] != [d for d in outer if d] or any(effect.start[: rank - depth]):
        raise NotRotation
    if not {atom.axis for atom in last} <= set(inner):
        raise NotRotation
    strides = {axis: effects.product(sizes[i + 1 :]) for i, axis in enumerate(inner)}
    first = sum(int(effect.start[axis]) * strides[axis] for axis in inner)
    return first + offsets(last, strides)


def _take(term: Term, index: np.ndarray) -> Term:
    return Term(term.factor[index], tuple((leaf, at[index]) for leaf, at in term.leaves))


def _negated(terms: list[Term]) -> list[Term]:
    return [replace(t, factor=-t.factor) for t in terms]


# --- element by element ---------------------------------------------------------------------------


def _add(view: View, walk: _Walk) -> list[Term]:
    value = view.value
    if value.kwargs.get("alpha", 1) != 1:
        raise NotRotation
    left, right = (_terms(view.of_operand(v), walk) for v in value.args[:2])
    return [*left, *(_negated(right) if value.op == "aten.sub" else right)]


def _mul(view: View, walk: _Walk) -> list[Term]:
    left, right = view.value.operands
    head, coefficient = (left, right) if left.value.projected else (right, left)
    terms = _terms(view.of_operand(head), walk)
    factors = _coefficients(view.of_operand(coefficient))
    return [_times(_where(term, here), leaf) for term in terms for leaf, here in factors]


def _where(term: Term, here: np.ndarray) -> Term:
    if len(here) != len(term.factor):
        raise NotRotation
    return replace(term, factor=term.factor * here)


def _coefficients(view: View) -> list[tuple[tuple[Leaf, np.ndarray], np.ndarray]]:
    """Returns a table as leaves with one open axis. Each leaf has a mask of the elements whose
    coefficient it has. A table [pairs, 2] with the two members of each pair gives two leaves."""
    view = _one_piece(view)
    places = _places(view)
    if len(places) < 2:
        whole = _leaf(view)
        return [(whole, np.ones(len(whole[1]), dtype=bool))]
    opened, *others = places
    if any(len(set(places[axis].tolist())) > _MOST_SUMMED for axis in others):
        raise NotRotation
    found = []
    for at in sorted(set(zip(*(places[axis].tolist() for axis in others), strict=True))):
        fixed = dict(zip(others, at, strict=True))
        leaf, first = _opened(view, opened, fixed)
        here = np.logical_and.reduce([places[axis] == place for axis, place in fixed.items()])
        found.append(((leaf, np.where(here, places[opened] + first, 0)), here))
    return found


def _places(view: View) -> dict[int, np.ndarray]:
    """Returns the places of a view's last dimension on each axis that the dimension selects along.
    The longest axis comes first."""
    return _places_along(view.effect.dims[-1] if view.effect.dims else ())


@lru_cache(maxsize=64)  # layers have the same heads
def _places_along(last: Dim) -> dict[int, np.ndarray]:
    if not all(isinstance(a.length, int) for a in last):
        raise NotRotation
    axes = {a.axis: a.length for a in last if a.axis is not None}
    places = {axis: offsets(last, {axis: 1}) for axis in sorted(axes, key=lambda a: -axes[a])}
    for at in places.values():
        at.flags.writeable = False
    return places


def _sum(view: View, walk: _Walk) -> list[Term]:
    """Reads a sum over a short axis as the sum of its parts."""
    (summed,) = view.value.operands
    axis = summed_axis(view.value)
    assert axis is not None
    parts = [summed.select(axis, place) for place in range(int(summed.shape[axis]))]
    return [term for part in parts for term in _terms(view.of_operand(part), walk)]


def _times(term: Term, coefficient: tuple[Leaf, np.ndarray]) -> Term:
    if len(term.leaves) != 1 or len(coefficient[1]) != len(term.factor):
        raise NotRotation
    return Term(term.factor, (*term.leaves, coefficient))


def _neg(view: View, walk: _Walk) -> list[Term]:
    return _negated(_terms(view.of_operand(view.value.args[0]), walk))


def _cast(view: View, walk: _Walk) -> list[Term]:
    return _terms(view.of_operand(view.value.args[0]), walk)


_RULES: dict[str, Callable[[View, _Walk], list[Term]]] = {
    "aten.add": _add,
    "aten.sub": _add,
    "aten.mul": _mul,
    "aten.neg": _neg,
    "aten.sum": _sum,
    "cast": _cast,
}


# --- pieces side by side --------------------------------------------------------------------------


def _cat(value: Value, walk: _Walk) -> list[Term]:
    """Reads pieces that are joined along the last axis, or along the axis before it, as one row of
    elements."""
    pieces, dim = value.args
    rank, depth = len(value.shape), joined_axes(value)
    if dim not in (rank - 1, rank - 2) or not all(isinstance(n, int) for n in value.shape[-depth:]):
        raise NotRotation
    width, first = value.shape[-1], 0
    out: list[Term] = []
    for piece in pieces:
        *lead, rows, columns = (
            piece.shape if depth == 2 else (*piece.shape[:-1], 1, piece.shape[-1])
        )
        at = np.arange(rows)[:, None] * width + np.arange(columns)[None, :]
        at = at.reshape(-1) + first * (width if dim == rank - 2 else 1)
        first += rows if dim == rank - 2 else columns
        if len(at) == 0:
            continue
        row = piece.reshape(*lead, len(at)) if depth == 2 else piece
        terms = _terms(row, walk)
        if any(len(term.factor) != len(at) for term in terms):
            raise NotRotation
        out += [_spread(term, at, effects.product(value.shape[-depth:])) for term in terms]
    return _merge(out)


def _interleaved(parts: list[list[Term]]) -> list[Term]:
    """Returns the terms of interleaved parts: element i of part k becomes element `i * len(parts) +
    k`."""
    width = len(parts[0][0].factor)
    if any(len(t.factor) != width for terms in parts for t in terms):
        raise NotRotation
    total = width * len(parts)
    out: list[Term] = []
    for k, terms in enumerate(parts):
        out += [_spread(t, np.arange(width) * len(parts) + k, total) for t in terms]
    return _merge(out)


def _spread(term: Term, at: np.ndarray, total: int) -> Term:
    factor = np.zeros(total)
    factor[at] = term.factor
    leaves = []
    for leaf, index in term.leaves:
        wide = np.zeros(total, dtype=np.int64)
        wide[at] = index
        leaves.append((leaf, wide))
    return Term(factor, tuple(leaves))


def _merge(terms: list[Term]) -> list[Term]:
    """Joins terms that have the same leaves and never overlap. They are the pieces of one
    concatenation."""
    merged: list[Term] = []
    for term in terms:
        key = tuple(leaf for leaf, _ in term.leaves)
        for k, other in enumerate(merged):
            same = key == tuple(leaf for leaf, _ in other.leaves)
            if same and not np.any(other.present & term.present):
                leaves = tuple(
                    (leaf, np.where(term.present, b, a))
                    for (leaf, a), (_, b) in zip(other.leaves, term.leaves, strict=True)
                )
                merged[k] = Term(other.factor + term.factor, leaves)
                break
        else:
            merged.append(term)
    return merged


# --- complex numbers ------------------------------------------------------------------------------


def _as_real(value: Value, walk: _Walk) -> list[Term]:
    """Reads `view_as_real`. The real and imaginary parts alternate along two dimensions that are
    read as one."""
    return _interleaved(list(_complex(value.operands[0], walk)))


_JOINS: dict[str, Callable[[Value, _Walk], list[Term]]] = {
    "aten.cat": _cat,
    "aten.view_as_real": _as_real,
}


def _complex(view: View, walk: _Walk) -> _Complex:
    """Returns the real terms and the imaginary terms of a view of complex projected data."""
    value = view.value
    if not value.projected:
        raise NotRotation
    walk.absorbed.append(value)
    if value.op == "aten.view_as_complex":
        pairs = value.operands[0]
        first, second = _parts(pairs, view)
        return _terms(first, walk), _terms(second, walk)
    if value.op == "cast" and value.dtype.is_complex:
        return _complex(view.of_operand(value.operands[0]), walk)
    if value.op in _CONJUGATES:
        real, imag = _complex(view.of_operand(value.operands[0]), walk)
        return real, imag if value.op == "aten.resolve_conj" else _negated(imag)
    if value.op == "aten.mul" and len(value.operands) == 2:
        return _complex_product(view, walk)
    raise NotRotation


def _parts(pairs: View, view: View) -> tuple[View, View]:
    """Returns the real part and the imaginary part of a view of `view_as_complex(pairs)`."""
    last = len(pairs.shape) - 1
    first, second = (pairs.select(last, k) for k in (0, 1))
    if view.is_whole:
        return first, second
    return first.through(view.effect), second.through(view.effect)


def _complex_product(view: View, walk: _Walk) -> _Complex:
    """Reads (a + ib)(c + is) = (ac - bs) + i(as + bc)."""
    left, right = view.value.operands
    head, turn = (left, right) if left.value.projected else (right, left)
    if turn.value.projected or not turn.value.dtype.is_complex:
        raise NotRotation
    a, b = _complex(view.of_operand(head), walk)
    c, s, sign = _turn(view.of_operand(turn))
    across = [_times(t, s) for t in b], [_times(t, s) for t in a]
    if sign < 0:
        across = _negated(across[0]), _negated(across[1])
    real = [*(_times(t, c) for t in a), *_negated(across[0])]
    imag = [*across[1], *(_times(t, c) for t in b)]
    return real, imag


def _turn(view: View) -> tuple[tuple[Leaf, np.ndarray], tuple[Leaf, np.ndarray], int]:
    """Returns (cos, sin, the sign of sin) for a tensor of complex numbers by which heads are
    multiplied. They depend on no projection."""
    value = view.value
    if value.op in _CONJUGATES:
        cos, sin, sign = _turn(view.of_operand(value.operands[0]))
        return cos, sin, sign if value.op == "aten.resolve_conj" else -sign
    if value.op == "aten.view_as_complex":
        first, second = _parts(value.operands[0], view)
        return _leaf(first), _leaf(second), 1
    leaf, index = _leaf(view)
    return (replace(leaf, part="real"), index), (replace(leaf, part="imag"), index), 1
