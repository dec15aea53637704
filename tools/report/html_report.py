"""Renders a report as one self-contained HTML page. The page can be used with the keyboard alone,
has a light mode and a dark mode, and can be printed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from tilewright.codegen.targets import Target, get_target
from tilewright.compiler import GraphReport, Lowered, Site
from tilewright.compiler.report import collapse_misses, collapse_sites, site_kind
from tilewright.compiler.report.savings import savings_of
from tilewright.compiler.report.traffic import Unit, units_of
from tilewright.patterns.dataflow import source_of
from tilewright.patterns.language import CODES
from tilewright.tools.files import write_whole
from tilewright.tools.kernel_audit import KernelAudit
from tilewright.tools.report.batch_plot import batch_plot
from tilewright.tools.report.drawings import Drawing, drawings, numbers_of, replaced
from tilewright.tools.report.miss_guide import miss_guide
from tilewright.tools.report.node_facts import SourceLine, source_lines
from tilewright.tools.report.roofline import Point, Work, chart, site_work
from tilewright.tools.report.step_bars import (
    KIND_NAMES,
    SiteBars,
    site_bars,
    step_view,
    tokens_present,
)
from tilewright.tools.report.templates import template
from tilewright.tools.step.batches import BatchRow, notes_of
from tilewright.tools.step.savings import remarks, said_of, unread_said

#: Pygments styles in which every colour has a contrast of at least 4.5 to 1 with the page's panels.
LIGHT, DARK = "xcode", "lightbulb"


@dataclass(frozen=True)
class SiteEntry:
    """A group of equal fused sites, as the page shows it.

    number: the number of this group of sites on the page.
    source: the line in the model's own code, followed by the line in the library that it calls.
    """

    site: Site
    scope: str
    count: int
    number: int
    work: Work | None
    source: tuple[SourceLine, ...]

    @property
    def anchor(self) -> str:
        """Returns the group's id on the page."""
        return f"site-{self.number}"


def write_html(
    path: Path,
    model: str,
    lowered: Lowered,
    audits: Sequence[KernelAudit] = (),
    present: int | None = None,
    batches: Sequence[BatchRow] = (),
) -> None:
    """Writes the page of a report. Raises OSError if the file cannot be written.

    audits: the audits of the report's kernels; empty if the kernels were not audited.
    present: the number of tokens in the caches of each sequence; None for full caches.
    batches: steps of the model at other batch sizes and on other chips. The page shows them in a
        section.
    """
    write_whole(path, render_html(model, lowered, audits, present, batches))


def render_html(
    model: str,
    lowered: Lowered,
    audits: Sequence[KernelAudit] = (),
    present: int | None = None,
    batches: Sequence[BatchRow] = (),
) -> str:
    """Returns the HTML of a page. The arguments have the meaning that they have in `write_html`."""
    target = get_target(lowered.target)
    units = [units_of(graph, target) for graph in lowered.graphs]
    entries = _site_entries(lowered, units)
    numbers = _numbers(lowered, entries)
    bars = site_bars(lowered, units, numbers, present)
    return template("report.html.j2").render(
        model=model,
        lowered=lowered,
        target=target,
        sites=entries,
        bars=bars,
        kinds=KIND_NAMES,
        step=step_view(lowered, present),
        batches=batches,
        batch_notes=list(notes_of(batches)) if batches else [],
        batch_plot=Markup(batch_plot(batches)),
        savings=savings_of(lowered, tokens_present(present)),
        savings_said=(said_of, remarks, unread_said),
        misses=list(_miss_entries(lowered)),
        drawings=list(_drawings(lowered, numbers)),
        kernels=list(_kernels(lowered, audits)),
        roofline=_roofline(entries, bars, target),
        code_css=Markup(_code_css()),
        nodes=(
            sum(graph.nodes for graph in lowered.graphs),
            sum(graph.nodes_after for graph in lowered.graphs),
        ),
        versions={n: importlib.metadata.version(n) for n in ("tilewright", "torch", "triton")},
    )


