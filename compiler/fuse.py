"""One graph through view, match, plan and rewrite."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import fx

import tilewright.patterns  # noqa: F401  registers the families
from tilewright.codegen.targets import detect_target
from tilewright.compiler import _compat
from tilewright.compiler.legality import check_legality
from tilewright.compiler.lint import check_graph
from tilewright.compiler.options import Options
from tilewright.compiler.report import GraphReport, Kernel, Site
from tilewright.compiler.rewrite import Rewritten, rewrite_sites
from tilewright.compiler.view import build_view
from tilewright.ops.contract import registered as registered_op
from tilewright.patterns.dataflow import Dataflow, Value
from tilewright.patterns.language import Findings, Match, Miss, Stage, find, registered

DEFAULT_TARGET = "sm100"


class StrictError(RuntimeError):
    """Under `strict`, a near miss, a refused rewrite or an internal error."""


@dataclass
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def fuse(gm: fx.GraphModule, options: Options) -> GraphReport:
    """Fuses what the patterns find in a copy of `gm`; `gm` itself is not touched.

    gm: a Dynamo graph module whose nodes carry `meta["example_value"]`.
    Raises StrictError under `options.strict` where a site was missed.
    """
    clock = _Clock()
    with clock.phase("copy"):
        after = _copy(gm)
    rewritten: list[Rewritten] = []
    misses: list[Miss] = []

    def run(graph: fx.Graph) -> None:
        with clock.phase("view"):
            flow = build_view(graph)
        with clock.phase("match"):
            found = find(flow, registered(options.patterns), check_legality)
            wanted, left = plan(found, flow, options)
        with clock.phase("rewrite"):
            done, refused = rewrite_sites(graph, flow, wanted)
        rewritten.extend(done)
        misses.extend((*found.misses, *left, *refused))

    _compat.GraphTransformObserver(after, "tilewright_fuse", "tilewright").apply_graph_pass(run)
    if rewritten:
        with clock.phase("lint"):
            check_graph(after.graph)
            after.recompile()
    if options.strict and misses:
        raise StrictError("\n".join(str(m) for m in misses))
    target = target_name(options)
    sites = tuple(_site(r, target) for r in rewritten)
    return GraphReport(gm, after, sites, tuple(misses), seconds=clock.seconds)


def target_name(options: Options) -> str:
    """The target asked for, else the GPU at hand, else sm100."""
    if options.target is not None:
        return options.target
    present = detect_target()
    return present.name if present is not None else DEFAULT_TARGET


def plan(found: Findings, flow: Dataflow, options: Options) -> tuple[list[Match], list[Miss]]:
    """Which matches to rewrite: no two share a value, `only` and `fuel` limit them."""
    chosen: list[Match] = []
    left: list[Miss] = []
    claimed: dict[Value, Match] = {}
    for match in found.matches:
        if not _wanted(match, options.only):
            continue
        rivals = {v for v in (*match.absorbed, *match.stores) if v in claimed}
        if rivals:
            other = claimed[next(iter(rivals))]
            left.append(
                Miss(
                    match.pattern,
                    "CLAIMED",
                    Stage.HAZARDS,
                    f"{other.pattern} at {other.scope} already absorbs part of this site",
                    (match.anchor.node,),
                )
            )
            continue
        claimed.update(dict.fromkeys((*match.absorbed, *match.stores), match))
        chosen.append(match)
    return (chosen if options.fuel is None else chosen[: options.fuel]), left


def _wanted(match: Match, only: Sequence[str] | None) -> bool:
    return only is None or any(fnmatch.fnmatchcase(match.scope, pattern) for pattern in only)


def _site(done: Rewritten, target: str) -> Site:
    match = done.match
    chosen = _lowering(done.node, target)
    return Site(
        pattern=match.pattern,
        op=match.op,
        scope=match.scope,
        source=match.source,
        shapes=dict(match.site.facts),
        lowering=chosen.name,
        reason=chosen.reason,
        kernels=tuple(Kernel(spec) for spec in chosen.specs),
    )


def _lowering(node: fx.Node, target: str) -> Any:
    """The op's own plan at the shapes of one node."""
    op = registered_op(node.meta["tilewright"]["op"])
    args = fx.node.map_arg(node.args, lambda n: n.meta["example_value"])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta["example_value"])
    tensors = _compat.as_meta([*args, *kwargs.values()])
    named = dict(zip(kwargs, tensors[len(args) :], strict=True))
    return op.plan_for(op.arguments(*tensors[: len(args)], **named), target)


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(gm.graph, mapped)
    if output is not None:
        graph.output(output)
        old = next(iter(reversed(gm.graph.nodes)))
        next(iter(reversed(graph.nodes))).meta = dict(old.meta)
    return fx.GraphModule(gm, graph)
