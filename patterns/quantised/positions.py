"""Selects the elements at one position of every packed word, and joins such selections again."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import Atom, Effect, InexpressibleError


def every(rows: View, axis: int, per: int, position: int) -> View:
    """Returns every `per`-th element along `axis`, starting at `position`."""
    shape = list(rows.shape)
    shape[axis : axis + 1] = [shape[axis] // per, per]
    apart = effects.reshape(rows.effect, shape)
    return View(rows.value, effects.select(apart, axis + 1, position))


def joined(views: Sequence[View | None], axis: int) -> View | None:
    """Joins the views of all positions to one view. This is the inverse of :func:`every`. Returns
    None if all views are None.

    Raises InexpressibleError if the views do not interleave.
    """
    first = views[0]
    if first is None or any(v is None or v.value is not first.value for v in views):
        if any(v is not None for v in views):
            raise InexpressibleError("the numbers for a word's positions are not in one tensor")
        return None
    starts = [v.effect.start for v in views if v is not None]
    steps = [b - a for a, b in zip(starts[0], starts[1], strict=True)]
    moved = [a for a, step in enumerate(steps) if step]
    for position, view in enumerate(views):
        assert view is not None
        expected = tuple(s + position * step for s, step in zip(starts[0], steps, strict=True))
        if view.effect != Effect(first.effect.dims, expected) or len(moved) > 1:
            raise InexpressibleError("the numbers for a word's positions do not interleave")
    inner = Atom(moved[0], steps[moved[0]], len(views)) if moved else Atom(None, 0, len(views))
    if inner.step < 0:
        raise InexpressibleError("the positions of a word are in descending order")
    dims = list(first.effect.dims)
    dims[axis] = effects.coalesce((*dims[axis], inner))
    return View(first.value, Effect(tuple(dims), starts[0]))
