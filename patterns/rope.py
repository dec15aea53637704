"""Recognises rotary position embedding by what it computes, not by how it is spelled.

The head dimension is small and static, so every element of the rotated head is written down as a
sum of products `sign * x[j] * coefficient[c]`. `rotate_half`, chunked halves, strided pairs with
stack and flatten, partial rotation: each comes out as the same table, and the table is classified.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import Atom, Effect
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.norm import is_float_cast, match_rms_norm

_ARITHMETIC = {"aten.add", "aten.sub", "aten.mul", "aten.neg", "aten.cat", "cast"}
_MAX_TERMS = 4


@dataclass(frozen=True)
class Rope:
    """style: `half` or `interleaved`. cos, sin: views [..., width] as they enter the product, with
    width rotary_dim or rotary_dim / 2. x: the unrotated head, dimensions as the rotated one's."""

    style: str
    rotary_dim: int
    cos: View
    sin: View
    x: View
    absorbed: tuple[Value, ...]


@dataclass(frozen=True)
class _Leaf:
    """A tensor the rotation multiplies or adds, with its last axis left open.

    value, rest: which one; `rest` is its effect without the open dimension. axis: the base axis the
    open dimension walks.
    """

    value: Value
    rest: Effect
    axis: int


@dataclass(frozen=True)
class _Term:
    """factor[i] * prod(leaf[index[i]]) for every element i of the head; factor 0 where absent."""

    factor: np.ndarray
    leaves: tuple[tuple[_Leaf, np.ndarray], ...]


def match_rope(head: View) -> Rope | None:
    """The rotation whose result is `head` [..., head_dim]; None where there is no rotation.

    Raises Reject (ROPE_STYLE, ROPE_TABLE) for a rotation of a kind the ops do not have.
    """
    if head.value.op not in _ARITHMETIC:
        return None
    absorbed: list[Value] = []
    try:
        terms = _terms(head, absorbed)
    except _NotRotation:
        return None
    if len(terms) == 1 or not any(len(t.leaves) == 2 for t in terms):
        return None
    return _classify(head, terms, tuple(absorbed))


class _NotRotation(Exception):
    """The arithmetic is not a sum of products of a head with coefficients."""


# --- writing the head down ------------------------------------------------------------------------


def _terms(view: View, absorbed: list[Value]) -> list[_Term]:
    """The sum of products that the last dimension of a view of projected data consists of."""
    value = view.value
    if value.op not in _ARITHMETIC or not value.projected or _is_boundary(value):
        return [_leaf_term(view)]
    width = value.shape[-1]
    if not isinstance(width, int) or not value.shape:
        raise _NotRotation
    parts = _RULES[value.op](value, absorbed)
    if value not in absorbed:
        absorbed.append(value)
    if len(parts) > _MAX_TERMS:
        raise _NotRotation
    if view.is_whole:
        return parts
    index = _last_index(view)
    return [_take(term, index) for term in parts]


def _is_boundary(value: Value) -> bool:
    """Arithmetic that belongs to what is rotated: a bias, a norm's weight, a sum of projections."""
    if value.op in ("aten.add", "aten.sub"):
        return len(value.operands) < 2 or not all(v.value.projected for v in value.operands)
    if value.op == "aten.mul":
        projected = [v for v in value.operands if v.value.projected]
        if len(projected) != 1 or len(value.operands) != 2:
            return True
        return match_rms_norm(value.whole) is not None
    if value.op == "cast":
        return not is_float_cast(value) or value.operands[0].value.op not in _ARITHMETIC
    return False


def _leaf_term(view: View) -> _Term:
    leaf, index = _leaf(view)
    return _Term(np.ones(len(index)), ((leaf, index),))


def _leaf(view: View) -> tuple[_Leaf, np.ndarray]:
    """A view with its last dimension opened: the rest, and the base indices that it takes."""
    *lead, last = view.effect.dims
    length = effects.product(a.length for a in last)
    axes = {a.axis for a in last}
    if not isinstance(length, int) or len(axes) > 1 or None in axes:
        raise _NotRotation
    if last == ():
        raise _NotRotation
    axis = last[0].axis
    assert axis is not None
    index = _walk(last)
    start = list(view.effect.start)
    first = start[axis]
    if not isinstance(first, int):
        raise _NotRotation
    start[axis] = 0
    return _Leaf(view.value, Effect(tuple(lead), tuple(start)), axis), index + first


def _walk(dim: tuple[Atom, ...]) -> np.ndarray:
    """The base indices a mixed-radix dimension takes, in order."""
    index = np.zeros(1, dtype=np.int64)
    for atom in dim:
        steps = np.arange(int(atom.length)) * atom.step
        index = (index[:, None] + steps[None, :]).reshape(-1)
    return index


