"""The elements that a chain of views selects, independent of how the chain is written.

An :class:`Effect` maps the indices of a tensor to the indices of a *base*. Every output dimension
is a mixed-radix number: a tuple of :class:`Atom`, the outermost first, and each atom steps along
one axis of the base. `view`, `transpose`, `split`, slices and `expand` in any order reduce to one
normal form, so two chains select the same elements exactly if their effects are equal. Effects
describe logical indices: strides in memory do not matter, and a copy (`contiguous`) has the same
effect as the identity.

A size is a Python int or, for a symbol of Dynamo, a sympy expression.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import sympy

# An int or a sympy.Expr. Code mixes both in arithmetic, which a type checker does not accept for a
# union.
Size = Any


class InexpressibleError(ValueError):
    """Raised for a selection that has no normal form, such as a split whose size does not divide
    the dimension."""


class Atom(NamedTuple):
    """`length` indices along the axis `axis` of the base, `step` apart. If `axis` is None, one
    element is repeated.

    A step is symbolic only if tokens are split by a symbol, for example from [B*S] to [B, S].
    """

    axis: int | None
    step: Any
    length: Size


Dim = tuple[Atom, ...]


class Effect(NamedTuple):
    """A selection of elements of a base.

    Attributes:
        dims: dims[i] is output dimension i.
        start: start[a] is the first index on axis a of the base.
    """

    dims: tuple[Dim, ...]
    start: tuple[Size, ...]

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple([(d[0].length if len(d) == 1 else _length(d)) if d else 1 for d in self.dims])


def _length(dim: Dim) -> Size:
    if len(dim) > 1:
        return product(atom.length for atom in dim)
    return dim[0].length if dim else 1


def only_data_tell(size: Size) -> bool:
    """Whether a size depends on data, like the size of the result of `nonzero`. Other sizes depend
    only on the shapes of inputs."""
    return any(str(symbol).startswith("u") for symbol in getattr(size, "free_symbols", ()))


def size_fact(size: Size) -> int | str:
    """Returns a size for reports: a number, or T for a size that is known only at run time."""
    return size if isinstance(size, int) else "T"


def product(sizes: Iterable[Size]) -> Size:
    return math.prod(sizes, start=1)


def identity(shape: Sequence[Size]) -> Effect:
    """Returns the effect that selects the whole base."""
    return _identity(tuple(shape))


@lru_cache(maxsize=1024)  # a model has few shapes, but they are needed thousands of times
def _identity(shape: tuple[Size, ...]) -> Effect:
    dims = tuple(() if n == 1 else (Atom(a, 1, n),) for a, n in enumerate(shape))
    return Effect(dims, (0,) * len(shape))


def is_identity(effect: Effect, base_shape: Sequence[Size]) -> bool:
    """Whether `effect` selects the whole base, in the base's shape."""
    return effect == identity(base_shape)


def coalesce(atoms: Iterable[Atom]) -> Dim:
    """Removes atoms of length one, and joins neighbours that continue each other."""
    out: list[Atom] = []
    for atom in atoms:
        if atom.length == 1:
            continue
        if out:
            outer = out[-1]
            broadcast = outer.axis is None and atom.axis is None
            continues = outer.axis == atom.axis and outer.step == atom.step * atom.length
            if broadcast or (atom.axis is not None and continues):
                step = 0 if broadcast else atom.step
                out[-1] = Atom(atom.axis, step, outer.length * atom.length)
                continue
        out.append(atom)
    return tuple(out)


def repeats(dim: Dim) -> bool:
    """Whether all indices of a dimension select the same element."""
    return all(atom.axis is None for atom in dim)


