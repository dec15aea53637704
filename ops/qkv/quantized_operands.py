"""From quantised arguments to the static data of their kernels, and the tensors those take."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from tilewright.codegen.formats import Quantization
from tilewright.ops.formats.code_operands import blocks_operand, code_words, quantization_of
from tilewright.ops.formats.weight_rows import WeightRows
from tilewright.ops.qkv.arguments import ACTIVATION_BLOCK, FusedQkvArguments, Projections

LETTERS = "qkv"
_BLOCKS = ("scale", "zero")


def quantized_values(a: FusedQkvArguments, weights: Projections) -> dict[str, Any]:
    """The tensors that `qkv_quantized` takes beside those of `head_values`, by parameter name.
    weights: the projections of `a`, here and below."""
    words = zip(LETTERS, code_words(weights), strict=True)
    return {
        "x_ptr": a.x,
        "x_scale_ptr": a.x_scale,
        **{f"{x}_weight_ptr": word for x, word in words},
        **{f"{x}_{what}_ptr": getattr(a, f"{x}_{what}") for what in _BLOCKS for x in LETTERS},
    }


def quantization(
    a: FusedQkvArguments, weights: Projections, values: dict[str, Any]
) -> Quantization:
    """The static data of quantised arguments, whose `quantized_values` are given; what q, k and v
    do not share is in `differs`."""
    per_token = a.x_scale is not None and a.x_scale.shape[1] == 1
    return replace(
        quantization_of(weights, values["q_weight_ptr"].dtype),
        x_scale=blocks_operand(a.x_scale),
        x_block=a.x.shape[1] if per_token else ACTIVATION_BLOCK if a.x_scale is not None else 0,
    )


def dequantized_rows(weights: Projections) -> WeightRows:
    """How q, k and v lie in the tensor that `dequantized_weights` makes: one after the other."""
    shapes = [weight.shape[:-1] for weight in weights if weight is not None]
    firsts = [0]
    for shape in shapes:
        firsts.append(firsts[-1] + prod(shape))
    steps = tuple((*(group * dim for group in groups), dim) for _, *groups, dim in shapes)
    return WeightRows(firsts[-1], tuple(firsts[:-1]), steps)
