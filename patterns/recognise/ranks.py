"""What several ranks make together."""

from __future__ import annotations

from tilewright.patterns.dataflow import Value, View

# How a DTensor goes to another placement, and becomes a plain tensor again.
_PLACED_ANEW = frozenset({"opaque:redistribute", "opaque:full_tensor"})
_UNWRAPPED = "opaque:to_local"


def part_of_a_sum(view: View) -> View | None:
    """One rank's part of a sum over ranks that is all that `view` is: what was all-reduced or
    reduce-scattered, or a DTensor of partial sums that was redistributed. None for anything else."""
    found, summed = view, False
    while (before := _before(found.value)) is not None:
        summed = summed or _sums(found.value, before)
        found = before
    return found if summed else None


def _before(value: Value) -> View | None:
    """What a step between ranks was given: a collective, the wait for it, the copy back into what
    was all-reduced in place."""
    if value.store is not None:
        return value.store.source if value.store.kind == "copy_" else None
    steps = value.op in _PLACED_ANEW or value.op == _UNWRAPPED or "c10d" in value.op
    return value.operands[0] if steps and value.operands else None


def _sums(value: Value, given: View) -> bool:
    held = given.value.node.meta.get("example_value")
    partial = any(one.is_partial() for one in getattr(held, "placements", ()))
    return "reduce" in value.op or (value.op in _PLACED_ANEW and partial)
