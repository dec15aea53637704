"""From quantised arguments to the static data of their kernels, and the tensors those take.

The stored words are seen as they lie: bytes of two nibbles that fill whole 32-bit words are read as
such, which is a view.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.codegen.formats import Quantization
from tilewright.codegen.operand import Operand
from tilewright.ops.formats.quantized_weight import zeros_are_packed
from tilewright.ops.formats.weight_rows import WeightRows
from tilewright.ops.qkv.checks import ACTIVATION_BLOCK
from tilewright.ops.runtime.operands import operand

LETTERS = "qkv"


def quantized_values(a: Any) -> dict[str, Any]:
    """The tensors that `qkv_quantized` takes beside those of `head_values`, by parameter name."""
    words = [getattr(a, f"{letter}_weight") for letter in LETTERS]
    bytes_of_two = a.weight_format == "int4_k" and a.q_weight.dtype == torch.uint8
    in_order = tuple(a.nibble_order) in ((), (0, 1))
    if bytes_of_two and in_order and all(w is None or _is_words(w) for w in words):
        words = [None if w is None else w.view(torch.int32) for w in words]
    return {
        "x_ptr": a.x,
        "x_scale_ptr": a.x_scale,
        **{f"{x}_weight_ptr": word for x, word in zip(LETTERS, words, strict=True)},
        **{f"{x}_{w}_ptr": getattr(a, f"{x}_{w}") for w in ("scale", "zero") for x in LETTERS},
    }


def _is_words(weight: torch.Tensor) -> bool:
    """Whether bytes can be seen as 32-bit words along the last dim."""
    *outer, last = weight.stride()
    sizes = (*outer, weight.shape[-1], weight.storage_offset(), weight.data_ptr())
    return last == 1 and all(size % 4 == 0 for size in sizes)


def quantization(a: Any, values: dict[str, Any]) -> Quantization:
    """The static data of quantised arguments, whose `quantized_values` are given; what q, k and v
    do not share is in `differs`."""
    words = values["q_weight_ptr"].dtype
    per_token = a.x_scale is not None and a.x_scale.shape[1] == 1
    return Quantization(
        weight_format=a.weight_format,
        block=(int(a.scale_block[0]), int(a.scale_block[1])),
        scales=tuple(_blocks(values[f"{x}_scale_ptr"]) for x in LETTERS),  # type: ignore[arg-type]
        zeros=tuple(_blocks(values[f"{x}_zero_ptr"]) for x in LETTERS),
        per_word=2 * words.itemsize if a.weight_format.startswith("int4") else 1,
        packed_zeros=a.q_zero is not None and _packed_zeros(a, 0),
        zero_point=a.zero_point,
        # Bytes seen as words count their nibbles up.
        order=tuple(a.nibble_order) if words == a.q_weight.dtype else (),
        x_scale=_blocks(a.x_scale),
        x_block=a.x.shape[1] if per_token else ACTIVATION_BLOCK if a.x_scale is not None else 0,
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


def _blocks(blocks: torch.Tensor | None) -> Operand | None:
    """Scales or zeros; stride 0 along an axis of one, which kernels may then read for any block."""
    if blocks is None:
        return None
    sizes = zip(blocks.shape, blocks.stride(), strict=True)
    return operand(blocks, *(0 if size == 1 else step for size, step in sizes))


def dequantized_rows(a: Any) -> WeightRows:
    """How q, k and v lie in the tensor that `dequantized_weights` makes: one after the other."""
    dim = head_dim(a)
    heads = [w.shape[:-2] for w in (a.q_weight, a.k_weight, a.v_weight) if w is not None]
    firsts = [0]
    for shape in heads:
        firsts.append(firsts[-1] + shape.numel() * dim)
    steps = tuple((shape[1] * dim, dim) if len(shape) == 2 else (dim,) for shape in heads)
    return WeightRows(firsts[-1], tuple(firsts[:-1]), steps)
