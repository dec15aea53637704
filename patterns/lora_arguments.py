"""The arguments that the LoRA ops take for the deltas of q, k and v, as nested calls.

Dimension letters: T rows, G adapters, R rank, W columns, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.ops.lora_shrink import KERNEL_DTYPES
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Computed, View
from tilewright.patterns.effects import Size
from tilewright.patterns.equality import equal_values
from tilewright.patterns.language import Stage, reject
from tilewright.patterns.lora_delta import LoraDelta

LETTERS = ("q", "k", "v")


def check_together(deltas: Sequence[LoraDelta]) -> None:
    """One shrink serves all: one activation, one index, one table of factors.

    Raises Reject (LORA_ROWS) naming what differs.
    """
    first, *rest = deltas
    for other in rest:
        for what, one, two in (
            ("activations", first.x, other.x),
            ("factors of adapters", first.scales, other.scales),
        ):
            same = one is two if one is None or two is None else equal_values(one, two)
            if not same:
                reject("LORA_ROWS", Stage.GUARDS, f"the deltas have different {what}", other.end)
        if not first.adapters.same(other.adapters):
            reject("LORA_ROWS", Stage.GUARDS, "the deltas have different adapters", other.end)
        if first.shrink.shape[0] != other.shrink.shape[0]:
            counts = f"{first.shrink.shape[0]} and {other.shrink.shape[0]}"
            reject("LORA_ROWS", Stage.GUARDS, f"the deltas are of {counts} adapters", other.end)


def check_kernels(delta: LoraDelta) -> None:
    """Raises Reject (DTYPE) on a GPU for adapters that the LoRA ops have no kernels for there."""
    dtype = delta.shrink.value.dtype
    if delta.x.value.device.type == "cuda" and dtype not in KERNEL_DTYPES:
        names = " and ".join(str(d).removeprefix("torch.") for d in KERNEL_DTYPES)
        reject(
            "DTYPE",
            Stage.CAPABILITY,
            f"the adapters are {str(dtype).removeprefix('torch.')}; there are kernels for {names}",
            delta.end,
            hint="peft: get_peft_model(..., autocast_adapter_dtype=False)",
        )


def delta_calls(
    deltas: Sequence[LoraDelta | None],
    expands: Sequence[View | Computed | None],
    bases: Sequence[View | Computed | None],
    packed: bool,
) -> Computed:
    """The call of `lora_expand_add` on that of `shrink_qkv_permute_3mn`; deltas of q, k, v.

    expands: B [G, W, R] of each; bases: what each delta is added to. Raises Reject (LORA_ROWS).
    """
    given = [delta for delta in deltas if delta is not None]
    check_together(given)
    first = given[0]
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


def packed_delta(
    deltas: Sequence[LoraDelta | None],
    expands: Sequence[View | None],
    widths: Sequence[Size],
) -> Computed:
    """The deltas of q, k and v, one beside the other: [T, Wq + Wk + Wv]."""
    first = next(delta for delta in deltas if delta is not None)
    check_kernels(first)
    rows = first.x.shape[0]
    empty = [
        zeros(rows, width, first.x) if delta is None else None
        for delta, width in zip(deltas, widths, strict=True)
    ]
    return Computed("getitem", (delta_calls(deltas, expands, empty, packed=True), 0))


def zeros(rows: Size, columns: Size, like: View) -> Computed:
    """A delta of nothing, for a projection without an adapter beside others in one tensor."""
    options = (("dtype", like.value.dtype), ("device", like.value.device))
    return Computed("full", ((rows, columns), 0.0), options)


def merged_rows(weight: View) -> View:
    """B of heads [H, D, R] or [groups, G, D, R] as [1, W, R]."""
    *lead, rank = weight.shape
    effect = effects.reshape(weight.effect, (1, effects.product(lead), rank))
    return View(weight.value, effect)


def fact(deltas: Sequence[LoraDelta | None]) -> dict[str, Any]:
    """What reports say of adapters: which projections have them, rank, how many."""
    given = [delta for delta in deltas if delta is not None]
    if not given:
        return {}
    names = "".join(n for n, d in zip(LETTERS, deltas, strict=True) if d is not None)
    ranks = "/".join(dict.fromkeys(str(delta.rank) for delta in given))
    many = "" if given[0].adapters.index is None else f" of {given[0].shrink.shape[0]}"
    return {"lora": f"{names} rank={ranks}{many}"}
