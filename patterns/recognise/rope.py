"""Recognises rotary position embedding by what it computes, independent of how it is written.

`rope_terms` expresses every element of the rotated head as a sum. Each term is an element of the
original head times its coefficients. This file reads the table of these products. It finds which
elements are paired, which columns of cos and sin multiply each element, and the signs of these
products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Atom, Effect, Size
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.recognise.rope_terms import (
    IsAddend,
    Leaf,
    NotRotation,
    Term,
    head_terms,
    is_arithmetic,
    never,
)


@dataclass(frozen=True)
class Table:
    """The table of cosines or sines that a rotation reads.

    Attributes:
        view: The table, [..., width]. Its dimensions correspond to the dimensions of the rotated
            head. `width` is rotary_dim or rotary_dim / 2.
        part: `real` or `imag` if the table is this part of a complex view; else "".
        signs: The signs of the first and of the second members of the pairs, relative to x0 * cos -
            x1 * sin and x1 * cos + x0 * sin.
        second: The table of the second members, [..., rotary_dim / 2], if the first and second
            members have separate tables; `view` is then the table of the first members.
        alternates: Whether the two members of a pair are neighbours.
    """

    view: View
    part: str = ""
    signs: tuple[int, int] = (1, 1)
    second: View | None = None
    alternates: bool = False

    @property
    def width(self) -> Size:
        return self.view.shape[-1] * (1 if self.second is None else 2)


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding that the graph computes.

    Attributes:
        style: `half`, `interleaved` or `interleaved_to_half`.
        rotary_dim: The number of rotated elements of a head.
        cos: The table of cosines.
        sin: The table of sines.
        x: The head before the rotation. Its dimensions correspond to the dimensions of the rotated
            head.
        absorbed: The values that compute the rotation.
    """

    style: str
    rotary_dim: int
    cos: Table
    sin: Table
    x: View
    absorbed: tuple[Value, ...]


class _Unknown(Exception):
    """Raised for a kind of rotation that the ops do not support. The message is the reason."""


@dataclass(frozen=True)
class _Pairs:
    """The pairs that a rotation rotates. Each field has one entry for each rotated element.

    Attributes:
        own: The index in x of each rotated element.
        partner: The index in x of the other element of its pair.
        second: 1 for the second member of a pair, 0 for the first.
    """

    own: np.ndarray
    partner: np.ndarray
    second: np.ndarray


def match_rope(head: View, stage: Stage = Stage.K_PATH, is_addend: IsAddend = never) -> Rope | None:
    """Returns the rotation whose result is `head` [..., head_dim]. Returns None if there is no
    rotation.

    is_addend: a function that returns True for a view that is added before the rotation, and is not
    a part of the sums of the rotation. Raises Reject (ROPE_STYLE) at `stage` for a kind of rotation
    that the ops do not support.
    """
    if not is_arithmetic(head.value):
        return None
    try:
        terms, absorbed = head_terms(head, is_addend)
    except NotRotation:
        return None
    if len(terms) == 1 or not any(len(t.leaves) == 2 for t in terms):
        return None
    try:
        return _classify(head, terms, absorbed)
    except _Unknown as unknown:
        reject(
            "ROPE_STYLE",
            stage,
            f"a rotation of {head.value} was found, but {unknown}",
            head,
            hint="half-split and interleaved rotations of the leading dimensions are supported",
        )


# --- reading the table ----------------------------------------------------------------------------


