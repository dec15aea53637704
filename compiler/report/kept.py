"""Reports of compiled graphs as they are kept: text and numbers, nothing of the graph itself.

A graph module holds fake tensors, sources and sometimes weights; a process that compiles for months
must not keep the models it dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.compiler.report import GraphReport, Lowered, Site
from tilewright.compiler.report.census import Point
from tilewright.patterns.language import Miss, Stage, Weight


@dataclass(frozen=True)
class KeptMiss:
    """A :class:`tilewright.patterns.language.Miss` without the graph. nodes: their names."""

    pattern: str
    code: str
    stage: Stage
    message: str
    scope: str
    source: str
    text: str
    nodes: tuple[str, ...] = ()
    hint: str = ""
    count: int = 1
    weight: Weight | None = "lost"

    @property
    def is_lost(self) -> bool:
        """Whether something that was asked for was not fused; else it is advice."""
        return self.weight == "lost"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class KeptReport:
    """What happened to one graph.

    nodes, nodes_after: how many the graph had, and has. seconds: by phase. points: the census of
    the graph. data: the report as JSON-ready data, as the option `report` writes it. `str()` prints
    what `lower` prints.
    """

    matches: tuple[Site, ...]
    misses: tuple[KeptMiss, ...]
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    nodes: int
    nodes_after: int
    points: tuple[Point, ...]
    data: Mapping[str, Any]
    text: str

    def __str__(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> Any:
        if name in ("before", "after"):
            raise AttributeError(
                f"{name}: the graphs of a compilation are not kept; tilewright.compiler.lower("
                "model, args).graphs has them, and TORCH_TRACE writes them"
            )
        raise AttributeError(name)


def kept(report: GraphReport, lowered: Lowered) -> KeptReport:
    """The report of a graph without the graph. lowered: that report alone, with its target."""
    return KeptReport(
        matches=report.matches,
        misses=tuple(_kept_miss(miss) for miss in report.misses),
        notes=report.notes,
        seconds=dict(report.seconds),
        nodes=len(report.before.graph.nodes),
        nodes_after=len(report.after.graph.nodes),
        points=report.points,
        data=lowered.as_dict(),
        text=str(lowered),
    )


def _kept_miss(miss: Miss) -> KeptMiss:
    names = ("pattern", "code", "stage", "message", "scope", "source", "hint", "count", "weight")
    same: dict[str, Any] = {name: getattr(miss, name) for name in names}
    return KeptMiss(text=str(miss), nodes=tuple(node.name for node in miss.nodes), **same)
