"""Describes what patterns without a match look for. `inspect` says what each pattern looks for, and
which operations of the graph come nearest to it. With `--at`, `inspect` gives the answer of each
pattern about one module."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import fx

from tilewright.compiler import GraphReport, Lowered, Site
from tilewright.compiler.dataflow.build import build_view
from tilewright.compiler.report import miss_dict, site_dict
from tilewright.compiler.report.census import Point
from tilewright.patterns.dataflow import Value, scope_of
from tilewright.patterns.language import Miss, Sought, registered, sought_by


def nearest_lines(lowered: Lowered) -> Iterator[str]:
    """Yields a line for each kind of operation that patterns look for, with the operations of that
    kind in the graphs."""
    values = [value for graph in lowered.graphs for value in _values(graph)]
    for sought in dict.fromkeys(sought_by(pattern) for pattern in registered()):
        if sought.what:
            yield f"{sought.what}: {_seen(_near(values, sought))}"


def _values(graph: GraphReport) -> Sequence[Value]:
    return build_view(graph.before.graph).values


def _near(values: Iterable[Value], sought: Sought) -> list[Value]:
    return [value for value in values if value.op in sought.near]


def _seen(values: list[Value]) -> str:
    if not values:
        return "nothing like it"
    counts = Counter(value.op for value in values)
    listed = ", ".join(f"{name.removeprefix('aten.')} x{n}" for name, n in counts.items())
    first = values[0]
    place = scope_of(first.node) or "the top level"
    source = f" ({first.source})" if first.source else ""
    return f"only {listed}, the first in {place}{source}"


# --- one module -----------------------------------------------------------------------------------


class NoSuchModuleError(ValueError):
    """Raised if no operation of the graphs is in the requested module."""


@dataclass(frozen=True)
class Said:
    """The answer of one pattern about a module: its matches and misses there. If the pattern has
    neither, `nearest` holds the values that come nearest to its anchor."""

    pattern: str
    sought: Sought
    matches: tuple[Site, ...]
    misses: tuple[Miss, ...]
    nearest: tuple[Value, ...]

    @property
    def line(self) -> str:
        """Describes the nearest values in words."""
        return _seen(list(self.nearest))

    def as_dict(self) -> dict[str, Any]:
        """Returns the object as JSON-ready data."""
        nearest = [
            {"op": v.op, "node": v.node.name, "scope": v.scope, "source": v.source}
            for v in self.nearest
        ]
        return {
            "pattern": self.pattern,
            "looks_for": self.sought.what,
            "matches": [site_dict(site) for site in self.matches],
            "misses": [miss_dict(miss) for miss in self.misses],
            "nearest": nearest,
        }


@dataclass(frozen=True)
class Module:
    """The part of a lowered model that lies in the modules that `path` matches, and in their
    submodules.

    `path` is a module path with the wildcards of fnmatch. Raises NoSuchModuleError, which names
    modules that exist.
    """

    lowered: Lowered
    path: str

    def __post_init__(self) -> None:
        scopes = {scope_of(node) for graph in self.lowered.graphs for node in _nodes(graph)}
        if not any(map(self.holds, scopes)):
            close = difflib.get_close_matches(self.path, sorted(scopes), n=3, cutoff=0.0)
            raise NoSuchModuleError(
                f"no operation of the graphs is in a module {self.path!r}; there are, for example, "
                + ", ".join(scope or "the top level" for scope in close)
            )

    def holds(self, scope: str) -> bool:
        """Whether a module path belongs to this part."""
        paths = (self.path, f"{self.path}.*")
        return any(fnmatch.fnmatchcase(scope, path) for path in paths)

    @cached_property
    def said(self) -> tuple[Said, ...]:
        """Returns the answer of each registered pattern, in the order in which the compiler tries
        the patterns."""
        values = [v for graph in self.lowered.graphs for v in _values(graph) if self.holds(v.scope)]
        found = []
        for pattern in registered():
            matches = tuple(site for site in self._sites() if site.pattern == pattern.name)
            misses = tuple(m for m in self.lowered.misses if self._tells(m, pattern.name))
            sought = sought_by(pattern)
            nearest = () if matches or misses else tuple(_near(values, sought))
            found.append(Said(pattern.name, sought, matches, misses, nearest))
        return tuple(found)

    @property
    def points(self) -> tuple[Point, ...]:
        """Returns the census points of this part."""
        return tuple(p for p in self.lowered.census.points if self.holds(p.scope))

    def _sites(self) -> Iterator[Site]:
        for graph in self.lowered.graphs:
            inside = {node.name for node in _nodes(graph) if self.holds(scope_of(node))}
            yield from (site for site in graph.matches if not inside.isdisjoint(site.absorbed))

    def _tells(self, miss: Miss, pattern: str) -> bool:
        nodes = dict.fromkeys((*miss.nodes, *miss.covers))
        return miss.pattern == pattern and any(self.holds(scope_of(node)) for node in nodes)

    def as_dict(self) -> dict[str, Any]:
        """Returns the object as JSON-ready data."""
        return {
            "module": self.path,
            "patterns": [said.as_dict() for said in self.said],
            "points": [asdict(point) for point in self.points],
        }


def _nodes(graph: GraphReport) -> list[fx.Node]:
    inputs = ("placeholder", "get_attr", "output")
    return [node for node in graph.before.graph.nodes if node.op not in inputs]
