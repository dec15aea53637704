"""Checks of a ragged batch over a paged cache, for the ops that have Modular MAX's arguments. Each
check raises ArgumentError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilewright.ops.checks import (
    ArgumentError,
    check_device,
    check_dtype,
    check_last_dim_dense,
    check_shape,
    holds,
)

INDEX_DTYPES = (torch.uint32, torch.int32, torch.int64)


def check_layer(op: str, a: Any) -> None:
    """Checks that layer_idx is a layer of blocks [P, 1 or 2, layers, ...]."""
    layers = a.blocks.shape[2]
    if not (a.layer_idx >= 0 and holds(a.layer_idx < layers)):
        raise ArgumentError(op, "layer_idx", f"a layer from 0 to {layers - 1}", a.layer_idx)


def check_batch(op: str, a: Any, device: torch.device, more: Iterable[str] = ()) -> None:
    """Checks the shapes of lookup_table [B, columns], input_row_offsets [B + 1] and cache_lengths
    [B]. Checks the dtype and device of these arguments and of the arguments in `more`."""
    check_shape(op, "lookup_table", a.lookup_table, "[B, columns]", (None, None))
    check_last_dim_dense(op, "lookup_table", a.lookup_table)
    batch = a.lookup_table.shape[0]
    check_shape(op, "input_row_offsets", a.input_row_offsets, "[B + 1]", (batch + 1,))
    check_shape(op, "cache_lengths", a.cache_lengths, "[B]", (batch,))
    for name in ("input_row_offsets", "cache_lengths", "lookup_table", *more):
        check_dtype(op, name, getattr(a, name), INDEX_DTYPES)
        check_device(op, name, getattr(a, name), device)


def check_row_offsets(op: str, argument: str, offsets: torch.Tensor, total: int, what: str) -> None:
    """Checks that offsets start at 0, never decrease and end at `total`. what: a description of
    `total` for the message."""
    values = offsets.to(torch.int64)
    start, end = int(values[0]), int(values[-1])
    if start != 0:
        raise ArgumentError(op, argument, "0 as the first offset", start)
    falls = values.diff() < 0
    if falls.any():
        where = int(falls.int().argmax())
        actual = f"{int(values[where])} and then {int(values[where + 1])} at {where + 1}"
        raise ArgumentError(op, argument, "offsets that do not decrease", actual)
    if end != total:
        raise ArgumentError(op, argument, f"{what}, {total}, as the last", end)
