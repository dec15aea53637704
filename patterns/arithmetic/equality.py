"""Decides whether two values that the graph computes separately are equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tilewright.patterns.dataflow import View

# Operations whose results have unknown contents. Two such results are equal only if one operation
# computed both.
_NEVER_EQUAL = {
    "input", "constant", "store", "aten.empty", "aten.empty_like", "aten.new_empty"
}  # fmt: skip


def equal_values(a: View, b: View) -> bool:
    """Whether two views certainly have the same numbers, because the graph computes both with the
    same operations from the same operands.

    Dynamo does not merge common subexpressions, so the graph may compute the slots of K and V
    separately.
    """
    if a == b:
        return True
    left, right = a.value, b.value
    if a.effect != b.effect or left.op != right.op or left.op.startswith("opaque"):
        return False
    if left.op in _NEVER_EQUAL or len(left.args) != len(right.args):
        return False
    if left.dtype != right.dtype or not _repeatable(left.op):
        return False
    return left.kwargs.keys() == right.kwargs.keys() and _equal_args(
        (*left.args, *left.kwargs.values()), (*right.args, *right.kwargs.values())
    )


@cache
def _repeatable(op: str) -> bool:
    """Whether an operation gives the same result again for the same operands. Random operations do
    not."""
    packet = getattr(torch.ops.aten, op.removeprefix("aten."), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet else []
    return not any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)


def _equal_args(a: Sequence[Any], b: Sequence[Any]) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if isinstance(x, View) and isinstance(y, View):
            if not equal_values(x, y):
                return False
        elif isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
            if not _equal_args(x, y):
                return False
        elif x != y:
            return False
    return True