def _last_index(view: View) -> np.ndarray:
    """Which elements of the value's trailing dimension(s) a view's last dimension takes."""
    value, effect = view.value, view.effect
    rank = len(value.shape)
    last = effect.dims[-1]
    trailing = {a.axis for a in last}
    depth = rank - min((a for a in trailing if a is not None), default=rank - 1)
    if None in trailing or depth > 2 or not all(isinstance(n, int) for n in value.shape[-depth:]):
        raise _NotRotation
    lead = tuple(effect.dims[:-1])
    untouched = effects.identity(value.shape).dims[: rank - depth]
    if tuple(d for d in lead if d) != tuple(d for d in untouched if d):
        raise _NotRotation
    strides = {rank - 1: 1, rank - 2: value.shape[-1] if rank > 1 else 1}
    index = np.array([sum(int(effect.start[a]) * strides[a] for a in range(rank - depth, rank))])
    for atom in last:
        assert atom.axis is not None
        steps = np.arange(int(atom.length)) * atom.step * strides[atom.axis]
        index = (index[:, None] + steps[None, :]).reshape(-1)
    return index


def _take(term: _Term, index: np.ndarray) -> _Term:
    return _Term(term.factor[index], tuple((leaf, at[index]) for leaf, at in term.leaves))


def _add(value: Value, absorbed: list[Value]) -> list[_Term]:
    left, right = value.args[0], value.args[1]
    if value.kwargs.get("alpha", 1) != 1:
        raise _NotRotation
    second = _terms(right, absorbed)
    if value.op == "aten.sub":
        second = [replace(t, factor=-t.factor) for t in second]
    return [*_terms(left, absorbed), *second]


def _mul(value: Value, absorbed: list[Value]) -> list[_Term]:
    left, right = value.operands
    head, coefficient = (left, right) if left.value.projected else (right, left)
    leaf, index = _leaf(coefficient)
    terms = []
    for term in _terms(head, absorbed):
        if len(term.leaves) != 1 or len(index) != len(term.factor):
            raise _NotRotation
        terms.append(_Term(term.factor, (*term.leaves, (leaf, index))))
    return terms


def _neg(value: Value, absorbed: list[Value]) -> list[_Term]:
    return [replace(t, factor=-t.factor) for t in _terms(value.args[0], absorbed)]


def _cast(value: Value, absorbed: list[Value]) -> list[_Term]:
    return _terms(value.args[0], absorbed)


def _cat(value: Value, absorbed: list[Value]) -> list[_Term]:
    """Concatenation along the last dimension; a stack has one more, of length one per piece."""
    pieces, dim = value.args
    if dim != len(value.shape) - 1:
        raise _NotRotation
    stacked = all(p.effect.dims[-1] == () for p in pieces)
    if stacked:
        pieces = [View(p.value, effects.squeeze(p.effect, [dim])) for p in pieces]
    parts = [_terms(p, absorbed) for p in pieces]
    widths = [len(ts[0].factor) for ts in parts]
    if len(set(widths)) > 1 and stacked:
        raise _NotRotation
    total = sum(widths)
    out: list[_Term] = []
    for k, terms in enumerate(parts):
        if stacked:
            at = np.arange(widths[k]) * len(pieces) + k
        else:
            at = np.arange(widths[k]) + sum(widths[:k])
        out += [_spread(t, at, total) for t in terms]
    return _merge(out)


def _spread(term: _Term, at: np.ndarray, total: int) -> _Term:
    factor = np.zeros(total)
    factor[at] = term.factor
    leaves = []
    for leaf, index in term.leaves:
        wide = np.zeros(total, dtype=np.int64)
        wide[at] = index
        leaves.append((leaf, wide))
    return _Term(factor, tuple(leaves))


def _merge(terms: list[_Term]) -> list[_Term]:
    """Joins terms of the same leaves that never overlap: the pieces of one concatenation."""
    merged: list[_Term] = []
    for term in terms:
        key = tuple(leaf for leaf, _ in term.leaves)
        for k, other in enumerate(merged):
            same = key == tuple(leaf for leaf, _ in other.leaves)
            if same and not np.any((other.factor != 0) & (term.factor != 0)):
                leaves = tuple(
                    (leaf, np.where(term.factor != 0, b, a))
                    for (leaf, a), (_, b) in zip(other.leaves, term.leaves, strict=True)
                )
                merged[k] = _Term(other.factor + term.factor, leaves)
                break
        else:
            merged.append(term)
    return merged


_RULES = {
    "aten.add": _add,
    "aten.sub": _add,
    "aten.mul": _mul,
    "aten.neg": _neg,
    "aten.cat": _cat,
    "cast": _cast,
}


# --- reading the table ----------------------------------------------------------------------------


