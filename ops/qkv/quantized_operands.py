"""From quantised arguments to the static data of their kernels, and the tensors those take.

The stored words are seen as they lie: bytes of two nibbles that fill whole 32-bit words are read as
such, which is a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.codegen.formats import Quantization, XScale
from tilewright.ops.formats.quantized_weight import zeros_are_packed
from tilewright.ops.qkv.checks import ACTIVATION_BLOCK
from tilewright.ops.runtime.dtypes import TRITON_TYPES

LETTERS = "qkv"


def stored_words(a: Any) -> tuple[list[torch.Tensor | None], tuple[int, ...]]:
    """The weights of q, k and v as the kernels read them, and the order of their nibbles."""
    weights = [getattr(a, f"{letter}_weight") for letter in LETTERS]
    order = tuple(a.nibble_order)
    bytes_of_two = a.weight_format == "int4_k" and a.q_weight.dtype == torch.uint8
    if bytes_of_two and order in ((), (0, 1)) and all(w is None or _is_words(w) for w in weights):
        return [None if w is None else w.view(torch.int32) for w in weights], ()
    return weights, order


def _is_words(weight: torch.Tensor) -> bool:
    """Whether bytes can be seen as 32-bit words along the last dim."""
    *outer, last = weight.stride()
    sizes = (*outer, weight.shape[-1], weight.storage_offset(), weight.data_ptr())
    return last == 1 and all(size % 4 == 0 for size in sizes)


def quantization(a: Any) -> Quantization:
    """The static data of quantised arguments; what q, k and v do not share is in `differs`."""
    words, order = stored_words(a)
    scales = [getattr(a, f"{letter}_scale") for letter in LETTERS]
    zeros = [getattr(a, f"{letter}_zero") for letter in LETTERS]
    first = words[0]
    assert first is not None
    return Quantization(
        weight_format=a.weight_format,
        word_dtype=TRITON_TYPES[first.dtype],
        block=(int(a.scale_block[0]), int(a.scale_block[1])),
        scale_dtype=TRITON_TYPES[scales[0].dtype],
        scale_strides=_strides(scales),
        zero_dtype=None if zeros[0] is None else TRITON_TYPES[zeros[0].dtype],
        zero_strides=_strides(zeros),
        packed_zeros=zeros[0] is not None and _packed_zeros(a, 0),
        zero_point=a.zero_point,
        order=order,
        x_dtype=TRITON_TYPES[a.x.dtype],
        x_scale=_x_scale(a),
        differs=differences(a),
    )


def differences(a: Any) -> str:
    """What the scales and zeros of q, k and v do not share; empty where they are of one kind."""
    there = [i for i, x in enumerate(LETTERS) if getattr(a, f"{x}_weight") is not None]
    scales = {getattr(a, f"{LETTERS[index]}_scale").dtype for index in there}
    zeros = [getattr(a, f"{LETTERS[index]}_zero") for index in there]
    kinds = {
        None if zero is None else (zero.dtype, _packed_zeros(a, index))
        for index, zero in zip(there, zeros, strict=True)
    }
    if len(kinds) > 1:
        return "zeros of several kinds"
    return "scales of several dtypes" if len(scales) > 1 else ""


def _packed_zeros(a: Any, index: int) -> bool:
    scale, zero = (getattr(a, f"{LETTERS[index]}_{what}") for what in ("scale", "zero"))
    rows = _rows(a, index)
    return (
        zero is not None
        and zero.shape != scale.shape
        and zeros_are_packed(zero, rows, a.scale_block)
    )


def _rows(a: Any, index: int) -> int:
    """Rows of one projection."""
    weight = getattr(a, f"{LETTERS[index]}_weight")
    heads = weight.shape[:-2].numel()
    return int(heads * head_dim(a))


def head_dim(a: Any) -> int:
    """Rows of a head, whatever they are packed in."""
    per = 2 * a.q_weight.dtype.itemsize if a.weight_format == "int4_n" else 1
    return int(a.q_weight.shape[-2] * per)


def _strides(tensors: Sequence[torch.Tensor | None]) -> tuple[tuple[int, int] | None, ...]:
    return tuple(None if t is None else _block_strides(t) for t in tensors)


def _block_strides(blocks: torch.Tensor) -> tuple[int, int]:
    """Strides (row, column); 0 along an axis of one, which kernels may then read for any block."""
    row, column = (
        0 if size == 1 else step for size, step in zip(blocks.shape, blocks.stride(), strict=True)
    )
    return row, column


def _x_scale(a: Any) -> XScale | None:
    if a.x_scale is None:
        return None
    block = a.x.shape[1] if a.x_scale.shape[1] == 1 else ACTIVATION_BLOCK
    return XScale(TRITON_TYPES[a.x_scale.dtype], _block_strides(a.x_scale), block)


def quantized_values(a: Any) -> dict[str, Any]:
    """The tensors that `qkv_quantized` takes beside those of `finish_values`, by parameter name."""
    words, _ = stored_words(a)
    values: dict[str, Any] = {"x_ptr": a.x, "x_scale_ptr": a.x_scale}
    for letter, word in zip(LETTERS, words, strict=True):
        values[f"{letter}_weight_ptr"] = word
        values[f"{letter}_scale_ptr"] = getattr(a, f"{letter}_scale")
        values[f"{letter}_zero_ptr"] = getattr(a, f"{letter}_zero")
    return values
