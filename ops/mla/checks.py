"""Checks of the up-projection's weight in MLA ops. They read only metadata and raise
ArgumentError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.ops.checks import (
    ArgumentError,
    check_operand,
    check_scale_block,
    holds,
    shape_text,
)
from tilewright.ops.mla.arguments import (
    FP8,
    MlaPrefillArguments,
    UpArguments,
    UpWeight,
    widths,
)
from tilewright.ops.runtime.dtypes import torch_types


def check_weight(op: str, a: MlaPrefillArguments | UpWeight) -> Any:
    """Checks the up-projection's weight [H * (N + V), L] and its scales against q [T, H, N + R].
    Returns R. Reads only metadata. Raises ArgumentError."""
    weight = a.kv_b_weight
    form = "[H * (N + V), L]", (None, None), (a.q.dtype, FP8), a.q.device
    check_operand(op, "kv_b_weight", weight, *form, dense=True)
    check_rows(op, a, weight.shape)
    if weight.dtype == FP8:
        _check_weight_scale(op, a)
        return widths(a)[1]
    coded = {"kv_b_scale": a.kv_b_scale is not None, "scale_block": len(a.scale_block) > 0}
    refuse_codes(op, coded, weight.dtype)
    return widths(a)[1]


def check_rows(op: str, a: UpArguments, shape: Sequence[Any]) -> None:
    """Checks that q has heads, and that the weight has N + V rows for each. Raises ArgumentError.

    shape: the shape of the weight in numbers.
    """
    check_heads(op, a)
    rows, heads = shape[0], a.q.shape[1]
    whole = holds(rows % heads == 0) and holds(rows // heads > a.v_dim)
    if not whole or not holds(rows // heads - a.v_dim < a.q.shape[2]):
        expected = f"H * (N + V) rows, H = {heads}, V = {a.v_dim}, 0 < N < {a.q.shape[2]}"
        raise ArgumentError(op, "kv_b_weight", expected, f"shape {shape_text(shape)}")


def check_heads(op: str, a: UpArguments) -> None:
    """Checks that q [T, H, N + R] has at least one head, and that the values have at least one
    column. Raises ArgumentError."""
    if not holds(a.q.shape[1] >= 1):
        raise ArgumentError(op, "q", "at least one head", f"shape {shape_text(a.q.shape)}")
    if not holds(a.v_dim >= 1):
        raise ArgumentError(op, "v_dim", "at least one value column", a.v_dim)


def refuse_codes(op: str, given: dict[str, bool], dtype: torch.dtype) -> None:
    for name in (name for name, there in given.items() if there):
        raise ArgumentError(op, name, f"nothing, since kv_b_weight is {dtype}", "one")


def _check_weight_scale(op: str, a: MlaPrefillArguments | UpWeight) -> None:
    block = tuple(a.scale_block)
    check_scale_block(op, block)
    if a.kv_b_scale is None:
        raise ArgumentError(op, "kv_b_scale", "a tensor, since kv_b_weight has codes", None)
    rows, rank = a.kv_b_weight.shape
    grid = (-(-rows // block[0]), -(-rank // block[1]))
    letters = f"per {block[0]} x {block[1]} block"
    dtypes = torch_types(WEIGHT_FORMATS["fp8"].scales)
    check_operand(op, "kv_b_scale", a.kv_b_scale, letters, grid, dtypes, a.q.device)