def _site_entries(lowered: Lowered, units: Sequence[Sequence[Unit]]) -> list[SiteEntry]:
    target = get_target(lowered.target)
    of_node = [{unit.node: unit for unit in made} for made in units]
    graphs = {id(site): (graph, made.get(site.node))
              for graph, made in zip(lowered.graphs, of_node, strict=True)
              for site in graph.matches}  # fmt: skip
    entries = []
    for number, (site, scope, count) in enumerate(collapse_sites(lowered.matches), 1):
        graph, unit = graphs[id(site)]
        work = None if unit is None else site_work(graph, site, unit, target)
        entries.append(SiteEntry(site, scope, count, number, work, _source(graph, site)))
    return entries


def _source(graph: GraphReport, site: Site) -> tuple[SourceLine, ...]:
    """Returns the source lines of a site. They are the lines of the node that gives the site its
    `source`."""
    by_name = {node.name: node for node in graph.before.graph.nodes}
    op = next((node for node in graph.after.graph.nodes if node.name == site.node), None)
    names = site.absorbed if op is None else replaced(op)
    nodes = [by_name[name] for name in names if name in by_name]
    named = next((node for node in nodes if source_of(node) == site.source), None)
    return source_lines(named) if named is not None else ()


def _miss_entries(lowered: Lowered) -> Iterator[dict[str, Any]]:
    guide = miss_guide(CODES)
    for miss, scope, count in collapse_misses(lowered.misses):
        source = source_lines(miss.nodes[0]) if miss.nodes else ()
        yield {"miss": miss, "scope": scope, "count": count, "source": source,
               "guide": guide.get(miss.code)}  # fmt: skip


def _numbers(lowered: Lowered, entries: Sequence[SiteEntry]) -> list[dict[str, int]]:
    """Returns, for each graph, a dictionary from the name of a node to the number of the site in
    which it is."""
    by_kind = {site_kind(entry.site): entry.number for entry in entries}
    return [
        numbers_of(graph, {site.node: by_kind[site_kind(site)] for site in graph.matches})
        for graph in lowered.graphs
    ]


def _drawings(lowered: Lowered, numbers: Sequence[Mapping[str, int]]) -> Iterator[Drawing]:
    for i, (graph, own) in enumerate(zip(lowered.graphs, numbers, strict=True)):
        yield from drawings(graph, own, f"graph {i}: " if len(lowered.graphs) > 1 else "")


def _roofline(entries: Sequence[SiteEntry], bars: Mapping[int, SiteBars], target: Target) -> Markup:
    points = [
        Point(
            f"{entry.number} {entry.site.pattern}",
            f"#{entry.anchor}",
            entry.work,
            max(len(entry.site.kernels), 1),
            int(bars[entry.number].spared.bytes / entry.count),
        )
        for entry in entries
        if entry.work is not None
    ]
    return Markup(chart(points, target) if points else "")


def _kernels(
    lowered: Lowered, audits: Sequence[KernelAudit]
) -> Iterator[tuple[KernelAudit, Markup]]:
    """Yields (audit, source as highlighted HTML) of each kernel. The audit is empty for a kernel
    that was not audited."""
    outcomes = {outcome.kernel.spec.name: outcome for outcome in audits}
    for kernel in lowered.kernels:
        outcome = outcomes.get(kernel.spec.name) or KernelAudit(None, kernel=kernel)
        code = highlight(kernel.source, PythonLexer(), _formatter(LIGHT))
        # A scrollable element needs keyboard focus.
        said = f'<pre tabindex="0" role="region" aria-label="Source of {kernel.spec.name}">'
        yield outcome, Markup(code.replace("<pre>", said, 1))


@cache
def _formatter(style: str) -> HtmlFormatter:
    return HtmlFormatter(cssclass="code", style=style)


def _code_css() -> str:
    """Returns the CSS for highlighted sources, light and dark."""
    light, dark = (_formatter(style).get_style_defs(".code") for style in (LIGHT, DARK))
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}"
