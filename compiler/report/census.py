"""A census of the points in a graph at which a pattern may look.

A point is a product with a weight, a softmax, a write into memory from outside of the graph, or a
choice of the largest numbers. Either a match covers the point, or a miss accounts for the point, or
the point is of no interest for a stated reason. A point for which none of these holds is
unaccounted: some pattern should have reported it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import fx

from tilewright.compiler.report.no_interest import is_of_no_interest
from tilewright.compiler.report.points import Graph, points_of
from tilewright.patterns.dataflow import (
    Computed,
    Dataflow,
    Value,
    View,
    iter_views,
    scope_of,
    source_of,
)
from tilewright.patterns.language import (
    CENSUS,
    UNRECOGNISED,
    Kind,
    Match,
    Miss,
    Pattern,
    Result,
    Sought,
    Stage,
    sought_by,
)

Account = Literal["match", "miss", "no interest", "unaccounted"]
ACCOUNTS: tuple[Account, ...] = ("match", "miss", "no interest", "unaccounted")


@dataclass(frozen=True)
class Round:
    """The outcome of one pass of the patterns over a graph.

    matches: the matches that were rewritten.
    misses: the misses of the pass; empty if another pass follows.
    """

    flow: Dataflow
    matches: tuple[Match, ...]
    misses: tuple[Miss, ...]


@dataclass(frozen=True)
class Point:
    """One point of a graph, and what accounts for it.

    node: the name of its node in the graph.
    op: the operation that it computes.
    why: the pattern of the match, or the pattern and code of the miss, or the reason why the point
        is of no interest. It is empty for an unaccounted point.
    """

    kind: Kind
    account: Account
    why: str
    op: str
    node: str
    scope: str
    source: str


@dataclass(frozen=True)
class Census:
    """The points of all graphs of a model, in program order."""

    points: tuple[Point, ...]

    @property
    def unaccounted(self) -> tuple[Point, ...]:
        """The points that no match, miss or rule accounts for."""
        return tuple(point for point in self.points if point.account == "unaccounted")

    def spoken_for_by(self, miss: Miss) -> Census:
        """Returns a census in which the given miss accounts for every unaccounted point. Callers
        pass the miss of a graph break: a break cuts a site in two, and no pattern sees both
        parts."""
        told: Account = "miss"
        why = f"{miss.pattern} {miss.code}"
        points = (
            replace(p, account=told, why=why) if p.account == "unaccounted" else p
            for p in self.points
        )
        return Census(tuple(points))

    def counts(self) -> dict[tuple[Kind, Account, str], int]:
        """Returns the number of points for each (kind, account, reason), which are the fields
        `kind`, `account` and `why` of a point."""
        return dict(Counter((p.kind, p.account, p.why) for p in self.points))

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON-ready data: the counts, then the unaccounted points."""
        return {
            "counts": [
                {"kind": kind, "account": account, "why": why, "count": count}
                for (kind, account, why), count in self.counts().items()
            ],
            "unaccounted": [asdict(point) for point in self.unaccounted],
        }


def census_of(rounds: Sequence[Round], patterns: Iterable[Pattern]) -> tuple[Point, ...]:
    """Returns the points of one graph, as they were in the first round."""
    matches = [match for one in rounds for match in one.matches]
    matched = {node: match.pattern for match in matches for node in match.nodes}
    missed = _spoken_for(rounds[-1], {pattern.name: pattern for pattern in patterns})
    taken = frozenset(view.value.node for match in matches for view in _arguments(match))
    graph = Graph(rounds[0].flow, matched.keys() | missed.keys(), taken)
    return tuple(_point(kind, value, graph, matched, missed) for kind, value in points_of(graph))


#: The words for each kind of point.
_IN_WORDS: dict[Kind, str] = {
    "product": "a product with a weight",
    "softmax": "a softmax or an attention",
    "write": "a write into memory from outside of the graph",
    "top-k": "a choice of the largest numbers",
}


