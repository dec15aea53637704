"""Spells calls out while patterns look, and puts a call back if no rewrite took a part of it.

    y = somebodys::op(x, w)      ⇒   y = linear(rms_norm(x), w)   ⇒   a fused op, or the call again

A library's operator is one opaque node, but its meaning may have a form that patterns know. While
patterns look at the graph, the users of the call's results read the spelled-out results. The call
itself stays in its place, and patterns pass over it. At the end, each call has either been put back
or is gone. A call is gone if a rewrite took a part of its spelled-out nodes, and the remaining
nodes hold no product. If the remaining nodes do hold a product, the call is not spelled out at all
(:class:`KeptCallsError`), because the operator's own kernel is faster.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import access_of
from tilewright.compiler.dataflow.memory import LIES_WITH
from tilewright.compiler.dataflow.spelling import PASSED_OVER, name_of
from tilewright.compiler.rewrite import Rewritten, erase_unused
from tilewright.compiler.rewrite.writer import Writer, describe
from tilewright.compiler.safety.modes import is_weighty
from tilewright.patterns.dataflow import STANDS_IN, Dataflow
from tilewright.patterns.language import Miss, Stage

_REGROUP = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


@dataclass(frozen=True)
class SpelledOut:
    """A call, and the nodes that stand for it while patterns look.

    results: the used nodes that hold the results of the call. A tensor that was allocated for the
        call to fill is among them.
    added: the spelled-out nodes, in order.
    ends: the added nodes that stand for the results, in the same order.
    regrouped: maps each of the last added nodes, if these only regroup dimensions, to its input.
    """

    call: fx.Node
    results: tuple[fx.Node, ...]
    added: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]
    regrouped: Mapping[fx.Node, fx.Node]

    @property
    def is_taken(self) -> bool:
        """Whether a rewrite took an added node, or left an added node unused that does more than
        regroup dimensions."""
        return any(node._erased for node in self.added if node not in self.regrouped)

    def only_selects(self, node: fx.Node) -> bool:
        """Whether a node only selects from the call's inputs."""
        given = _compat.storages_of(*self.call.all_input_nodes)
        return not set(_compat.storages_of(node)).isdisjoint(given)


class KeptCallsError(Exception):
    """Raised with the calls that must stay as they are, each with its miss.

    The miss is None if nothing is lost, because no pattern matched in the spelled-out form.
    """

    def __init__(self, calls: dict[str, Miss | None]) -> None:
        super().__init__(f"{[*calls]} are better left as they are")
        self.calls = calls


class Kind(Protocol):
    """A kind of call that is spelled out."""

    def takes(self, target: Any) -> bool:
        """Whether a call of `target` is of this kind."""

    def spell(self, call: fx.Node, write: Writer) -> SpelledOut | None:
        """Adds the nodes that a call stands for. Returns None to leave the call alone. May raise
        any exception."""

    def refused(self, call: fx.Node, error: Exception) -> Miss | None:
        """Returns the miss of a call for which :meth:`spell` raised. Returns None if the report
        shall have no miss for it."""


def spell_out(
    graph: fx.Graph, kinds: Sequence[Kind], kept: Collection[str] = ()
) -> tuple[list[SpelledOut], list[Miss]]:
    """Spells out the calls of the given kinds. Returns a miss for each call that cannot be spelled
    out.

    `kept` has the names of the calls that must stay.
    """
    found: list[SpelledOut | None] = []
    misses: list[Miss | None] = []
    called = {node.target for node in graph.nodes}
    taken = {target: kind for kind in reversed(kinds) for target in called if kind.takes(target)}
    for node in [node for node in graph.nodes if node.target in taken and node.name not in kept]:
        kind = taken[node.target]
        write = Writer(node, STANDS_IN)
        try:
            found.append(kind.spell(node, write))
        except _compat.DynamoError:
            raise
        except Exception as error:  # a meaning may be the user's own function
            write.undo()
            misses.append(kind.refused(node, error))
    return [*filter(None, found)], [*filter(None, misses)]


def stand_in(write: Writer, results: Sequence[fx.Node], ends: Sequence[fx.Node]) -> SpelledOut:
    """Makes the users of a call's results read `ends`, which are the nodes that were added for
    them."""
    for result, end in zip(results, ends, strict=True):
        end.meta.setdefault(LIES_WITH, []).append(result.meta["example_value"])
        result.replace_all_uses_with(end, lambda user: user is not write.before)
    for node in {write.before, *results}:
        node.meta[PASSED_OVER] = True
    regrouped: dict[fx.Node, fx.Node] = {}
    for end in ends:
        while end in write.added and end.target in _REGROUP:
            regrouped[end] = end = end.all_input_nodes[0]
    return SpelledOut(write.before, tuple(results), tuple(write.added), tuple(ends), regrouped)


