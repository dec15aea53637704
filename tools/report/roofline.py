"""FLOPs and bytes of a fused site beside the target's limits: the roofline plot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from tilewright.codegen.targets import Target
from tilewright.compiler import GraphReport, Site, _compat
from tilewright.compiler.report.work import flop_rate, flops_of, share_of_experts
from tilewright.ops.contract import get_op


@dataclass(frozen=True)
class Work:
    """What a site computes, and the bytes it reads and writes.

    flops: of the matrix products it replaces. bytes: every operand read once and every result
    written once, but caches, of which a step writes little; of a mixture only as many experts as
    tokens reach that are spread evenly. rate: the target's FLOP/s for the activation's dtype.
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


def site_work(graph: GraphReport, site: Site, target: Target) -> Work | None:
    """The work of one site; None where a size is a symbol or nothing is multiplied."""
    after = {node.name: node for node in graph.after.graph.nodes}
    before = {node.name: node for node in graph.before.graph.nodes}
    node = after.get(site.node)
    absorbed = [before[name] for name in site.absorbed if name in before]
    flops = sum(map(flops_of, absorbed))
    if node is None or not flops:
        return None
    op = get_op(node.meta["tilewright"]["op"])
    names = [argument.name for argument in op.torch_op._schema.arguments]
    given = zip(names, node.args, strict=False)
    written = {argument for name, argument in given if name in op.mutated}
    read = [n for n in node.all_input_nodes if n not in written]
    tensors = _compat.tensors_of(*read, node)
    share = share_of_experts(site)
    sizes = [t.numel() * t.element_size() * (share if t.dim() == 3 else 1) for t in tensors]
    if not all(isinstance(size, (int, float)) for size in sizes):
        return None
    return Work(flops, int(sum(sizes)), flop_rate(tensors, target))


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
    whole = {point: point.at(target) for point in points}
    apart = {point: point.at(target, point.apart_bytes) for point in points}
    seen = [*whole.values(), *apart.values()]
    x = _Axis.over([flops_per_byte for flops_per_byte, _ in seen] + [3 * rates[-1] / bandwidth],
                   LEFT, RIGHT)  # fmt: skip
    y = _Axis.over([rate for _, rate in seen] + [1.5 * rates[-1]], BOTTOM, TOP)
    height = max(HEIGHT, TOP + LABEL_SPACE * (len(points) + 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="group" '
        f'aria-label="Roofline of {escape(target.name)}">',
        *_grid(x, y),
        *_roofs(x, y, bandwidth, rates),
    ]
    # The higher a point, the higher its label.
    ordered = sorted(points, key=lambda p: -whole[p][1])
    places = [(x.at(whole[p][0]), y.at(whole[p][1])) for p in ordered]
    labels = spread([py for _, py in places], LABEL_SPACE, TOP + 6, height - 12)
    for point, (px, py), label_y in zip(ordered, places, labels, strict=True):
        ax, ay = x.at(apart[point][0]), y.at(apart[point][1])
        lead = [(px, py), (RIGHT + 8, label_y), (RIGHT + 16, label_y)]
        intensity = point.work.intensity
        said = f"{point.label}: {intensity:{'.0f' if intensity >= 100 else '.3g'}} FLOP/B"
        parts += [
            f'<polyline class="lead" points="{_corners(lead)}"/>',
            f'<polyline class="shift" points="{_corners([(ax, ay), (px, py)])}"/>',
            f'<circle class="from" cx="{ax:.1f}" cy="{ay:.1f}" r="4.5"/>',
            f'<circle class="to" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>',
            f'<a href="{escape(point.link)}">{_text(RIGHT + 20, label_y + 4, said)}</a>',
        ]
    return "".join([*parts, "</svg>"])


def _roofs(x: _Axis, y: _Axis, bandwidth: float, rates: Sequence[float]) -> Iterator[str]:
    """What memory allows, up to what each rate of products does."""
    start = max(x.low, y.low / bandwidth)
    for rate in rates:
        ends = [(start, start * bandwidth), (rate / bandwidth, rate), (x.high, rate)]
        yield f'<polyline class="roof" points="{_corners([(x.at(i), y.at(r)) for i, r in ends])}"/>'
        yield _text(RIGHT - 4, y.at(rate) - 6, f"{rate / 1e12:.0f} TFLOP/s", "end")
    rate = math.sqrt(start * bandwidth * rates[0])  # half way up
    place = x.at(rate / bandwidth) - 8, y.at(rate) - 6
    yield _text(*place, f"{bandwidth / 1e12:.1f} TB/s", "end")


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis of whole decades, drawn from one pixel to another."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def over(cls, values: Sequence[float], first: float, last: float) -> _Axis:
        ends = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(10.0 ** ends[0], 10.0 ** max(ends[1], ends[0] + 1), first, last)

    def at(self, value: float) -> float:
        share = math.log10(value / self.low) / math.log10(self.high / self.low)
        return self.first + share * (self.last - self.first)

    def decades(self) -> list[float]:
        count = round(math.log10(self.high / self.low))
        return [self.low * 10.0**i for i in range(count + 1)]


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


def _grid(x: _Axis, y: _Axis) -> Iterator[str]:
    for value in x.decades():
        px = x.at(value)
        yield f'<path class="grid" d="M{px:.1f} {TOP}V{BOTTOM}"/>'
        yield _text(px, BOTTOM + 17, f"{value:g}", "middle", "tick")
    for value in y.decades():
        py = y.at(value)
        yield f'<path class="grid" d="M{LEFT} {py:.1f}H{RIGHT}"/>'
        yield _text(LEFT - 6, py + 4, f"{value / 1e12:g}", "end", "tick")
    yield _text((LEFT + RIGHT) / 2, BOTTOM + 38, "FLOP per byte", "middle", "tick")
    yield _text(4, TOP - 10, "TFLOP/s", "start", "tick")


def _text(x: float, y: float, text: str, anchor: str = "start", css_class: str = "") -> str:
    kind = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _corners(corners: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