def _classify(head: View, terms: Sequence[Term], absorbed: tuple[Value, ...]) -> Rope:
    x_leaf = terms[0].leaves[0][0]
    if any(t.leaves[0][0] != x_leaf for t in terms):
        raise _Unknown("its terms read different tensors")
    head_dim = len(terms[0].factor)
    first = min(int(t.leaves[0][1][t.present].min()) for t in terms if np.any(t.factor))
    rotary_dim = _rotated(terms, first, head_dim)
    for style, pairs in _styles(rotary_dim).items():
        own = _column(terms, pairs.own + first, pairs.second)
        partner = _column(terms, pairs.partner + first, pairs.second)
        if own is not None and partner is not None:
            # The second element of a pair adds x_partner * sin. The first element subtracts it.
            partner = replace(partner, sign=partner.sign * (2 * pairs.second - 1))
            cos, sin = (_table(c, pairs, style) for c in (own, partner))
            cos, sin = _same_width(cos, sin, rotary_dim, style)
            return Rope(style, rotary_dim, cos, sin, _x(head, x_leaf, first, head_dim), absorbed)
    raise _Unknown("the pairs are neither (i, i + half) nor (2i, 2i + 1)")


def _rotated(terms: Sequence[Term], first: int, head_dim: int) -> int:
    """Returns the number of rotated elements. Raises _Unknown unless they are the first elements of
    the head, and each is a sum of two products."""
    products, passed = np.zeros(head_dim, dtype=int), np.zeros(head_dim, dtype=bool)
    for term in terms:
        if len(term.leaves) == 2:
            products += term.present
            continue
        at = np.flatnonzero(term.present)
        if np.any(term.factor[at] != 1) or np.any(term.leaves[0][1][at] - first != at):
            raise _Unknown("unrotated elements change place or sign")
        passed |= term.present
    if np.any(products[~passed] != 2) or np.any(products[passed]):
        raise _Unknown("its elements are not sums of two products")
    rotary_dim = int(np.count_nonzero(~passed))
    if rotary_dim % 2:
        raise _Unknown(f"an odd number of elements, {rotary_dim}, cannot turn in pairs")
    if not np.array_equal(np.flatnonzero(~passed), np.arange(rotary_dim)):
        raise _Unknown("the rotated elements are not the first ones of the head")
    return rotary_dim


@lru_cache(maxsize=16)
def _styles(rotary_dim: int) -> dict[str, _Pairs]:
    """Returns the pairs of each style."""
    i, half = np.arange(rotary_dim), rotary_dim // 2
    second = (i >= half).astype(int)
    other = 2 * (i % half)
    return {
        "half": _Pairs(i, (i + half) % rotary_dim, second),
        "interleaved": _Pairs(i, i ^ 1, i % 2),
        "interleaved_to_half": _Pairs(other + second, other + 1 - second, second),
    }


@dataclass(frozen=True)
class _Column:
    """The column of a coefficient that multiplies each rotated element, and its sign.

    Attributes:
        leaves: The tensors of the coefficient, for the first and for the second members of the
            pairs.
        index: The column of the coefficient for each rotated element.
        sign: The sign of the coefficient for each rotated element.
    """

    leaves: tuple[Leaf, Leaf]
    index: np.ndarray
    sign: np.ndarray


def _column(terms: Sequence[Term], x: np.ndarray, second: np.ndarray) -> _Column | None:
    """Returns the coefficient that multiplies the element x[i] of the head in every rotated element
    i. Returns None if an element has no such coefficient, or several.

    second: which member of its pair an element is.
    """
    rotary_dim = len(x)
    index, sign = np.zeros(rotary_dim, dtype=np.int64), np.zeros(rotary_dim)
    leaves: dict[int, Leaf] = {}
    for term in terms:
        if len(term.leaves) != 2:
            continue
        (_, of), (coefficient, at) = term.leaves
        here = term.present[:rotary_dim] & (of[:rotary_dim] == x)
        if not np.any(here):
            continue
        members = set(second[here].tolist())
        if np.any(sign[here]) or any(leaves.get(m, coefficient) != coefficient for m in members):
            return None
        leaves |= dict.fromkeys(members, coefficient)
        sign[here] = term.factor[:rotary_dim][here]
        index[here] = at[:rotary_dim][here]
    if len(leaves) != 2 or np.any(np.abs(sign) != 1):
        return None
    return _Column((leaves[0], leaves[1]), index, sign)


