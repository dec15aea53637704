"""Reduces scales with one number for each element to scales with one number for each block of
neighbouring elements."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import Atom, Dim, Effect, InexpressibleError, Size

#: The numbers of (rows, columns) that share a scale. None means all rows, or all columns.
Block = tuple[int | None, int | None]


def with_whole_blocks(scale: View) -> View:
    """Returns the repeated scales from which the graph cut off the scales that the last block of a
    weight does not use. Returns `scale` itself if the graph cut off nothing, or something else.

        scale.repeat_interleave(128, 0)[:192]   ⇒   the 256 rows before the slice
    """
    value = scale.value
    selection = value.kwargs.get("selection") if value.op.startswith("opaque:") else None
    if not isinstance(selection, Effect) or any(selection.start) or any(scale.effect.start):
        return scale
    (base,) = value.operands
    longer = [_longer(dim, value.shape, selection, base.shape) for dim in scale.effect.dims]
    if any(dim is None for dim in longer):
        return scale
    dims = tuple(dim for dim in longer if dim is not None)
    return base.through(Effect(dims, (0,) * len(base.shape)))


def _longer(dim: Dim, cut: Sequence[Size], selection: Effect, whole: Sequence[Size]) -> Dim | None:
    """Extends a dimension that selects from a tensor which the graph has cut, so that it selects
    from the whole tensor. Returns None if the dimension does not take whole axes.

    selection: the part of the whole tensor that the graph kept. cut, whole: the sizes of the cut
    tensor and of the whole tensor.
    """
    found = []
    for atom in dim:
        if atom.axis is None:
            found.append(atom)
            continue
        axes = selection.dims[atom.axis]
        if (atom.step, atom.length) != (1, cut[atom.axis]) or len(axes) != 1 or axes[0].step != 1:
            return None
        axis = axes[0].axis
        found.append(atom if axis is None else Atom(axis, 1, whole[axis]))
    return tuple(found)


def block_of(dims: Sequence[Dim]) -> Block:
    """Returns the block of rows and columns. Raises InexpressibleError if the scales repeat in
    another way."""
    (_, rows), (_, columns) = (unrepeated(dim) for dim in dims)
    return rows, columns


def unrepeated(dim: Dim) -> tuple[Dim, int | None]:
    """Returns (a dimension without its innermost repetition, how often each number is repeated).
    The second value is None if the whole dimension repeats one number.

    Raises InexpressibleError if the numbers repeat in another way.
    """
    if all(a.axis is None for a in dim):
        return (), None
    repeats = dim[-1].length if dim[-1].axis is None else 1
    kept = dim[:-1] if dim[-1].axis is None else dim
    if any(a.axis is None for a in kept):
        raise InexpressibleError("the elements that share a scale are not neighbours")
    return kept, int(repeats)


def common_block(blocks: Sequence[Block]) -> Block:
    """Returns the largest block into which all these blocks can be cut. Raises InexpressibleError
    if, in some dimension, one length is not a multiple of the smallest length."""
    found: list[int | None] = []
    for axis in (0, 1):
        known = sorted({size for b in blocks if (size := b[axis]) is not None})
        if any(size % known[0] for size in known):
            raise InexpressibleError(f"the scales' blocks have no common size: {known}")
        found.append(known[0] if known else None)
    return found[0], found[1]


def cut_to_blocks(
    dims: Sequence[Dim], sizes: Sequence[Size], block: Sequence[int | None]
) -> list[Dim]:
    """Reduces dimensions that have one number for each element to dimensions that have one number
    for each block. If `block` is smaller than the blocks of the dimensions, numbers repeat."""
    found = []
    for dim, size, wanted in zip(dims, sizes, block, strict=True):
        kept, own = unrepeated(dim)
        again = 1 if wanted is None else -(-(size if own is None else own) // wanted)
        found.append(effects.coalesce((*kept, Atom(None, 0, again))))
    return found
