"""Reports caches that an op cannot write in place, because they grow by `cat` or are updated out of
place.

The pattern never matches. It only reports misses, which tell the user what to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from tilewright.patterns import effects
from tilewright.patterns.cache.states import made_by_recurrence
from tilewright.patterns.dataflow import Dataflow, Memory, Store, Value, View, is_in_package
from tilewright.patterns.language import Match, Miss, Reject, Sought, Stage, register
from tilewright.patterns.recognise.gemm import match_gemm

_FACTORIES = {
    f"aten.{prefix}{kind}{suffix}"
    for kind in ("zeros", "ones", "empty", "full")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
}
_OUT_OF_PLACE = {"aten.index_put", "aten.index_copy", "aten.scatter"}


@dataclass(frozen=True)
class AbsentCache:
    """All sites of one kind in a graph. They have the same cause, so one Miss reports all of
    them."""

    code: str
    values: tuple[Value, ...]

    @property
    def node(self) -> fx.Node:
        return self.values[0].node


@dataclass(frozen=True)
class CacheAbsent:
    """Reports caches that an op cannot write in place. `op` is the op that would otherwise perform
    the writes."""

    name: str = "cache_absent"
    op: str = "fused_qkv_paged"
    asked_before: ClassVar[tuple[str, ...]] = ("mla_latent_store",)
    speaks_for: ClassVar[tuple[str, ...]] = ("qkv_cache", "cache_store", "mla_latent_store")
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
        miss = Miss(
            self.name, anchor.code, Stage.ANCHORED, f"{count} {message}", nodes, hint, count
        )
        raise Reject(replace(miss, weight="advice") if _is_scratch(anchor, flow) else miss)


def _grows(value: Value, flow: Dataflow) -> bool:
    """Whether a value is a growing cache: a cat([past, new]) of projected data that the graph
    returns."""
    if value.op != "aten.cat" or value not in flow.output_values or len(value.shape) < 2:
        return False
    past, *new = value.args[0]
    if len(value.shape) == 2 and (value.args[1] != 0 or not flow.users.get(value)):
        return False  # a cache [tokens, width] must grow along its tokens, and be read
    held = past.value.op == "input" or past.value.shape == (0,)
    return held and any(v.value.projected for v in new)


def _fresh(value: Value, flow: Dataflow) -> bool:
    """Whether a value writes projected data to memory that the graph allocates, as if this memory
    were a cache. There are three such writes: a write at slots; a write to a part of a tensor that
    attention reads; and a write to a part of a tensor that the graph returns, if attention reads
    the same data elsewhere."""
    store = value.store
    if store is None or store.memory.is_input or len(store.memory.shape) < 3:
        return False
    if not _is_made_anew(flow.views.get(store.memory.root)):
        return False
    if store.source is None:
        written = [flow.views[n] for n in value.node.all_input_nodes if n in flow.views]
        keys = any(isinstance(v, View) and v.value.projected for v in written)
        return bool(store.note) and keys and _is_attended(value, flow)
    if not store.source.value.projected:
        return False
    return bool(store.index) or (_is_part(store, flow) and _holds_keys(value, store, flow))


def _is_made_anew(made: Any) -> bool:
    """Whether memory is new, or is a copy of an input in another dtype or on another device."""
    if not isinstance(made, View):
        return False
    source = made.value
    if source.op == "cast":
        source = source.operands[0].value
        return source.op == "input" and made.is_whole
    return source.op in _FACTORIES or (source.op == "input" and made.is_whole)


def _is_part(store: Store, flow: Dataflow) -> bool:
    """Whether the copies to a memory leave a part of it unwritten. If a rotation is assembled in an
    empty tensor, the copies fill the whole tensor."""
    stores = [value.store for value in flow.written.get(store.memory, ()) if value.store]
    filled = sum(effects.product(each.target.shape) for each in stores)
    total = effects.product(store.memory.shape)
    known = isinstance(filled, int) and isinstance(total, int)
    return bool(filled < total) if known else filled != total


def _holds_keys(value: Value, store: Store, flow: Dataflow) -> bool:
    assert store.source is not None
    if made_by_recurrence(store.source.value):
        return False
    returned = _is_returned(store.memory, flow)
    return _is_attended(value, flow) or (returned and _is_attended(store.source.value, flow))


def _is_scratch(anchor: AbsentCache, flow: Dataflow) -> bool:
    """Whether all values write slices of memory that the graph does not return. Such memory may be
    padding."""
    stores = [value.store for value in anchor.values]
    return anchor.code == "FRESH_CACHE" and all(
        store is not None and not store.index and not _is_returned(store.memory, flow)
        for store in stores
    )


def _is_returned(memory: Memory, flow: Dataflow) -> bool:
    written = set(flow.written.get(memory, ()))
    return any(view.value in written for view in flow.outputs)


#: Products of two activations, and the operations that may be between keys and such a product.
_ATTENTION = {
    "aten.matmul", "aten.bmm", "aten.baddbmm", "aten.einsum", "aten.scaled_dot_product_attention"
}  # fmt: skip
_BETWEEN = {"cast", "store", *(f"aten.{name}" for name in ("mul", "cat", "repeat_interleave"))}
_REACH = 16


def _is_attended(value: Value, flow: Dataflow) -> bool:
    """Whether attention reads a value. Attention reads a value if a product combines the value with
    another projected value."""
    return any(
        user.op in _ATTENTION
        and match_gemm(user) is None
        and any(view.value.projected and view.value is not item for view in user.operands)
        for item in flow.downstream(value, _REACH, lambda v: v.op in _BETWEEN)
        for user in flow.users.get(item, ())
    )


def _updates(value: Value, flow: Dataflow) -> bool:
    """Whether a value is an indexed update, out of place, of an input of the graph with projected
    data."""
    if value.op not in _OUT_OF_PLACE or len(value.shape) < 3:
        return False
    target, *others = value.operands
    return target.value.op == "input" and any(v.value.projected for v in others)


#: For each code: (the test of a value, the message, the hint for users of transformers).
_KINDS: dict[str, tuple[Callable[[Value, Dataflow], bool], str, str]] = {
    "GROWING_CACHE": (
        _grows,
        "caches grow by torch.cat, so every step copies whole caches, and a fused op has no "
        "memory to write into",
        "use a static cache: StaticCache, or cache_implementation='static'",
    ),
    "FUNCTIONAL_WRITE": (
        _updates,
        "cache updates return a new tensor instead of writing in place",
        "",
    ),
    "FRESH_CACHE": (
        _fresh,
        "cache writes go into memory that the graph itself allocates, which is not a cache yet",
        "create the cache before the compiled call (StaticCache.early_initialization, or run "
        "the prompt uncompiled)",
    ),
}

register(CacheAbsent())
