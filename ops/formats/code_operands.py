"""From weights of codes to the static data of kernels that read them, and the words those take.

The stored words are seen as they lie: bytes of two nibbles that fill whole 32-bit words are read as
such, which is a view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand
from tilewright.ops.formats.quantized_weight import zeros_are_packed
from tilewright.ops.runtime.operands import operand


@dataclass(frozen=True)
class Blocks:
    """The scales and zeros of one weight of so many rows."""

    scale: torch.Tensor
    zero: torch.Tensor | None
    rows: int

    def has_packed_zeros(self, block: Sequence[int]) -> bool:
        """Whether a word holds the zeros of eight rows."""
        zero = self.zero
        if zero is None or zero.shape == self.scale.shape:
            return False
        return zeros_are_packed(zero, self.rows, block)


def code_words(
    weights: Sequence[torch.Tensor | None], weight_format: str, order: Sequence[int]
) -> list[torch.Tensor | None]:
    """An op's weights as its kernels read them."""
    bytes_of_two = weight_format == "int4_k" and tuple(order) in ((), (0, 1))
    if bytes_of_two and all(w is None or _fills_words(w) for w in weights):
        return [None if w is None else w.view(torch.int32) for w in weights]
    return list(weights)


def _fills_words(weight: torch.Tensor) -> bool:
    """Whether bytes can be seen as 32-bit words along the last dim."""
    *outer, last = weight.stride()
    sizes = (*outer, weight.shape[-1], weight.storage_offset(), weight.data_ptr())
    return weight.dtype == torch.uint8 and last == 1 and all(size % 4 == 0 for size in sizes)


def quantization_of(
    a: Any, stored: torch.dtype, words: torch.dtype, weights: Sequence[Blocks | None]
) -> Quantization:
    """The static data of weights of codes. `a`: the options of their format. stored, words: their
    dtypes as given and as kernels read them. What the weights do not share is in `differs`."""
    there = [one for one in weights if one is not None]
    return Quantization(
        weight_format=a.weight_format,
        block=(int(a.scale_block[0]), int(a.scale_block[1])),
        scales=tuple(blocks_operand(one.scale if one else None) for one in weights),
        zeros=tuple(blocks_operand(one.zero if one else None) for one in weights),
        per_word=2 * words.itemsize if a.weight_format.startswith("int4") else 1,
        packed_zeros=any(one.has_packed_zeros(a.scale_block) for one in there),
        zero_point=a.zero_point,
        # Bytes seen as words count their nibbles up.
        order=tuple(a.nibble_order) if words == stored else (),
        differs=differences(there, a.scale_block),
    )


def differences(weights: Iterable[Blocks], block: Sequence[int]) -> str:
    """What the scales and zeros of weights do not share; empty where they are of one kind."""
    weights = list(weights)
    kinds = {
        None if one.zero is None else (one.zero.dtype, one.has_packed_zeros(block))
        for one in weights
    }
    if len(kinds) > 1:
        return "zeros of several kinds"
    several = len({one.scale.dtype for one in weights}) > 1
    return "scales of several dtypes" if several else ""


def blocks_operand(blocks: torch.Tensor | None) -> Operand | None:
    """Scales or zeros; stride 0 along an axis of one, which kernels may then read for any block."""
    if blocks is None:
        return None
    sizes = zip(blocks.shape, blocks.stride(), strict=True)
    return operand(blocks, *(0 if size == 1 else step for size, step in sizes))
