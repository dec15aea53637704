"""Finds the points of a graph that a census counts: products with weights, softmaxes, writes into
memory that came from outside of the graph, and choices of the largest numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

from tilewright.compiler import _compat
from tilewright.patterns.dataflow import Dataflow, Value, View
from tilewright.patterns.language import Kind
from tilewright.patterns.recognise.attention import is_spelled_softmax
from tilewright.patterns.recognise.attention_varlen import FORMS

#: The sources of a value. `own`: it is computed only from tensors that the model stores. `given`:
#: it is also computed from other inputs of the graph, or from results of points. `made`: it is
#: computed only from factories.
Origin = Literal["own", "given", "made"]

PRODUCTS = re.compile(
    r"(^|[._:])(linear|matmul|mm|addmm|bmm|baddbmm|addbmm|einsum|mv|addmv|addr|tensordot|inner|"
    r"bilinear|conv(olution|_transpose)?(_?\dd)?|(_?\w*_)?(linear|mm|bmm|matmul|gemm|conv\dd?)"
    r"(_v2)?)(\.\w+)?$"
)
ATTENTION = re.compile(r"attention|attn|flash|sdpa", re.IGNORECASE)
_SOFTMAX = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"})
_CHOICES = frozenset({"topk", "sort", "argsort", "argmax", "kthvalue"})
_KNOWN = frozenset({"input", "constant", "store", "cast", "bitcast"})
# Only the first operand of these operators gives elements. The other operands are indices.
_SELECTIONS = frozenset({"index", "index_select", "gather", "take", "take_along_dim"})
# Operators that read a matrix of the model without multiplying by it.
_LOOKUPS = re.compile(r"embedding|index|gather|take|memory|norm|getitem|copy|where|scatter")


def plain_name(value: Value) -> str:
    """Returns the name of a value's operation, without ATen's prefix."""
    return value.op.removeprefix("aten.").removeprefix("opaque:")


def is_unknown(value: Value) -> bool:
    """Whether an operator that does not belong to ATen computes a value."""
    known = value.op.startswith("aten.") or value.op in _KNOWN
    return not known and plain_name(value) not in FORMS


@dataclass(frozen=True)
class Graph:
    """The dataflow view of a graph, with the inputs that the model stores.

    told: the nodes in matches, and the nodes that misses account for.
    taken: the nodes whose results are arguments of matches.
    """

    flow: Dataflow
    told: Set[fx.Node] = frozenset()
    taken: Set[fx.Node] = frozenset()
    _origins: dict[Value, Origin] = field(default_factory=dict, compare=False)
    _kinds: dict[Value, Kind | None] = field(default_factory=dict, compare=False)

    @cached_property
    def own(self) -> frozenset[fx.Node]:
        """The inputs that are parameters, buffers or other tensors of modules."""
        inputs = (n for n in self.flow.graph.nodes if n.op in ("placeholder", "get_attr"))
        return frozenset(node for node in inputs if _compat.is_models_own(node))

    @cached_property
    def read(self) -> frozenset[fx.Node]:
        """The nodes that an output of the graph, a write or an unknown call depends on."""
        ends = {v.node for v in self.flow.values if v.store is not None or is_unknown(v)}
        ends |= {node for node in self.flow.graph.nodes if node.op == "output"}
        waiting, found = list(ends), set(ends)
        while waiting:
            new = [node for node in waiting.pop().all_input_nodes if node not in found]
            found.update(new)
            waiting += new
        return frozenset(found)

    def kind(self, value: Value) -> Kind | None:
        """Returns the kind as which a value is counted. Returns None for a value that is not
        counted."""
        if value not in self._kinds:
            kinds = (kind for kind, is_one in _KINDS.items() if is_one(value, self))
            self._kinds[value] = next(kinds, None)
        return self._kinds[value]

    def origin(self, value: Value) -> Origin:
        """Returns the sources of a value."""
        waiting = [value]
        while waiting:
            last = waiting[-1]
            sources = self._sources(last)
            new = [] if last in self._origins else [s for s in sources if s not in self._origins]
            if new:
                waiting += new
                continue
            waiting.pop()
            if last not in self._origins:
                self._origins[last] = self._origin_of(last, sources)
        return self._origins[value]

    def _sources(self, value: Value) -> tuple[Value, ...]:
        name, operands = plain_name(value), tuple(v.value for v in value.operands)
        if name in _SELECTIONS:
            held = tuple(o for o in operands if o.dtype.is_floating_point or o.node in self.own)
            return (held or operands)[:1]
        return operands

    def _origin_of(self, value: Value, sources: tuple[Value, ...]) -> Origin:
        if value.op in ("input", "constant"):
            return "own" if value.node in self.own else "given"
        if self.kind(value) is not None and value.op != "store":
            return "given"
        found = {self._origins[source] for source in sources}
        return "given" if "given" in found else "own" if "own" in found else "made"

    def weights(self, value: Value) -> tuple[View, ...]:
        """Returns the operands of a product that the model stores, or that are computed only from
        stored tensors."""
        wide = [v for v in value.operands if len(v.shape) > 1]
        return tuple(v for v in wide if self.origin(v.value) == "own" or self._is_looked_up(v))

    def _is_looked_up(self, view: View) -> bool:
        """Whether a view has a matrix for each index: rows of a table that the model stores are
        looked up, and each is reshaped to a matrix."""
        value = view.value
        if plain_name(value) != "embedding" or len(value.operands) != 2:
            return False
        features = {len(value.shape) - 1}
        matrix = ({atom.axis for atom in dim} == features for dim in view.effect.dims[-2:])
        return all(matrix) and self.origin(value.operands[0].value) == "own"


def _is_write(value: Value, graph: Graph) -> bool:
    return value.store is not None and value.store.memory.is_input


def _is_softmax(value: Value, graph: Graph) -> bool:
    name = plain_name(value)
    if name in _SOFTMAX or name in FORMS:
        return True
    if "attention" in name or (is_unknown(value) and ATTENTION.search(name)):
        return len(value.operands) > 1
    return is_spelled_softmax(value)


def _is_choice(value: Value, graph: Graph) -> bool:
    return plain_name(value) in _CHOICES


def _is_product(value: Value, graph: Graph) -> bool:
    if value.op in _KNOWN:
        return False
    name = plain_name(value)
    if PRODUCTS.search(name):
        return True
    if not is_unknown(value) or _LOOKUPS.search(name):
        return False
    matrices = [v for v in value.operands if len(v.shape) > 1]
    return any(v.value.node in graph.own for v in matrices) and len(value.operands) > 1


_KINDS: dict[Kind, Callable[[Value, Graph], bool]] = {
    "write": _is_write,
    "softmax": _is_softmax,
    "top-k": _is_choice,
    "product": _is_product,
}


def points_of(graph: Graph) -> Iterator[tuple[Kind, Value]]:
    """Yields the points in program order, each node once for each kind."""
    seen: set[tuple[Kind, fx.Node]] = set()
    for value in graph.flow.values:
        kind = graph.kind(value)
        if kind is not None and (kind, value.node) not in seen:
            seen.add((kind, value.node))
            yield kind, value