def _table(column: _Column, pairs: _Pairs, style: str) -> Table:
    """Returns the view of a coefficient, in which the last dimension has only the used columns.
    Raises _Unknown for signs or a layout that the ops do not support."""
    first, second = (column.sign[pairs.second == member] for member in (0, 1))
    if np.any(first != first[0]) or np.any(second != second[0]):
        raise _Unknown("its signs alternate")
    signs = (int(first[0]), int(second[0]))
    if column.leaves[0] != column.leaves[1]:
        return _table_of_members(column, pairs, style, signs)
    if signs[0] != signs[1] and style == "interleaved":
        raise _Unknown("the members of a pair take a coefficient with different signs")
    rotary_dim = len(column.index)
    each, half = np.arange(rotary_dim), rotary_dim // 2
    pair = each // 2 if style == "interleaved" else each % half
    low = int(column.index.min())
    reach = int(column.index.max()) - low
    leaf = column.leaves[0]
    for place, width in ((each, rotary_dim), (pair, half)):
        step = reach // (width - 1) if width > 1 else 1
        if step > 0 and np.array_equal(column.index - low, place * step):
            return Table(leaf.columns(low, width, step), leaf.part, signs)
    raise _Unknown("the layout of cos and sin differs from the layout of the pairs")


def _table_of_members(column: _Column, pairs: _Pairs, style: str, signs: tuple[int, int]) -> Table:
    """Returns one table that has a separate view for the first members and for the second members.
    Raises _Unknown for a layout that the ops do not support."""
    parts = {leaf.part for leaf in column.leaves}
    if len(parts) != 1:
        raise _Unknown("cos and sin are parts of different numbers")
    views = []
    for member, leaf in enumerate(column.leaves):
        index = column.index[pairs.second == member]
        step = int(index[1] - index[0]) if len(index) > 1 else 1
        if step <= 0 or np.any(index - index[0] != np.arange(len(index)) * step):
            raise _Unknown("the layout of cos and sin differs from the layout of the pairs")
        views.append(leaf.columns(int(index[0]), len(index), step))
    return Table(views[0], parts.pop(), signs, views[1], style == "interleaved")


