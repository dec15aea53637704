"""Draws the layers of a report for its page. Each distinct layer is drawn as captured and as
rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from tilewright.compiler import GraphReport
from tilewright.tools.report.flow import Line, Row, rows, side_by_side
from tilewright.tools.report.layers import Layer, layers
from tilewright.tools.report.node_facts import facts, label, shape, writes_in_place

#: A layer with more nodes is not drawn, because the drawing would be too long to read.
MAX_NODES = 2000
#: The distance between lanes, in pixels.
LANE = 11

Kind = Literal["", "outside", "fused", "op"]


@dataclass(frozen=True)
class Chip:
    """The small box that shows a node in a row of a drawing. `site` is the number of the node's
    site, or 0 if the node is in no site."""

    label: str
    facts: str
    kind: Kind
    site: int
    writes: bool


@dataclass(frozen=True)
class Drawing:
    """The drawing of a distinct layer.

    nodes: the number of nodes before and after the rewrite.
    fused: the number of fused ops.
    lines: the lines of the drawing; empty if the layer has too many nodes.
    chips: the box of each node in `lines`.
    widths: the widths of the lanes before and after, in pixels.
    """

    title: str
    nodes: tuple[int, int]
    fused: int
    lines: tuple[Line, ...] = ()
    chips: Mapping[fx.Node, Chip] = field(default_factory=dict)
    widths: tuple[int, int] = (0, 0)

    def x(self, lane: int) -> int:
        """Returns the x coordinate of the middle of a lane, in pixels."""
        return LANE * lane + LANE // 2

    def shape(self, row: Row) -> str:
        """Returns the shape of the value that a row passes on."""
        return shape(row.nodes[-1])


def drawings(graph: GraphReport, numbers: Mapping[str, int], title: str = "") -> list[Drawing]:
    """Returns the drawing of each distinct layer. Layers with fused ops come first.

    `numbers` maps the name of a node in either graph to the number of its site. `title` stands
    before the title of each layer.
    """
    kept = {node.name for node in graph.after.graph.nodes}
    found = [_drawing(layer, numbers, kept, title) for layer in layers(graph)]
    return sorted(found, key=lambda drawing: not drawing.fused)


def replaced(op: fx.Node) -> tuple[str, ...]:
    """Returns the names of the nodes that a fused op replaces. Writes come last."""
    said = op.meta["tilewright"]
    return (*said["absorbed"], *said["stores"])


def numbers_of(graph: GraphReport, numbers: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of each node's site, by the name of the node in the captured or the
    rewritten graph.

    `numbers` maps the name of each fused op to the number of its site. Views and copies that
    disappeared together with a site get the number of a neighbour.
    """
    found = dict(numbers)
    for op in graph.after.graph.nodes:
        if "tilewright" in op.meta:
            found |= dict.fromkeys(replaced(op), numbers.get(op.name, 0))
    kept = {node.name for node in graph.after.graph.nodes}
    gone = [n for n in graph.before.graph.nodes if n.name not in kept and n.name not in found]
    for node in (*reversed(gone), *gone):  # views and copies before a site, then those after a site
        near = (found[n.name] for n in (*node.users, *node.all_input_nodes) if n.name in found)
        if node.name not in found and (number := next(near, 0)):
            found[node.name] = number
    return found


def _drawing(layer: Layer, numbers: Mapping[str, int], kept: Set[str], title: str) -> Drawing:
    """Draws a layer. `kept` has the names of the nodes that the rewritten graph still has."""

    def kind_of(node: fx.Node) -> tuple[Kind, int]:
        number = numbers.get(node.name, 0)
        if "tilewright" in node.meta:
            return "op", number
        return ("", 0) if node.name in kept else ("fused", number)

    fused = [node for node in layer.after if "tilewright" in node.meta]
    counts = len(layer.before), len(layer.after)
    if max(counts) > MAX_NODES:
        return Drawing(title + layer.title, counts, len(fused))
    before, after = rows(layer.before, kind_of), rows(layer.after, kind_of)
    # A fused op stands in the place of the last node that it replaces.
    order = {node.name: i for i, node in enumerate(layer.before)}
    came_from = {node: max(replaced(node), key=lambda n: order.get(n, -1)) for node in fused}
    inside = {*layer.before, *layer.after}

    def chip(node: fx.Node) -> Chip:
        kind, number = kind_of(node) if node in inside else ("outside", 0)
        return Chip(label(node), facts(node), kind, number, writes_in_place(node))

    return Drawing(
        title + layer.title,
        counts,
        len(fused),
        tuple(side_by_side(before, after, came_from)),
        {node: chip(node) for row in (*before, *after) for node in row.nodes},
        (_width(before), _width(after)),
    )


def _width(drawn: Sequence[Row]) -> int:
    lanes = (max((row.lane, *row.passing, *row.into)) for row in drawn)
    return LANE * (max(lanes, default=0) + 1)
