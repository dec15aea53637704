"""The drawings of a page: each distinct layer as captured and as rewritten, ready to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from torch import fx

from tilewright.compiler import GraphReport
from tilewright.tools.report.flow import Line, Row, rows, side_by_side
from tilewright.tools.report.layers import Layer, layers
from tilewright.tools.report.node_facts import facts, label, shape, writes_in_place

#: A layer with more nodes than these is not drawn: nobody would read it.
MAX_NODES = 2000
#: Pixels from lane to lane, and the height of a row in units of its drawing.
LANE, HEIGHT = 11, 100

Kind = Literal["", "outside", "fused", "op"]


@dataclass(frozen=True)
class Chip:
    """A node as it stands in a row. site: the number of the site that it is in, or 0."""

    label: str
    facts: str
    kind: Kind
    site: int
    writes: bool


@dataclass(frozen=True)
class Cell:
    """A row of one drawing. lines, dot: its lanes as SVG paths, the dot's empty in a row without
    nodes. shape: of what it hands on."""

    chips: tuple[Chip, ...]
    lines: str
    dot: str
    shape: str

    @property
    def site(self) -> int:
        """The number of the site that the row is in, or 0."""
        return self.chips[0].site if self.chips else 0


@dataclass(frozen=True)
class Drawing:
    """A distinct layer. lines: a cell before and one after; none where it has too many nodes.
    widths: of the lanes before and after, in pixels. fused: the number of fused ops in it."""

    title: str
    nodes: tuple[int, int]
    lines: tuple[tuple[Cell, Cell], ...]
    widths: tuple[int, int]
    fused: int


def drawings(graph: GraphReport, numbers: Mapping[str, int], title: str = "") -> list[Drawing]:
    """Of each distinct layer, those with fused ops first. numbers: of the site that a node is in,
    by the node's name, before or after; title: put before each one's own."""
    kept = {node.name for node in graph.after.graph.nodes}
    found = [_drawing(layer, numbers, kept, title) for layer in layers(graph)]
    return sorted(found, key=lambda drawing: not drawing.fused)


def replaced(op: fx.Node) -> tuple[str, ...]:
    """The names of the nodes that a fused op stands for, writes last."""
    said = op.meta["tilewright"]
    return (*said["absorbed"], *said["stores"])


def numbers_of(graph: GraphReport, numbers: Mapping[str, int]) -> dict[str, int]:
    """The number of the site that each node, before or after, is in. numbers: of each fused op.

    What is gone with a site but was only layout or a copy on the way has its neighbour's.
    """
    found = dict(numbers)
    for op in graph.after.graph.nodes:
        if "tilewright" in op.meta:
            found |= dict.fromkeys(replaced(op), numbers.get(op.name, 0))
    kept = {node.name for node in graph.after.graph.nodes}
    gone = [n for n in graph.before.graph.nodes if n.name not in kept and n.name not in found]
    for node in (*reversed(gone), *gone):  # what hands on to a site, then what it hands on to
        near = (found[n.name] for n in (*node.users, *node.all_input_nodes) if n.name in found)
        if node.name not in found and (number := next(near, 0)):
            found[node.name] = number
    return found


def _drawing(layer: Layer, numbers: Mapping[str, int], kept: Set[str], title: str) -> Drawing:
    """kept: names of the nodes that the rewritten graph still has."""

    def kind_of(node: fx.Node) -> tuple[Kind, int]:
        number = numbers.get(node.name, 0)
        if "tilewright" in node.meta:
            return "op", number
        return ("", 0) if node.name in kept else ("fused", number)

    fused = [node for node in layer.after if "tilewright" in node.meta]
    counts = len(layer.before), len(layer.after)
    if max(counts) > MAX_NODES:
        return Drawing(title + layer.title, counts, (), (0, 0), len(fused))
    before, after = rows(layer.before, kind_of), rows(layer.after, kind_of)
    # A fused op stands where the last of what it replaces stood.
    order = {node.name: i for i, node in enumerate(layer.before)}
    came_from = {node: max(replaced(node), key=lambda n: order.get(n, -1)) for node in fused}
    inside = {*layer.before, *layer.after}

    def chips(row: Row) -> Iterator[Chip]:
        for node in row.nodes:
            kind, number = kind_of(node) if node in inside else ("outside", 0)
            yield Chip(label(node), facts(node), kind, number, writes_in_place(node))

    def cell(row: Row | None, passing: Sequence[int]) -> Cell:
        if row is None:
            return Cell((), _upright(passing), "", "")
        return Cell(tuple(chips(row)), _lanes(row), _dot(row), shape(row.nodes[-1]))

    def cells(line: Line) -> tuple[Cell, Cell]:
        return cell(line.before, line.before_passing), cell(line.after, line.after_passing)

    lines = tuple(map(cells, side_by_side(before, after, came_from)))
    return Drawing(title + layer.title, counts, lines, (_width(before), _width(after)), len(fused))


def _width(drawn: Sequence[Row]) -> int:
    lanes = (max((row.lane, *row.passing, *row.into)) for row in drawn)
    return LANE * (max(lanes, default=0) + 1)


def _x(lane: int) -> int:
    return LANE * lane + LANE // 2


def _upright(lanes: Sequence[int]) -> str:
    return "".join(f"M{_x(lane)} 0V{HEIGHT}" for lane in lanes)


def _lanes(row: Row) -> str:
    """Lanes that pass, those that lead to the dot, and its own below."""
    here, half = _x(row.lane), HEIGHT // 2
    into = (f"M{_x(lane)} 0C{_x(lane)} {half} {here} 0 {here} {half}" for lane in row.into)
    below = f"M{here} {half}V{HEIGHT}" if row.goes_on else ""
    return _upright(row.passing) + "".join(into) + below


def _dot(row: Row) -> str:
    return f"M{_x(row.lane)} {HEIGHT // 2}h0"
