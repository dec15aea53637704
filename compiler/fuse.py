"""Takes one graph through the steps: copy, view, match, plan, rewrite, report."""

from __future__ import annotations

import fnmatch
import gc
import math
import operator
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import fx

import tilewright.patterns  # noqa: F401  registers the families
from tilewright.codegen.names import did_you_mean
from tilewright.codegen.targets import detect_target, get_target, key_of
from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import call_key
from tilewright.compiler.dataflow.build import build_view
from tilewright.compiler.options import Options
from tilewright.compiler.report import GraphReport, Kernel, Site
from tilewright.compiler.report.census import Point, Round, census_of, unrecognised
from tilewright.compiler.report.failures import Failures, raise_strictly
from tilewright.compiler.rewrite import HalfRewrittenError, Rewritten, arguments_of, rewrite_sites
from tilewright.compiler.rewrite.bodies import unseen_in_bodies
from tilewright.compiler.rewrite.declared import NOTE, notes_of_unregistered
from tilewright.compiler.rewrite.dropouts import count_dropouts
from tilewright.compiler.rewrite.lengths import advance_lengths_last
from tilewright.compiler.rewrite.normal import normalise
from tilewright.compiler.rewrite.single_columns import multiply_single_columns
from tilewright.compiler.rewrite.spelled import (
    KeptCallsError,
    drop_taken,
    named_by_calls,
    put_back,
)
from tilewright.compiler.safety.devices import lost_nowhere, with_kernels
from tilewright.compiler.safety.legality import check_legality
from tilewright.compiler.safety.lint import check_graph
from tilewright.compiler.safety.modes import (
    check_modes,
    modes_of,
    unknown_writes,
    unseen_in_transforms,
)
from tilewright.compiler.safety.overlap import InputMemory, input_memory
from tilewright.compiler.scopes import collapse_scope
from tilewright.ops.contract import LoweringReport, get_op
from tilewright.ops.fused_op import loaded
from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import (
    CENSUS,
    Findings,
    Match,
    Miss,
    Pattern,
    Stage,
    find,
    registered,
)

DEFAULT_TARGET = "sm100"
#: The beginnings of the notes that the backend also issues as warnings.
TOLD = ("options['only']", "dropout is on", NOTE)


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def _collector_paused() -> Iterator[None]:
    # The short-lived objects of this pass would trigger full collections of Dynamo's heap, which
    # take longer than the pass itself.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def fuse(gm: fx.GraphModule, options: Options) -> GraphReport:
    """Fuses the patterns' matches in a copy of `gm`, and returns the report. `gm` does not change.

    `gm` is a Dynamo graph module whose nodes carry `meta["example_value"]`. If a pattern or an op
    raises an exception at a site, that site stays as written, and the report has a miss INTERNAL
    for it. Raises StrictError for such a failure, or for a lost site, if `options.strict` asks for
    it.
    """
    failures = Failures(gm, options)
    clock = _Clock()
    target = target_name(options)
    kept: dict[str, Miss | None] = {}
    with failures.of_the_graph(), _collector_paused():
        while True:
            rounds: list[Round] = []
            attempt = _attempt(gm, options, failures, clock, target, rounds, kept)
            if attempt is not None:
                break
        with clock.phase("census"):
            points, untold = _counted(rounds, options, failures)
        del rounds  # the garbage collector must not walk the views
    misses = (*attempt.misses, *untold)
    raise_strictly(misses, options)
    return GraphReport(
        modules=(gm, attempt.after),
        matches=attempt.sites,
        misses=misses,
        notes=attempt.notes,
        seconds=clock.seconds,
        inputs=attempt.inputs,
        points=points,
        target=target,
    )


def _counted(
    rounds: Sequence[Round], options: Options, failures: Failures
) -> tuple[tuple[Point, ...], list[Miss]]:
    """Returns the census of a graph, and a miss for each point that no match or miss accounts for.
    If the options leave out patterns or sites, the second list is empty."""
    try:
        points = census_of(rounds, registered(options.patterns))
    except Exception as error:
        return (), [failures(CENSUS, "to count the points of the graph", error, ())]
    whole = options.patterns is None and options.only is None and options.fuel is None
    return points, unrecognised(points, rounds[0].flow) if whole else []


@dataclass(frozen=True)
class _Attempt:
    """A rewritten copy of the graph, with the inputs that share memory (`inputs`).

    It keeps no reference to the Dataflow, so that the Dataflow is freed before the garbage
    collector runs again and walks it.
    """

    after: fx.GraphModule
    sites: tuple[Site, ...]
    misses: list[Miss]
    notes: tuple[str, ...]
    inputs: InputMemory