def once(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    """Returns the dimensions. A dimension that only repeats an element has length one in the
    result."""
    return tuple(() if repeats(dim) else dim for dim in dims)


def divides(divisor: Size, size: Size) -> Size | None:
    """Returns size / divisor if the divisor certainly divides the size; else None."""
    if size == divisor:
        return 1
    if isinstance(size, int) and isinstance(divisor, int):
        return size // divisor if divisor and size % divisor == 0 else None
    quotient = sympy.sympify(size) / divisor
    if not quotient.is_integer:
        return None
    return int(quotient) if quotient.is_Integer else quotient


def reshape(effect: Effect, sizes: Sequence[Size]) -> Effect:
    """Regroups dimensions in row-major order into `sizes`, in which -1 is not allowed.

    An effect without elements can get any shape without elements.
    """
    if tuple(sizes) == effect.shape:
        return effect
    if 0 in sizes and 0 in effect.shape:
        return Effect(tuple(() if n == 1 else (Atom(None, 0, n),) for n in sizes), effect.start)
    # A stack of the atoms that are not used yet. The innermost atom is on top.
    pending = [atom for dim in effect.dims for atom in dim]
    dims: list[Dim] = []
    for size in reversed(sizes):
        dims.append(_take_inner(pending, size))
    if pending:
        raise InexpressibleError(f"cannot view {effect.shape} as {tuple(sizes)}")
    return Effect(tuple(reversed(dims)), effect.start)


def regroup(effect: Effect, sizes: Sequence[Size]) -> Effect:
    """Reshapes like :func:`reshape`. The sizes must be known to have as many elements as the
    effect, like the sizes of a view in the graph. If a view requires it, symbols are assumed to
    divide each other, even if this cannot be proven."""
    if tuple(sizes) == effect.shape or (0 in sizes and 0 in effect.shape):
        return reshape(effect, sizes)
    pending = [atom for dim in effect.dims for atom in dim]
    left, dims = list(sizes), []
    while left and len(pending) != 1:
        dims.append(_take_inner(pending, left.pop()))
    if len(pending) > 1:
        raise InexpressibleError(f"cannot view {effect.shape} as {tuple(sizes)}")
    for atom in pending:  # the only atom that is left is split into the remaining sizes
        step = atom.step
        while left:
            dims.append(coalesce([Atom(atom.axis, step, left[-1])]))
            step = step * left.pop()
    return Effect(tuple(reversed(dims)), effect.start)


def _take_inner(pending: list[Atom], size: Size) -> Dim:
    """Removes atoms from the inner end that have exactly `size` indices together, and returns
    them."""
    taken: list[Atom] = []
    left = size
    while left != 1:
        if not pending:
            raise InexpressibleError(f"no atoms left for a dimension of {size}")
        atom = pending.pop()
        if (rest := divides(atom.length, left)) is not None:
            taken.append(atom)
            left = rest
        elif (outer := divides(left, atom.length)) is not None:
            taken.append(Atom(atom.axis, atom.step, left))
            pending.append(Atom(atom.axis, atom.step * left, outer))
            left = 1
        else:
            raise InexpressibleError(f"cannot split {atom.length} by {left}")
    return coalesce(taken[::-1])


def permute(effect: Effect, order: Sequence[int]) -> Effect:
    """Reorders output dimensions."""
    return Effect(tuple(effect.dims[i] for i in order), effect.start)


def unsqueeze(effect: Effect, dim: int) -> Effect:
    """Adds a dimension of length one at `dim` (0 <= dim <= rank)."""
    return Effect((*effect.dims[:dim], (), *effect.dims[dim:]), effect.start)


def squeeze(effect: Effect, dims: Sequence[int]) -> Effect:
    """Removes each dimension in `dims` that has length one."""
    gone = {d for d in dims if effect.dims[d] == ()}
    kept = tuple(dim for i, dim in enumerate(effect.dims) if i not in gone)
    return Effect(kept, effect.start)


def expand(effect: Effect, sizes: Sequence[Size]) -> Effect:
    """Broadcasts to `sizes`: new leading dimensions, and dimensions of length one, are repeated."""
    lead = len(sizes) - len(effect.dims)
    if lead < 0:
        raise InexpressibleError(f"cannot expand {effect.shape} to {tuple(sizes)}")
    dims = ((),) * lead + effect.dims
    out = []
    for dim, size in zip(dims, sizes, strict=True):
        out.append(dim if size in (-1, _length(dim)) or size == 1 else _repeat(dim, size))
    return Effect(tuple(out), effect.start)


def _repeat(dim: Dim, size: Size) -> Dim:
    if dim != () and not isinstance(size, int):
        return dim  # only length one broadcasts, so the symbol must equal this length
    if dim != ():
        raise InexpressibleError(f"cannot expand a dimension of {_length(dim)} to {size}")
    return (Atom(None, 0, size),)


def narrow(effect: Effect, dim: int, start: Size, length: Size, step: int = 1) -> Effect:
    """Takes `length` indices of output dimension `dim`, starting at `start`, `step` apart."""
    atoms = effect.dims[dim]
    if start == 0 and step == 1 and length == _length(atoms):
        return effect
    first, taken = _narrow_atoms(atoms, start, length, step)
    begin = list(effect.start)
    for axis, offset in first:
        begin[axis] = begin[axis] + offset
    return Effect((*effect.dims[:dim], taken, *effect.dims[dim + 1 :]), tuple(begin))


def _narrow_atoms(
    atoms: Dim, start: Size, length: Size, step: int
) -> tuple[list[tuple[int, Size]], Dim]:
    """Narrows a mixed-radix dimension. Returns the offsets, on the axes of the base, at which the
    narrowed dimension starts, and its atoms."""
    if not atoms:
        return [], ()
    inner = product(a.length for a in atoms[1:])
    outer = atoms[0]
    if inner == 1:
        offsets = [] if outer.axis is None else [(outer.axis, start * outer.step)]
        return offsets, coalesce([Atom(outer.axis, outer.step * step, length)])
    if (count := divides(inner, length)) is not None and step == 1:
        if (skip := divides(inner, start)) is None:
            raise InexpressibleError("a slice cuts across a merged dimension")
        offsets = [] if outer.axis is None else [(outer.axis, skip * outer.step)]
        return offsets, coalesce([Atom(outer.axis, outer.step, count), *atoms[1:]])
    # The slice lies in one block of the inner atoms.
    if isinstance(start, int) and isinstance(inner, int) and isinstance(length, int):
        block, within = divmod(start, inner)
        if within + (length - 1) * step < inner:
            offsets, rest = _narrow_atoms(atoms[1:], within, length, step)
            if outer.axis is not None:
                offsets = [(outer.axis, block * outer.step), *offsets]
            return offsets, rest
    raise InexpressibleError("a slice cuts across a merged dimension")


def select(effect: Effect, dim: int, index: Size) -> Effect:
    """Takes one index of `dim`, and removes this dimension."""
    cut = narrow(effect, dim, index, 1)
    return Effect((*cut.dims[:dim], *cut.dims[dim + 1 :]), cut.start)


def compose(outer: Effect, inner: Effect) -> Effect:
    """Returns `outer`, whose base is what `inner` selects, as an effect on the base of `inner`."""
    between = inner.shape
    if is_identity(inner, between):
        return outer
    if is_identity(outer, between):
        return inner
    start = list(inner.start)
    axes: list[Dim] = list(inner.dims)
    used = {atom.axis for dim in outer.dims for atom in dim}
    for axis, first in enumerate(outer.start):
        if first != 0 and axis not in used:
            offsets, _ = _narrow_atoms(axes[axis], first, 1, 1)
            for base_axis, offset in offsets:
                start[base_axis] = start[base_axis] + offset
    dims = []
    shifted: set[int] = set()
    digits = {axis: _digits(outer, axis, axes[axis], start) for axis in used if axis is not None}
    for dim in outer.dims:
        atoms: list[Atom] = []
        for atom in dim:
            if atom.axis is None:
                atoms.append(atom)
            elif (known := digits[atom.axis]) is not None:
                atoms.extend(known[id(atom)])
            else:
                atoms.extend(_through(atom, outer, axes, start, shifted))
        dims.append(coalesce(atoms))
    return Effect(tuple(dims), tuple(start))


def _digits(outer: Effect, axis: int, dim: Dim, start: list[Size]) -> dict[int, list[Atom]] | None:
    """Splits each atom of the outer effect that steps along `axis` into atoms along the digits of
    this axis, which is the merged dimension `dim`. Returns the new atoms by the id of the outer
    atom, and adds the first index on each axis of the base to `start`. Returns None if sizes are
    symbols, or if a digit of an index would exceed its length and carry over into the next
    digit."""
    taken = [atom for d in outer.dims for atom in d if atom.axis == axis]
    first = outer.start[axis]
    numbers = [first, *(n for a in (*dim, *taken) for n in (a.length, a.step))]
    plain = not dim or (len(dim) == 1 and dim[0].axis is not None)
    if plain or not all(isinstance(n, int) for n in numbers):
        return None
    digits = [(piece, product(a.length for a in dim[i + 1 :])) for i, piece in enumerate(dim)]
    places = split_index(first, digits)
    reach = list(places)
    found: dict[int, list[Atom]] = {}
    for atom in taken:
        pieces = split_atom(atom, digits, reach)
        if pieces is None:
            return None
        found[id(atom)] = pieces
    if any(last >= piece.length for last, piece in zip(reach, dim, strict=True)):
        return None
    for place, piece in zip(places, dim, strict=True):
        if piece.axis is not None:
            start[piece.axis] = start[piece.axis] + place * piece.step
    return found


#: A digit of a mixed-radix index: the atom of the base that it steps along, and the value of one
#: step.
Digit = tuple[Atom, int]


def split_index(index: int, digits: Sequence[Digit]) -> list[int]:
    """Splits an index into its digits, the outermost first."""
    found = []
    for _, weight in digits:
        place, index = divmod(index, weight)
        found.append(place)
    return found


def split_atom(atom: Atom, digits: Sequence[Digit], reach: list[int]) -> list[Atom] | None:
    """Splits an atom that steps along an index into one atom for each digit of the index, the
    outermost first. Adds to `reach` the distance that is covered along each digit. Returns None if
    the steps of the atom cannot be split into steps of the digits."""
    step, left = atom.step, atom.length
    found: list[Atom] = []
    for at in range(len(digits) - 1, -1, -1):
        piece, weight = digits[at]
        if left == 1 or step >= weight * piece.length:
            continue
        stride, odd = divmod(step, weight)
        if odd or stride == 0:
            return None
        length = left
        if stride * (left - 1) >= piece.length:
            length, rest = divmod(piece.length, stride)
            follows = at > 0 and digits[at - 1][1] == weight * piece.length
            if rest or left % length or not follows:
                return None
        inner = 0 if piece.axis is None else piece.step * stride
        found.append(Atom(piece.axis, inner, length))
        reach[at] += stride * (length - 1)
        step, left = step * length, left // length
    return None if left != 1 else found[::-1]


def _through(
    atom: Atom, outer: Effect, axes: list[Dim], start: list[Size], shifted: set[int]
) -> Dim:
    """Returns one atom of the outer effect as atoms on the axes of the inner effect's base."""
    axis = atom.axis
    assert axis is not None
    dim = axes[axis]
    if len(dim) == 1 and dim[0].axis is not None:
        first = outer.start[axis] if axis not in shifted else 0
        start[dim[0].axis] = start[dim[0].axis] + first * dim[0].step
        shifted.add(axis)
        return (Atom(dim[0].axis, dim[0].step * atom.step, atom.length),)
    if atom.step == 1 and axis not in shifted:
        offsets, rest = _narrow_atoms(dim, outer.start[axis], atom.length, 1)
        for base_axis, offset in offsets:
            start[base_axis] = start[base_axis] + offset
        shifted.add(axis)
        return rest
    return _split_block(atom, dim, outer.start[axis])


def _split_block(atom: Atom, dim: Dim, first: Size) -> Dim:
    """Returns an atom that steps over whole inner blocks of a merged dimension, or stays inside one
    block."""
    if first != 0:
        raise InexpressibleError("a slice with a step cuts a merged dimension")
    inner: Size = 1
    for position in range(len(dim) - 1, -1, -1):
        piece = dim[position]
        scale = divides(inner, atom.step)
        if scale is not None and (
            atom.length * scale == piece.length or divides(atom.length * scale, piece.length)
        ):
            return (Atom(piece.axis, piece.step * scale, atom.length),)
        inner = inner * piece.length
    raise InexpressibleError("a slice with a step cuts a merged dimension")
