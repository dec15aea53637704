"""FLOPs and bytes of a fused site beside the target's limits: the roofline plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright.codegen.targets import Target
from tilewright.compiler import GraphReport, Site
from tilewright.compiler.report.step import FULL, amounts_of
from tilewright.compiler.report.traffic import Unit
from tilewright.compiler.report.work import flops_of
from tilewright.tools.report.templates import template


@dataclass(frozen=True)
class Work:
    """The work of a site, and the bytes it reads and writes.

    flops: of the matrix products it replaces. bytes: as `Amounts` counts them, of full caches.
    rate: the target's FLOP/s for the activation's dtype.
    """

    flops: int
    bytes: int
    rate: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def bound_us(self, target: Target) -> float:
        """The least time the target needs, in microseconds."""
        return 1e6 * max(self.flops / self.rate, self.bytes / target.hbm_bytes_per_s)


def site_work(graph: GraphReport, site: Site, unit: Unit, target: Target) -> Work | None:
    """The work of one site, `unit` of the rewritten graph; None where a size is a symbol or nothing
    is multiplied."""
    replaced = frozenset(site.absorbed)
    flops = sum(flops_of(node) for node in graph.before.graph.nodes if node.name in replaced)
    if not flops or unit.symbols:
        return None
    return Work(flops, amounts_of(unit, target, FULL).bytes, unit.flop_rate)


@dataclass(frozen=True)
class Point:
    """A site under the roof. label: its name; link: where it leads. launches: of its kernels.
    apart_bytes: what its parts would move besides, were each computed by itself."""

    label: str
    link: str
    work: Work
    launches: int
    apart_bytes: int

    def at(self, target: Target, more_bytes: int = 0) -> tuple[float, float]:
        """(FLOP per byte, FLOP/s) of the least time and the start of each kernel."""
        work = replace(self.work, bytes=self.work.bytes + more_bytes)
        seconds = 1e-6 * work.bound_us(target) + self.launches * target.launch_s
        return work.intensity, work.flops / seconds


#: Pixels of the chart: the plot's edges, the whole's size, the least distance of two labels.
LEFT, TOP, RIGHT, BOTTOM, WIDTH, HEIGHT, LABEL_SPACE = 62, 24, 640, 480, 960, 530, 19


def chart(points: Sequence[Point], target: Target) -> str:
    """The roofline of the target as an SVG element: both axes logarithmic, each site at what it
    reaches at best when its kernels have to be started, labels in a column beside the plot, where
    none covers another."""
    bandwidth = target.hbm_bytes_per_s
    rates = sorted({point.work.rate for point in points})
    # The higher a point, the higher its label.
    ordered = sorted(points, key=lambda point: -point.at(target)[1])
    reached = [point.at(target) for point in ordered]
    seen = [*reached, *(point.at(target, point.apart_bytes) for point in points)]
    x = Axis.over([i for i, _ in seen] + [3 * rates[-1] / bandwidth], LEFT, RIGHT)
    y = Axis.over([rate for _, rate in seen] + [1.5 * rates[-1]], BOTTOM, TOP)
    height = max(HEIGHT, TOP + LABEL_SPACE * (len(points) + 1))
    labels = spread([y.at(rate) for _, rate in reached], LABEL_SPACE, TOP + 6, height - 12)
    return template("roofline.svg.j2").render(
        target=target,
        width=WIDTH,
        height=height,
        x=x,
        y=y,
        rates=rates,
        start=max(x.low, y.low / bandwidth),
        labelled=list(zip(ordered, labels, strict=True)),
    )


#: First digits of the ticks of an axis, from few to many.
ROUND = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(n / 10 for n in range(10, 100, 2)))


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis, drawn from one pixel to another."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """An axis of whole decades."""
        ends = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(10.0 ** ends[0], 10.0 ** max(ends[1], ends[0] + 1), first, last)

    @classmethod
    def around(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """An axis with some room on both sides of the values, for points that lie side by side."""
        low, high = min(values), max(values)
        room = max((high / low) ** 0.1, 1.1)
        return cls(low / room, high * room, first, last)

    def at(self, value: float) -> float:
        share = math.log10(value / self.low) / math.log10(self.high / self.low)
        return self.first + share * (self.last - self.first)

    def decades(self) -> list[float]:
        count = round(math.log10(self.high / self.low))
        return [self.low * 10.0**i for i in range(count + 1)]

    def ticks(self) -> list[float]:
        """Round numbers on the axis, the fewest that are at least three."""
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
        found: list[float] = []
        for digits in ROUND:
            values = (float(f"{digit}e{exponent}") for exponent in exponents for digit in digits)
            found = [value for value in values if self.low <= value <= self.high]
            if len(found) >= 3:
                break
        return found


def spread(wanted: Sequence[float], space: float, low: float, high: float) -> list[float]:
    """Places as near as may be to those wanted, in their order, `space` apart and between `low` and
    `high`; where there is no room for that, they go on behind `high`."""
    placed: list[float] = []
    for value in wanted:
        placed.append(max(value, placed[-1] + space if placed else low))
    for i in reversed(range(len(placed))):  # back up from the end
        limit = placed[i + 1] - space if i + 1 < len(placed) else high
        placed[i] = max(min(placed[i], limit), low + i * space)
    return placed
