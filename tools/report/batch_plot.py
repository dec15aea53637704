"""The time of a step by its batch, on each chip, with error bars: a plot as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.tools.report.roofline import Axis
from tilewright.tools.report.templates import template
from tilewright.tools.step.batches import BatchRow

#: Pixels of the plot's edges and of the whole.
LEFT, TOP, RIGHT, BOTTOM, WIDTH, HEIGHT = 62, 24, 560, 320, 760, 370


@dataclass(frozen=True)
class Line:
    """The steps of one chip, by batch. number: of its look."""

    target: str
    number: int
    rows: Sequence[BatchRow]


def batch_plot(rows: Sequence[BatchRow]) -> str:
    """The plot as an SVG element: both axes logarithmic; a line for each chip, the range of each
    modelled time as a bar, the floor as a hollow point. Rows that take no time are left out."""
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
