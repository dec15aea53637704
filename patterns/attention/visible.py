"""Describes which keys the queries of an attention attend to, with the arguments of an op: `mask`,
`positions`, `window` and `cache_lengths`. If the graph's mask is not recognised, the arguments are
the mask tensor, `attn_mask`, and the list of its blocks, `mask_blocks`.

Dimension letters are explained in `patterns/recognise/attention.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.attention.masks import bounds_logits
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.dataflow import Computed, View
from tilewright.patterns.recognise.attention import Attention, refuse
from tilewright.patterns.recognise.masks import visible_by


def visible_keys(attention: Attention) -> dict[str, Any]:
    """Returns the op's arguments for the mask of an attention. Raises Reject (ATTENTION_FORM) if
    the attention has a mask in addition to `is_causal`."""
    if attention.row_offsets is not None:
        return _ragged(attention)
    mask, added = attention.mask, attention.added
    says = mask or added
    if says is None:
        return {"mask": "causal" if attention.causal else "none"}
    if attention.causal:
        refuse(
            "it has a mask in addition to is_causal",
            attention.end,
            hint=(
                "make the mask exclude the keys that ones(S, K, dtype=bool).tril() excludes, "
                "and leave out is_causal"
            ),
        )
    found = None
    if mask is not None or not attention.subtracted:
        found = visible_by(says, *attention.queries[:2], sees=attention.sees, added=mask is None)
    numbers = _numbers(attention)
    if found is None:
        seen = mask if mask is None or attention.sees else Computed("invert", (mask,))
        whole = _with_numbers(seen, numbers)
        return {"mask": "none", **_tensor(whole, hide_lowest=_lowest_hides(attention))}
    # `mask` already covers added numbers that only hide keys.
    more = None if mask is None else numbers
    given = {
        "positions": found.positions,
        "window": found.window or None,
        **_tensor(_with_numbers(found.padding, more)),
    }
    return {"mask": found.mask, **{n: item for n, item in given.items() if item is not None}}


def mask_fact(arguments: dict[str, Any]) -> str:
    """Returns a description of the mask of these arguments for reports."""
    kinds = [] if arguments["mask"] == "none" else [arguments["mask"]]
    if "window" in arguments:
        kinds[-1] += f"({arguments['window']})"
    if "positions" in arguments:
        kinds[-1] += " by position"
    if "attn_mask" in arguments:
        kinds.append("tensor")
    return " and ".join(kinds) or "none"


def _tensor(mask: View | Computed | None, *, hide_lowest: bool = False) -> dict[str, Any]:
    """Returns the arguments for a mask tensor: the tensor and the list of its blocks. Layers that
    have the same mask share the node that computes the list."""
    if mask is None:
        return {}
    options = (("hide_lowest", True),) if hide_lowest else ()
    return {"attn_mask": mask, "mask_blocks": Computed("mask_blocks", (mask,), options)}


def _lowest_hides(attention: Attention) -> bool:
    """Whether the op may treat a key as hidden if the mask has the lowest number of its dtype for
    this key. This requires that the mask is not combined with another mask."""
    if attention.added is None or not attention.added.value.dtype.is_floating_point:
        return False
    return bounds_logits(attention.scale, attention.softcap, attention.added.value.dtype)


def _with_numbers(
    seen: View | Computed | None, numbers: View | Computed | None
) -> View | Computed | None:
    """Combines a bool mask (True means visible) and numbers that the graph adds to the logits into
    one mask."""
    if seen is None or numbers is None:
        return numbers if seen is None else seen
    return Computed("where", (seen, numbers, float("-inf")))


def _numbers(attention: Attention) -> View | Computed | None:
    """Returns the added numbers as floats. In a sum, True in a bool tensor adds 1. To the op,
    however, a bool tensor would say which keys are visible."""
    if attention.added is None:
        return None
    added: View | Computed = attention.added
    if not attention.added.value.dtype.is_floating_point:
        added = Computed("to", (added,), (("dtype", torch.float32),))
    return Computed("neg", (added,)) if attention.subtracted else added


def _ragged(attention: Attention) -> dict[str, Any]:
    """Returns the mask arguments of a ragged batch. A causal mask is aligned to the end of each
    sequence, because the queries are the last tokens of the sequence."""
    rows, keys = attention.row_offsets, attention.key_offsets
    assert rows is not None
    assert keys is not None
    if not attention.causal:
        return {"mask": "none"}
    if equal_values(rows, keys):
        return {"mask": "causal"}
    lengths = Computed("add", (_lengths(keys), Computed("neg", (_lengths(rows),))))
    return {"mask": "causal", "cache_lengths": lengths}


def _lengths(offsets: View) -> Computed:
    """Returns the lengths [B] that follow from offsets [B + 1]."""
    count = offsets.shape[0] - 1
    ends, starts = (offsets.narrow(0, first, count) for first in (1, 0))
    return Computed("add", (ends, Computed("neg", (starts,))))
