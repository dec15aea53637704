"""Static data and operands of kernels that read quantised weights.

Kernels read the stored words in place. If nibbles are stored in bytes, and the bytes of a row fill
whole 32-bit words, the bytes are viewed as 32-bit words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.codegen.formats import TABLES, Quantization, high_first, scales_are_exact
from tilewright.codegen.operand import Operand
from tilewright.ops.formats.weight import Weight
from tilewright.ops.runtime.dtypes import TRITON_TYPES
from tilewright.ops.runtime.operands import operand

# Kernels read bytes as 32-bit words if at least this many columns share a scale. If fewer columns
# share a scale, kernels do so only if they can multiply by the scales in registers.
_WORD_COLUMNS = 32


def code_words(weights: Sequence[Weight | None]) -> list[torch.Tensor | None]:
    """Returns the data of an op's quantised weights, in the dtype that its kernels read."""
    given = [None if weight is None else weight.data for weight in weights]
    pairs = [weight is None or _packs_columns(weight) for weight in weights]
    if (
        scales_fill_words(weights)
        and all(pairs)
        and all(data is None or _is_of_words(data) for data in given)
    ):
        return [None if data is None else data.view(torch.int32) for data in given]
    return given


def dot_words(data: torch.Tensor | None, per: int) -> torch.Tensor | None:
    """Returns `data`, a result of `code_words`, in the dtype that kernels without tensor cores
    read. per: the number of codes that these kernels read as one word. If it is four, the codes are
    bytes, and are viewed as 32-bit words."""
    return data.view(torch.int32) if data is not None and per == 4 else data


def scales_fill_words(weights: Sequence[Weight | None]) -> bool:
    """Whether the scales allow kernels to read bytes as 32-bit words: each scale covers at least
    _WORD_COLUMNS columns, or the numbers can be multiplied by the scales in registers."""
    return all(weight is None or _scale_fills_words(weight) for weight in weights)


def _scale_fills_words(weight: Weight) -> bool:
    columns, form, scale = weight.scale_block[1], weight.format, weight.scale
    if columns >= _WORD_COLUMNS:
        return True
    if form is None or scale is None:
        return False
    return scales_are_exact(form, TRITON_TYPES[scale.dtype], columns)


def _packs_columns(weight: Weight) -> bool:
    """Whether the nibbles of a byte belong to adjacent columns, in an order that kernels also
    support for 32-bit words."""
    form = weight.format
    if form is None or form.packed_axis != -1:
        return False
    return not weight.nibble_order or form.number in TABLES or tuple(weight.nibble_order) == (0, 1)


def _is_of_words(data: torch.Tensor) -> bool:
    return data.dtype == torch.uint8 and fills_words(data)


def fills_words(data: torch.Tensor) -> bool:
    """Whether the elements can be viewed as 32-bit words along the last dimension."""
    *outer, last = data.stride()
    sizes = (*outer, data.shape[-1], data.storage_offset())
    whole = all(size * data.element_size() % 4 == 0 for size in sizes)
    return last == 1 and whole and data.data_ptr() % 4 == 0


def quantization_of(weights: Sequence[Weight | None], words: torch.dtype) -> Quantization:
    """Returns the static data of an op's quantised weights. The first weight must be given. words:
    the dtype that kernels read. If the weights differ in a property, `differs` describes it."""
    first, form = weights[0], weights[0].format if weights[0] else None
    assert first is not None
    assert form is not None
    packed = [weight is not None and weight.has_packed_zeros for weight in weights]
    rows, columns = first.scale_block
    return Quantization(
        weight_format=first.weight_format,
        block=(int(rows), int(columns)),
        scales=tuple([blocks_operand(weight.scale if weight else None) for weight in weights]),
        zeros=tuple([blocks_operand(weight.zero if weight else None) for weight in weights]),
        per_word=words.itemsize * form.per_byte,
        packed_zeros=any(packed),
        zero_point=first.zero_point,
        order=_order(first, words),
        differs=_differences(weights, packed),
    )


def _order(weight: Weight, words: torch.dtype) -> tuple[int, ...]:
    """Returns the order of the nibbles in the words that kernels read. An empty order means
    ascending."""
    order = tuple(weight.nibble_order)
    if words == weight.data.dtype:
        return order
    return high_first(2 * words.itemsize) if order == (1, 0) else ()


def differences(weights: Sequence[Weight | None]) -> str:
    """Returns in which property of scales or zeros the weights differ; "" if they do not differ."""
    packed = [weight is not None and weight.has_packed_zeros for weight in weights]
    return _differences(weights, packed)


def _differences(weights: Sequence[Weight | None], packed: Sequence[bool]) -> str:
    """Implements `differences`. packed: whether the zeros of each weight are packed."""
    pairs = [(one, words) for one, words in zip(weights, packed, strict=True) if one is not None]
    kinds = {one.zero if one.zero is None else (one.zero.dtype, words) for one, words in pairs}
    if len(kinds) > 1:
        return "zeros of several kinds"
    several = len({one.scale.dtype for one, _ in pairs if one.scale is not None}) > 1
    return "scales of several dtypes" if several else ""


def blocks_operand(blocks: torch.Tensor | None) -> Operand | None:
    """Returns scales or zeros as an operand. An axis of length one has the stride 0, so that
    kernels may read it for any block."""
    if blocks is None:
        return None
    sizes = zip(blocks.shape, blocks.stride(), strict=True)
    return operand(blocks, *(0 if size == 1 else step for size, step in sizes))
