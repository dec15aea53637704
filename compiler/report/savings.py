"""Compares a step that reads weights as codes with the same step in bfloat16.

    from tilewright.compiler.report.savings import savings_of
    savings = savings_of(lowered)          # None for a model without codes
    savings.read.bytes, savings.read.bfloat16
    for row in savings.rows: ...           # by fused op and format
    for one in savings.unread: ...         # weights that are not read as codes, and why

Nothing is measured. The bfloat16 step has the same parts, except the parts that decode, and it
reads two bytes for each number of a weight that is stored as codes. Both steps keep the parts that
round activations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewright.codegen.targets import Target, get_target
from tilewright.compiler.report import GraphReport, Lowered
from tilewright.compiler.report.step import Amounts, Summed, amounts_of
from tilewright.compiler.report.traffic import Unit, units_of
from tilewright.compiler.report.weight_reads import GraphWeights, WeightRead, weights_of
from tilewright.compiler.scopes import collapse_scope
from tilewright.patterns.language import Miss

#: The bytes of a number in bfloat16, the format with which the codes are compared.
BFLOAT16 = 2


@dataclass(frozen=True)
class Read(Summed):
    """The bytes of the weights that a step reads as codes.

    codes, scales, zeros: the bytes of each, as they are stored.
    bfloat16: the bytes that the same weights have in bfloat16.
    """

    codes: int = 0
    scales: int = 0
    zeros: int = 0
    bfloat16: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of codes, scales and zeros."""
        return self.codes + self.scales + self.zeros


@dataclass(frozen=True)
class Times(Summed):
    """Times of a step, or of parts of it, in microseconds by a chip's cost model.

    floor_us, modelled_us: the floor and the modelled time, as in `Amounts`.
    bfloat16_floor_us, bfloat16_modelled_us: the times of the same parts with weights in bfloat16.
    """

    floor_us: float = 0.0
    modelled_us: float = 0.0
    bfloat16_floor_us: float = 0.0
    bfloat16_modelled_us: float = 0.0


@dataclass(frozen=True)
class SavingsRow:
    """The parts of a step in which one reader reads weights of one format as codes. The reader is
    either the ops of one pattern, or another function.

    by: the name of the pattern, or of the function.
    form: the format, in words.
    """

    by: str
    form: str
    count: int
    read: Read
    times: Times


@dataclass(frozen=True)
class Unread:
    """Weights that are alike and are not read as codes.

    scope: the module of the weights, with `*` in place of the layer's number.
    bytes: the number of bytes of these weights that a step reads.
    has_codes: whether the model stores them as codes.
    reason: the reason why they are not read as codes.
    """

    scope: str
    count: int
    bytes: int
    has_codes: bool
    reason: str