def _classify(head: View, terms: list[_Term], absorbed: tuple[Value, ...]) -> Rope:
    x_leaf = terms[0].leaves[0][0]
    if any(t.leaves[0][0] != x_leaf for t in terms):
        _refuse(head, "its terms read different tensors")
    head_dim = len(terms[0].factor)
    first = min(int(t.leaves[0][1][t.factor != 0].min()) for t in terms if np.any(t.factor))
    own, partner, passed = _roles(head, terms, first, head_dim)
    rotary_dim = int(np.count_nonzero(~passed))
    if rotary_dim % 2 or not np.array_equal(np.flatnonzero(~passed), np.arange(rotary_dim)):
        _refuse(head, "the rotated elements are not the first ones of the head")
    if np.any(own.sign[:rotary_dim] != 1):
        _refuse(head, "an element's own product is negated")
    style = _style(head, partner, rotary_dim, first)
    cos, sin = _coefficient(head, own, rotary_dim), _coefficient(head, partner, rotary_dim)
    for column in (own, partner):
        _check_columns(head, column, style, rotary_dim)
    x = _head_view(head, x_leaf, first, head_dim)
    return Rope(style, rotary_dim, cos, sin, x, absorbed)


@dataclass(frozen=True)
class _Column:
    """For each element: sign, index into x, the coefficient leaf and its index."""

    sign: np.ndarray
    x: np.ndarray
    leaf: _Leaf
    index: np.ndarray


def _roles(
    head: View, terms: list[_Term], first: int, head_dim: int
) -> tuple[_Column, _Column, np.ndarray]:
    """Splits the terms: the element's own product, its partner's product, and what passes."""
    own: list[_Term] = []
    partner: list[_Term] = []
    passed = np.zeros(head_dim, dtype=bool)
    for term in _merge(terms):
        present = term.factor != 0
        x = term.leaves[0][1] - first
        if len(term.leaves) == 1:
            if np.any(term.factor[present] != 1) or np.any(x[present] != np.flatnonzero(present)):
                _refuse(head, "unrotated elements change place or sign")
            passed |= present
        elif np.array_equal(x[present], np.flatnonzero(present)):
            own.append(term)
        else:
            partner.append(term)
    both = np.zeros(head_dim, dtype=int)
    for term in (*own, *partner):
        both += term.factor != 0
    if len(own) != 1 or len(partner) != 1 or np.any(both[~passed] != 2) or np.any(both[passed]):
        _refuse(head, "its elements are not sums of two products")
    return _column(own[0]), _column(partner[0]), passed


def _column(term: _Term) -> _Column:
    (_, x), (leaf, index) = term.leaves
    return _Column(term.factor, x, leaf, index)


def _style(head: View, partner: _Column, rotary_dim: int, first: int) -> str:
    i = np.arange(rotary_dim)
    half = rotary_dim // 2
    x, sign = partner.x[:rotary_dim] - first, partner.sign[:rotary_dim]
    if np.array_equal(x, (i + half) % rotary_dim) and np.array_equal(
        sign, np.where(i < half, -1, 1)
    ):
        return "half"
    if np.array_equal(x, i ^ 1) and np.array_equal(sign, np.where(i % 2 == 0, -1, 1)):
        return "interleaved"
    _refuse(head, "the pairs are neither (i, i + half) nor (2i, 2i + 1)")


def _check_columns(head: View, column: _Column, style: str, rotary_dim: int) -> None:
    i = np.arange(rotary_dim)
    narrow = i % (rotary_dim // 2) if style == "half" else i // 2
    index = column.index[:rotary_dim] - column.index[:rotary_dim].min()
    if not (np.array_equal(index, i) or np.array_equal(index, narrow)):
        _refuse(head, "cos and sin are not laid out like the pairs")


def _coefficient(head: View, column: _Column, rotary_dim: int) -> View:
    """The coefficient's view with its last dimension cut to the columns in use."""
    used = column.index[:rotary_dim]
    low, high = int(used.min()), int(used.max())
    leaf = column.leaf
    start = list(leaf.rest.start)
    start[leaf.axis] = low
    last = (Atom(leaf.axis, 1, high - low + 1),)
    effect = Effect((*leaf.rest.dims, last), tuple(start))
    lead = len(head.effect.dims) - 1
    if len(leaf.rest.dims) > lead:
        reject("ROPE_TABLE", Stage.K_PATH, "cos has more dimensions than the head", leaf.value)
    padded = Effect(((),) * (lead - len(leaf.rest.dims)) + effect.dims, effect.start)
    return View(leaf.value, padded)


def _head_view(head: View, leaf: _Leaf, first: int, head_dim: int) -> View:
    start = list(leaf.rest.start)
    start[leaf.axis] = first
    effect = Effect((*leaf.rest.dims, (Atom(leaf.axis, 1, head_dim),)), tuple(start))
    if len(effect.dims) != len(head.effect.dims):
        _refuse(head, "the rotation changes the number of dimensions")
    return View(leaf.value, effect)


def _refuse(head: View, why: str) -> NoReturn:
    reject(
        "ROPE_STYLE",
        Stage.K_PATH,
        f"a rotation of {head.value} was found, but {why}",
        head,
        hint="half-split and interleaved rotations of the leading dimensions are supported",
    )
