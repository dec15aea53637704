"""Renders the census of a model, and the answers of the patterns about one module, for a
terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.compiler.report.census import ACCOUNTS, Census, Point
from tilewright.compiler.scopes import collapse_scope
from tilewright.tools.report.looked_for import Module, Said

_STYLES = {"match": "green", "miss": "yellow", "no interest": "dim", "unaccounted": "red"}


def render_census(name: str, census: Census) -> Group:
    """Renders the number of points for each kind and account, followed by the places of the
    unaccounted points."""
    count = len(census.points)
    title = Text(f"{name}: {count} points", style="bold")
    parts: list[RenderableType] = [title, _table(census.points)]
    left = len(census.unaccounted)
    parts.append(Text(f"{left} unaccounted", style="red" if left else "green"))
    parts += _places(census.unaccounted)
    return Group(*parts)


def _table(points: Sequence[Point]) -> Table:
    counts = Counter((p.kind, p.account, p.why) for p in points)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("kind", "account", "points"):
        table.add_column(name, no_wrap=True, justify="right" if name == "points" else "left")
    table.add_column("pattern, code or reason", overflow="fold")
    order = {account: at for at, account in enumerate(ACCOUNTS)}
    for kind, account, why in sorted(counts, key=lambda key: (key[0], order[key[1]], key[2])):
        shown = Text(account, style=_STYLES[account])
        table.add_row(kind, shown, str(counts[kind, account, why]), why)
    return table


def _places(points: Sequence[Point]) -> Iterator[Text]:
    """Yields a line for each place. The same place in several layers is one line with a count."""
    counts = Counter((p.kind, p.op, collapse_scope(p.scope), p.source) for p in points)
    for (kind, op, scope, source), count in counts.items():
        times = f" x{count}" if count > 1 else ""
        yield Text(f"  {scope or 'graph'}{times}  {kind} {op}  {source}")


def render_module(module: Module) -> Group:
    """Renders the answer of each pattern about a module, followed by the points in the module."""
    parts: list[RenderableType] = [Text(module.path, style="bold")]
    for said in module.said:
        parts += _said(said)
    parts += [Text("\nPoints", style="bold")]
    for point in module.points:
        shown = Text(f"  {point.scope or 'graph'}  {point.kind} {point.op}  {point.source}  ")
        parts.append(shown.append(point.account, style=_STYLES[point.account]))
        if point.why:
            shown.append(f": {point.why}")
    return Group(*parts)


def _said(said: Said) -> Iterator[Text]:
    yield Text(f"\n{said.pattern}", style="bold cyan")
    for site in said.matches:
        yield Text(f"  match at {site.scope or 'the top level'} ({site.source})", style="green")
    for miss in said.misses:
        yield Text(f"  missed: {miss}", style="yellow")
    if not said.matches and not said.misses:
        yield Text(f"  no anchor. It looks for {said.sought.what or 'its own kind'}: {said.line}")
