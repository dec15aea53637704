"""Recognises communication between ranks in a graph."""

from __future__ import annotations

from tilewright.patterns.dataflow import Value, View, upstream

# Calls that move a DTensor to another placement. A call that does not move anything has no value in
# the Dataflow.
_PLACED_ANEW = frozenset({"opaque:redistribute", "opaque:full_tensor"})
_UNWRAPPED = "opaque:to_local"


def collective_of(value: Value) -> Value | None:
    """Returns the collective operation, or the redistribution of a DTensor, whose result a value
    is; else None."""
    if value.op == _UNWRAPPED and value.operands:
        value = value.operands[0].value
    return value if "c10d" in value.op or value.op in _PLACED_ANEW else None


def collective_behind(value: Value, reach: int) -> Value | None:
    """Returns the nearest collective operation from which a value is computed, at most `reach`
    values back."""
    moved = (v for v in upstream(value, reach) if collective_of(v) is not None)
    return next((v for v in moved if "wait_tensor" not in v.op), None)


def part_of_a_sum(view: View) -> View | None:
    """Returns this rank's summand if `view` is a sum over ranks; else None. The summand is the
    input of an all-reduce or reduce-scatter, or a DTensor of partial sums that was
    redistributed."""
    found, summed = view, False
    while (moved := collective_of(found.value)) is not None and moved.operands:
        found = moved.operands[0]
        summed = summed or _sums(moved, found)
    return found if summed else None


def _sums(moved: Value, given: View) -> bool:
    held = given.value.node.meta.get("example_value")
    partial = any(one.is_partial() for one in getattr(held, "placements", ()))
    return "reduce" in moved.op or (moved.op in _PLACED_ANEW and partial)
