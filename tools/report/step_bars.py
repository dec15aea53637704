"""Computes the bars of a page: the cost and the savings of each site, and the cost of a whole step.

The cost model predicts what a site costs with plain Inductor, and what it costs as a fused op. The
site saves the difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from tilewright.codegen.targets import Target, get_target
from tilewright.compiler import GraphReport, Lowered, _compat
from tilewright.compiler.report.bars import Bar
from tilewright.compiler.report.step import (
    FULL,
    FUSED,
    INDUCTOR,
    LIBRARY,
    Amounts,
    Kind,
    LayerStep,
    Step,
    Summed,
    amounts_of,
    step_of,
)
from tilewright.compiler.report.traffic import Unit, units_of
from tilewright.tools.report.layers import title_of
from tilewright.tools.report.node_facts import writes_in_place

#: For each kind of part of a step, the name that a page shows.
KIND_NAMES: dict[Kind, str] = {
    FUSED: "fused",
    LIBRARY: "library products",
    INDUCTOR: "left to Inductor",
}


@dataclass(frozen=True)
class Taken(Summed):
    """The bytes and predicted microseconds of sites, or the bytes and microseconds that sites
    save."""

    bytes: float = 0.0
    us: float = 0.0

    def less(self, other: Taken) -> Taken:
        """Returns how much larger each of the two amounts is than that of `other`, or 0 for an
        amount that is smaller."""
        return Taken(max(self.bytes - other.bytes, 0.0), max(self.us - other.us, 0.0))


@dataclass(frozen=True)
class SiteBars:
    """The total cost of equal sites, and their savings. `known` is False if a size is a symbol:
    both totals then leave out the bytes and times that depend on that size."""

    taken: Taken
    spared: Taken
    known: bool

    @property
    def whole(self) -> Taken:
        """Returns the length of both bars together."""
        return self.taken + self.spared


@dataclass(frozen=True)
class StepRow:
    """The times of a whole step, or the summed times of equal layers.

    by_kind: the modelled time of each kind of part, in microseconds.
    most: the longest bar among the rows that are drawn at the same scale.
    """

    title: str
    amounts: Amounts
    by_kind: Mapping[Kind, float]
    most: float


@dataclass(frozen=True)
class StepView:
    """A step as the page shows it.

    alone: the step of the captured graph, compiled by Inductor alone.
    present: the number of tokens in the caches, as in `Step`; None for full caches.
    bar: the error bar of the modelled time of the whole step.
    """

    total: StepRow
    alone: StepRow
    layers: tuple[StepRow, ...]
    present: int | None
    symbols: tuple[str, ...]
    bar: Bar


def site_bars(
    lowered: Lowered,
    units: Sequence[Sequence[Unit]],
    numbers: Sequence[Mapping[str, int]],
    present: int | None,
) -> dict[int, SiteBars]:
    """Returns the bars of equal sites, by the number of the site.

    `units` has the units of each rewritten graph. For each graph, `numbers` maps the name of a node
    to the number of the site in which it is.
    """
    target = get_target(lowered.target)
    now: defaultdict[int, Taken] = defaultdict(Taken)
    apart: defaultdict[int, Taken] = defaultdict(Taken)
    unknown: set[int] = set()
    for graph, made, own in zip(lowered.graphs, units, numbers, strict=True):
        for unit in made:
            if unit.kind == FUSED:
                number, amounts = (
                    own.get(unit.node, 0),
                    amounts_of(unit, target, tokens_present(present)),
                )
                now[number] += Taken(amounts.bytes, amounts.modelled_us)
                unknown |= {number} if unit.symbols else set()
        for number, taken in _taken_apart(graph, own, target, present):
            apart[number] += taken
    sites = {number for own in numbers for number in own.values() if number}
    # With symbolic sizes, the amounts before and after fusion leave out different parts, so their
    # difference means nothing.
    spared = {n: Taken() if n in unknown else apart[n].less(now[n]) for n in sites}
    return {n: SiteBars(now[n], spared[n], n not in unknown) for n in sites}


def tokens_present(present: int | None) -> int:
    """Returns the number of tokens in caches that a page assumes: `present`, or FULL if it is
    None."""
    return FULL if present is None else present


def _taken_apart(
    graph: GraphReport, numbers: Mapping[str, int], target: Target, present: int | None
) -> Iterator[tuple[int, Taken]]:
    """Yields (number of a site, its share of a unit's cost) for the units of the captured graph.
    Sites that share a unit divide its cost in proportion to the bytes that their nodes produce."""
    by_name = {node.name: node for node in graph.before.graph.nodes}
    for unit in units_of(as_captured(graph), target):
        amounts = amounts_of(unit, target, tokens_present(present))
        made: defaultdict[int, float] = defaultdict(float)
        for member in unit.members:
            made[numbers.get(member, 0)] += _made(by_name[member])
        whole = sum(made.values())
        for number, size in made.items():
            yield number, Taken(amounts.bytes * size / whole, amounts.modelled_us * size / whole)


def as_captured(graph: GraphReport) -> GraphReport:
    """Returns the report that the graph would have if nothing were fused."""
    return replace(graph, modules=(graph.before, graph.before), matches=())


def _made(node: fx.Node) -> float:
    """Returns the number in proportion to which a node takes a part of the cost of its unit. It is
    the bytes of the node's results (for a write in place, the bytes that are written) plus one, so
    that no number is zero."""
    tensors = _compat.tensors_of(node)
    if writes_in_place(node):
        tensors = _compat.tensors_of(*node.all_input_nodes)[1:]
    sizes = (t.numel() * t.element_size() for t in tensors)
    return 1.0 + sum(size for size in sizes if isinstance(size, int))


def step_view(lowered: Lowered, present: int | None) -> StepView:
    """Returns the bars of a step and of its layers. The bars of the layers share a scale, which
    differs from that of the whole step."""
    step = step_of(lowered, tokens_present(present))
    alone = step_of(
        replace(lowered, graphs=tuple(map(as_captured, lowered.graphs))), tokens_present(present)
    )
    layers = sorted(step.layers, key=lambda layer: -len(layer.scopes) * layer.total.modelled_us)
    most = max((len(x.scopes) * _widest(x.total) for x in layers), default=0.0)
    most_of_all = max(_widest(step.total), _widest(alone.total))
    return StepView(
        _row("all", step, most_of_all),
        _row("as captured, by Inductor alone", alone, most_of_all),
        tuple(_row(title_of(x.scopes), x, most, len(x.scopes)) for x in layers),
        present,
        step.symbols,
        step.bar,
    )


def _widest(amounts: Amounts) -> float:
    return max(amounts.modelled_us, amounts.floor_us)


def _row(title: str, of: Step | LayerStep, most: float, count: int = 1) -> StepRow:
    by_kind = {kind: of.of(kind).times(count).modelled_us for kind in KIND_NAMES}
    return StepRow(title, of.total.times(count), by_kind, most)
