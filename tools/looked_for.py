"""What `inspect` says of a model in which no pattern starts: where they would, and what of it is
there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tilewright.codegen.mlp.plan import MOST_TOKENS
from tilewright.compiler import Lowered
from tilewright.compiler.dataflow.build import build_view
from tilewright.patterns.dataflow import Value, scope_of


@dataclass(frozen=True)
class LookedFor:
    """Where some patterns start. near: operations that a graph which has none may have instead, by
    the names of `patterns.dataflow`; an in-place write is a "store"."""

    what: str
    near: frozenset[str]


_LINEARS = frozenset({"aten.linear", "aten.addmm", "aten.mm", "aten.matmul"})
LOOKED_FOR = (
    LookedFor(
        "writes into a cache that is an input or a buffer (index_copy_, cache[slots] = k)",
        frozenset({"store", "aten.cat", "aten.index_put", "aten.index_copy", "aten.scatter"}),
    ),
    LookedFor(
        "attention that reads a cache, has a mask, or shares keys among heads",
        frozenset({"aten.scaled_dot_product_attention", "aten.softmax", "aten.bmm"}),
    ),
    LookedFor(
        f"linears of at most {MOST_TOKENS} tokens with an activation, a gate or a residual sum "
        "behind them",
        _LINEARS,
    ),
    LookedFor(
        "experts: a router's topk, and a product of rows in groups (torch._grouped_mm, bmm)",
        frozenset({"aten.topk", "aten.sort", "aten._grouped_mm", "aten.bmm"}),
    ),
    LookedFor(
        "adapters: a linear, and two products of low rank added to it",
        _LINEARS,
    ),
)


def nearest_lines(lowered: Lowered) -> Iterator[str]:
    """A line for each of LOOKED_FOR, with what of the kind the graphs have."""
    values = [v for graph in lowered.graphs for v in build_view(graph.before.graph).values]
    for entry in LOOKED_FOR:
        yield f"{entry.what}: {_seen([v for v in values if v.op in entry.near])}"


def _seen(values: list[Value]) -> str:
    if not values:
        return "nothing like it"
    counts = Counter(value.op for value in values)
    listed = ", ".join(f"{name.removeprefix('aten.')} x{n}" for name, n in counts.items())
    first = values[0]
    place = scope_of(first.node) or "the top level"
    source = f" ({first.source})" if first.source else ""
    return f"only {listed}, the first in {place}{source}"
