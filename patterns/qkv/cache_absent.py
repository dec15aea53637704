"""Caches that cannot be written in place: those that grow by `cat`, or are updated out of place.

Never a match: these anchors exist so that the user is told what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tilewright.patterns.dataflow import Dataflow, Value, View, is_in_package
from tilewright.patterns.language import Match, Miss, Reject, Sought, Stage, register

_FACTORIES = {
    f"aten.{prefix}{kind}{suffix}"
    for kind in ("zeros", "ones", "empty", "full")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
}
_OUT_OF_PLACE = {"aten.index_put", "aten.index_copy", "aten.scatter"}


@dataclass(frozen=True)
class AbsentCache:
    """All sites of one kind in a graph: they share one cause, so they get one Miss."""

    code: str
    values: tuple[Value, ...]

    @property
    def node(self) -> fx.Node:
        return self.values[0].node


@dataclass(frozen=True)
class CacheAbsent:
    """The pattern; see the module. `op` is what would have taken the writes."""

    name: str = "cache_absent"
    op: str = "fused_qkv_paged"
    sought: ClassVar[Sought] = Sought(
        "caches that grow by cat, are updated out of place, or are made by the graph",
        frozenset({"aten.cat", "aten.index_put", "aten.index_copy", "aten.scatter"}),
        before=frozenset({"product"}),
        beside=True,
    )

    def anchors(self, flow: Dataflow) -> Iterator[AbsentCache]:
        for code, (is_one, _, _) in _KINDS.items():
            values = tuple(value for value in flow.values if is_one(value, flow))
            if values:
                yield AbsentCache(code, values)

    def match(self, anchor: AbsentCache, flow: Dataflow) -> Match:
        _, message, of_transformers = _KINDS[anchor.code]
        count = len(anchor.values)
        nodes = tuple(v.node for v in anchor.values)
        hint = of_transformers if is_in_package(nodes[0], "transformers") else ""
        raise Reject(
            Miss(self.name, anchor.code, Stage.ANCHORED, f"{count} {message}", nodes, hint, count)
        )


def _grows(value: Value, flow: Dataflow) -> bool:
    """cat([past, new]) of projected data that the graph returns: a cache that grows."""
    if value.op != "aten.cat" or value not in flow.output_values or len(value.shape) < 2:
        return False
    past, *new = value.args[0]
    if len(value.shape) == 2 and (value.args[1] != 0 or not flow.users.get(value)):
        return False  # joined features: a grown cache [tokens, width] is read again by the graph
    held = past.value.op == "input" or past.value.shape == (0,)
    return held and any(v.value.projected for v in new)


def _fresh(value: Value, flow: Dataflow) -> bool:
    """An indexed write of projected data into memory allocated in the graph, that is returned."""
    store = value.store
    if store is None or store.memory.is_input or len(store.memory.shape) < 3 or not store.index:
        return False
    made = flow.views.get(store.memory.root)
    if not isinstance(made, View) or made.value.op not in _FACTORIES:
        return False  # a copy of something
    return store.source is not None and store.source.value.projected


def _updates(value: Value, flow: Dataflow) -> bool:
    """An out-of-place indexed update of an input with projected data."""
    if value.op not in _OUT_OF_PLACE or len(value.shape) < 3:
        return False
    target, *others = value.operands
    return target.value.op == "input" and any(v.value.projected for v in others)


#: Code -> what such a value is, the message, the hint where transformers' code does so.
_KINDS: dict[str, tuple[Callable[[Value, Dataflow], bool], str, str]] = {
    "GROWING_CACHE": (
        _grows,
        "caches grow by torch.cat: every step copies them whole, and there is no memory for a "
        "fused op to write into",
        "use a static cache: StaticCache, or cache_implementation='static'",
    ),
    "FUNCTIONAL_WRITE": (
        _updates,
        "cache updates return a new tensor instead of writing in place",
        "",
    ),
    "FRESH_CACHE": (
        _fresh,
        "cache writes go into memory that the graph itself allocates, so it is no cache yet",
        "make the cache before the compiled call (StaticCache.early_initialization, or run the "
        "prompt uncompiled)",
    ),
}

register(CacheAbsent())