def _same_width(cos: Table, sin: Table, rotary_dim: int, style: str) -> tuple[Table, Table]:
    """Returns both tables with equal width. The op expects one column for each pair, or one for
    each element."""
    both = (cos, sin)
    if all(t.width == rotary_dim // 2 and t.signs[0] == t.signs[1] for t in both):
        return both
    wide = [t if t.width == rotary_dim else _per_element(t, style) for t in both]
    return wide[0], wide[1]


def _per_element(table: Table, style: str) -> Table:
    """Converts a table with one column for each pair to a table with one column for each
    element."""
    *lead, last = table.view.effect.dims
    twice = Atom(None, 0, 2)
    both = (*last, twice) if style == "interleaved" else (twice, *last)
    view = table.view.with_dims(*lead, both)
    return Table(view, table.part, table.signs)


def _x(head: View, leaf: Leaf, first: int, head_dim: int) -> View:
    x = leaf.columns(first, head_dim)
    if len(x.shape) != len(head.shape):
        raise _Unknown("the rotation changes the number of dimensions")
    return x


# --- the op's arguments ---------------------------------------------------------------------------


def table_argument(
    table: Table, layout: Effect, feature: int, tokens: Sequence[Size], stage: Stage
) -> View | Computed:
    """Returns cos or sin in the form that the op expects, [T or S or 1, width]. The rows repeat
    over the leading token axes.

    layout: the dimensions of the rotated head, expressed on the axes [tokens..., N] of the product.
    feature: the axis of N. Raises Reject (ROPE_TABLE) at `stage` if the table differs between
    heads.
    """
    rows = _rows(table.view, layout, feature, tokens, stage)
    first, second = table.signs
    if table.second is not None:
        others = _rows(table.second, layout, feature, tokens, stage)
        return _side_by_side(table, rows, others)
    if first != second:
        half = rows.shape[-1] // 2
        pieces = (rows.narrow(1, start, half) for start in (0, half))
        signed = zip(pieces, table.signs, strict=True)
        return Computed("cat", (tuple(_signed(p, table.part, s) for p, s in signed), -1))
    item = _signed(rows, table.part, first)
    return item if _is_dense(rows, item) else Computed("contiguous", (item,))


def _side_by_side(table: Table, first: View, second: View) -> Computed:
    """Returns rows that have the columns for both members of the pairs. The columns alternate if
    the two members are neighbours. Otherwise the columns for the first members come first."""
    count, half = max((first, second), key=lambda view: len(view.effect.dims[0])).shape
    both = zip((first, second), table.signs, strict=True)
    members = [(view.expand(count, half), sign) for view, sign in both]
    if not table.alternates:
        return Computed("cat", (tuple(_signed(v, table.part, s) for v, s in members), -1))
    apart = tuple(_signed(view.unsqueeze(2), table.part, sign) for view, sign in members)
    return Computed("reshape", (Computed("cat", (apart, -1)), (count, 2 * half)))


def same_table(a: Any, b: Any) -> bool:
    """Whether two results of :func:`table_argument` have the same numbers, even if the graph
    computes them twice."""
    if isinstance(a, View) and isinstance(b, View):
        return equal_values(a, b)
    if isinstance(a, Computed) and isinstance(b, Computed):
        return a.function == b.function and same_table(a.operands, b.operands)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(same_table(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _signed(rows: View, part: str, sign: int) -> View | Computed:
    item: View | Computed = Computed(part, (rows,)) if part else rows
    return Computed("neg", (item,)) if sign < 0 else item


def _is_dense(rows: View, item: View | Computed) -> bool:
    """Whether columns are contiguous in memory, as the op requires."""
    last = rows.effect.dims[-1]
    if isinstance(item, Computed):
        return False
    if len(last) != 1 or not rows.value.shape:
        return True  # the argument is built as a contiguous copy
    held = rows.value.node.meta.get("example_value")
    inner = held.stride(-1) if isinstance(held, torch.Tensor) and held.dim() else 1
    return inner == 1 and last == (Atom(len(rows.value.shape) - 1, 1, last[0].length),)


def _rows(table: View, layout: Effect, feature: int, tokens: Sequence[Size], stage: Stage) -> View:
    """Returns a table whose token dimensions are merged into one, in the op's order of the tokens.
    Raises Reject (ROPE_TABLE) if the table differs between heads."""
    by_axis: dict[int, tuple[Atom, ...]] = {}
    for place, dim in zip(layout.dims[:-1], table.effect.dims[:-1], strict=True):
        axes = [a.axis for a in place]
        if feature in axes and dim != ():
            reject("ROPE_TABLE", stage, "cos and sin differ between heads", table)
        if feature in axes:
            continue
        if len(axes) > 1 and dim != ():
            by_axis.update(_split_tokens(place, dim))
        elif axes and axes[0] is not None:
            by_axis[axes[0]] = dim
        elif dim != ():
            reject("ROPE_TABLE", stage, "cos and sin vary along no token axis", table)
    rows: list[Atom] = []
    for axis, size in enumerate(tokens):
        dim = by_axis.get(axis, ())
        if dim == () and size != 1 and rows:
            dim = (Atom(None, 0, size),)
        rows += dim
    width = table.effect.dims[-1]
    return table.with_dims(effects.coalesce(rows), width)


def _split_tokens(place: tuple[Atom, ...], dim: tuple[Atom, ...]) -> dict[int, tuple[Atom, ...]]:
    """Returns the atoms of a table's dimension `dim` for each token axis. The dimension merges the
    same token axes as the dimension `place` of the head."""
    flat = Effect((dim,), (0,) * (1 + max(a.axis or 0 for a in dim)))
    apart = effects.reshape(flat, [a.length for a in place])
    return {a.axis: d for a, d in zip(place, apart.dims, strict=True) if a.axis is not None}