def drop_taken(graph: fx.Graph, flow: Dataflow, spelled: Sequence[SpelledOut]) -> None:
    """Erases the calls of which rewrites took a part, and the nodes that are then unused."""
    while taken := [s for s in spelled if not s.call._erased and s.is_taken]:
        for site in taken:  # erasing one call may leave nodes of another unused
            _drop(graph, flow, site)


def _drop(graph: fx.Graph, flow: Dataflow, site: SpelledOut) -> None:
    unused = [*site.call.all_input_nodes, *site.added]
    given = [node for node in site.results if node in unused]
    for node in (*(n for n in site.results if n not in given), site.call, *given):
        if not node._erased:
            graph.erase_node(node)
    erase_unused(graph, flow, [node for node in unused if not node._erased])
    for node in unused:
        if node.op == "get_attr" and not node._erased and not node.users:
            graph.erase_node(node)


def named_by_calls(done: Sequence[Rewritten], spelled: Sequence[SpelledOut]) -> list[Rewritten]:
    """Replaces the names of spelled-out nodes by the names of the user's calls, in the lists of the
    nodes that sites absorbed."""
    if not spelled:
        return list(done)
    calls = {node.name: site.call.name for site in spelled for node in site.added}
    named = []
    for one in done:
        said = one.node.meta["tilewright"]
        for what in ("absorbed", "stores"):
            said[what] = tuple(dict.fromkeys(calls.get(name, name) for name in said[what]))
        named.append(replace(one, before=said["absorbed"]))
    return named


def put_back(
    graph: fx.Graph, spelled: Sequence[SpelledOut], rewritten: Sequence[Rewritten]
) -> None:
    """Puts back the calls that :func:`drop_taken` left, and erases the nodes that stood for them.

    `rewritten` has all sites of the graph. Raises KeptCallsError for a call that is gone although a
    product of it is left, or although it contained no match. Also raises KeptCallsError for a call
    that cannot be put back, because a part of it was moved or another node reads it.
    """
    matched = {node for one in rewritten for node in one.match.nodes}
    kept: dict[str, Miss | None] = {}
    for site in spelled:
        if not site.call._erased:
            if not _put_back(graph, site):
                kept[site.call.name] = None
        elif all(node._erased for node in site.added):
            continue  # it is unused: another call computes the same result
        elif matched.isdisjoint(site.added):
            kept[site.call.name] = None
        elif any(not node._erased and is_weighty(node) for node in site.added):
            kept[site.call.name] = _part_of(site.call)
    if kept:
        raise KeptCallsError(kept)


def _put_back(graph: fx.Graph, site: SpelledOut) -> bool:
    """Puts back a call. Returns False if that is not possible."""
    if site.call.prev is not next(node for node in reversed(site.added) if not node._erased):
        return False
    for result, end in zip(site.results, site.ends, strict=True):
        end.replace_all_uses_with(result)
        while end in site.regrouped:
            end = site.regrouped[end]
            if not _give_back(result, end, site):
                return False
    for node in {site.call, *site.results}:
        del node.meta[PASSED_OVER]
    for node in reversed(site.added):
        if not node._erased and not node.users:
            graph.erase_node(node)
    left = [node for node in site.added if not node._erased]
    return all(site.only_selects(node) and not access_of(node) for node in left)


def _give_back(result: fx.Node, part: fx.Node, site: SpelledOut) -> bool:
    """Makes the readers of `part` read a view of `result` that has the shape of `part`. Returns
    False if there are readers and no such view is possible."""
    readers = [user for user in part.users if user not in site.regrouped]
    held = result.meta["example_value"]
    shape = [n if isinstance(n, int) else -1 for n in part.meta["example_value"].shape]
    if not readers:
        return True
    if result is not site.call or not held.is_contiguous() or shape.count(-1) > 1:
        return False
    with result.graph.inserting_after(result):
        view = result.graph.call_function(torch.ops.aten.view.default, (result, shape))
    describe(view, result, _compat.run_fake(view))
    part.replace_all_uses_with(view, lambda user: user in readers)
    return True


def _part_of(call: fx.Node) -> Miss:
    message = (
        f"patterns know a part of the computation of {name_of(call)}; the other part has products"
    )
    return Miss("declare", "PART_OF_CALL", Stage.ANCHORED, message, (call,))
