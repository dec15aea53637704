"""The outcome of a compilation as data that can be printed and saved: matches, misses and
kernels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx

from tilewright.codegen.spec import KernelSpec
from tilewright.compiler.scopes import collapse_scope
from tilewright.patterns.language import CAPTURE, UNRECOGNISED, Miss, Stage

if TYPE_CHECKING:
    from tilewright.codegen.audit import Audit
    from tilewright.codegen.build import Artifact
    from tilewright.compiler.report.census import Census, Point
    from tilewright.compiler.safety.overlap import InputMemory


@dataclass(frozen=True)
class Kernel:
    """One emitted kernel of a lowering."""

    spec: KernelSpec

    @cached_property
    def source(self) -> str:
        """The text of the emitted standalone Triton file."""
        from tilewright.codegen.emit import emit

        return emit(self.spec)

    def build(self, target: str | None = None) -> Artifact:
        """Cross-compiles for `target`, which needs no GPU. The default is the target of the
        kernel's own spec.

        Returns an Artifact with ptx, cubin and audit. Raises BuildError with the compiler's
        message.
        """
        from tilewright.codegen.build import compile_for

        return compile_for(self.spec, target or self.spec.target)

    @property
    def audit(self) -> Audit:
        return self.build().audit


@dataclass(frozen=True)
class Site:
    """One fused site.

    shapes: facts about the site by name, such as its shapes, which a reader can check.
    lowering: the way in which the op is computed.
    reason: the reason for this lowering.
    node: the name of the op in the rewritten graph.
    absorbed: the names of the original graph's nodes that the op replaces.
    intermediate_bytes: the size of the values that disappear from the graph together with the
        absorbed nodes; 0 if the size is not known before the run. The op may make some of these
        values itself.
    launches: the number of kernels that the op itself starts.
    kernels: the kernels of the op, and the kernels of ops that compute its arguments, such as
        `mask_blocks`. The latter ops are separate nodes.
    """

    pattern: str
    op: str
    scope: str
    source: str
    shapes: dict[str, Any]
    lowering: str
    reason: str
    kernels: tuple[Kernel, ...] = ()
    node: str = ""
    absorbed: tuple[str, ...] = ()
    intermediate_bytes: int = 0
    launches: int = 0

    @property
    def facts(self) -> str:
        """The shapes in one line: `heads=32/8x128 rope=half`."""
        return " ".join(f"{key}={value}" for key, value in self.shapes.items())

    @property
    def kernel(self) -> str:
        """The names of the emitted kernels, separated by commas. The text is empty if a library
        computes the op."""
        return ", ".join(k.spec.name for k in self.kernels)


@dataclass(frozen=True)
class GraphReport:
    """The outcome for one Dynamo graph. `str()` returns the report in plain lines.

    modules: the graph before and after fusing; None in a report that :meth:`without_graphs`
        returned.
    seconds: the time of each phase.
    inputs: the graph's inputs that shared memory when the graph was traced.
    points: the census of the graph; empty if fusing did not begin.
    target: the name of the chip for which kernels are planned.
    graph_breaks: the texts of the graph breaks that ended this graph.
    node_counts: the number of nodes before and after fusing, set only in a report without graphs.
    """

    modules: tuple[fx.GraphModule, fx.GraphModule] | None
    matches: tuple[Site, ...]
    misses: tuple[Miss, ...]
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    inputs: InputMemory | None = None
    points: tuple[Point, ...] = ()
    target: str = ""
    graph_breaks: tuple[str, ...] = ()
    node_counts: tuple[int, int] = (0, 0)

    @property
    def before(self) -> fx.GraphModule:
        """The graph as Dynamo captured it."""
        return self._module(0)

    @property
    def after(self) -> fx.GraphModule:
        """The rewritten graph."""
        return self._module(1)

    def _module(self, place: int) -> fx.GraphModule:
        if self.modules is None:
            raise AttributeError(
                "the graphs of a compilation are not kept; tilewright.compiler.lower(model, args)"
                ".graphs has them, and TORCH_TRACE writes them"
            )
        return self.modules[place]

    @property
    def nodes(self) -> int:
        """The number of nodes in the graph."""
        return len(self.before.graph.nodes) if self.modules else self.node_counts[0]

    @property
    def nodes_after(self) -> int:
        """The number of nodes in the rewritten graph."""
        return len(self.after.graph.nodes) if self.modules else self.node_counts[1]

    @property
    def lowered(self) -> Lowered:
        """The report on this graph alone."""
        return Lowered((self,), self.target, self.graph_breaks)

    @property
    def data(self) -> dict[str, Any]:
        """The report as JSON-ready data, in the form in which the option `report` writes it."""
        return self.lowered.as_dict()

    @property
    def text(self) -> str:
        return str(self.lowered)

    def __str__(self) -> str:
        return self.text

    def without_graphs(self) -> GraphReport:
        """Returns the report as text and numbers only. A graph holds fake tensors, sources and
        sometimes weights. A process that compiles for months must not keep models alive that it no
        longer uses."""
        misses = tuple(miss.without_graph() for miss in self.misses)
        counts = self.nodes, self.nodes_after
        return replace(self, modules=None, misses=misses, inputs=None, node_counts=counts)


@dataclass(frozen=True)
class Lowered:
    """All graphs of a model. `str()` returns the report as text, and `to_json()` returns it as
    JSON.

    graphs: the report of each graph, in the order in which the graphs were compiled.
    target: the name of the chip for which kernels are planned.
    graph_breaks: the texts of the graph breaks, one for each place.
    """

    graphs: tuple[GraphReport, ...]
    target: str
    graph_breaks: tuple[str, ...] = ()

    @property
    def matches(self) -> list[Site]:
        return [m for g in self.graphs for m in g.matches]

    @property
    def misses(self) -> list[Miss]:
        """The misses of every graph, followed by the graph breaks. Each place occurs once. If a
        graph break cut a graph, the miss of the break replaces the misses for points that no
        pattern recognises in the parts."""
        found = [m for g in self.graphs for m in g.misses]
        breaks = [m for m in found if m.pattern == CAPTURE]
        breaks += [break_miss(text) for text in self.graph_breaks]
        if not self.graphs and not breaks:
            breaks = [NO_GRAPH]
        others = [m for m in found if m.pattern != CAPTURE]
        return [*unless_cut(others, bool(breaks)), *dict.fromkeys(breaks)]

    @property
    def lost(self) -> list[Miss]:
        """The misses in which something that the user asked for is lost. The other misses are
        advice."""
        return [m for m in self.misses if m.is_lost]

    @property
    def notes(self) -> list[str]:
        return [n for g in self.graphs for n in g.notes]

    @property
    def kernels(self) -> list[Kernel]:
        """Every distinct kernel, in the order in which the graphs first use them."""
        found = {k.spec.name: k for m in self.matches for k in m.kernels}
        return list(found.values())

    @cached_property
    def census(self) -> Census:
        """The points of all graphs. A point is a product with a weight, a softmax, a write into
        memory from outside of the graph, or a choice of the largest numbers. Each point has the
        match or the miss to which it belongs, or the reason why it is of no interest."""
        from tilewright.compiler.report.census import Census

        census = Census(tuple(point for graph in self.graphs for point in graph.points))
        breaks = [miss for miss in self.misses if miss.pattern == CAPTURE]
        return census.spoken_for_by(breaks[0]) if breaks else census

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-ready data."""
        return {
            "target": self.target,
            "graphs": [
                {"nodes": g.nodes, "nodes_after": g.nodes_after, "seconds": dict(g.seconds)}
                for g in self.graphs
            ],
            "matches": [site_dict(m) for m in self.matches],
            "misses": [miss_dict(m) for m in self.misses],
            "kernels": [asdict(k.spec) | {"name": k.spec.name} for k in self.kernels],
            "graph_breaks": list(self.graph_breaks),
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return "\n".join(text_lines(self))


NO_GRAPH = Miss(
    CAPTURE,
    "NO_GRAPH",
    Stage.ANCHORED,
    "Nothing was captured: Dynamo met no tensor operation that it could trace",
    hint="check that neither the model nor a function that it calls is under "
    "torch.compiler.disable, is already compiled by itself, or is a generator; "
    "TORCH_LOGS=graph_breaks,dynamo gives more details",
)


def unless_cut(misses: Sequence[Miss], is_cut: bool) -> Sequence[Miss]:
    """Returns the misses of a graph. If graph breaks cut the graph (`is_cut`), leaves out the
    misses for points that no pattern recognises, because the parts of a cut site look like such
    points."""
    return [miss for miss in misses if miss.code != UNRECOGNISED] if is_cut else misses


def break_miss(reason: str) -> Miss:
    """Makes the miss of a graph break from its text, which has Dynamo's reason and lines with
    hints."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    return Miss(
        CAPTURE,
        "GRAPH_BREAK",
        Stage.ANCHORED,
        f"the graph breaks here, and what runs between graphs is not fused: {lines[0]}",
        hint=hints[0] if hints else "torch.compile(..., fullgraph=True) shows where",
    )


def site_dict(site: Site) -> dict[str, Any]:
    """Returns a site as JSON-ready data."""
    names = ("pattern", "op", "scope", "source", "shapes", "lowering", "reason")
    return {n: getattr(site, n) for n in names} | {
        "kernels": [k.spec.name for k in site.kernels],
        "nodes_absorbed": len(site.absorbed),
        "intermediate_bytes": site.intermediate_bytes,
    }


def miss_dict(miss: Miss) -> dict[str, Any]:
    """Returns a miss as JSON-ready data."""
    names = ("pattern", "code", "scope", "source", "message", "hint", "count", "weight")
    return {n: getattr(miss, n) for n in names} | {"stage": miss.stage.label}


Placed = TypeVar("Placed", Site, Miss)


def collapse_sites(sites: Sequence[Site]) -> list[tuple[Site, str, int]]:
    """Joins equal sites of different layers. Returns a representative, the collapsed scope and the
    count of each group."""
    return [(g[0], scope, len(g)) for g, scope in _alike(sites, site_kind)]


def site_kind(site: Site) -> tuple[Any, ...]:
    """Returns the key that is equal for equal sites of different layers."""
    facts = tuple(sorted((k, str(v)) for k, v in site.shapes.items()))
    return collapse_scope(site.scope), site.pattern, facts, site.lowering, site.kernel


def collapse_misses(misses: Sequence[Miss]) -> list[tuple[Miss, str, int]]:
    """Joins equal misses of different layers. Returns a representative, the collapsed scope and the
    count of each group."""

    def kind(miss: Miss) -> tuple[Any, ...]:
        why = miss.message if miss.pattern == CAPTURE else ""
        return miss.pattern, miss.code, miss.stage, miss.source, why

    return [(g[0], scope, sum(m.count for m in g)) for g, scope in _alike(misses, kind)]


def _alike(
    items: Sequence[Placed], kind: Callable[[Placed], Any]
) -> Iterator[tuple[list[Placed], str]]:
    """Yields groups of items that differ only in the number of the layer, each with its collapsed
    scope."""
    groups: dict[Any, list[Placed]] = {}
    for item in items:
        groups.setdefault((collapse_scope(item.scope), kind(item)), []).append(item)
    for (scope, _), group in groups.items():
        yield group, scope if len(group) > 1 else group[0].scope


def text_lines(lowered: Lowered) -> list[str]:
    """Returns the report in plain lines. The command line prints the same facts as tables."""
    lines = []
    for site, scope, count in collapse_sites(lowered.matches):
        times = f" x{count}" if count > 1 else ""
        # The reference is slow, so the line says why no kernel computes the site.
        why = f": {site.reason}" if site.lowering == "reference" and site.reason else ""
        lines.append(f"{scope}{times}  {site.pattern}  {site.facts}  [{site.lowering}{why}]")
    for miss, _, count in collapse_misses(lowered.misses):
        times = f" (x{count})" if count > 1 else ""
        word = "missed" if miss.is_lost else "advice by"
        lines.append(f"{word} {miss.pattern}: {miss}{times}")
    return [*lines, *lowered.notes] or ["nothing to fuse was found"]
