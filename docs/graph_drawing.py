"""Draws a small captured graph as SVG for a document. The graph is drawn in layers, and fused nodes
are highlighted.

grandalf computes the layout (Sugiyama's method). Weights are not drawn as nodes; the title of the
node that reads a weight names it. `tools/report/flow.py` draws whole layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from grandalf.graphs import Edge, Graph, Vertex
from grandalf.layouts import SugiyamaLayout
from grandalf.routing import EdgeViewer, route_with_lines
from torch import fx

from tilewright.tools.report.node_facts import facts, label

_HEIGHT, _PER_LETTER, _PADDING = 24, 7.2, 18
_X_SPACE, _Y_SPACE, _MARGIN = 16, 26, 20


@dataclass
class _Box:
    """A box that grandalf places. It has a width and a height, and grandalf sets its centre."""

    w: float
    h: float = _HEIGHT
    xy: tuple[float, float] = (0.0, 0.0)


def draw(
    nodes: Sequence[fx.Node],
    title: str,
    css_class: Callable[[fx.Node], str],
) -> str:
    """Returns the nodes, and lines for the values that flow between them, as an SVG element.

    `css_class` returns a class for a node, which may be empty.
    """
    shown = [node for node in nodes if node.op not in ("get_attr", "placeholder", "output")]
    boxes = {node: _Box(len(label(node)) * _PER_LETTER + _PADDING) for node in shown}
    lines = _place(boxes)
    right = max((box.xy[0] + box.w / 2 for box in boxes.values()), default=0) + _MARGIN
    bottom = max((box.xy[1] + box.h / 2 for box in boxes.values()), default=0) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom:.0f}" '
        f'width="{right:.0f}" height="{bottom:.0f}" role="group" aria-label="{escape(title)}">'
    ]
    # grandalf returns the lines in a different order in each run, so they are sorted.
    parts += sorted(f'<polyline points="{_points(line)}"/>' for line in lines)
    parts += [_node(node, box, css_class(node)) for node, box in boxes.items()]
    return "".join([*parts, "</svg>"])


def _place(boxes: Mapping[fx.Node, _Box]) -> list[list[tuple[float, float]]]:
    """Places each box, and returns the lines between them. Unconnected parts stand side by side.

    The layout is computed from the results upwards and then turned upside down, so that an input
    stands directly above its first use.
    """
    vertices = {node: Vertex(node) for node in boxes}
    for node, vertex in vertices.items():
        vertex.view = boxes[node]
    edges = [
        Edge(vertices[node], vertices[used])
        for node in boxes
        for used in dict.fromkeys(node.all_input_nodes)
        if used in vertices
    ]
    for edge in edges:
        edge.view = EdgeViewer()
    left, lines = float(_MARGIN), []
    for core in Graph(list(vertices.values()), edges).C:
        members = [boxes[vertex.data] for vertex in core.sV]
        if len(members) > 1:
            layout = SugiyamaLayout(core)
            layout.xspace, layout.yspace = _X_SPACE, _Y_SPACE
            layout.route_edge = route_with_lines
            layout.init_all()
            layout.draw(3)
        shift = left - min(box.xy[0] - box.w / 2 for box in members)
        foot = _MARGIN + max(box.xy[1] + box.h / 2 for box in members)
        for box in members:
            box.xy = (box.xy[0] + shift, foot - box.xy[1])
        lines += [[(x + shift, foot - y) for x, y in e.view._pts] for e in core.sE]
        left = max(box.xy[0] + box.w / 2 for box in members) + 2 * _X_SPACE
    return lines


def _points(line: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.0f},{y:.0f}" for x, y in line)


def _node(node: fx.Node, box: _Box, css_class: str) -> str:
    x, y = box.xy[0] - box.w / 2, box.xy[1] - box.h / 2
    return (
        f'<g class="node {css_class}"><title>{escape(facts(node))}</title>'
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{box.w:.0f}" height="{box.h}" rx="5"/>'
        f'<text x="{box.xy[0]:.0f}" y="{box.xy[1] + 4:.0f}">{escape(label(node))}</text></g>'
    )
