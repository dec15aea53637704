"""The bars of a page: what each site takes and spares, and what a whole step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.codegen.targets import get_target
from tilewright.compiler import Site
from tilewright.compiler.report.step import (
    FUSED,
    INDUCTOR,
    LIBRARY,
    Amounts,
    Kind,
    LayerStep,
    Part,
    Step,
)
from tilewright.tools.layers import layer_of, title_of

#: The kinds of parts, as a page calls them.
KIND_NAMES: dict[Kind, str] = {
    FUSED: "fused",
    LIBRARY: "products of a library",
    INDUCTOR: "left to Inductor",
}


@dataclass(frozen=True)
class Segment:
    """A part of a bar. kind: its colour; value: in the bar's unit; share: of the widest bar, in
    percent."""

    kind: str
    name: str
    value: float
    share: float


Bar = tuple[Segment, ...]


@dataclass(frozen=True)
class SiteBars:
    """Of equal sites together. bytes: what they move, and what is spared; time, in microseconds:
    what they take by the model, and what is spared. known: False where sizes are symbols."""

    bytes: Bar
    time: Bar
    known: bool


@dataclass(frozen=True)
class StepRow:
    """A step's total, or equal layers together. bar: its modelled time by kind of part; floor: the
    least time, as a bar of its own."""

    title: str
    count: int
    amounts: Amounts
    bar: Bar
    floor: Segment


@dataclass(frozen=True)
class StepView:
    """A step as the page shows it. present: as in Step."""

    total: StepRow
    layers: tuple[StepRow, ...]
    present: int | None
    symbols: tuple[str, ...]


def site_bars(sites: Sequence[tuple[Site, int]], step: Step) -> list[SiteBars]:
    """The bars of each (site, count), at one scale.

    Spared are the values that leave the graph: computed by parts, each would be written once and
    read again, at the rate of the target's memory.
    """
    rate = get_target(step.target).hbm_bytes_per_s / 1e6
    rows = []
    for site, count in sites:
        part = _part(site, step)
        amounts = part.amounts.times(count) if part is not None else Amounts()
        spared = 2 * site.intermediate_bytes * count
        known = part is not None and not part.symbols
        rows.append((known, (amounts.bytes, spared), (amounts.modelled_us, spared / rate)))
    most_bytes = max((sum(moved) for _, moved, _ in rows), default=0)
    most_time = max((sum(took) for _, _, took in rows), default=0)
    return [
        SiteBars(_two(moved, most_bytes), _two(took, most_time), known)
        for known, moved, took in rows
    ]


def _part(site: Site, step: Step) -> Part | None:
    """Its part in the step, or its like in an equal layer."""
    layer = layer_of(site.scope)
    alike = [
        part
        for one in step.layers
        if layer in one.scopes
        for part in one.parts
        if (part.kind, part.name) == (FUSED, site.pattern)
    ]
    return next((part for part in alike if part.node == site.node), next(iter(alike), None))


def _two(values: tuple[float, float], most: float) -> Bar:
    return (
        _segment("takes", "moved or taken", values[0], most),
        _segment("saved", "spared", values[1], most),
    )


def _segment(kind: str, name: str, value: float, most: float) -> Segment:
    return Segment(kind, name, value, 100 * value / most if most else 0.0)


def step_view(step: Step) -> StepView:
    """The bars of a step and of its layers; those of the layers at a scale of their own."""
    layers = sorted(step.layers, key=lambda layer: -len(layer.scopes) * layer.total.modelled_us)
    most = max((len(x.scopes) * _widest(x.total) for x in layers), default=0.0)
    return StepView(
        _row("whole step", 1, step, _widest(step.total)),
        tuple(_row(title_of(layer.scopes), len(layer.scopes), layer, most) for layer in layers),
        step.present,
        step.symbols,
    )


def _widest(amounts: Amounts) -> float:
    return max(amounts.modelled_us, amounts.floor_us)


def _row(title: str, count: int, of: Step | LayerStep, most: float) -> StepRow:
    total = of.total.times(count)
    bar = tuple(
        _segment(kind, name, of.of(kind).times(count).modelled_us, most)
        for kind, name in KIND_NAMES.items()
    )
    return StepRow(title, count, total, bar, _segment("floor", "floor", total.floor_us, most))
