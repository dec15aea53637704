"""Converts the scales and zero points of quantised weights to the form that the op expects, one
number for each block."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.patterns.dataflow import Computed, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.quantised.blocks import (
    Block,
    block_of,
    common_block,
    cut_to_blocks,
    with_whole_blocks,
)
from tilewright.patterns.quantised.factors import fp32, product_of, repeats, stored_exponents
from tilewright.patterns.quantised.positions import joined
from tilewright.patterns.quantised.weights import DequantizedWeight, packed, refuse

#: The names of the arguments for a weight's codes, scale, zero and factor. If several weights have
#: the same name for the factor, this argument has the factors of all these weights, one after the
#: other.
Names = tuple[str, str, str, str]
QKV_NAMES: tuple[Names, ...] = tuple(
    (f"{x}_weight", f"{x}_scale", f"{x}_zero", "factors") for x in "qkv"
)


def weight_arguments(
    weights: Sequence[DequantizedWeight], names: Sequence[Names] = QKV_NAMES
) -> dict[str, Any]:
    """Returns an op's arguments for its weights, which must all be quantised in the same way.

    names: the names of the arguments for each weight. The default is the names for q, k and v.
    Raises Reject (WEIGHT_FORMAT) if the weights are quantised differently or have no scale. Raises
    Reject (SCALE_BLOCK) if their scales are not one number for each block.
    """
    first = weights[0]
    for weight in weights:
        same = (weight.format, weight.zero_point, weight.nibble_order, weight.zero is None)
        if same != (first.format, first.zero_point, first.nibble_order, first.zero is None):
            refuse(weight.codes, "the projections are quantised differently")
        if weight.scale is None:
            refuse(weight.codes, "no scale multiplies the codes")
    try:
        weights = _with_exponents([_with_whole_blocks(weight) for weight in weights])
        given = [view for view in (*(w.scale for w in weights), *(w.zero for w in weights)) if view]
        parts = [view for w in weights for view in (*w.factors, *w.divisors)]
        block = common_block([block_of(view.effect.dims) for view in (*given, *parts)])
        grids = [_cut(view, block) for view in given]
        apart = all(_has_one_factor(w) for w in weights)
        scales = [_scale(w, block, apart) for w in weights]
    except InexpressibleError as error:
        reject("SCALE_BLOCK", Stage.GUARDS, f"{first.codes.value}: {error}", first.codes)
    if block == (1, 1):
        why = (
            "the graph does not show which adjacent codes share a scale (it cannot show this if "
            "the size of a block does not divide K)"
        )
        reject("SCALE_BLOCK", Stage.GUARDS, why, first.codes)
    sizes = [max(view.shape[axis] for view in given) for axis in (0, 1)]
    arguments: dict[str, Any] = {
        "weight_format": first.format,
        "scale_block": [size if b is None else b for size, b in zip(sizes, block, strict=True)],
        "nibble_order": _order(first),
        "zero_point": first.zero_point,
    }
    for (codes, scale, *_), weight, grid in zip(names, weights, scales, strict=False):
        arguments |= {codes: weight.codes, scale: grid}
    if apart:
        arguments |= _factors(weights, [factor for *_, factor in names])
    zeros = dict(zip((zero for _, _, zero, _ in names), grids[len(weights) :], strict=False))
    return arguments | _zeros(zeros, first)


def _with_whole_blocks(weight: DequantizedWeight) -> DequantizedWeight:
    """Returns the weight with whole blocks of scales. If the graph cuts off the scales that the
    last block does not use, and the weight has neither zeros nor factors, these scales are added
    again."""
    if weight.scale is None or weight.zero is not None or weight.has_factors:
        return weight
    scale = with_whole_blocks(weight.scale)
    try:
        block_of(scale.effect.dims)
    except InexpressibleError:
        return weight
    return replace(weight, scale=scale)


def _with_exponents(weights: Sequence[DequantizedWeight]) -> Sequence[DequantizedWeight]:
    """Returns the weights with stored exponents in place of the scales that the graph computes from
    them. Returns the weights unchanged if not all of them have such scales, or if the op takes no
    exponents."""
    found = []
    for weight in weights:
        takes = "u8" in WEIGHT_FORMATS[weight.format].scales and not weight.has_factors
        stored = stored_exponents(weight.scale) if takes and weight.scale is not None else None
        if stored is None:
            return weights
        found.append(replace(weight, scale=stored.view, steps=stored.steps))
    return found


def _order(weight: DequantizedWeight) -> list[int]:
    """Returns the order of the nibbles, or an empty list if they are in ascending order."""
    order = weight.nibble_order
    return [] if order == tuple(range(len(order))) else list(order)


def _cut(view: View, block: Block) -> View:
    """Reduces a view [N, K] to one number for each block."""
    dims = tuple(cut_to_blocks(view.effect.dims, view.shape, block))
    return view.with_dims(*dims)


def _has_one_factor(weight: DequantizedWeight) -> bool:
    """Whether a weight has factors besides the scale, and each of them is one number for the whole
    weight."""
    device = weight.codes.value.device
    parts = (*weight.factors, *weight.divisors)
    whole = all(block_of(v.effect.dims) == (None, None) and v.value.device == device for v in parts)
    return weight.has_factors and whole


def _factors(weights: Sequence[DequantizedWeight], names: Sequence[str]) -> dict[str, Computed]:
    """Returns the factors of whole weights, float32 [weights], by the names of their arguments."""
    sharing: dict[str, list[DequantizedWeight]] = {}
    for weight, name in zip(weights, names, strict=False):
        sharing.setdefault(name, []).append(weight)
    return {name: _in_a_row(given) for name, given in sharing.items()}


def _in_a_row(weights: Sequence[DequantizedWeight]) -> Computed:
    """Returns the factors of weights in one tensor. If the model already stores the factors in one
    tensor in this order, returns that tensor."""
    if len(weights) > 1 and (stored := _stored_in_a_row(weights)) is not None:
        return fp32(stored)
    parts = [
        product_of(
            [_number(view) for view in weight.factors],
            [_number(view) for view in weight.divisors],
            weight.number,
            [1],
            weight.codes.value.device,
        )
        for weight in weights
    ]
    return parts[0] if len(parts) == 1 else Computed("cat", (tuple(parts), 0))


def _stored_in_a_row(weights: Sequence[DequantizedWeight]) -> View | None:
    """Returns the part of one tensor in which the model stores the factors of all weights, one
    after the other. Returns None if a weight has more than one factor, or if there is no such
    tensor."""
    if any(len(w.factors) != 1 or w.divisors or w.number != 1 for w in weights):
        return None
    views = [_number(weight.factors[0]) for weight in weights]
    try:
        found = joined(views, 0)
    except InexpressibleError:
        return None
    return None if found is None or repeats(found.effect) else found


def _number(view: View) -> View:
    """Returns, as a tensor [1], the single number that a view has for a whole weight."""
    return _cut(view, (None, None)).reshape(1)


def _scale(weight: DequantizedWeight, block: Block, apart: bool) -> View | Computed:
    """Returns the scale with one number for each block. If the weight has other factors, the scale
    is multiplied by them, unless they are a separate argument (`apart`)."""
    assert weight.scale is not None
    item: View | Computed = _cut(weight.scale, block)
    for function, given in weight.steps:
        item = Computed(function, (item, given))
    if apart or not weight.has_factors:
        return item
    item = fp32(item)
    if weight.number != 1:
        item = Computed("mul", (item, weight.number))
    for view in weight.factors:
        item = Computed("mul", (item, fp32(_cut(view, block))))
    for view in weight.divisors:
        item = Computed(operator.truediv, (item, fp32(_cut(view, block))))
    return item


def _zeros(unpacked: Mapping[str, View], weight: DequantizedWeight) -> dict[str, Any]:
    """Returns the zero points. If the model stores them packed like the weight, the result has
    words of eight rows. If not, it has the numbers that the graph unpacks."""
    if WEIGHT_FORMATS[weight.format].packed_axis is None:
        return dict(unpacked)
    words, points = {}, set()
    for name, grid in unpacked.items():
        found = packed(grid, 0, 8, torch.int32)
        if found is None or list(found[1]) != (_order(weight) or list(range(8))):
            return dict(unpacked)
        if any(e.scale is not None or e.zero is not None for e in found[2]):
            return dict(unpacked)
        words[name] = found[0]
        points |= {e.zero_point for e in found[2]}
    if len(points) != 1:
        return dict(unpacked)
    # GPTQ stores each zero point minus one, so a weight is computed from code - (zero + 1).
    return {**words, "zero_point": weight.zero_point - points.pop()}
