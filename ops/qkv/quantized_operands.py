"""From quantised arguments to the static data of their kernels, and the tensors those take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.codegen.formats import Quantization
from tilewright.ops.formats import code_operands
from tilewright.ops.formats.code_operands import (
    Blocks,
    blocks_operand,
    code_words,
    quantization_of,
)
from tilewright.ops.formats.weight_rows import WeightRows
from tilewright.ops.qkv.checks import ACTIVATION_BLOCK

LETTERS = "qkv"


def quantized_values(a: Any) -> dict[str, Any]:
    """The tensors that `qkv_quantized` takes beside those of `head_values`, by parameter name."""
    stored = [getattr(a, f"{letter}_weight") for letter in LETTERS]
    words = code_words(stored, a.weight_format, a.nibble_order)
    return {
        "x_ptr": a.x,
        "x_scale_ptr": a.x_scale,
        **{f"{x}_weight_ptr": word for x, word in zip(LETTERS, words, strict=True)},
        **{f"{x}_{w}_ptr": getattr(a, f"{x}_{w}") for w in ("scale", "zero") for x in LETTERS},
    }


def quantization(a: Any, values: dict[str, Any]) -> Quantization:
    """The static data of quantised arguments, whose `quantized_values` are given; what q, k and v
    do not share is in `differs`."""
    words = values["q_weight_ptr"].dtype
    per_token = a.x_scale is not None and a.x_scale.shape[1] == 1
    return replace(
        quantization_of(a, a.q_weight.dtype, words, _blocks(a)),
        x_scale=blocks_operand(a.x_scale),
        x_block=a.x.shape[1] if per_token else ACTIVATION_BLOCK if a.x_scale is not None else 0,
    )


def differences(a: Any) -> str:
    """What the scales and zeros of q, k and v do not share; empty where they are of one kind."""
    return code_operands.differences((one for one in _blocks(a) if one), a.scale_block)


def _blocks(a: Any) -> list[Blocks | None]:
    return [
        None
        if getattr(a, f"{x}_weight") is None
        else Blocks(getattr(a, f"{x}_scale"), getattr(a, f"{x}_zero"), _rows(a, x))
        for x in LETTERS
    ]


def _rows(a: Any, letter: str) -> int:
    """Rows of one projection."""
    return int(getattr(a, f"{letter}_weight").shape[:-2].numel() * head_dim(a))


def head_dim(a: Any) -> int:
    """Rows of a head, whatever they are packed in."""
    per = 2 * a.q_weight.dtype.itemsize if a.weight_format == "int4_n" else 1
    return int(a.q_weight.shape[-2] * per)


def dequantized_rows(a: Any) -> WeightRows:
    """How q, k and v lie in the tensor that `dequantized_weights` makes: one after the other."""
    dim = head_dim(a)
    heads = [w.shape[:-2] for w in (a.q_weight, a.k_weight, a.v_weight) if w is not None]
    firsts = [0]
    for shape in heads:
        firsts.append(firsts[-1] + shape.numel() * dim)
    steps = tuple((shape[1] * dim, dim) if len(shape) == 2 else (dim,) for shape in heads)
    return WeightRows(firsts[-1], tuple(firsts[:-1]), steps)
