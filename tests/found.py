"""Selects the matches and misses of a report by pattern, so that a test ignores all other
patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from tilewright.compiler import reports, tilewright
from tilewright.compiler.report.census import Census, Point
from tilewright.patterns import language


def matches_of(report: Any, *names: str) -> list:
    """Returns the matches of a report by the named patterns. The report is `reports()[-1]` or the
    result of `lower`.

    `names` are names of patterns, of families or of ops. A family is a folder of `patterns/`, and
    "qkv", for example, stands for all patterns in it. An op such as "fused_moe" stands for all
    patterns that insert it.
    """
    patterns = patterns_of(*names)
    return [site for site in report.matches if site.pattern in patterns]


def patterns_in(report: Any, *names: str) -> list[str]:
    """Returns the pattern of each match by the named patterns."""
    return [site.pattern for site in matches_of(report, *names)]


def misses_of(report: Any, *names: str) -> list:
    """Returns the misses by the named patterns or families; "capture" stands for graph breaks."""
    patterns = patterns_of(*names)
    return [miss for miss in report.misses if miss.pattern in patterns]


def codes_of(report: Any, *names: str) -> set[str]:
    """Returns the codes of the misses by the named patterns."""
    return {miss.code for miss in misses_of(report, *names)}


def patterns_of(*names: str) -> set[str]:
    """Returns the patterns of families and of ops. Any other name is taken as the name of a
    pattern."""
    families: dict[str, set[str]] = {}
    ops: dict[str, set[str]] = {}
    for pattern in language.registered():
        ops.setdefault(pattern.op, set()).add(pattern.name)
        _, layer, family, *_ = (*type(pattern).__module__.split("."), "", "")
        if layer == "patterns":
            families.setdefault(family, set()).add(pattern.name)
    own = {pattern.name: {pattern.name} for pattern in language.registered()}
    known = ops | own | families
    return set().union(*(known.get(name, {name}) for name in names))


def counting(points: list[Point]) -> Callable[..., Any]:
    """Returns tilewright's backend, extended so that it adds the census of each graph to
    `points`."""

    def backend(gm: fx.GraphModule, inputs: Any, **given: Any) -> Callable[..., Any]:
        compiled = tilewright(gm, inputs, **given)
        points.extend(reports()[-1].points)
        return compiled

    return backend


def assert_accounted(points: list[Point]) -> None:
    """Asserts that every point of a census has a match, a miss, or a reason why it is of no
    interest."""
    assert points
    assert Census(tuple(points)).unaccounted == ()
