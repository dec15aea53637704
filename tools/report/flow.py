"""Arranges a part of a graph in rows, with lanes for the values that flow from row to row. The
captured part and the rewritten part are set side by side, with corresponding nodes on one line.

A row holds one node, or a chain of nodes in which each value has no other reader. A value that a
row does not read passes the row in a lane, like a branch in the graph of a version history. A
drawing is therefore as wide as its longest row, however many nodes it has, and two drawings have
the same scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tilewright.tools.report.node_facts import INPUTS, is_view_of_input, label

#: The maximum number of letters in the labels of a row, including padding. A single label may be
#: longer.
MAX_LETTERS = 38


@dataclass(frozen=True)
class Row:
    """A row of a drawing.

    lane: the lane of the row's dot.
    into: the lanes of the values that the row reads.
    passing: the lanes of values that the row does not read, which pass from top to bottom.
    goes_on: whether the row's own lane continues below the row.
    outside: whether the row's node is outside the part that is drawn.
    """

    nodes: tuple[fx.Node, ...]
    lane: int
    into: tuple[int, ...]
    passing: tuple[int, ...]
    goes_on: bool
    outside: bool = False

    @property
    def below(self) -> tuple[int, ...]:
        """Returns the lanes at the row's lower edge."""
        return (*self.passing, self.lane) if self.goes_on else self.passing


@dataclass(frozen=True)
class Line:
    """A line of two drawings side by side. It has a row of each drawing. If one row is None, only
    the lanes of that drawing pass there."""

    before: Row | None
    after: Row | None
    before_passing: tuple[int, ...]
    after_passing: tuple[int, ...]


def rows(nodes: Sequence[fx.Node], kind: Callable[[fx.Node], object]) -> list[Row]:
    """Returns the rows of these nodes, in order. Only nodes of equal `kind` share a row.

    Inputs of the graph and views of inputs are not drawn. A node outside of `nodes` whose value is
    read gets a separate row, before all other rows.
    """
    drawn = [n for n in nodes if n.op not in (*INPUTS, "output") and not is_view_of_input(n)]
    members = set(drawn)
    outside = dict.fromkeys(
        used
        for node in drawn
        for used in node.all_input_nodes
        if used not in members and used.op not in INPUTS and not is_view_of_input(used)
    )
    return list(_in_lanes([(node,) for node in outside], list(_runs(drawn, kind))))


def _runs(
    drawn: Sequence[fx.Node], kind: Callable[[fx.Node], object]
) -> Iterator[tuple[fx.Node, ...]]:
    """Yields chains of nodes. In a chain, each node reads the value of the node before it, and that
    value has no other reader."""
    run: list[fx.Node] = []
    letters = 0
    for node in drawn:
        length = len(label(node)) + 2
        follows = run and run[-1] in node.all_input_nodes and list(run[-1].users) == [node]
        if run and not (
            follows and kind(node) == kind(run[-1]) and letters + length <= MAX_LETTERS
        ):
            yield tuple(run)
            run, letters = [], 0
        run.append(node)
        letters += length
    if run:
        yield tuple(run)


def _in_lanes(
    outside: Sequence[tuple[fx.Node, ...]], inside: Sequence[tuple[fx.Node, ...]]
) -> Iterator[Row]:
    groups = [*outside, *inside]
    place = {node: i for i, group in enumerate(groups) for node in group}

    def last_reader(i: int) -> int:
        """Returns the last row that reads row i.

        If a node outside the part that is drawn also reads row i, the lane continues below all
        rows. If row i is itself outside the part, only readers inside the part count.
        """
        elsewhere = i if i < len(outside) else len(groups)
        readers = (place.get(user, elsewhere) for node in groups[i] for user in node.users)
        return max(readers, default=i)

    last = [last_reader(i) for i in range(len(groups))]
    open_lanes: list[int | None] = []  # for each lane, the row whose value it holds
    for i, group in enumerate(groups):
        read = {place[used] for n in group for used in n.all_input_nodes if used in place}
        held = [(lane, row) for lane, row in enumerate(open_lanes) if row is not None]
        into = [lane for lane, row in held if row in read]
        ending = [lane for lane, row in held if last[row] <= i]
        for lane in ending:
            open_lanes[lane] = None
        free = [lane for lane, row in enumerate(open_lanes) if row is None]
        own = (*(lane for lane in into if lane in ending), *free, len(open_lanes))[0]
        if goes_on := last[i] > i:
            open_lanes[own : own + 1] = [i]
        passing = tuple(lane for lane, _ in held if lane not in ending)
        yield Row(group, own, tuple(into), passing, goes_on, i < len(outside))


def side_by_side(
    before: Sequence[Row], after: Sequence[Row], came_from: Mapping[fx.Node, str]
) -> list[Line]:
    """Returns the lines of two drawings side by side.

    For a node of the rewritten graph, `came_from` gives the name of the captured node with which it
    is aligned.
    """
    at = {node.name: i for i, row in enumerate(before) for node in row.nodes}
    pairs: list[tuple[Row | None, Row | None]] = []
    waiting: list[Row] = []
    upper = 0  # the index of the next row of `before`

    def place(rows: Sequence[Row]) -> None:
        nonlocal upper
        for row in rows:
            pairs.append((before[upper] if upper <= target and upper < len(before) else None, row))
            upper += pairs[-1][0] is not None

    for row in after:
        waiting.append(row)
        known = [at[name] for n in row.nodes if (name := came_from.get(n, n.name)) in at]
        if known or row.outside:
            target = max(known, default=upper)
            while upper <= target - len(waiting):
                pairs.append((before[upper], None))
                upper += 1
            place(waiting)
            waiting = []
    target = len(before)
    place(waiting)
    pairs += [(row, None) for row in before[upper:]]
    return list(_lines(pairs))


def _lines(pairs: Sequence[tuple[Row | None, Row | None]]) -> Iterator[Line]:
    left: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    for before, after in pairs:
        yield Line(before, after, left, right)
        left = before.below if before else left
        right = after.below if after else right
