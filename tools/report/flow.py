"""A part of a graph in rows, with lanes for the values that flow from row to row; and two such
parts side by side, as captured and as rewritten, with the same things on the same line.

A row has one node, or several that hand a value on with no other reader. What goes around a row
passes in a lane beside it, as the branches of a history do. So a drawing is as wide as its longest
row, however many nodes there are, and two of them have one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tilewright.tools.report.node_facts import INPUTS, is_view_of_input, label

#: The letters of a row's labels at most, with what stands around each; one label may be longer.
MAX_LETTERS = 38


@dataclass(frozen=True)
class Row:
    """A line of a drawing. lane: of its dot. into: lanes that end in the dot or give to it.
    passing: lanes that go by, from top to bottom. goes_on: whether its own goes on below.
    outside: whether its node is not of the part that is drawn."""

    nodes: tuple[fx.Node, ...]
    lane: int
    into: tuple[int, ...]
    passing: tuple[int, ...]
    goes_on: bool
    outside: bool = False

    @property
    def below(self) -> tuple[int, ...]:
        """The lanes at its lower end."""
        return (*self.passing, self.lane) if self.goes_on else self.passing


@dataclass(frozen=True)
class Line:
    """A line of two drawings: a row of each, or none, where the lanes of the row above go by."""

    before: Row | None
    after: Row | None
    before_passing: tuple[int, ...]
    after_passing: tuple[int, ...]


def rows(nodes: Sequence[fx.Node], kind: Callable[[fx.Node], object]) -> list[Row]:
    """The rows of these nodes, in order. Only nodes of equal `kind` share a row.

    Inputs of the graph and views of them are not drawn; what comes from outside of `nodes` has a
    row with its node, before all others.
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
    """Nodes in groups: each takes what the one before it made, and nothing else does."""
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
        """The last row that reads row i; what reads it elsewhere is behind all rows, but who else
        reads what comes from outside is not told."""
        elsewhere = i if i < len(outside) else len(groups)
        readers = (place.get(user, elsewhere) for node in groups[i] for user in node.users)
        return max(readers, default=i)

    last = [last_reader(i) for i in range(len(groups))]
    open_lanes: list[int | None] = []  # the row whose result each lane has
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
    """Two drawings line by line. came_from: of a node after, the name of its like before."""
    at = {node.name: i for i, row in enumerate(before) for node in row.nodes}
    pairs: list[tuple[Row | None, Row | None]] = []
    waiting: list[Row] = []
    upper = 0  # the next row of `before`

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
