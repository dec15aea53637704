"""A sum over ranks, and the residual that is added to it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.ops.collective.all_reduce_residual_norm import OP
from tilewright.ops.runtime.peers import group_size
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Value, View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.recognise.norm import Norm

_REDUCED, _WAITED = "_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"
_SCATTERED = "_c10d_functional::reduce_scatter_tensor"


@dataclass(frozen=True)
class RankSum:
    """The sum of a residual and the parts of all ranks.

    Attributes:
        part: The part of this rank.
        residual: The tensor that is added to the sum over ranks.
        group: The name of the process group.
        num_ranks: The number of ranks in the process group.
        end: The sum with the residual.
        absorbed: The values that compute the sum.
    """

    part: View
    residual: View
    group: str
    num_ranks: int
    end: Value
    absorbed: tuple[Value, ...]


def match_rank_sum(value: Value) -> RankSum | None:
    """Returns the description of a value that is a sum over ranks plus a residual. Returns None for
    every other value, and if there are too many tokens for ranks to read each other's rows."""
    if value.op != "aten.add" or value.kwargs.get("alpha", 1) != 1:
        return None
    for side, residual in value.either_way:
        found = _reduced(side)
        if found is None or side.shape != value.shape or residual.shape != value.shape:
            continue
        part, group, absorbed = found
        ranks = group_size(group)
        if ranks is not None and ranks > 1 and _few(value, ranks):
            return RankSum(part, residual, group, ranks, value, (value, *absorbed))
    return None


def is_scattered_sum(value: Value) -> bool:
    """Whether a value adds a residual to the result of a reduce-scatter, which leaves a part of the
    sum on each rank."""
    if value.op != "aten.add":
        return False
    waited = [side.value for side, _ in value.either_way]
    return any(one.op == _WAITED and one.operands[0].value.op == _SCATTERED for one in waited)


def unless_summed(norm: Norm | None) -> Norm | None:
    """Returns the given norm, or None if its input is an all-reduced sum. The op that computes such
    a sum computes the norm as well."""
    return None if norm is None or match_rank_sum(norm.x.value) is not None else norm


def _reduced(side: View) -> tuple[View, str, tuple[Value, ...]] | None:
    """If `side` is a sum over ranks, returns the part of this rank, the group and the values of the
    collective; else None."""
    waited = side.value
    if waited.op != _WAITED or not _is_whole(side):
        return None
    reduced = waited.operands[0].value
    if reduced.op != _REDUCED or not waited.operands[0].is_whole:
        return None
    part, kind, group = reduced.args[0], reduced.argument(1, "reduce_op"), reduced.args[-1]
    if kind != "sum" or not isinstance(group, str):
        return None
    return part, group, (waited, reduced)


def _is_whole(side: View) -> bool:
    """Whether a view has all elements of its value, in order, in any shape."""
    try:
        return side == side.value.whole.reshape(*side.shape)
    except InexpressibleError:  # dimensions were permuted
        return False


def _few(value: Value, ranks: int) -> bool:
    """Whether there are few enough tokens for the op. If the number of tokens is symbolic, the
    result is True, and the op decides at each call."""
    *rows, columns = value.shape
    return OP.slower(tokens=effects.product(rows), columns=columns, ranks=ranks) is None
