"""Models a whole step: the bytes that a graph moves, and the shortest time that this takes on a
chip.

    from tilewright.compiler.report.step import step_of
    step = step_of(lowered, present=1000)
    step.total.floor_us, step.total.modelled_us   # of the whole graph
    for layer in step.layers:                     # equal layers once, with their count
        layer.total, layer.of(FUSED), layer.of(INDUCTOR)

Nothing is measured. The step reads each weight in use once, and reads caches as far as the given
number of tokens fills them. A tensor that crosses from one part to the next is written and read
again. The floor is the time for weights and caches alone, which no fusing saves; if the products
with weights take longer, the floor is their time. The cost model of a part
(`compiler/report/times.py`) adds the crossing tensors, attention, and the start of each kernel, at
the rates that kernels reach. `compiler/report/bars.py` says how far modelled times were from
measured times.
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
from tilewright.compiler.report.times import Spent, spent_of
from tilewright.compiler.report.traffic import Unit, units_of

Kind = Literal["fused", "library", "inductor"]
FUSED: Kind = "fused"
#: Products that a library computes. The code that Inductor generates calls the library.
LIBRARY: Kind = "library"
#: Nodes for which Inductor generates kernels.
INDUCTOR: Kind = "inductor"
KINDS: tuple[Kind, ...] = (FUSED, LIBRARY, INDUCTOR)
#: The causes of a time in words, by the field of `Spent`.
SPENT = {
    "weights_us": "reading weights",
    "caches_us": "reading caches",
    "between_us": "bytes between parts",
    "products_us": "products with weights",
    "attention_us": "attention",
    "starts_us": "starts of kernels",
}
#: The value of `present` that stands for full caches.
FULL = sys.maxsize


S = TypeVar("S", bound="Summed")


@dataclass(frozen=True)
class Summed:
    """Adds numbers field by field."""

    def __add__(self: S, other: S) -> S:
        names = (field.name for field in fields(self))
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class Amounts(Summed, Spent):
    """Sums over parts: times in microseconds, counts and bytes.

    weights: the bytes of parameters and buffers in use, each counted once. For a mixture, these are
        the experts that tokens reach if tokens are spread evenly.
    caches: the bytes of the tokens that are present in caches; 0 if their number is not given.
    cache_capacity: the bytes of full caches.
    activations: the bytes of tensors that cross between parts, of other inputs of the graph, and of
        its outputs. Each tensor is written once, and every reader reads it.
    nodes: the number of nodes that compute. Views do not count.
    launches: the number of kernels. A library's product counts as one kernel.
    floor_us, modelled_us: the floor and the modelled time, which the top of this file explains. The
        times of `Spent` are the causes of the modelled time.
    """

    weights: int = 0
    caches: int = 0
    cache_capacity: int = 0
    activations: int = 0
    nodes: int = 0
    launches: int = 0
    floor_us: float = 0.0
    modelled_us: float = 0.0

    @property
    def bound(self) -> str:
        """The largest cause of the modelled time, as a value of SPENT. It is empty if there is no
        time."""
        longest = max(SPENT, key=lambda name: getattr(self, name))
        return SPENT[longest] if getattr(self, longest) else ""

    @property
    def bytes(self) -> int:
        """The number of all bytes that are moved."""
        return self.weights + self.caches + self.activations

    def times(self, count: int) -> Amounts:
        """Returns the amounts of `count` equal parts together."""
        return Amounts(*(count * getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Part:
    """A unit that runs as one: a fused op, a library's product, or nodes that Inductor joins.

    scope: the layer, as in `LayerStep.scope`.
    name: the pattern, the function of the product, or the first few functions in a group.
    node: the first node, in the rewritten graph; for a fused op it equals `Site.node`.
    symbols: the symbolic sizes. Bytes and times that depend on them are not in the amounts.
    kernels: the names of the emitted kernels.
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
    """Layers with equal parts. The first of them represents all.

    scope: the path of the first layer, such as "model.layers.0"; "" for parts outside all layers.
    scopes: the paths of all equal layers.
    parts: the parts of one layer, in order.
    """

    scope: str
    scopes: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def total(self) -> Amounts:
        """The amounts of one of the layers."""
        return _sum(part.amounts for part in self.parts)

    def of(self, kind: Kind) -> Amounts:
        """Returns the amounts of one kind of parts in one of the layers."""
        return _sum(part.amounts for part in self.parts if part.kind == kind)


@dataclass(frozen=True)
class Step:
    """All parts of a model's graphs, in order.

    target: the name of the chip.
    present: the number of tokens in the caches of each sequence. If it is None, no bytes and no
        times include the caches.
    kind: the class of the step, as `class_of` in `compiler/report/bars.py` returns it.
    """

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
        """The symbolic sizes. No sum includes bytes or times that depend on them."""
        return tuple(dict.fromkeys(s for part in self.parts for s in part.symbols))

    @property
    def left_share(self) -> float:
        """The share of the modelled time that is spent outside fused ops."""
        whole = self.total.modelled_us
        return 1.0 - self.of(FUSED).modelled_us / whole if whole else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON-ready data."""
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
    """Returns the step of a model on the target for which the model was lowered.

    present: the number of tokens in the caches, as in `Step`.
    chip: the target with other rates, such as those of another GPU product; None for the target's
        own rates in TARGETS.
    """
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
    """Returns the bytes and times of one unit. `present` has the meaning that it has in `Step`."""
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
