"""Draws a roofline plot: the FLOPs and bytes of each fused site against the target's limits."""

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
    """The work of a site.

    flops: the FLOPs of the matrix products that the site replaces.
    bytes: the bytes that are read and written, as `Amounts` counts them, with full caches.
    rate: the target's FLOP/s for the dtype of the activation.
    """

    flops: int
    bytes: int
    rate: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    def bound_us(self, target: Target) -> float:
        """Returns the shortest time that the target needs, in microseconds."""
        return 1e6 * max(self.flops / self.rate, self.bytes / target.hbm_bytes_per_s)


def site_work(graph: GraphReport, site: Site, unit: Unit, target: Target) -> Work | None:
    """Returns the work of a site, which is `unit` of the rewritten graph. Returns None if a size is
    a symbol, or if the site multiplies no matrices."""
    replaced = frozenset(site.absorbed)
    flops = sum(flops_of(node) for node in graph.before.graph.nodes if node.name in replaced)
    if not flops or unit.symbols:
        return None
    return Work(flops, amounts_of(unit, target, FULL).bytes, unit.flop_rate)


@dataclass(frozen=True)
class Point:
    """A site in the plot.

    label: the name of the site.
    link: the target of its hyperlink.
    launches: the number of its kernels.
    apart_bytes: the additional bytes that the operations of the site would move if each operation
        were computed by itself.
    """

    label: str
    link: str
    work: Work
    launches: int
    apart_bytes: int

    def at(self, target: Target, more_bytes: int = 0) -> tuple[float, float]:
        """Returns (FLOP per byte, FLOP/s) of the site. The rate is for the shortest time of the
        site plus the time to launch its kernels. `more_bytes` is added to the bytes of the site."""
        work = replace(self.work, bytes=self.work.bytes + more_bytes)
        seconds = 1e-6 * work.bound_us(target) + self.launches * target.launch_s
        return work.intensity, work.flops / seconds


#: LEFT, TOP, RIGHT and BOTTOM are the edges of the plot. WIDTH and HEIGHT are the size of the whole
#: image. LABEL_SPACE is the smallest distance between two labels. All of them are in pixels.
LEFT, TOP, RIGHT, BOTTOM, WIDTH, HEIGHT, LABEL_SPACE = 62, 24, 640, 480, 960, 530, 19


def chart(points: Sequence[Point], target: Target) -> str:
    """Returns the roofline of the target as an SVG element.

    Both axes are logarithmic. Each site is drawn at the highest FLOP/s that it can reach, including
    launch times. Labels stand in a column beside the plot, where they do not overlap.
    """
    bandwidth = target.hbm_bytes_per_s
    rates = sorted({point.work.rate for point in points})
    # A site with a higher point has a higher label.
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


#: The choices of the leading digits of ticks. The first choice gives the fewest ticks, the last
#: choice the most.
ROUND = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(n / 10 for n in range(10, 100, 2)))


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis between two pixel positions."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """Returns the shortest axis of whole decades that contains all values."""
        ends = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(10.0 ** ends[0], 10.0 ** max(ends[1], ends[0] + 1), first, last)

    @classmethod
    def around(cls, values: Sequence[float], first: float, last: float) -> Axis:
        """Returns an axis that contains all values, with a margin on both sides."""
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
        """Returns round numbers on the axis. There are at least three, unless no choice in `ROUND`
        gives so many."""
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
        found: list[float] = []
        for digits in ROUND:
            values = (float(f"{digit}e{exponent}") for exponent in exponents for digit in digits)
            found = [value for value in values if self.low <= value <= self.high]
            if len(found) >= 3:
                break
        return found


def spread(wanted: Sequence[float], space: float, low: float, high: float) -> list[float]:
    """Returns positions near the wanted ones, in the same order. They are at least `space` apart
    and lie between `low` and `high`. If they do not fit, they go on beyond `high`."""
    placed: list[float] = []
    for value in wanted:
        placed.append(max(value, placed[-1] + space if placed else low))
    for i in reversed(range(len(placed))):  # pushes positions back, from the last to the first
        limit = placed[i + 1] - space if i + 1 < len(placed) else high
        placed[i] = max(min(placed[i], limit), low + i * space)
    return placed
