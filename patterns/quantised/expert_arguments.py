"""Converts quantised expert weights to arguments of an op: codes, one scale for each block, and
factors for each expert.

Dimension letters: E experts, N rows, K columns, M rows of activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.patterns.dataflow import Computed, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.quantised.blocks import Block, block_of, common_block, cut_to_blocks
from tilewright.patterns.quantised.factors import MAGNITUDE, Steps, product_of
from tilewright.patterns.quantised.signs import never_negative


@dataclass(frozen=True)
class DequantizedExperts:
    """A weight that is the product of codes, scales and factors of the experts, in a format of
    `ops/formats/expert_weight.py`.

    Attributes:
        data: The codes as the model stores them, [E, N, K / codes per byte]. For activations the
            shape is [M, K / 2].
        format: The name of the format.
        shape: (E, N, K).
        scale: The scale, [E, N, K], with one number for each element, so that numbers repeat. None
            if there are only factors.
        steps: The steps that are applied to the scale after it is cut to blocks.
        unsigned: Whether the sign of the scale is removed after these steps.
        factors: Views [E] of float32 numbers that multiply the weights of each expert. For
            activations they are views [M], with one number for each row.
        divisors: Views of the same shape, whose numbers divide the weights of each expert.
        number: One more factor, which is the same for all elements.
    """

    data: View | Computed
    format: str
    shape: tuple[Any, ...]
    scale: View | None
    steps: Steps = ()
    unsigned: bool = False
    factors: tuple[View, ...] = ()
    divisors: tuple[View, ...] = ()
    number: float = 1.0

    @property
    def device(self) -> torch.device:
        codes = self.data if isinstance(self.data, View) else self.data.operands[0]
        device: torch.device = codes.value.device
        return device

    @property
    def has_natural_scale(self) -> bool:
        """Whether the graph shows that the scales of all blocks are zero or positive."""
        return self.unsigned or (self.scale is not None and never_negative(self.scale))

    def expert_scale(self) -> Computed | None:
        """Returns the product of all factors of each expert (or row), float32 and contiguous.
        Returns None if there are no factors."""
        parts = (self.factors, self.divisors, self.number)
        if parts == ((), (), 1) and self.scale is not None:
            return None
        return Computed("contiguous", (product_of(*parts, [self.shape[0]], self.device),))


# --- what the op takes ----------------------------------------------------------------------------


def blocks_of(weight: DequantizedExperts) -> Block:
    """Returns the numbers of (rows, columns) that share a scale. None means all rows, or all
    columns. Raises InexpressibleError if the format does not allow these numbers."""
    if weight.scale is None:
        return None, None
    own = block_of(weight.scale.effect.dims[1:])
    fixed = WEIGHT_FORMATS[weight.format].expert_block
    if fixed is None and own == (1, 1):
        raise InexpressibleError("every element has its own scale")
    if fixed is None:
        return own
    for size, block, wanted in zip(weight.shape[1:], own, fixed, strict=True):
        if (size if block is None else block) % wanted:
            raise InexpressibleError(
                f"{weight.format} has one scale for each block of {list(fixed)}, not of {list(own)}"
            )
    return fixed


#: The names of the arguments for one weight: its codes, its scale, and its factor for each expert.
Names = tuple[str, str, str]


def expert_arguments(weights: Mapping[Names, DequantizedExperts]) -> dict[str, Any]:
    """Returns the arguments for an op that reads these weights together: the codes, the scales [E,
    N/bn, K/bk], and factors [E] for the weights that have factors.

    Raises Reject (WEIGHT_FORMAT) if the formats differ. Raises Reject (SCALE_BLOCK) if the blocks
    have no common size.
    """
    first = next(iter(weights.values()))
    anchor = first.data if isinstance(first.data, View) else first.data.operands[0]
    if len({w.format for w in weights.values()}) != 1:
        formats = ", ".join(f"{codes} {w.format}" for (codes, *_), w in weights.items())
        message = f"the experts' weights differ in format: {formats}"
        reject("WEIGHT_FORMAT", Stage.GUARDS, message, anchor)
    try:
        block = _common_block(list(weights.values()))
        scales = [cut_scale(weight, block) for weight in weights.values()]
    except InexpressibleError as error:
        reject("SCALE_BLOCK", Stage.GUARDS, str(error), anchor)
    arguments: dict[str, Any] = {"weight_format": first.format}
    if WEIGHT_FORMATS[first.format].expert_block is None:
        arguments["scale_block"] = list(block)
    for ((codes, scale, factor), weight), grid in zip(weights.items(), scales, strict=True):
        arguments |= {codes: weight.data, scale: grid}
        if (product := weight.expert_scale()) is not None:
            arguments[factor] = product
    return arguments


def _common_block(weights: Sequence[DequantizedExperts]) -> tuple[int, int]:
    """Returns the largest block into which the blocks of all weights can be divided. A weight
    without blocks can be divided into blocks of any size."""
    rows, columns = common_block([blocks_of(w) for w in weights])
    widest = [max(w.shape[axis] for w in weights) for axis in (1, 2)]
    return rows or widest[0], columns or widest[1]


def cut_scale(weight: DequantizedExperts, block: Sequence[int]) -> Any:
    """Returns the scale with one number for each block, [E, N/bn, K/bk], or [M, K/bk] for
    activations."""
    if weight.scale is None:
        counts = [-(-n // b) for n, b in zip(weight.shape[1:], block, strict=True)]
        options = (("dtype", torch.float32), ("device", weight.device))
        return Computed("full", ([weight.shape[0], *counts], 1.0), options)
    lead, *inner = weight.scale.effect.dims
    dims = (lead, *cut_to_blocks(inner, weight.shape[1:], block))
    item: Any = weight.scale.with_dims(*dims)
    for function, given in (*weight.steps, *(MAGNITUDE if weight.unsigned else ())):
        item = Computed(function, (item, given))
    return item