def _attempt(
    gm: fx.GraphModule,
    options: Options,
    failures: Failures,
    clock: _Clock,
    target: str,
    rounds: list[Round],
    kept: dict[str, Miss | None],
) -> _Attempt | None:
    """Rewrites a copy of the graph. Appends the results of each pass over the patterns to `rounds`.

    `kept` holds the calls that must not be spelled out; this function may add calls to it.

    Returns None if the copy cannot be used and the caller must make another. There are three
    reasons: a rewrite failed half-way, the plan of an op failed (the next copy refuses that site),
    or some spelled-out calls are better left as they are.
    """
    with clock.phase("copy"):
        after = _copy(gm)
    rewritten: list[Rewritten] = []
    misses: list[Miss] = []
    inputs: list[InputMemory] = []
    scopes: Counter[str] = Counter()  # the number of matches in each module
    told_of: list[str] = []

    patterns, afterwards = _in_two(registered(options.patterns))
    planned = get_target(target)

    def run(graph: fx.Graph) -> None:
        spelled, unfit = normalise(graph, kept)
        told_of.extend(_dropout_note(count_dropouts(graph)))
        # If an op refuses a site, the next round offers the site to the other patterns.
        refused: dict[tuple[str, fx.Node], Miss] = {}
        left_open: set[fx.Node] = set()
        told: list[Miss] = []

        def check(match: Match, flow: Dataflow) -> Miss | None:
            known = refused.get((match.pattern, match.anchor.node))
            known = known or failures.earlier(match) or check_legality(match, flow)
            return known or check_modes(match, flow, modes)

        while True:
            with clock.phase("view"):
                flow = build_view(graph, planned)
                modes = modes_of(graph, torch.is_grad_enabled())
                if not inputs:
                    inputs.append(input_memory(flow))
            with clock.phase("match"):
                found = find(flow, patterns, check, failures)
                scopes.update(match.scope for match in found.matches)
                wanted, left = plan(found, options, len(rewritten))
                inside = unseen_in_bodies(graph, modes, patterns)
                unseen = [*unseen_in_transforms(modes), *unknown_writes(flow, found.matches)]
            with clock.phase("rewrite"):
                done, no = rewrite_sites(graph, flow, wanted, failures, planned)
            missed = found.misses if options.everywhere else lost_nowhere(found.misses, patterns)
            told = _told(told, [*missed, *left], found.matches, left_open if rewritten else None)
            done = named_by_calls(done, spelled)
            drop_taken(graph, flow, spelled)
            rewritten.extend(done)
            misses_so_far = () if no else tuple(told)
            rounds.append(Round(flow, tuple(one.match for one in done), misses_so_far))
            refused |= {(match.pattern, match.anchor.node): miss for match, miss in no}
            left_open.update(node for match, _ in no for node in _nodes_of(match))
            if not no:
                unread = [failures("view", "to read a node", e, (n,)) for n, e in flow.failed]
                if not options.everywhere:
                    inside = lost_nowhere(inside, patterns)
                misses.extend((*told, *inside, *unread, *unseen, *unfit))
                misses.extend(filter(None, kept.values()))
                put_back(graph, spelled, rewritten)
                if rewritten:
                    misses.extend(ask_afterwards(graph))
                    advance_lengths_last(graph)
                    multiply_single_columns(graph)
                return

    def ask_afterwards(graph: fx.Graph) -> list[Miss]:
        """Tries the patterns that look at the graph after all others, and rewrites their matches.
        Returns the misses."""
        wanted = [one for one in afterwards if one.asked_afterwards(rounds[0].flow)]
        if not wanted:
            return []
        with clock.phase("view"):
            flow = build_view(graph, planned)
            modes = modes_of(graph, torch.is_grad_enabled())

        def check(match: Match, flow: Dataflow) -> Miss | None:
            known = failures.earlier(match) or check_legality(match, flow)
            return known or check_modes(match, flow, modes)

        with clock.phase("match"):
            found = find(flow, wanted, check, failures)
            scopes.update(match.scope for match in found.matches)
            chosen, left = plan(found, options, len(rewritten))
        with clock.phase("rewrite"):
            done, no = rewrite_sites(graph, flow, chosen, failures, planned)
        rewritten.extend(done)
        told = found.misses if options.everywhere else lost_nowhere(found.misses, wanted)
        return [*told, *left, *(miss for _, miss in no)]

    observer = _compat.GraphTransformObserver(after, "tilewright_fuse", "tilewright")
    try:
        observer.apply_graph_pass(run)
    except KeptCallsError as error:
        kept.update(error.calls)
        return None
    except HalfRewrittenError as error:
        cause = error.__cause__
        failures.refuse(error.match, "to rewrite", cause if isinstance(cause, Exception) else error)
        return None
    notes = _ask_for_tuning(rewritten, options) if options.tune else ()
    notes = (*notes, *told_of, *_only_note(options.only, scopes), *notes_of_unregistered())
    if rewritten:
        with clock.phase("lint"):
            check_graph(after.graph)
            after.recompile()
    sites = _sites(rewritten, target, failures)
    return None if sites is None else _Attempt(after, sites, misses, notes, inputs[0])


