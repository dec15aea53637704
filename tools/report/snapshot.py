"""Writes the matches and misses of a model as a few lines that a person can review, and compares
two such lists of lines.

Each kind of site has one line. Equal layers share a line, which has their count. The lines have no
names of nodes:

    model.layers.*.self_attn x32  qkv_cache -> fused_qkv_paged  gqa=4 heads=32/8x128 rope=half
    model.layers.* x2  missed qkv_cache  k path, K_PATH (cache_utils.py:486)

Lines of a snapshot file that begin with '#' describe how it was made. They are not compared.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.compiler.scopes import collapse_scope

if TYPE_CHECKING:
    from tilewright.compiler import Lowered

VERSIONED = ("torch", "transformers", "tilewright")
_COUNT = re.compile(r" x(\d+)$")


class SnapshotError(ValueError):
    """Raised for a file that is neither a snapshot nor a report. The message names the file and
    says why."""


@dataclass(frozen=True)
class Line:
    """Equal sites, or equal misses, in one or many layers."""

    scope: str
    count: int
    what: str

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        return f"{self.scope}{times}  {self.what}"

    @classmethod
    def of(cls, text: str) -> Line:
        """Parses a line of a snapshot file. Raises ValueError for any other text."""
        place, gap, what = text.strip().partition("  ")
        if not gap or not what:
            raise ValueError(f"expected 'place  what', got {text!r}")
        count = _COUNT.search(place)
        scope = place[: count.start()] if count else place
        return cls(scope, int(count[1]) if count else 1, what)


@dataclass(frozen=True)
class Change:
    """A line that differs between two lists. `before` and `after` are the numbers of sites for
    which the line stands in each list; 0 means that the line is absent."""

    scope: str
    what: str
    before: int
    after: int

    def __str__(self) -> str:
        sign = "-" if self.after < self.before else "+"
        return f"{sign} {self.scope}  {self.what}  ({self.before} -> {self.after})"


def snapshot_lines(report: Lowered | Mapping[str, Any]) -> tuple[Line, ...]:
    """Returns the sorted lines of a report. The report may be data that was loaded from JSON.
    Raises SnapshotError."""
    data = report if isinstance(report, Mapping) else report.as_dict()
    counts: Counter[tuple[str, str]] = Counter()
    try:
        for site in data["matches"]:
            facts = " ".join(f"{key}={value}" for key, value in site["shapes"].items())
            what = f"{site['pattern']} -> {site['op']}  {facts}"
            counts[collapse_scope(site["scope"]) or "graph", what.strip()] += 1
        for miss in data["misses"]:
            place = f" ({_stable_source(miss['source'])})" if miss["source"] else ""
            what = f"missed {miss['pattern']}  {miss['stage']}, {miss['code']}{place}"
            counts[collapse_scope(miss["scope"]) or "graph", what] += miss["count"]
    except KeyError as error:
        raise SnapshotError(f"not a report of tilewright: it lacks {error}") from error
    except (TypeError, AttributeError) as error:
        raise SnapshotError(f"not a report of tilewright: {error!r}") from error
    return tuple(Line(scope, n, what) for (scope, what), n in sorted(counts.items()))


def _stable_source(source: str) -> str:
    """Returns a source location without its line number, because the number changes with every edit
    above it."""
    return source.rpartition(":")[0] or source


def snapshot_text(lines: Iterable[Line]) -> str:
    """Returns the text of a snapshot file."""
    versions = ", ".join(_version(name) for name in VERSIONED)
    body = [str(line) for line in lines] or ["graph  nothing fused, nothing missed"]
    return "\n".join([f"# {versions}", *body]) + "\n"


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


def parse_snapshot(text: str) -> tuple[Line, ...]:
    """Parses a snapshot file. Raises SnapshotError, which names the first bad line."""
    lines = []
    for number, row in enumerate(text.splitlines(), 1):
        if row.startswith("#") or not row.strip():
            continue
        try:
            lines.append(Line.of(row))
        except ValueError as error:
            raise SnapshotError(f"line {number}: {error}") from error
    if not lines:
        raise SnapshotError("it has no lines")
    return tuple(line for line in lines if line.what != "nothing fused, nothing missed")


def read_lines(path: Path) -> tuple[Line, ...]:
    """Returns the lines of a file. The file is a snapshot, a report written by `--json`, or a file
    that the option `report` wrote. A file of the option `report` has one report per line; the sites
    of its reports are added up. Raises SnapshotError."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SnapshotError(f"{path}: {error}") from error
    try:
        if text.lstrip().startswith("{"):
            return _added(snapshot_lines(report) for report in _reports(text))
        return parse_snapshot(text)
    except (SnapshotError, json.JSONDecodeError) as error:
        raise SnapshotError(f"{path}: neither a snapshot nor a report: {error}") from error


def _reports(text: str) -> list[Mapping[str, Any]]:
    """Parses a text that is one report or has one report per line."""
    try:
        found = [json.loads(text)]
    except json.JSONDecodeError:
        rows = [row for row in text.splitlines() if row.strip()]
        if len(rows) < 2:
            raise
        found = [json.loads(row) for row in rows]
    if not all(isinstance(report, Mapping) for report in found):
        raise SnapshotError("a line of it is not a report of tilewright")
    return found


def _added(reports: Iterable[tuple[Line, ...]]) -> tuple[Line, ...]:
    """Merges the lines of several reports and adds up their counts."""
    counts = _counted([line for lines in reports for line in lines])
    return tuple(Line(scope, n, what) for (scope, what), n in sorted(counts.items()))


def compare(before: Sequence[Line], after: Sequence[Line]) -> tuple[Change, ...]:
    """Returns the lines that differ between the two lists. Lost sites come first."""
    old, new = _counted(before), _counted(after)
    changes = [
        Change(scope, what, old[scope, what], new[scope, what])
        for scope, what in sorted(old.keys() | new.keys())
        if old[scope, what] != new[scope, what]
    ]
    return tuple(sorted(changes, key=lambda change: change.after >= change.before))


def _counted(lines: Sequence[Line]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for line in lines:
        counts[line.scope, line.what] += line.count
    return counts
