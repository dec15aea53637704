"""A report as one self-contained HTML page, usable with the keyboard alone.

Needs the extra `report` (grandalf for the drawings, matplotlib for the roofline).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from torch import fx

from tilewright.codegen.targets import get_target
from tilewright.compiler import GraphReport, Lowered, Site
from tilewright.compiler.report import collapse_misses, collapse_sites
from tilewright.patterns.language import CODES
from tilewright.tools.files import write_whole
from tilewright.tools.kernel_audit import KernelAudit
from tilewright.tools.layers import Layer, layer_of, layers
from tilewright.tools.miss_guide import miss_guide
from tilewright.tools.report.graph_drawing import MAX_NODES, draw
from tilewright.tools.report.roofline import Work, plot, site_work


@dataclass(frozen=True)
class SiteEntry:
    """Equal fused sites as the page shows them. anchor: their id on the page."""

    site: Site
    scope: str
    count: int
    anchor: str
    work: Work | None


@dataclass(frozen=True)
class LayerEntry:
    """A distinct layer: its title, and its drawings as SVG (or why there is none)."""

    title: str
    before: str
    after: str
    fused: int


def write_html(
    path: Path, model: str, lowered: Lowered, audits: Sequence[KernelAudit] = ()
) -> None:
    """Writes the page of a report. audits: of its kernels, or none. Raises OSError."""
    write_whole(path, render_html(model, lowered, audits))


def render_html(model: str, lowered: Lowered, audits: Sequence[KernelAudit] = ()) -> str:
    """The page's HTML."""
    target = get_target(lowered.target)
    entries = _site_entries(lowered)
    guide = miss_guide(CODES)
    works = {f"{e.site.pattern} {e.scope}": e.work for e in entries if e.work}
    return _template().render(
        model=model,
        lowered=lowered,
        target=target,
        sites=entries,
        misses=[
            (miss, scope, count, guide.get(miss.code))
            for miss, scope, count in collapse_misses(lowered.misses)
        ],
        layers=[layer for graph in lowered.graphs for layer in _layer_entries(graph, entries)],
        kernels=list(_kernels(lowered, audits)),
        roofline=Markup(plot(works, target)) if works else "",
        code_css=Markup(_formatter().get_style_defs(".code")),
        nodes=(
            sum(len(graph.before.graph.nodes) for graph in lowered.graphs),
            sum(len(graph.after.graph.nodes) for graph in lowered.graphs),
        ),
        versions={n: importlib.metadata.version(n) for n in ("tilewright", "torch", "triton")},
    )


@cache
def _template() -> jinja2.Template:
    text = files("tilewright.tools.report").joinpath("assets/report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["bytes"] = _readable_bytes
    return environment.from_string(text)


def _readable_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _site_entries(lowered: Lowered) -> list[SiteEntry]:
    target = get_target(lowered.target)
    graphs = {id(site): graph for graph in lowered.graphs for site in graph.matches}
    return [
        SiteEntry(site, scope, count, f"site-{i}", site_work(graphs[id(site)], site, target))
        for i, (site, scope, count) in enumerate(collapse_sites(lowered.matches))
    ]


def _layer_entries(graph: GraphReport, entries: Sequence[SiteEntry]) -> list[LayerEntry]:
    by_node = _by_node(graph, entries)
    kept = {node.name for node in graph.after.graph.nodes}
    return [
        LayerEntry(
            layer.title,
            _drawing(layer.before, f"{layer.title}, as captured", by_node, kept),
            _drawing(layer.after, f"{layer.title}, as rewritten", by_node, kept),
            sum(1 for node in layer.after if "tilewright" in node.meta),
        )
        for layer in _fused_first(layers(graph))
    ]


def _fused_first(found: Sequence[Layer]) -> list[Layer]:
    return sorted(found, key=lambda layer: not any("tilewright" in n.meta for n in layer.after))


def _by_node(graph: GraphReport, entries: Sequence[SiteEntry]) -> Mapping[str, str]:
    """Node name, before or after, to the anchor of its kind of site."""
    anchors = {_kind(entry.site): entry.anchor for entry in entries}
    return {
        name: anchors.get(_kind(site), "")
        for site in graph.matches
        for name in (*site.absorbed, site.node)
    }


def _kind(site: Site) -> tuple[str, ...]:
    facts = (f"{key}={value}" for key, value in site.shapes.items())
    return (site.pattern, layer_of(site.scope) and "layer", site.lowering, *facts)


def _drawing(
    nodes: Sequence[fx.Node], title: str, by_node: Mapping[str, str], kept: Set[str]
) -> str:
    """kept: names of the nodes that the rewritten graph still has."""
    if len(nodes) > MAX_NODES:
        return f"{len(nodes)} nodes: too many for one readable drawing."

    def css_class(node: fx.Node) -> str:
        return "op" if "tilewright" in node.meta else "" if node.name in kept else "fused"

    def link(node: fx.Node) -> str:
        anchor = by_node.get(node.name, "")
        return f"#{anchor}" if anchor else ""

    return Markup(draw(nodes, title, css_class, link))


def _kernels(
    lowered: Lowered, audits: Sequence[KernelAudit]
) -> Iterator[tuple[KernelAudit, Markup]]:
    """Each kernel's audit, empty where there is none, and its source as highlighted HTML."""
    outcomes = {outcome.kernel.spec.name: outcome for outcome in audits}
    for kernel in lowered.kernels:
        outcome = outcomes.get(kernel.spec.name) or KernelAudit(kernel, None, ())
        yield outcome, Markup(highlight(kernel.source, PythonLexer(), _formatter()))


@cache
def _formatter() -> HtmlFormatter:
    return HtmlFormatter(cssclass="code", style="default")
