"""RMS norms of whole rows, before linears or behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.language import Reject, Stage
from tilewright.patterns.recognise.norm import Norm, match_norm


def match_norm_before(
    x: View, readers: Collection[Value], place: int, flow: Dataflow
) -> Norm | None:
    """The RMS norm that made x [T, K], the activation of `readers`, where nobody but these reads
    it. Its own x is [T, K] too, and what is absorbed of it are values that nobody else reads.

    place: where the op will stand, in program order. None where no op can take it: they multiply
    before they divide, which wants the range of bfloat16, and for many tokens a norm apart is
    faster; or where it reads rows that are not dense, or that change before the op's place.
    """
    normed = x.value
    if normed.dtype != torch.bfloat16 or not isinstance(x.shape[0], int):
        return None
    if not set(readers).issuperset(flow.users.get(normed, ())) or normed in flow.output_values:
        return None
    try:
        norm = rms_norm_of(normed.whole) if x == normed.whole.matrix else None
        if norm is None or not flow.rows_are_dense(norm.x):
            return None
        norm = replace(norm, x=norm.x.matrix, absorbed=unread(norm.absorbed, readers, flow))
    except InexpressibleError:
        return None
    read = [view for view in (norm.x, norm.weight) if view is not None]
    return None if any(any(flow.changes(view, place)) for view in read) else norm


def rms_norm_of(normed: View) -> Norm | None:
    """The RMS norm whose result `normed` is, with one weight for all rows; None for any other."""
    try:
        norm = match_norm(normed, Stage.ACTIVATION)
    except (Reject, InexpressibleError):
        return None
    dtype = normed.value.dtype
    if norm is None or norm.kind != "rms" or norm.x.shape != normed.shape:
        return None
    if norm.x.value.dtype != dtype or norm.width != normed.shape[-1]:
        return None
    weight = norm.weight
    if weight is not None:
        if any(size != 1 for size in weight.shape[:-1]) or weight.shape[-1] != norm.width:
            return None
        if weight.value.dtype not in (dtype, torch.float32):
            return None
    return norm


def row_norm_arguments(norm: Norm | None, prefix: str = "") -> dict[str, Any]:
    """The op's arguments for a norm, their names with a prefix; none for none."""
    if norm is None:
        return {}
    return {
        f"{prefix}rms_norm": True,
        f"{prefix}norm_weight": norm.weight and norm.weight.reshape(norm.width),
        f"{prefix}norm_eps": norm.eps,
        f"{prefix}norm_offset": norm.offset,
    }


def unread(values: Iterable[Value], readers: Iterable[Value], flow: Dataflow) -> tuple[Value, ...]:
    """Those of `values` that none but the others of them and `readers` read."""
    inside, readers = set(values), set(readers)
    while True:
        left = {
            value
            for value in inside
            if value not in flow.output_values
            and (inside | readers).issuperset(flow.users.get(value, ()))
        }
        if left == inside:
            return tuple(sorted(inside, key=lambda value: value.position))
        inside = left