def unrecognised(points: Iterable[Point], flow: Dataflow) -> list[Miss]:
    """Returns a miss, as advice, for each unaccounted point. `flow` is the dataflow view in which
    the points were counted."""
    nodes = {value.node.name: value.node for value in flow.values}
    return [
        Miss(
            CENSUS,
            UNRECOGNISED,
            Stage.ANCHORED,
            f"no pattern recognises this form of {_IN_WORDS[point.kind]} ({point.op})",
            (nodes[point.node],),
        )
        for point in points
        if point.account == "unaccounted"
    ]


def _arguments(match: Match) -> Iterator[View]:
    """Yields the views among a match's arguments, including the views in small expressions, and the
    views that are added to its results."""
    added = (result.added for result in match.results if isinstance(result, Result))
    waiting = [*match.arguments.values(), *(view for view in added if view is not None)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Computed):
            waiting += item.operands
        else:
            yield from iter_views(item)


def _point(
    kind: Kind, value: Value, graph: Graph, matched: dict[fx.Node, str], missed: dict[fx.Node, str]
) -> Point:
    account: Account = "unaccounted"
    why = ""
    if value.node in matched:
        account, why = "match", matched[value.node]
    elif value.node in missed:
        account, why = "miss", missed[value.node]
    else:
        why = is_of_no_interest(value, graph)
        account = "no interest" if why else "unaccounted"
    place = scope_of(value.node), source_of(value.node)
    return Point(kind, account, why, value.op, value.node.name, *place)


def _spoken_for(last: Round, patterns: dict[str, Pattern]) -> dict[fx.Node, str]:
    """Returns the nodes that misses account for, each with the pattern and the code of the miss."""
    graph = Graph(last.flow)
    found: dict[fx.Node, str] = {}
    for miss in last.misses:
        nodes = (*miss.nodes, *miss.covers)
        sought = sought_by(patterns.get(miss.pattern))
        name = f"{miss.pattern} {miss.code}"
        for node in (*nodes, *_reached(last.flow.values_at(nodes), sought, graph)):
            found.setdefault(node, name)
    return found


def _reached(start: Sequence[Value], sought: Sought, graph: Graph) -> Iterator[fx.Node]:
    """Yields the nodes of the points that a miss at `start` accounts for."""
    for value in start:
        before = _walk(value, sought, graph) if sought.before else []
        yield from (point.node for point in before)
        if sought.behind:
            yield from (point.node for point in _behind(value, sought, graph))
        if sought.beside:
            for point in before:
                yield from _beside(point, graph)


def _walk(start: Value, sought: Sought, graph: Graph) -> list[Value]:
    """Returns the points upstream of a value that have a kind in `sought.before`. The search ends
    at points of other kinds, at writes, and after `sought.depth` products on the way."""
    found: list[Value] = []
    front, seen = [(start, 0)], {start}
    while front:
        value, passed = front.pop()
        kind = graph.kind(value) if value is not start else None
        if kind is not None:
            if kind not in sought.before:
                continue
            found.append(value)
            passed += kind == "product"
            if kind == "write" or passed >= sought.depth:
                continue
        for view in value.operands:
            if view.value not in seen:
                seen.add(view.value)
                front.append((view.value, passed))
    return found


def _behind(start: Value, sought: Sought, graph: Graph) -> Iterator[Value]:
    """Yields the first points downstream of a value that have a kind in `sought.behind`. The search
    passes through softmaxes and choices of the largest numbers."""

    def goes_on(value: Value) -> bool:
        return graph.kind(value) in (None, "softmax", "top-k")

    passed = graph.flow.downstream(start, None, goes_on)
    read = dict.fromkeys(user for value in passed for user in graph.flow.users.get(value, ()))
    yield from (
        value for value in read if value is not start and graph.kind(value) in sought.behind
    )


def _beside(product: Value, graph: Graph) -> Iterator[fx.Node]:
    """Yields the nodes of the other products that read the same activation as `product` and
    multiply it by a weight."""
    held = graph.weights(product)
    for view in product.operands:
        if view in held or len(view.shape) < 2:
            continue
        for user in graph.flow.users.get(view.value, ()):
            if graph.kind(user) == "product":
                yield user.node
