"""Checks of weights of codes with their scales and zeros. Metadata only; each raises ArgumentError.

Dimension letters: N rows, K columns. `a` is the arguments of an op: x [T, K], weight_format,
scale_block, zero_point, nibble_order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.ops.checks import (
    FLOAT_DTYPES,
    ArgumentError,
    check_absent,
    check_operand,
    check_scale_block,
    check_shape,
    holds,
    shape_text,
)
from tilewright.ops.formats.quantized_weight import (
    WEIGHT_FORMATS,
    logical_shape,
    nibbles_per_word,
    zeros_are_packed,
)

_ZERO_DTYPES = (*FLOAT_DTYPES, torch.uint8, torch.int8, torch.int32, torch.int64)


def check_format_options(op: str, a: Any, words: torch.dtype) -> None:
    """What goes with a format as a whole: block, zero point and nibble order. words: the dtype of
    the stored weights."""
    stored = WEIGHT_FORMATS.get(a.weight_format)
    block, order = list(a.scale_block), list(a.nibble_order)
    if stored is None:
        given = {"scale_block": block, "nibble_order": order, "zero_point": a.zero_point}
        for name, value in given.items():
            if value:
                raise ArgumentError(op, name, "nothing, since weights are dense", value)
        return
    check_scale_block(op, block)
    if a.weight_format == "fp8" and a.zero_point:
        raise ArgumentError(op, "zero_point", "0 for fp8 weights", a.zero_point)
    if not order:
        return
    per = 0 if stored.packed_axis is None else nibbles_per_word(words)
    if sorted(order) != list(range(per)):
        expected = f"an order of the {per} nibbles of a word" if per else "nothing, as no nibbles"
        raise ArgumentError(op, "nibble_order", expected, order)


def check_code_shape(op: str, a: Any, name: str, letters: str, sizes: Sequence[Any]) -> None:
    """The shape of a weight, the argument `name`, in elements: of a packed axis, what its words
    hold."""
    weight, weight_format = getattr(a, name), a.weight_format
    stored = WEIGHT_FORMATS.get(weight_format)
    if stored is None or stored.packed_axis is None or weight.dim() != len(sizes):
        check_shape(op, name, weight, letters, sizes)
        return
    shape = logical_shape(weight, weight_format)
    if not all(w is None or holds(n == w) for n, w in zip(shape, sizes, strict=True)):
        known = shape_text(["*" if size is None else size for size in sizes])
        expected = f"words that hold {letters} = {known} ({weight_format})"
        actual = f"shape {shape_text(weight.shape)}, which holds {shape_text(shape)}"
        raise ArgumentError(op, name, expected, actual)


def check_blocks(op: str, a: Any, names: tuple[str, str], rows: Any, columns: Any) -> None:
    """The scale and zero, arguments of these names, of a weight of so many rows and columns."""
    scale, zero = (getattr(a, name) for name in names)
    stored = WEIGHT_FORMATS.get(a.weight_format)
    if stored is None:
        check_absent(op, a, names, "weights are dense")
        return
    if scale is None:
        raise ArgumentError(op, names[0], f"a tensor, since weights are {a.weight_format}", None)
    block = a.scale_block
    if stored.packed_axis is not None and not holds(columns % block[1] == 0):
        expected = f"a group that divides K = {columns}"
        raise ArgumentError(op, "scale_block", expected, list(block))
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    letters = f"[ceil(N / {block[0]}), ceil(K / {block[1]})]"
    check_operand(op, names[0], scale, letters, grid, FLOAT_DTYPES, a.x.device)
    if zero is None:
        return
    if a.weight_format == "fp8":
        raise ArgumentError(op, names[1], "None for fp8 weights", "a tensor")
    words = stored.packed_axis is not None and zero.dim() == 2
    if words and zeros_are_packed(zero, rows, block):
        if len(a.nibble_order) not in (0, 8):
            expected = "an order of 8 nibbles, as the zeros are packed in words of 8"
            raise ArgumentError(op, "nibble_order", expected, list(a.nibble_order))
        letters, grid = f"[N / {8 * block[0]}, K / {block[1]}] words", (zero.shape[0], grid[1])
    check_operand(op, names[1], zero, letters, grid, _ZERO_DTYPES, a.x.device)
