"""Simplifies concatenations that have empty pieces, a single piece, or all pieces of one split
tensor."""

from __future__ import annotations

import torch

from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import InexpressibleError, Size


def piece_of_rank(piece: View | None, dim: int, shape: tuple[Size, ...]) -> View | None:
    """Returns a piece of a concatenation, reshaped to the rank of the concatenation.

    The concatenation has the shape `shape` and runs along `dim`. torch.cat skips tensors of shape
    [0], whatever the rank of the other tensors is; such a piece becomes an empty tensor along
    `dim`.
    """
    if piece is None or piece.shape != (0,) or len(shape) == 1:
        return piece
    nothing = tuple(0 if axis == dim else size for axis, size in enumerate(shape))
    return piece.reshape(*(0 if axis == dim else 1 for axis in range(len(shape)))).expand(*nothing)


def without_rests(pieces: tuple[View | None, ...], dim: int) -> tuple[View | None, ...]:
    """Returns the pieces of a concatenation, without the pieces that are empty slices of nonempty
    tensors. For example, the unrotated part of a head that is rotated as a whole is such a slice.
    If all pieces are such slices, returns all pieces."""
    kept = [p for p in pieces if p is None or p.shape[dim] != 0 or 0 in p.value.shape]
    kept_dtypes = {p.value.dtype for p in kept if p is not None}
    # Empty pieces take part in type promotion, too.
    plain = all(p is None or p.value.dtype in kept_dtypes for p in pieces)
    return tuple(kept) if kept and plain else pieces


def copied_whole(pieces: tuple[View | None, ...], result: torch.Tensor) -> View | None:
    """Returns the piece of a concatenation that has a single piece. Returns None for other
    concatenations, and if the result has another dtype or device than the piece."""
    (piece, *others) = pieces or (None,)
    if others or piece is None or piece.value.dtype != result.dtype:
        return None
    return piece if piece.value.device == result.device else None


def split_before(pieces: tuple[View | None, ...], dim: int, shape: tuple[Size, ...]) -> View | None:
    """Returns the tensor that was split, if a concatenation joins all parts of a split in their
    order. Returns None for any other concatenation.

    `shape` is the shape of the concatenation.
    """
    try:
        whole = pieces[0].value.whole.reshape(*shape) if pieces and pieces[0] else None
        start: Size = 0
        for piece in pieces:
            if whole is None or piece is None:
                return None
            length = piece.shape[dim]
            if piece != View(whole.value, effects.narrow(whole.effect, dim, start, length)):
                return None
            start = start + length
    except (InexpressibleError, IndexError):
        return None
    return whole
