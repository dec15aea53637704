"""What a report says of the patterns that a test is about; of others it may say what it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from tilewright.compiler import reports, tilewright
from tilewright.compiler.report.census import Census, Point
from tilewright.patterns import language


def matches_of(report: Any, *names: str) -> list:
    """The matches of a report (`reports()[-1]`, or what `lower` gives) by the patterns named.

    names: patterns, families, which are folders of `patterns/`: "qkv" for all patterns in it, or
    ops: "fused_moe" for all patterns that put it in place.
    """
    patterns = patterns_of(*names)
    return [site for site in report.matches if site.pattern in patterns]


def patterns_in(report: Any, *names: str) -> list[str]:
    """The pattern of each of these matches."""
    return [site.pattern for site in matches_of(report, *names)]


def misses_of(report: Any, *names: str) -> list:
    """The misses by the patterns named, or in families; "capture" for what Dynamo did not see."""
    patterns = patterns_of(*names)
    return [miss for miss in report.misses if miss.pattern in patterns]


def codes_of(report: Any, *names: str) -> set[str]:
    """The codes of these misses."""
    return {miss.code for miss in misses_of(report, *names)}


def patterns_of(*names: str) -> set[str]:
    """The patterns of some families, or for some ops; what names neither is a pattern."""
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
    """tilewright's backend, which also adds the census of each graph to `points`."""

    def backend(gm: fx.GraphModule, inputs: Any, **given: Any) -> Callable[..., Any]:
        compiled = tilewright(gm, inputs, **given)
        points.extend(reports()[-1].points)
        return compiled

    return backend


def assert_accounted(points: list[Point]) -> None:
    """Every point of a census has a match, a miss or a reason why it is of no interest."""
    assert points
    assert Census(tuple(points)).unaccounted == ()
