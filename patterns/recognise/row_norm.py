"""Recognises norms of whole rows, before or after linears."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from tilewright.ops.checks import HALVES
from tilewright.ops.fused_op import FusedOp
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.recognise.norm import Norm, norm_of

# For each kind of norm, the dtypes of the norm's input for which ops compute the norm. With an RMS
# norm, the op multiplies by the weight before it divides by the root mean square, which requires
# the range of bfloat16. With a layer norm, the op rounds the result of the norm to the dtype of x
# before the product, as the graph does.
_TAKEN = {"rms": (torch.bfloat16,), "layer": HALVES}


def match_norm_before(
    x: View,
    readers: Collection[Value],
    place: int,
    flow: Dataflow,
    op: FusedOp,
) -> Norm | None:
    """Returns the RMS norm or layer norm whose result is x [T, K], the activation that `readers`
    read.

    In the returned norm, `x` is a view [T, K] too, and `absorbed` has the values that only the norm
    reads. Returns None if other values read x, if no op computes the norm, if `op` is slower with
    the norm, if the rows of the norm's input are not dense, or if tensors of the norm change before
    the place of the op. place: where the op will be inserted, in program order.
    """
    normed = x.value
    if normed.dtype not in HALVES or not isinstance(x.shape[0], int):
        return None
    if not set(readers).issuperset(flow.users.get(normed, ())) or normed in flow.output_values:
        return None
    try:
        norm = row_norm_of(normed.whole) if x == normed.whole.matrix else None
        if norm is None or not flow.rows_are_dense(norm.x):
            return None
        sizes = {"tokens": x.shape[0], "columns": norm.width}
        if normed.dtype not in _TAKEN[norm.kind] or op.slower(norm=norm.kind, **sizes):
            return None
        norm = replace(norm, x=norm.x.matrix, absorbed=unread(norm.absorbed, readers, flow))
    except InexpressibleError:
        return None
    read = [view for view in (norm.x, norm.weight, norm.bias) if view is not None]
    return None if any(any(flow.changes(view, place)) for view in read) else norm


def rms_norm_of(normed: View) -> Norm | None:
    """Returns the RMS norm whose result is `normed`, if it has one weight for all rows; else
    None."""
    norm = row_norm_of(normed)
    return norm if norm is not None and norm.kind == "rms" else None


def row_norm_of(normed: View) -> Norm | None:
    """Returns the norm whose result is `normed`, if it has one weight and one bias for all rows.
    Returns None for every other value, and for an RMS norm with a bias."""
    norm = norm_of(normed)
    dtype = normed.value.dtype
    if norm is None or norm.x.shape != normed.shape:
        return None
    if norm.x.value.dtype != dtype or norm.width != normed.shape[-1]:
        return None
    if norm.kind == "rms" and norm.bias is not None:
        return None
    vectors = [vector for vector in (norm.weight, norm.bias) if vector is not None]
    return norm if all(_is_for_all_rows(v, norm.width, dtype) for v in vectors) else None


def _is_for_all_rows(vector: View, width: int, dtype: torch.dtype) -> bool:
    """Whether the weight or bias of a norm is [width], in a dtype that ops support."""
    if any(size != 1 for size in vector.shape[:-1]) or vector.shape[-1] != width:
        return False
    return vector.value.dtype in (dtype, torch.float32)


def row_norm_arguments(norm: Norm | None, prefix: str = "") -> dict[str, Any]:
    """Returns the op's arguments for a norm, with prefixed names. Returns no arguments if there is
    no norm."""
    if norm is None:
        return {}
    given = {
        f"{prefix}{norm.kind}_norm": True,
        f"{prefix}norm_weight": norm.weight and norm.weight.reshape(norm.width),
        f"{prefix}norm_eps": norm.eps,
        f"{prefix}norm_offset": norm.offset,
    }
    bias = norm.bias and norm.bias.reshape(norm.width)
    return given if bias is None else given | {f"{prefix}norm_bias": bias}


def unread(values: Iterable[Value], readers: Iterable[Value], flow: Dataflow) -> tuple[Value, ...]:
    """Returns the values that only `readers` and these values themselves read."""
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
