"""Finds the meaning of each dimension of a slice that is written to a cache, `cache[:B, s : s +
n]`.

There is no index tensor that shows which dimension of a slice has the slots. The slots are in the
dimension that the slice cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.patterns.effects import Dim, Effect, Size


@dataclass(frozen=True)
class Slots:
    """The meaning of the dimensions of a slice.

    Attributes:
        page: The dimension of pages; None if there is a single page.
        slot: The dimension of slots.
        head: The dimension of heads.
        element: The dimension of a head's elements.
        axis: The axis of the memory that has the slots. If there is a single head, the memory may
            have no axis for heads.
    """

    page: int | None
    slot: int
    head: int
    element: int
    axis: int


def fill_slices(target: Effect, shape: Sequence[Size]) -> Slots | str:
    """Returns what the dimensions of the slice `target` mean. `shape` is the shape of the memory.
    If the meaning is not known, returns the reason as a message."""
    axes = _axes(target.dims, len(shape))
    if axes is None or len(axes) not in (3, 4):
        return "its dimensions are not pages, slots, heads and head_dim"
    page = 0 if len(axes) == 4 else None
    inner = range(len(axes) - 3, len(axes) - 1)
    choices = [d for d in inner if axes[d] is not None]
    if len(choices) > 1:
        choices = [d for d in choices if _is_cut(target, shape, d, axes[d])]
    if len(choices) != 1:
        return "it is not known which dimension has the slots"
    slot = choices[0]
    (head,) = (d for d in inner if d != slot)
    first = 0 if page is None else axes[page]
    axis = axes[slot]
    assert axis is not None
    if page is not None and (first is None or not isinstance(target.start[first], int)):
        return "it starts at an unknown sequence"
    return Slots(page, slot, head, len(axes) - 1, axis)


def _axes(dims: Sequence[Dim], rank: int) -> list[int | None] | None:
    """Returns the memory's axis for every dimension; None if the axes are not known.

    A dimension of length one does not show its axis. It gets an unused axis between the axes of its
    neighbours, unless there are more unused axes than dimensions of length one. If there are fewer
    unused axes than such dimensions, the last of these dimensions get no axis.
    """
    known: list[int | None] = []
    for dim in dims:
        if len(dim) > 1 or any(a.axis is None or a.step != 1 for a in dim):
            return None
        known.append(dim[0].axis if dim else None)
    taken = {axis for axis in known if axis is not None}
    found: list[int | None] = []
    for place, axis in enumerate(known):
        if axis is not None:
            found.append(axis)
            continue
        before = max((a for a in known[:place] if a is not None), default=-1)
        after = min((a for a in known[place:] if a is not None), default=rank)
        free = [a for a in range(before + 1, after) if a not in taken]
        run = _run_of_ones(known, place)
        if len(free) > len(run):
            return None
        at = run.index(place)
        found.append(free[at] if at < len(free) else None)
    return found


def _run_of_ones(known: Sequence[int | None], place: int) -> list[int]:
    """Returns the adjacent dimensions around `place` whose axes are unknown."""
    first = place
    while first > 0 and known[first - 1] is None:
        first -= 1
    last = place
    while last + 1 < len(known) and known[last + 1] is None:
        last += 1
    return list(range(first, last + 1))


def _is_cut(target: Effect, shape: Sequence[Size], dim: int, axis: int | None) -> bool:
    """Whether a dimension covers only a part of its axis."""
    return axis is not None and bool(target.start[axis] != 0 or target.shape[dim] != shape[axis])
