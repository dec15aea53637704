"""Plots the time of a step against its batch size as SVG, for each chip, with error bars."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilewright.tools.report.roofline import Axis, spread
from tilewright.tools.report.templates import template
from tilewright.tools.step.batches import BatchRow

#: LEFT, TOP, RIGHT and BOTTOM are the edges of the plot. WIDTH and HEIGHT are the size of the whole
#: image. All of them are in pixels.
LEFT, TOP, RIGHT, BOTTOM, WIDTH, HEIGHT = 62, 34, 620, 340, 720, 390
#: LABEL_SPACE is the smallest distance between two labels, in pixels. TICK_SPACE is the smallest
#: distance between two ticks.
LABEL_SPACE, TICK_SPACE = 17, 30
#: The largest distance between the points of neighbouring chips at one batch size, in pixels. The
#: points are drawn side by side, so that their error bars do not cover each other.
ASIDE = 10
#: The number of line styles in `report.css`.
LOOKS = 4


@dataclass(frozen=True)
class Line:
    """The steps of one chip, sorted by batch size.

    look: the number that selects the style of the line.
    aside: the distance, in pixels, by which the points lie to the right of the tick of their batch
        size.
    """

    target: str
    look: int
    aside: float
    rows: Sequence[BatchRow]


def batch_plot(rows: Sequence[BatchRow]) -> str:
    """Returns the plot as an SVG element.

    Both axes are logarithmic. Each chip has a line, each modelled time an error bar, and each floor
    a hollow point. Rows whose modelled time is 0 are left out.
    """
    shown = [row for row in rows if row.modelled_us > 0]
    if not shown:
        return ""
    times = [t for row in shown for t in (row.modelled_us, *row.ends, row.floor_us) if t > 0]
    x = Axis.around([row.batch for row in shown], LEFT, RIGHT)
    y = Axis.around(times, BOTTOM, TOP)
    batches = _apart({row.batch for row in shown}, x)
    lines = _lines(shown, [x.at(batch) for batch in batches])
    # The higher a line ends, the higher its label.
    lines.sort(key=lambda line: -line.rows[-1].modelled_us)
    ends = [y.at(line.rows[-1].modelled_us) for line in lines]
    return template("batches.svg.j2").render(
        width=WIDTH,
        height=HEIGHT,
        x=x,
        y=y,
        batches=batches,
        lines=list(zip(lines, spread(ends, LABEL_SPACE, TOP, BOTTOM), strict=True)),
    )


def _lines(rows: Sequence[BatchRow], ticks: Sequence[float]) -> list[Line]:
    names = list(dict.fromkeys(row.target for row in rows))
    # The points of a batch size stand nearer to the tick of that size than to any other tick.
    nearest = min((b - a for a, b in pairwise(ticks)), default=math.inf)
    aside = min(ASIDE, 0.6 * nearest / len(names))
    return [
        Line(
            name,
            number % LOOKS,
            aside * (number - (len(names) - 1) / 2),
            sorted((row for row in rows if row.target == name), key=lambda row: row.batch),
        )
        for number, name in enumerate(names)
    ]


def _apart(batches: Collection[int], axis: Axis) -> list[int]:
    """Returns the sorted batches, without those whose tick is too close to the tick before it."""
    kept: list[int] = []
    for batch in sorted(batches):
        if not kept or axis.at(batch) - axis.at(kept[-1]) >= TICK_SPACE:
            kept.append(batch)
    return kept