def _in_two(patterns: Sequence[Pattern]) -> tuple[list[Pattern], list[Any]]:
    """Returns (the patterns that are tried in every round, the patterns that are tried once, on the
    graph that the others have rewritten)."""
    later = [one for one in patterns if hasattr(one, "asked_afterwards")]
    return [one for one in patterns if one not in later], later


def _told(
    before: Sequence[Miss],
    now: Sequence[Miss],
    matches: Sequence[Match],
    left_open: Set[fx.Node] | None,
) -> list[Miss]:
    """Returns the misses of all rounds so far.

    before: the misses of earlier rounds. The function drops a miss if its pattern now matches the
        site.
    now: the misses of this round. After the first rewrite, the function adds only misses at nodes
        of `left_open`.
    left_open: the nodes of the sites that ops refused; None before the first rewrite.
    """
    found = {(match.pattern, match.anchor.node) for match in matches}
    kept = [m for m in before if not any((m.pattern, node) in found for node in m.nodes)]
    said = {(m.pattern, m.code, m.nodes) for m in kept}
    new = [m for m in now if (m.pattern, m.code, m.nodes) not in said]
    if left_open is not None:
        new = [m for m in new if not left_open.isdisjoint(m.nodes)]
    return [*kept, *new]


def _nodes_of(match: Match) -> set[fx.Node]:
    return {value.node for value in (match.anchor, *match.absorbed, *match.stores)}


def _sites(
    rewritten: Sequence[Rewritten], target: str, failures: Failures
) -> tuple[Site, ...] | None:
    """Returns the sites with the plans of their ops. Returns None if a plan failed; the next copy
    of the graph then refuses that site."""
    sites: list[Site] = []
    plans: _Plans = {}
    for done in rewritten:
        try:
            sites.append(_site(done, target, plans))
        except Exception as error:
            failures.refuse(done.match, f"to plan {done.match.op} for {target}", error)
    return tuple(sites) if len(sites) == len(rewritten) else None


def _ask_for_tuning(rewritten: Sequence[Rewritten], options: Options) -> tuple[str, ...]:
    """Sets `tune` at the sites whose op can be tuned. Returns notes that say on which GPU the ops
    will be measured."""
    notes: dict[str, None] = {}
    for done in rewritten:
        tuning = get_op(done.node.meta["tilewright"]["op"]).tuning
        if tuning is not None:
            done.node.update_kwarg("tune", True)
            notes[loaded(tuning)(target_name(options))] = None
    return tuple(notes)


def target_name(options: Options) -> str:
    """Returns the name of the target or product that the options name. Without one, returns the
    name of this machine's GPU, or sm100 if there is no GPU."""
    if options.target is not None:
        return options.target
    present = detect_target()
    return key_of(present) if present is not None else DEFAULT_TARGET


def plan(found: Findings, options: Options, done: int = 0) -> tuple[list[Match], list[Miss]]:
    """Chooses the matches to rewrite.

    The options `only` and `fuel` limit the matches, and no two chosen matches may share a value.
    `done` is the number of rewrites in earlier rounds, which count towards `fuel`.

    If matches overlap, the plan keeps the set that absorbs the most nodes (a maximum-weight clique
    of the graph of compatible matches) and reports the other matches as CLAIMED. It reports kept
    matches on devices without kernels as NO_KERNELS, unless `everywhere` is set.
    """
    wanted = [m for m in found.matches if _wanted(m, options.only)]
    conflicts = nx.Graph()
    conflicts.add_nodes_from(range(len(wanted)))
    claims: dict[Value, list[int]] = defaultdict(list)
    for i, match in enumerate(wanted):
        for value in {*match.absorbed, *match.stores}:
            conflicts.add_edges_from((other, i) for other in claims[value])
            claims[value].append(i)
    lost: dict[int, int] = {}
    for rivals in nx.connected_components(conflicts):
        if len(rivals) > 1:
            lost |= _losers(conflicts.subgraph(rivals), wanted)
    chosen = [m for i, m in enumerate(wanted) if i not in lost]
    left = [_claimed(wanted[i], wanted[winner]) for i, winner in sorted(lost.items())]
    if not options.everywhere:
        chosen, without = with_kernels(chosen)
        left += without
    return (chosen if options.fuel is None else chosen[: options.fuel - done]), left


