"""Tests the roofline plot: each point is at the place that its work gives, and labels do not cover
each other."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tilewright.codegen.targets import get_target
from tilewright.tools.report.roofline import (
    BOTTOM,
    LABEL_SPACE,
    LEFT,
    RIGHT,
    TOP,
    Point,
    Work,
    chart,
    spread,
)

TARGET = get_target("sm100")
RATE = dict(TARGET.flops)["bf16"]
SVG = "{http://www.w3.org/2000/svg}"


def point(name, flops, size, launches=1, apart=0):
    return Point(name, "#site-1", Work(flops, size, RATE), launches, apart)


def drawn(points):
    return ElementTree.fromstring(chart(points, TARGET))


def circles(svg, kind):
    found = [c for c in svg.iter(f"{SVG}circle") if c.get("class") == kind]
    return [(float(c.get("cx")), float(c.get("cy"))) for c in found]


@pytest.mark.parametrize("count", [1, 6, 40])
def test_labels_of_equal_points_do_not_cover_each_other(count):
    svg = drawn([point(f"site {i}", 2**30, 2**30) for i in range(count)])
    texts = [link.find(f"{SVG}text") for link in svg.iter(f"{SVG}a")]
    heights = sorted(float(text.get("y")) for text in texts)
    assert len(heights) == count
    assert all(b - a >= LABEL_SPACE - 0.11 for a, b in pairwise(heights))
    assert heights[-1] < float(svg.get("viewBox").split()[3])


def test_points_part_by_what_the_start_of_their_kernels_takes_of_them():
    """Points lie below the roof by the share of time that the starts of kernels take. The points
    have equal FLOP per byte and different sizes: the smaller a site is, the further below the roof
    its point is."""
    svg = drawn([point("large", 2**32, 2**32), point("small", 2**22, 2**22, launches=4)])
    (x1, y1), (x2, y2) = circles(svg, "to")
    assert x1 == x2
    assert y2 - y1 > 50


def test_a_point_stands_where_its_work_puts_it():
    """Both axes are logarithmic, with a tick at each decade."""
    work = point("products", 10**13, 10**10)
    svg = drawn([work])
    ((x, y),) = circles(svg, "to")
    ticks = [t for t in svg.iter(f"{SVG}text") if t.get("class") == "tick"]
    across = {float(t.text): float(t.get("x")) for t in ticks if t.get("text-anchor") == "middle"
              and re.fullmatch(r"[\d.e+-]+", t.text)}  # fmt: skip
    low, high = min(across), max(across)
    assert (across[low], across[high]) == (LEFT, RIGHT)
    share = math.log10(1000 / low) / math.log10(high / low)
    assert x == pytest.approx(LEFT + share * (RIGHT - LEFT), abs=0.1)
    assert TOP <= y <= BOTTOM
    seconds = max(10**13 / RATE, 10**10 / TARGET.hbm_bytes_per_s) + TARGET.launch_s
    assert work.at(TARGET) == (1000, pytest.approx(10**13 / seconds))


def test_what_is_spared_moves_a_point_along():
    svg = drawn([point("fused", 2**30, 2**30, apart=2**32)])
    ((ax, ay),), ((x, y),) = circles(svg, "from"), circles(svg, "to")
    assert ax < x
    assert ay > y


def test_names_are_escaped():
    assert "a &lt;b&gt;" in chart([point("a <b>", 1, 1)], TARGET)


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([5, 50], [5, 50]),
        ([20, 20, 20], [20, 30, 40]),
        ([95, 98, 99], [80, 90, 100]),
        ([0, 0, 100, 100], [0, 10, 90, 100]),
        ([50] * 12, [10 * i for i in range(12)]),  # there is no room, so they go on behind the end
    ],
)
def test_labels_are_spread_as_near_as_may_be(wanted, placed):
    assert spread(wanted, 10, 0, 100) == placed
