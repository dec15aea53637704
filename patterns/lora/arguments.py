"""Builds the arguments of the LoRA ops for the deltas of q, k and v, as nested calls.

Dimension letters: T rows, G adapters, R rank, W columns, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.ops.lora.rows import KERNEL_DTYPES
from tilewright.ops.lora.shrink import OP as SHRINK
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, Value, View
from tilewright.patterns.effects import Size
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.lora.delta import LoraDelta
from tilewright.patterns.recognise.dtypes import dtype_name

LETTERS = ("q", "k", "v")
CAST_ADAPTERS = "peft: get_peft_model(..., autocast_adapter_dtype=False)"
#: The deltas of one projection. Each delta comes with its matrices B [G, W, R], whose W rows are in
#: the order of the projection's columns.
Placed = Sequence[tuple[LoraDelta, View]]


def together(one: LoraDelta, other: LoraDelta) -> bool:
    """Whether one shrink call can compute both deltas. They must have the same activation, index,
    factors and number of adapters."""
    same = equal_values(one.x, other.x) and one.adapters.same(other.adapters)
    if not same or one.shrink.shape[0] != other.shrink.shape[0]:
        return False
    if one.scales is None or other.scales is None:
        return one.scales is other.scales
    return equal_values(one.scales, other.scales)


def has_kernels(delta: LoraDelta) -> bool:
    """Whether the LoRA ops have kernels for an adapter, and these kernels are faster than the graph
    on the adapter's device.

    In fp32, there are no tensor cores, so kernels are faster only for a few rows. For many rows,
    cuBLAS is faster.
    """
    dtype = delta.shrink.value.dtype
    if delta.x.value.device.type != "cuda":
        return True
    rows, hidden = delta.x.shape
    columns = len(LETTERS) * delta.rank
    slow = SHRINK.slower(rows=rows, columns=columns, hidden=hidden, dtype=dtype)
    return dtype in KERNEL_DTYPES and slow is None


def check_kernels(delta: LoraDelta) -> None:
    """On a GPU, raises Reject (DTYPE) for adapters for which the LoRA ops have no kernels."""
    if not has_kernels(delta):
        dtype, rows = dtype_name(delta.shrink.value.dtype), delta.x.shape[0]
        message = (
            f"the adapters are {dtype} and the rows {rows}; kernels exist only for 16-bit "
            "floats, and for a few rows of float32"
        )
        reject("DTYPE", Stage.CAPABILITY, message, delta.end, hint=CAST_ADAPTERS)


def delta_calls(
    deltas: Sequence[LoraDelta | None],
    expands: Sequence[View | Computed | None],
    bases: Sequence[View | Computed | None],
    packed: bool,
) -> Computed:
    """Returns `lora_expand_add` of `shrink_qkv_permute_3mn`, for deltas of q, k and v that share
    one shrink call.

    expands: B [G, W, R] of each delta. bases: the tensors to which the deltas are added.
    """
    first = next(delta for delta in deltas if delta is not None)
    ids = first.adapters.argument(first.shrink.shape[0])
    shrink = Computed(
        "shrink_qkv_permute_3mn",
        (first.x,),
        (
            ("expert_ids", ids),
            *((f"{n}_weight", d.shrink) for n, d in zip(LETTERS, deltas, strict=True) if d),
        ),
    )
    options = (
        ("expert_ids", ids),
        ("scales", first.scales),
        ("scale", tuple(1.0 if d is None else d.scale for d in deltas)),
        ("packed", packed),
    )
    return Computed("lora_expand_add", (shrink, *bases, *expands), options)


def packed_deltas(parts: Sequence[Placed], widths: Sequence[Size]) -> Computed:
    """Returns the sum of the deltas of q, of k and of v, with the columns of the three sums side by
    side: [T, Wq + Wk + Wv].

    Deltas that share a shrink call also share an expand call. The next expand call adds to the
    result of the previous one.
    """
    total: Computed | None = None
    for layer in _layers(parts):
        first = next(item[0] for item in layer if item is not None)
        rows, start = first.x.shape[0], 0
        bases: list[Computed | None] = []
        for item, width in zip(layer, widths, strict=True):
            base = None
            if total is not None:
                base = Computed("narrow", (total, 1, start, width))
            elif item is None:
                base = zeros(rows, width, first.x.value)
            bases.append(base)
            start += width
        deltas = [None if item is None else item[0] for item in layer]
        expands = [None if item is None else item[1] for item in layer]
        call = delta_calls(deltas, expands, bases, packed=True)
        total = Computed("getitem", (call, 0))
    assert total is not None
    return total


def _layers(parts: Sequence[Placed]) -> list[list[tuple[LoraDelta, View] | None]]:
    """Returns groups of deltas that share a shrink call. A group has at most one delta for each
    projection."""
    layers: list[list[tuple[LoraDelta, View] | None]] = []
    for place, items in enumerate(parts):
        for item in items:
            home = next((layer for layer in layers if _has_room(layer, place, item[0])), None)
            if home is None:
                home = [None] * len(parts)
                layers.append(home)
            home[place] = item
    return layers


def _has_room(layer: Sequence[tuple[LoraDelta, View] | None], place: int, delta: LoraDelta) -> bool:
    return layer[place] is None and all(together(i[0], delta) for i in layer if i is not None)


def own_deltas(parts: Sequence[Sequence[View]], widths: Sequence[Size]) -> Computed:
    """Returns the deltas [T, W] that the graph itself computes, in the layout of
    `packed_deltas`."""
    first = next(view for views in parts for view in views)
    columns: list[View | Computed] = []
    for views, width in zip(parts, widths, strict=True):
        total: View | Computed | None = None
        for view in views:
            total = view if total is None else Computed("add", (total, view))
        columns.append(zeros(first.shape[0], width, first.value) if total is None else total)
    return Computed("cat", (tuple(columns), 1))


def zeros(rows: Size, columns: Size, like: Value) -> Computed:
    """Returns zeros, which replace the delta of a projection without an adapter if other
    projections have one."""
    options = (("dtype", like.dtype), ("device", like.device))
    return Computed("full", ((rows, columns), 0.0), options)


def fact(parts: Sequence[Sequence[LoraDelta]], *, own: bool = False) -> dict[str, Any]:
    """Returns the facts about adapters for reports: their projections, rank and number. own:
    whether the graph itself computes the deltas."""
    given = [delta for deltas in parts for delta in deltas]
    if not given:
        return {}
    names = "".join(n for n, deltas in zip(LETTERS, parts, strict=True) if deltas)
    ranks = "/".join(dict.fromkeys(str(delta.rank) for delta in given))
    many = "" if given[0].adapters.index is None else f" of {given[0].shrink.shape[0]}"
    return {"lora": f"{names} rank={ranks}{many}{' added' if own else ''}"}