def _losers(conflicts: nx.Graph, wanted: Sequence[Match]) -> dict[int, int]:
    """Returns the matches to give up. The result maps the index of each such match in `wanted` to
    the index of a kept match with which it conflicts."""
    compatible = nx.complement(conflicts)
    for i in compatible:
        compatible.nodes[i]["weight"] = len(wanted[i].absorbed) + len(wanted[i].stores)
    kept, _ = nx.max_weight_clique(compatible, weight="weight")
    return {
        i: next(k for k in sorted(kept) if conflicts.has_edge(i, k))
        for i in conflicts
        if i not in kept
    }


def _claimed(match: Match, other: Match) -> Miss:
    return Miss(
        match.pattern,
        "CLAIMED",
        Stage.HAZARDS,
        f"{other.pattern} at {other.scope or 'the top level'} already absorbs part of this site",
        (match.anchor.node,),
        covers=match.nodes,
    )


def _wanted(match: Match, only: Sequence[str] | None) -> bool:
    return only is None or _named(match.scope, only)


def _named(scope: str, only: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(scope, pattern) for pattern in only)


def _only_note(only: Sequence[str] | None, scopes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns a note if `only` names no module that has a site. `scopes` has the number of sites in
    each module."""
    if only is None or not scopes or any(_named(scope, only) for scope in scopes):
        return ()
    total = sum(scopes.values())
    places = sorted({collapse_scope(scope) or "the top level" for scope in scopes})
    wider = [f"*{name}*" for name in only if any(_named(scope, [f"*{name}*"]) for scope in scopes)]
    near = (
        f"; did you mean {wider[0]!r}?" if wider else did_you_mean(only[0], scopes) if only else ""
    )
    sites = "the one site, which is" if total == 1 else f"the {total} sites, which are"
    return (f"{TOLD[0]}: {list(only)} names none of {sites} at {', '.join(places)}{near}",)


def _dropout_note(count: int) -> tuple[str, ...]:
    """Returns a note about a graph in which `count` dropouts are on."""
    if not count:
        return ()
    places = "1 place" if count == 1 else f"{count} places"
    said = "as in train mode, and keeps sites from being fused: call model.eval()"
    return (f"{TOLD[1]} in {places}, {said}",)


# The plans of the ops of one graph, by `call_key`. Most layers of a model make the same call.
_Plans = dict[Any, LoweringReport]


def _site(done: Rewritten, target: str, plans: _Plans) -> Site:
    match = done.match
    chosen = _lowering(done.node, done.node.meta["tilewright"]["op"], target, plans)
    inner = [_lowering(node, name, target, plans) for node, name in _nested_ops(done.node)]
    specs = [spec for plan in (*inner, chosen) for spec in plan.specs]
    return Site(
        pattern=match.pattern,
        op=match.op,
        scope=match.scope,
        source=match.source,
        shapes=dict(match.facts),
        lowering=chosen.name,
        reason=chosen.reason,
        kernels=tuple(Kernel(spec) for spec in specs),
        node=done.node.name,
        absorbed=done.before,
        intermediate_bytes=_intermediate_bytes(match),
        launches=len(chosen.specs),
    )


def _intermediate_bytes(match: Match) -> int:
    """Returns the number of bytes of the values that the rewrite removes from the graph. Returns 0
    if one of these values has a symbolic size."""
    kept = {result.replaced for result in match.results}
    gone = [v for v in match.absorbed if v not in kept and v.op != "store"]
    sizes = [(*value.shape, value.dtype.itemsize) for value in gone]
    known = all(isinstance(size, int) for value in sizes for size in value)
    return sum(map(math.prod, sizes)) if known else 0


def _nested_ops(node: fx.Node) -> list[tuple[fx.Node, str]]:
    """Returns the other nodes of tilewright's ops that the rewrite added as inputs of `node`, with
    the names of their ops."""
    found: list[tuple[fx.Node, str]] = []
    for source in node.all_input_nodes:
        called = source.target
        if called is operator.getitem:
            found += _nested_ops(source)
        elif isinstance(called, torch._ops.OpOverload) and "tilewright" not in source.meta:
            name = called._schema.name
            if name.startswith("tilewright::"):
                found += [*_nested_ops(source), (source, name)]
    return list(dict.fromkeys(found))


def _lowering(node: fx.Node, name: str, target: str, plans: _Plans) -> LoweringReport:
    """Returns the plan of an op at the shapes of one node."""
    key = call_key(node)
    if key not in plans:
        op = get_op(name)
        plans[key] = op.plan_for(arguments_of(op, node), target)
    return plans[key]


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        # Arguments are set afterwards: create_node would search them for symbolic numbers.
        new = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
        new.args = fx.node.map_arg(node.args, copies.__getitem__)
        if node.kwargs:
            new.kwargs = fx.node.map_arg(node.kwargs, copies.__getitem__)
        new.meta.update(node.meta)
        copies[node] = new
    copy = _compat.graph_module(gm, graph)
    _compat.copy_origin(copy, gm)
    return copy
