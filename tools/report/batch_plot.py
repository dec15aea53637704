"""Plots the time of a step against its batch size, for each chip, with error bars, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.tools.report.roofline import Axis
from tilewright.tools.report.templates import template
from tilewright.tools.step.batches import BatchRow

#: The plot's edges, and the size of the whole image, in pixels.
LEFT, TOP, RIGHT, BOTTOM, WIDTH, HEIGHT = 62, 24, 560, 320, 760, 370


@dataclass(frozen=True)
class Line:
    """The steps of one chip, sorted by batch size. number: selects the line's style."""

    target: str
    number: int
    rows: Sequence[BatchRow]


def batch_plot(rows: Sequence[BatchRow]) -> str:
    """Returns the plot as an SVG element.

    Both axes are logarithmic. Each chip has a line, each modelled time an error bar, and each floor
    a hollow point. Rows whose modelled time is 0 are left out.
    """
    shown = [row for row in rows if row.modelled_us > 0]
    if not shown:
        return ""
    names = dict.fromkeys(row.target for row in shown)
    lines = [
        Line(name, number, sorted((r for r in shown if r.target == name), key=lambda r: r.batch))
        for number, name in enumerate(names)
    ]
    times = [t for row in shown for t in (*row.ends, row.floor_us) if t > 0]
    return template("batches.svg.j2").render(
        width=WIDTH,
        height=HEIGHT,
        x=Axis.over([row.batch for row in shown], LEFT, RIGHT),
        y=Axis.over(times, BOTTOM, TOP),
        lines=lines,
    )
