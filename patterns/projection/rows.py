"""The rows of a packed weight that are the heads of one projection.

Dimension letters: N rows of the weight, H heads, G heads of a group, D head_dim, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import Atom, Dim, Effect, InexpressibleError, Size
from tilewright.patterns.recognise.linear import rows_of


@dataclass(frozen=True)
class Rows:
    """The rows of a packed weight that compute heads of `head_dim` rows each.

    Attributes:
        first: The first row of the first head.
        heads: The (count, step) of each dimension of heads, outermost first. It is empty for one
            head. It has one pair for heads that are `step` rows apart, and two pairs for heads in
            groups, [groups, G].
        head_dim: The number of rows of each head.
    """

    first: int
    heads: tuple[tuple[int, int], ...]
    head_dim: int

    @property
    def num_heads(self) -> int:
        return int(effects.product(count for count, _ in self.heads))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [H, D], or [groups, G, D]."""
        return (*(count for count, _ in self.heads or ((1, 0),)), self.head_dim)

    def dims(self, feature: int, repeat: int = 1) -> tuple[Dim, Dim]:
        """Returns (heads, head_dim) on the axes [tokens..., N]. Each head is repeated `repeat`
        times, one copy after another."""
        outer = [Atom(feature, step, count) for count, step in self.heads]
        inner = effects.coalesce([Atom(feature, 1, self.head_dim)])
        return effects.coalesce([*outer, Atom(None, 0, repeat)]), inner

    def indices(self) -> frozenset[int]:
        """Returns all row numbers."""
        return _indices(self)

    def of(self, view: View, base: int = 0) -> View:
        """Returns these rows of `view` as [H, D, ...]. `view` is [N - base, ...], and its first row
        is row `base` of the weight."""
        dims = [effects.coalesce([Atom(0, step, count)]) for count, step in self.heads or ((1, 0),)]
        dims.append(effects.coalesce([Atom(0, 1, self.head_dim)]))
        return rows_of(view, dims, self.first - base)

    def restate(self, effect: Effect, tokens: Sequence[Size]) -> Effect:
        """Converts an effect on [tokens..., N] to an effect on the op's output [T, H, D].

        Raises InexpressibleError if the effect selects other rows.
        """
        feature, digits = len(tokens), self._digits()
        first_row = effect.start[feature] - self.first
        if not isinstance(first_row, int) or first_row < 0:
            raise InexpressibleError("the view has features of another projection")
        start = effects.split_index(first_row, digits)
        reach = list(start)
        dims = []
        for dim in effect.dims:
            atoms: list[Atom] = []
            for atom in dim:
                if atom.axis == feature:
                    pieces = effects.split_atom(atom, digits, reach)
                    if pieces is None:
                        raise InexpressibleError("the heads' features are regrouped")
                    atoms += pieces
                elif atom.axis is None:
                    atoms.append(atom)
                else:
                    inner = effects.product(tokens[atom.axis + 1 :])
                    atoms.append(Atom(0, atom.step * inner, atom.length))
            dims.append(effects.coalesce(atoms))
        if any(last >= piece.length for last, (piece, _) in zip(reach, digits, strict=True)):
            raise InexpressibleError("the view has features of another projection")
        first: list[Size] = [0, 0, 0]
        for axis, at in enumerate(effect.start[:feature]):
            first[0] = first[0] + at * effects.product(tokens[axis + 1 :])
        for at, (piece, _) in zip(start, digits, strict=True):
            assert piece.axis is not None
            first[piece.axis] = first[piece.axis] + at * piece.step
        return Effect(tuple(dims), tuple(first))

    def _digits(self) -> list[effects.Digit]:
        """Returns the dimensions of the heads, outermost first, and head_dim, as the digits of a
        row number. Each digit has its place on [T, H, D]."""
        found, out = [(Atom(2, 1, self.head_dim), 1)], 1
        for count, step in reversed(self.heads):
            found.append((Atom(1, out, count), step))
            out *= count
        return found[::-1]


@lru_cache(maxsize=64)  # the result has thousands of numbers, and layers share it
def _indices(rows: Rows) -> frozenset[int]:
    at = np.array([rows.first])
    for count, step in (*rows.heads, (rows.head_dim, 1)):
        at = (at[:, None] + np.arange(count) * step).reshape(-1)
    return frozenset(at.tolist())


def heads_of(layout: Effect, feature: int, head_dim: int | None) -> Rows | None:
    """Returns the rows that a view of [tokens..., N] selects, or None if these rows are not heads.

    head_dim: the number of rows of a head. If None, this number is the length of the view's
    dimension that has step 1 along N.
    """
    first = layout.start[feature]
    by_dim = [[a for a in d if a.axis == feature] for d in layout.dims]
    atoms = sorted((a for d in by_dim for a in d), key=lambda a: a.step)
    if not atoms or atoms[0].step != 1 or not all(isinstance(a.length, int) for a in atoms):
        return None
    if not isinstance(first, int):
        return None
    if head_dim is None:
        inner = next(d for d in by_dim if atoms[0] in d)
        head_dim = int(effects.product(a.length for a in inner))
    run, outer = 1, []
    for atom in atoms:
        length = int(atom.length)
        if run == head_dim:
            outer.append((length, atom.step))
        elif atom.step == run and run * length <= head_dim:
            run *= length
        elif atom.step == run and run * length % head_dim == 0:
            outer.append((run * length // head_dim, head_dim))
            run = head_dim
        else:
            return None
    return None if run != head_dim else rows(first, outer[::-1], head_dim)


def rows(first: int, heads: Sequence[tuple[int, int]], head_dim: int) -> Rows | None:
    """Returns rows in normal form, or None if the heads would have more than one level of
    groups."""
    joined: list[tuple[int, int]] = []
    for count, step in heads:
        if joined and joined[-1][1] == step * count:
            joined[-1] = (joined[-1][0] * count, step)
        elif count != 1:
            joined.append((count, step))
    return Rows(first, tuple(joined), head_dim) if len(joined) <= 2 else None


def rest_of(size: int, taken: frozenset[int], head_dim: int) -> Rows | None:
    """Returns the heads in `size` rows without the rows in `taken`. Returns None if no rows remain,
    or if the remaining rows are not runs of whole heads with equal lengths and distances."""
    gone = np.fromiter(taken, dtype=np.int64)
    remain = np.ones(size, dtype=bool)
    remain[gone[(gone >= 0) & (gone < size)]] = False
    left = np.flatnonzero(remain)
    if not len(left):
        return None
    cuts = np.flatnonzero(np.diff(left) != 1) + 1
    runs = np.split(left, cuts)
    starts = np.array([run[0] for run in runs])
    apart = np.unique(np.diff(starts))
    length = len(runs[0])
    if any(len(run) != length for run in runs) or length % head_dim or len(apart) > 1:
        return None
    outer = (len(runs), int(apart[0]) if len(apart) else 0)
    return rows(int(starts[0]), (outer, (length // head_dim, head_dim)), head_dim)
