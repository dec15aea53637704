"""Matches the operations after a linear that is split over ranks. The graph sums the parts of the
ranks and adds the residual, and the linears of the next layer read the norm of the sum.

    summed = residual + all_reduce(part)
    normed = rms_norm(summed) * norm_weight      ⇒   all_reduce_residual_norm(part, residual, ...)

If the norm is written as separate operations, it is recognised, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tilewright.ops.checks import HALVES
from tilewright.patterns.collective.sums import RankSum, is_scattered_sum, match_rank_sum
from tilewright.patterns.dataflow import Dataflow, Value, common_scope
from tilewright.patterns.language import Match, Result, Sought, Stage, register, reject
from tilewright.patterns.recognise.dtypes import check_dtypes, rows_fact
from tilewright.patterns.recognise.norm import Norm
from tilewright.patterns.recognise.row_norm import rms_norm_of

# How many values after the sum are searched for its norm, which may consist of several operations.
_REACH = 16


@dataclass(frozen=True)
class AllReduceResidualNorm:
    """Matches a sum over ranks, the residual that is added to it, and the norm of the result."""

    name: str = "all_reduce_residual_norm"
    op: str = "all_reduce_residual_norm"
    asked_before: ClassVar[tuple[str, ...]] = (
        "linear_activation",
    )  # linear_activation would otherwise absorb the norm
    optional: ClassVar[bool] = True  # without a kernel, PyTorch's operations are good enough
    sought: ClassVar[Sought] = Sought(
        "sums over ranks that are followed by a residual and a norm",
        frozenset({"_c10d_functional::all_reduce", "opaque:all_reduce"}),
        before=frozenset({"product"}),
    )

    def anchors(self, flow: Dataflow) -> Iterator[Value]:
        """Yields each sum of a residual and a sum over ranks that is followed by a norm. Also
        yields such sums in sequence-parallel form."""
        for value in flow.values:
            summed = match_rank_sum(value) is not None or is_scattered_sum(value)
            if summed and _norm_of(value, flow) is not None:
                yield value

    def match(self, anchor: Value, flow: Dataflow) -> Match:
        found, normed_by = match_rank_sum(anchor), _norm_of(anchor, flow)
        if found is None:
            message = (
                "each rank keeps a part of the sum and gathers the norms, and the "
                "library performs both"
            )
            reject("COLLECTIVE", Stage.ANCHORED, message, anchor)
        assert normed_by is not None
        normed, norm = normed_by
        _check(found)
        made = found.part.matrix.shape
        (_, waited, _) = found.absorbed
        return Match(
            anchor=anchor,
            arguments={
                "x": found.part.matrix,
                "residual": found.residual.matrix,
                "norm_weight": norm.weight and norm.weight.reshape(norm.width),
                "group": found.group,
                "num_ranks": found.num_ranks,
                "norm_eps": norm.eps,
                "norm_offset": norm.offset,
            },
            results=(Result.of_rows(anchor, made), Result.of_rows(normed, made, output=1)),
            absorbed=tuple(dict.fromkeys((*found.absorbed, *norm.absorbed, normed))),
            scratch=tuple(flow.written_back(waited)),
            facts={
                "x": rows_fact(anchor.dtype, *made),
                "ranks": found.num_ranks,
                "group": found.group,
            },
            scope=common_scope(found.part.value.scope, anchor.scope),
        )


def _norm_of(end: Value, flow: Dataflow) -> tuple[Value, Norm] | None:
    """Returns (result, norm) of the norm that reads a value. If norms are nested, returns the
    outermost norm. Returns None if there is no norm."""
    norms = [
        (value, norm)
        for value in flow.downstream(end, _REACH)
        if (norm := rms_norm_of(value.whole)) is not None and norm.x == end.whole
    ]
    return max(norms, key=lambda found: len(found[1].absorbed), default=None)


def _check(found: RankSum) -> None:
    dtypes = [view.value.dtype for view in (found.part, found.residual)]
    if len(set(dtypes)) > 1:
        reject("DTYPE", Stage.CAPABILITY, f"{dtypes[0]} is added to {dtypes[1]}", found.end)
    check_dtypes([*dtypes, found.end.dtype], "parts and residual", found.end, HALVES)


register(AllReduceResidualNorm())
