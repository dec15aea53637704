"""The time of a step by its batch, on each chip, with error bars: a plot as SVG."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilewright.tools.report.roofline import Axis, spread
from tilewright.tools.report.templates import template
from tilewright.tools.step.batches import BatchRow

#: Pixels of the plot's edges and of the whole.
LEFT, TOP, RIGHT, BOTTOM, WIDTH, HEIGHT = 62, 34, 620, 340, 720, 390
#: The least pixels from label to label and from tick to tick; the most between the points of two
#: chips at one batch, which stand side by side so that no bar covers another.
LABEL_SPACE, TICK_SPACE, ASIDE = 17, 30, 10
#: Looks of lines that `report.css` tells apart.
LOOKS = 4


@dataclass(frozen=True)
class Line:
    """The steps of one chip, by batch. look: of its points and its line. aside: pixels to the right
    of their batch, at which its points stand."""

    target: str
    look: int
    aside: float
    rows: Sequence[BatchRow]


def batch_plot(rows: Sequence[BatchRow]) -> str:
    """The plot as an SVG element: both axes logarithmic; a line for each chip, the range of each
    modelled time as a bar, the floor as a hollow point. Rows that take no time are left out."""
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
    # The points of a batch stand nearer to its tick than to the next one.
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
    """The batches whose ticks do not touch the one before."""
    kept: list[int] = []
    for batch in sorted(batches):
        if not kept or axis.at(batch) - axis.at(kept[-1]) >= TICK_SPACE:
            kept.append(batch)
    return kept