@dataclass(frozen=True)
class Savings:
    """A comparison of a model's step, which reads weights as codes, with the same step in bfloat16.

    tokens: the number of tokens of the step; None if it is symbolic.
    times: the times of the whole step.
    rounds: whether both steps round activations to codes.
    breaks: the number of graph breaks.
    """

    target: str
    tokens: int | None
    rows: tuple[SavingsRow, ...]
    unread: tuple[Unread, ...]
    times: Times
    rounds: bool = False
    breaks: int = 0

    @property
    def read(self) -> Read:
        """The bytes of all weights that are read as codes."""
        return sum((row.read for row in self.rows), Read())

    @property
    def forms(self) -> tuple[str, ...]:
        """The formats of the weights that are read as codes, in words. The format with the most
        bytes comes first."""
        size: dict[str, int] = {}
        for row in self.rows:
            size[row.form] = size.get(row.form, 0) + row.read.bytes
        return tuple(sorted(size, key=lambda form: -size[form]))

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON-ready data."""
        return {
            "target": self.target,
            "tokens": self.tokens,
            "forms": list(self.forms),
            "read": _sizes(self.read),
            **asdict(self.times),
            "rounds_activations": self.rounds,
            "graph_breaks": self.breaks,
            "rows": [
                {"by": row.by, "form": row.form, "count": row.count, "read": _sizes(row.read)}
                | asdict(row.times)
                for row in self.rows
            ],
            "unread": [asdict(one) for one in self.unread],
        }


def _sizes(read: Read) -> dict[str, int]:
    return asdict(read) | {"bytes": read.bytes}


def savings_of(lowered: Lowered, present: int | None = None) -> Savings | None:
    """Returns the savings of a step. Returns None if the model stores no codes.

    `present` is the number of tokens in the caches of each sequence, as in `step_of`.
    """
    target = get_target(lowered.target)
    graphs = [_Graph.of(graph, target) for graph in lowered.graphs]
    if not any(read.how != "numbers" for graph in graphs for read in graph.weights.reads):
        return None
    rows: dict[tuple[str, str], SavingsRow] = {}
    whole = Times()
    for graph in graphs:
        for reads, times in graph.timed(target, present):
            whole += times
            for row in _rows(reads, times):
                key = row.by, row.form
                rows[key] = _joined(rows[key], row) if key in rows else row
    unread = _collapsed(one for graph in graphs for one in graph.unread(lowered.misses))
    tokens = next((t for graph in graphs if (t := graph.tokens) is not None), None)
    made = tuple(sorted(rows.values(), key=lambda row: -row.read.bfloat16))
    rounds = any(graph.weights.rounds for graph in graphs)
    return Savings(lowered.target, tokens, made, unread, whole, rounds, len(lowered.graph_breaks))


@dataclass(frozen=True)
class _Graph:
    """One graph with its units and its weights."""

    report: GraphReport
    units: Sequence[Unit]
    weights: GraphWeights

    @classmethod
    def of(cls, graph: GraphReport, target: Target) -> _Graph:
        units = units_of(graph, target)
        return cls(graph, units, weights_of(graph, units))

    @property
    def tokens(self) -> int | None:
        """The number of rows of the first fused op that reads codes and whose number of rows is not
        symbolic. None if there is no such op."""
        coded = {read.node for read in self.weights.reads if read.how == "codes"}
        facts = (str(s.shapes.get("x", "")) for s in self.report.matches if s.node in coded)
        found = (re.match(r"\w*\[(\d+),", fact) for fact in facts)
        return next((int(rows[1]) for rows in found if rows), None)

    def timed(
        self, target: Target, present: int | None
    ) -> Iterator[tuple[list[WeightRead], Times]]:
        """Yields the weight reads and the times of each unit."""
        by_unit: dict[str, list[WeightRead]] = {}
        for read in self.weights.reads:
            by_unit.setdefault(read.unit, []).append(read)
        for unit in self.units:
            reads = by_unit.get(unit.node, [])
            now, then = amounts_of(unit, target, present), Amounts()
            if not self.weights.decoding >= set(unit.members):
                then = amounts_of(_in_bfloat16(unit, reads, target), target, present)
            times = now.floor_us, now.modelled_us, then.floor_us, then.modelled_us
            yield reads, Times(*times)

    def unread(self, misses: Sequence[Miss]) -> Iterator[Unread]:
        """Yields the weights that are not read as codes, one by one."""
        points = {point.node: point for point in self.report.points if point.kind == "product"}
        for read in self.weights.reads:
            if read.how == "codes":
                continue
            has_codes = read.how != "numbers"
            if not has_codes:
                reason = f"the model stores it in {read.form}, not as codes"
            else:
                point = points.get(read.node)
                why = point.why if point is not None and point.account != "match" else ""
                reason = _reason(read, why, misses)
            yield Unread(read.scope, 1, read.bytes, has_codes, reason)


def _in_bfloat16(unit: Unit, reads: Sequence[WeightRead], target: Target) -> Unit:
    """Returns a unit as it would be with bfloat16 weights in place of codes."""
    changed = [read for read in reads if read.how in ("codes", "decoded")]
    if not changed:
        return unit
    stored = sum(read.stored for read in changed)
    made = sum(read.bytes for read in changed) - stored
    weights = unit.weights - stored + BFLOAT16 * sum(read.numbers for read in changed)
    rate = dict(target.flops)["bf16"]
    return replace(
        unit,
        weights=weights,
        # A kernel for bfloat16 weights computes the norm of x itself.
        launches=unit.launches - unit.preparations,
        preparations=0,
        activations=max(unit.activations - made, 0),
        flop_rate=rate,
        codes="",
    )


def _rows(reads: Sequence[WeightRead], times: Times) -> Iterator[SavingsRow]:
    """Yields the row of a unit's weights in codes, if it has any."""
    coded = [read for read in reads if read.how == "codes"]
    if coded:
        parts = (Read(r.codes, r.scales, r.zeros, BFLOAT16 * r.numbers) for r in coded)
        form = ", ".join(dict.fromkeys(read.form for read in coded))
        yield SavingsRow(coded[0].by, form, 1, sum(parts, Read()), times)


def _joined(row: SavingsRow, other: SavingsRow) -> SavingsRow:
    count, read = row.count + other.count, row.read + other.read
    return replace(row, count=count, read=read, times=row.times + other.times)


def _reason(read: WeightRead, why: str, misses: Sequence[Miss]) -> str:
    """Returns why a product does not read codes as codes. `why` is the census's account of the
    product."""
    named = [miss for miss in misses if f"{miss.pattern} {miss.code}" == why]
    # A miss may account for all products of a layer. A product's own miss comes first.
    own = [miss for miss in misses if miss.scope == read.scope] if named else []
    if miss := next(iter([*own, *named]), None):
        return f"{miss.code}: {miss.message}"
    if why:
        return f"{why}; the graph decodes the codes" if read.how == "decoded" else why
    if read.how == "decoded":
        return f"{read.by} takes no codes of this form, so the graph decodes them first"
    return f"{read.by} takes {read.form}, and it is not known how many of their bytes it reads"


def _collapsed(each: Iterable[Unread]) -> tuple[Unread, ...]:
    """Joins equal items of different layers, and sorts items with codes to the front."""
    found: dict[tuple[str, bool, str], Unread] = {}
    for one in each:
        scope = collapse_scope(one.scope)
        key = scope, one.has_codes, one.reason
        known = found.get(key, replace(one, scope=scope, count=0, bytes=0))
        found[key] = replace(known, count=known.count + 1, bytes=known.bytes + one.bytes)
    return tuple(sorted(found.values(), key=lambda one: (not one.has_codes, -one.bytes)))
