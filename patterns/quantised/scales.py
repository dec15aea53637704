"""Scales and zero points of quantised weights, one number per block, as the op takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import Atom, Dim, Effect, InexpressibleError
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.quantised.weights import DequantizedWeight, packed, refuse

_Block = tuple[int | None, int | None]


@dataclass(frozen=True)
class _Blocks:
    """One number per block: numbers [N / bn, K / bk]; a block of None is all of its dimension."""

    numbers: View
    block: _Block
    shape: tuple[int, int]


def weight_arguments(weights: Sequence[DequantizedWeight]) -> dict[str, Any]:
    """The op's arguments for the three weights, q first.

    Raises Reject. WEIGHT_FORMAT: they differ, or nothing scales them. SCALE_BLOCK: their scales do
    not go by blocks.
    """
    first = weights[0]
    for weight in weights:
        same = (weight.format, weight.zero_point, weight.nibble_order, weight.zero is None)
        if same != (first.format, first.zero_point, first.nibble_order, first.zero is None):
            refuse(weight.codes, "the projections are quantised differently")
        if weight.scale is None:
            refuse(weight.codes, "nothing scales them")
    try:
        blocks = [_blocks(w.scale) for w in weights if w.scale is not None]
        blocks += [_blocks(w.zero) for w in weights if w.zero is not None]
        block = _common([b.block for b in blocks])
        grids = [_cut(b, block) for b in blocks]
    except InexpressibleError as error:
        reject("SCALE_BLOCK", Stage.GUARDS, f"{first.codes.value}: {error}", first.codes)
    if block == (1, 1):
        reject("SCALE_BLOCK", Stage.GUARDS, "every element has a scale of its own", first.codes)
    sizes = [max(b.shape[axis] for b in blocks) for axis in (0, 1)]
    arguments: dict[str, Any] = {
        "weight_format": first.format,
        "scale_block": [size if b is None else b for size, b in zip(sizes, block, strict=True)],
        "nibble_order": _order(first),
        "zero_point": first.zero_point,
    }
    for letter, weight, grid in zip("qkv", weights, grids, strict=False):
        arguments |= {f"{letter}_weight": weight.codes, f"{letter}_scale": grid}
    return arguments | _zeros(grids[len(weights) :], first)


def _order(weight: DequantizedWeight) -> list[int]:
    """Nothing where nibbles count up."""
    order = weight.nibble_order
    return [] if order == tuple(range(len(order))) else list(order)


def _blocks(view: View) -> _Blocks:
    """A view [N, K] without what repeats innermost."""
    dims, block = zip(*(unrepeated(dim) for dim in view.effect.dims), strict=True)
    numbers = View(view.value, Effect(tuple(dims), view.effect.start))
    return _Blocks(numbers, (block[0], block[1]), (view.shape[0], view.shape[1]))


def unrepeated(dim: Dim) -> tuple[Dim, int | None]:
    """A dimension without what repeats innermost, and how often that repeats; None: all of it.

    Raises InexpressibleError where it repeats in another way.
    """
    if all(a.axis is None for a in dim):
        return (), None
    repeats = dim[-1].length if dim[-1].axis is None else 1
    kept = dim[:-1] if dim[-1].axis is None else dim
    if any(a.axis is None for a in kept):
        raise InexpressibleError("its scales repeat other than over neighbours")
    return kept, int(repeats)


def _common(blocks: Sequence[_Block]) -> _Block:
    """The largest block that all of these are made of, per dimension."""
    found: list[int | None] = []
    for axis in (0, 1):
        known = sorted({size for b in blocks if (size := b[axis]) is not None})
        if any(size % known[0] for size in known):
            raise InexpressibleError(f"scales of blocks of {known} do not go together")
        found.append(known[0] if known else None)
    return found[0], found[1]


def _cut(blocks: _Blocks, block: _Block) -> View:
    """Numbers per block, repeated for the smaller blocks that they are made of."""
    dims = []
    effect = blocks.numbers.effect
    for dim, own, wanted, size in zip(effect.dims, blocks.block, block, blocks.shape, strict=True):
        if wanted is not None and own != wanted:
            repeats = -(-size // wanted) if own is None else own // wanted
            dim = (*dim, Atom(None, 0, repeats)) if repeats > 1 else dim
        dims.append(dim)
    return View(blocks.numbers.value, Effect(tuple(dims), effect.start))


def _zeros(grids: Sequence[View], weight: DequantizedWeight) -> dict[str, Any]:
    """Zero points as words of eight rows where they are packed as the weight is, else as numbers
    that the graph unpacks."""
    words, points = [], set()
    for grid in grids:
        found = packed(grid, 0, 8, torch.int32)
        order = None if found is None else list(found[1])
        if found is None or order not in (_order(weight) or list(range(8)),):
            return {f"{k}_zero": grid for k, grid in zip("qkv", grids, strict=False)}
        if any(e.scale is not None or e.zero is not None for e in found[2]):
            return {f"{k}_zero": grid for k, grid in zip("qkv", grids, strict=False)}
        words.append(found[0])
        points |= {e.zero_point for e in found[2]}
    named = {f"{k}_zero": view for k, view in zip("qkv", words, strict=False)}
    if len(points) > 1:
        return {f"{k}_zero": grid for k, grid in zip("qkv", grids, strict=False)}
    # A stored zero that counts from one: (code - (zero + 1)).
    return named | ({"zero_point": weight.zero_point - points.pop()} if points else {})
