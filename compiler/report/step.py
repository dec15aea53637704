"""A step, seen whole: the bytes that a graph moves, and the least time they take on a chip.

    from tilewright.compiler.report.step import step_of
    step = step_of(lowered, present=1000)
    step.total.floor_us, step.total.modelled_us   # of the whole graph
    for layer in step.layers:                     # equal layers once, with their count
        layer.total, layer.of(FUSED), layer.of(INDUCTOR)

Nothing is measured. Weights in use are read once; of caches the tokens that are said to be present.
What crosses from one part to the next is written and read again. The floor is of weights and caches
alone, which no fusing saves, or of the products with weights where those take longer. The model of
a part's time (`compiler/report/times.py`) adds what crosses, attention, and the start of each
kernel, at the rates that kernels reach; `compiler/report/bars.py` says how far it was from measured
times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from tilewright.codegen.targets import Target, get_target
from tilewright.compiler.report import Lowered
from tilewright.compiler.report.bars import Bar, bar_of, class_of
from tilewright.compiler.report.times import spent_of
from tilewright.compiler.report.traffic import Unit, units_of

Kind = Literal["fused", "library", "inductor"]
FUSED: Kind = "fused"
#: Products that a library computes, called from what Inductor generates.
LIBRARY: Kind = "library"
#: What Inductor generates kernels for.
INDUCTOR: Kind = "inductor"
KINDS: tuple[Kind, ...] = (FUSED, LIBRARY, INDUCTOR)
#: What a time is spent on, in words, by field of `Amounts`.
SPENT = {
    "weights_us": "reading weights",
    "caches_us": "reading caches",
    "between_us": "bytes between parts",
    "products_us": "products with weights",
    "attention_us": "attention",
    "starts_us": "starts of kernels",
}
#: As many tokens as caches have room for, where it is not said how many are present.
FULL = sys.maxsize


S = TypeVar("S", bound="Summed")


@dataclass(frozen=True)
class Summed:
    """Adds numbers field by field."""

    def __add__(self: S, other: S) -> S:
        names = (field.name for field in fields(self))
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class Amounts(Summed):
    """Sums over parts; times in microseconds, the rest in bytes but for the counts.

    weights: parameters and buffers in use, each once; of a mixture as many experts as tokens reach
    that are spread evenly. caches: of the tokens present, 0 where their number is not given.
    cache_capacity: of full caches. activations: what parts hand to each other, what the graph is
    given besides, and returns; written once and read by each. nodes: what computes, views apart.
    launches: kernels, of a library's product one. floor_us, modelled_us: as this file says. The
    other times are what the modelled one is spent on (`compiler/report/times.py` `Spent`).
    """

    weights: int = 0
    caches: int = 0
    cache_capacity: int = 0
    activations: int = 0
    nodes: int = 0
    launches: int = 0
    floor_us: float = 0.0
    modelled_us: float = 0.0
    weights_us: float = 0.0
    caches_us: float = 0.0
    between_us: float = 0.0
    products_us: float = 0.0
    attention_us: float = 0.0
    starts_us: float = 0.0

    @property
    def bound(self) -> str:
        """The largest part of the modelled time, a value of SPENT; empty without any time."""
        longest = max(SPENT, key=lambda name: getattr(self, name))
        return SPENT[longest] if getattr(self, longest) else ""

    @property
    def bytes(self) -> int:
        """All that is moved."""
        return self.weights + self.caches + self.activations

    def times(self, count: int) -> Amounts:
        """Returns the amounts of `count` equal parts."""
        return Amounts(*(count * getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Part:
    """A unit that runs as one: a fused op, a library's product, or nodes that Inductor puts
    together.

    scope: of its layer, as `LayerStep.scope`. name: the pattern's, the product's, or the first few
    of the functions in a group. node: the first node, in the rewritten graph; of a fused op
    `Site.node`. symbols: sizes that are symbols; what has them is not in the amounts. kernels:
    names of those that are emitted.
    """

    scope: str
    kind: Kind
    name: str
    node: str
    amounts: Amounts
    symbols: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerStep:
    """Layers with equal parts, represented by the first of them.

    scope: "model.layers.0", or "" for what is outside of all layers. scopes: of all equal ones.
    parts: of one of them, in order.
    """

    scope: str
    scopes: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def total(self) -> Amounts:
        """The amounts of one layer."""
        return _sum(part.amounts for part in self.parts)

    def of(self, kind: Kind) -> Amounts:
        """Returns the amounts of one kind of parts in one layer."""
        return _sum(part.amounts for part in self.parts if part.kind == kind)


@dataclass(frozen=True)
class Step:
    """All parts of a model's graphs, in order. target: a name. present: tokens in the caches of
    each sequence; None where that is not said: then caches are in no bytes and in no time. kind:
    its class, as `compiler/report/bars.py` `class_of` has it."""

    target: str
    present: int | None
    parts: tuple[Part, ...]
    kind: str = ""

    @cached_property
    def layers(self) -> tuple[LayerStep, ...]:
        """The distinct layers, in order."""
        by_scope: dict[str, list[Part]] = {}
        for part in self.parts:
            by_scope.setdefault(part.scope, []).append(part)
        alike: dict[Any, list[str]] = {}
        for scope, own in by_scope.items():
            key = bool(scope), tuple(replace(part, scope="", node="") for part in own)
            alike.setdefault(key, []).append(scope)
        return tuple(LayerStep(s[0], tuple(s), tuple(by_scope[s[0]])) for s in alike.values())

    @cached_property
    def total(self) -> Amounts:
        return _sum(part.amounts for part in self.parts)

    def of(self, kind: Kind) -> Amounts:
        """Returns the amounts of one kind of parts in all layers."""
        return _sum(part.amounts for part in self.parts if part.kind == kind)

    @property
    def bar(self) -> Bar:
        """The error bar of the modelled time."""
        return bar_of(self.kind, get_target(self.target))

    @property
    def symbols(self) -> tuple[str, ...]:
        """Sizes that are symbols: what has them is in no sum."""
        return tuple(dict.fromkeys(s for part in self.parts for s in part.symbols))

    @property
    def left_share(self) -> float:
        """The share of the modelled time that is not in fused ops."""
        whole = self.total.modelled_us
        return 1.0 - self.of(FUSED).modelled_us / whole if whole else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "target": self.target,
            "present": self.present,
            "bytes_per_s": get_target(self.target).hbm_bytes_per_s,
            "symbols": list(self.symbols),
            "left_share": self.left_share,
            "class": self.kind,
            "bar_percent": self.bar.percent,
            "bar_why": self.bar.why,
            "bound": self.total.bound,
            "total": asdict(self.total),
            **{kind: asdict(self.of(kind)) for kind in KINDS},
            "layers": [
                {
                    "scopes": list(layer.scopes),
                    "total": asdict(layer.total),
                    "parts": [
                        {"kind": p.kind, "name": p.name, "node": p.node}
                        | {"symbols": list(p.symbols)}
                        | asdict(p.amounts)
                        for p in layer.parts
                    ],
                }
                for layer in self.layers
            ],
        }


def step_of(lowered: Lowered, present: int | None = None, chip: Target | None = None) -> Step:
    """The step of a model on the target it was lowered for. present: as in Step. chip: that target
    at other rates, such as those of another product; None: as it is in TARGETS."""
    target = chip or get_target(lowered.target)
    units = [unit for graph in lowered.graphs for unit in units_of(graph, target)]
    parts = (
        Part(
            unit.scope,
            unit.kind,
            unit.name,
            unit.node,
            amounts_of(unit, target, present),
            unit.symbols,
            unit.kernels,
        )
        for unit in units
    )
    return Step(lowered.target, present, tuple(parts), class_of(units))


def amounts_of(unit: Unit, target: Target, present: int | None) -> Amounts:
    """Returns what one unit moves and takes. present: as in Step."""
    reads = unit.cache_reads
    caches = unit.caches
    if present is not None:
        caches += sum(read.bytes_of(present) for read in reads)
    fixed = unit.weights + caches
    spent = spent_of(unit, caches, present, target)
    return Amounts(
        weights=unit.weights,
        caches=caches,
        cache_capacity=unit.caches + sum(read.bytes_of(read.capacity) for read in reads),
        activations=unit.activations,
        nodes=unit.nodes,
        launches=unit.launches,
        floor_us=max(1e6 * fixed / target.hbm_bytes_per_s, 1e6 * unit.flops / unit.flop_rate),
        modelled_us=spent.us,
        **asdict(spent),
    )


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    return sum(amounts, Amounts())
