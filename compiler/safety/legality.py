"""Checks whether a match may be rewritten. Every hazard of moving a cache write has a code of its
own.

The fused op takes the place of the last absorbed write or, if it absorbs no write, of the last
replaced value. Between the first absorbed write and that place, no other node may read or write the
elements of the cache that the absorbed writes fill. At that place, the op's inputs must still hold
the values that the absorbed nodes read. No other node may use an absorbed value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.safety.subclasses import described
from tilewright.ops.checks import proven
from tilewright.ops.formats.paged_cache import in_bytes, strided_disjoint
from tilewright.patterns.dataflow import Computed, Dataflow, Memory, Store, Value, View, source_of
from tilewright.patterns.effects import Effect, InexpressibleError, Size
from tilewright.patterns.language import (
    Match,
    Miss,
    Parts,
    PatternError,
    Reject,
    Result,
    Stage,
    reject,
)


def check_legality(match: Match, flow: Dataflow) -> Miss | None:
    """Returns None if the rewrite is safe. Otherwise returns the hazard that forbids it."""
    try:
        for rule in _RULES:
            rule(match, flow)
    except Reject as rejection:
        miss = rejection.miss
        return replace(miss, pattern=match.pattern, weight=match.miss_weight or miss.weight)
    return None


def insertion_node(match: Match, flow: Dataflow) -> fx.Node:
    """Returns the node before which the op is inserted: the last absorbed write or, if there is
    none, the last replaced value."""
    values = match.stores or tuple(r.replaced for r in match.results)
    return max((v.node for v in values), key=lambda node: flow.positions[node])


def insertion_position(match: Match, flow: Dataflow) -> int:
    """Returns the program position of :func:`insertion_node`."""
    return flow.positions[insertion_node(match, flow)]


def _hazard(code: str, message: str, *at: Any, hint: str = "") -> NoReturn:
    reject(code, Stage.HAZARDS, message, *at, hint=hint)


def operands_of(match: Match) -> Iterator[tuple[str, View]]:
    """Yields (argument name, view) for every view that the op reads or that is added to its
    result."""
    for name, argument in match.arguments.items():
        for view in views_in(argument):
            yield name, view
    for result in match.results:
        if isinstance(result, Result) and result.added is not None:
            yield "what the result is added to", result.added


def views_in(item: Any) -> Iterator[View]:
    """Yields every view in an argument of a match."""
    if isinstance(item, View):
        yield item
    elif isinstance(item, Computed):
        yield from views_in(item.operands)
        yield from views_in([option for _, option in item.options])
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from views_in(part)


def _memories(match: Match) -> dict[Memory, Store]:
    return {s.store.memory: s.store for s in match.stores if s.store is not None}


def _between(match: Match, flow: Dataflow) -> tuple[int, int]:
    last = insertion_position(match, flow)
    return min((flow.positions[s.node] for s in match.stores), default=last), last


def _no_read(match: Match, flow: Dataflow) -> None:
    first, last = _between(match, flow)
    own = {v.node for v in (*match.stores, *match.absorbed)}
    for memory in _memories(match):
        for alias in flow.on_storage(memory.storage):
            for _, node in flow.reads_between(alias, first, last):
                if node not in own and not _reads_apart(node, match, flow):
                    message = f"{node.format_node()} reads the cache between the absorbed writes"
                    _hazard("CACHE_READ", message, node, hint="write K and V before either is read")


def _reads_apart(node: fx.Node, match: Match, flow: Dataflow) -> bool:
    """Whether a node certainly reads no element that the absorbed writes before it fill. After the
    rewrite, these writes happen after the node."""
    at = flow.positions[node]
    stores = [value for value in match.stores if flow.positions[value.node] < at]
    moved = [value.store for value in stores if value.store is not None]
    if len(moved) != len(stores) or not all(_is_known(store) for store in moved):
        return False
    storages = {store.memory.storage for store in moved}
    read = [
        source
        for source in node.all_input_nodes
        if storages & {flow.storage_of(tensor) for tensor in _compat.tensors_of(source)}
    ]
    return all(_lies_beside(source, store, flow) for source in read for store in moved)


def _lies_beside(source: fx.Node, store: Store, flow: Dataflow) -> bool:
    """Whether a node's tensor is a part of the memory of a write, and the write does not fill that
    part."""
    memory, view = flow.memory_of.get(source), flow.views.get(source)
    if memory is not store.memory or not isinstance(view, View):
        return False
    # A view of the value is a view of the memory only if the value is all of the memory.
    whole = flow.home(view.value) is memory.root and view.value.shape == memory.shape
    return whole and _effects_disjoint(view.effect, store.target)


def _is_known(store: Store) -> bool:
    """Whether it is known which elements of the memory a write may fill. If it is known, they are
    elements that the target of the write selects."""
    return store.dtype == store.memory.dtype and _has_its_own_elements(store.memory)


def _no_other_write(match: Match, flow: Dataflow) -> None:
    first, last = _between(match, flow)
    for memory in _memories(match):
        for value in flow.writes_between(memory.storage, first, last):
            if value not in match.stores and not _lies_apart_from(match, value):
                _hazard(
                    "CACHE_WRITE",
                    "the cache is written again between the absorbed writes",
                    value,
                )


def _lies_apart_from(match: Match, value: Value) -> bool:
    """Whether a write `value`, which is not absorbed, fills only parts of its memory that no
    absorbed write fills."""
    other = value.store
    if other is None or not _is_known(other):
        return False
    own = [store.store for store in match.stores if store.store is not None]
    return all(
        one.memory is other.memory and _disjoint(one, other) for one in own if _meet(one, other)
    )


def _has_its_own_elements(memory: Memory) -> bool:
    """Whether different indices certainly mean different elements of a memory. In an expanded
    tensor, or in a tensor from `as_strided`, they may mean the same element."""
    if len(memory.strides) != len(memory.shape):
        return False  # the strides are not known
    axes = [(s, n) for n, s in zip(memory.shape, memory.strides, strict=True) if n != 1]
    if all(isinstance(stride, int) for stride, _ in axes):
        reach: Size = 0
        for stride, size in sorted(axes, key=itemgetter(0)):
            if not proven(stride > reach):
                return False
            reach = reach + (size - 1) * stride
        return True
    inside: Size = 1
    while axes:  # a symbolic stride must be the product of the sizes of all inner axes
        found = next((axis for axis in axes if axis[0] == inside), None)
        if found is None:
            return False
        axes.remove(found)
        inside = inside * found[1]
    return True


def _meet(one: Store, other: Store) -> bool:
    return one.memory.storage == other.memory.storage


def _no_alias(match: Match, flow: Dataflow) -> None:
    storages = {m.storage for m in _memories(match)}
    for name, view in operands_of(match):
        memory = flow.memory_of.get(flow.home(view.value))
        if memory is not None and memory.storage in storages:
            _hazard("CACHE_ALIAS", f"{name} lies in the cache's own memory", view)


def _caches_apart(match: Match, flow: Dataflow) -> None:
    stores = [s.store for s in match.stores if s.store is not None]
    for i, one in enumerate(stores):
        for other in stores[i + 1 :]:
            if one.memory.storage == other.memory.storage and not _disjoint(one, other):
                message = (
                    "K and V lie on one storage, and it cannot be proven that they share no element"
                )
                _hazard("CACHE_OVERLAP", message, *match.stores)


def _disjoint(one: Store, other: Store) -> bool:
    if one.memory is other.memory:
        own = _has_its_own_elements(one.memory)
        return own and _effects_disjoint(one.target, other.target)
    return lie_apart(one.memory, other.memory)


def lie_apart(one: Memory, other: Memory) -> bool:
    """Whether two inputs on one storage certainly share no element.

    Returns False for tensor subclasses, because their shape and offset do not tell where their
    memory lies. Dynamo has no guard for overlap, so `compiler.safety.overlap` checks again at each
    call.
    """
    if any(_compat.is_subclass(m.root.meta["example_value"]) for m in (one, other)):
        return False
    a, b = (in_bytes(m.shape, m.strides, m.dtype.itemsize) for m in (one, other))
    distance = other.offset * other.dtype.itemsize - one.offset * one.dtype.itemsize
    if not all(isinstance(n, int) for n in (*a[0], *a[1], *b[0], *b[1], distance)):
        return False
    return strided_disjoint(*a, *b, distance)


def _effects_disjoint(one: Effect, other: Effect) -> bool:
    """Whether two selections of one tensor are certainly disjoint along some axis.

    Along that axis, one selection may follow the other, or the two may interleave, as K and V of a
    layer do in a cache `[blocks, layers, 2, page, ...]`.
    """
    return any(_apart_along(axis, one, other) for axis in range(len(one.start)))


def _apart_along(axis: int, one: Effect, other: Effect) -> bool:
    (lengths, steps), (more, others) = (_walked(effect, axis) for effect in (one, other))
    return strided_disjoint(lengths, steps, more, others, other.start[axis] - one.start[axis])


def _walked(effect: Effect, axis: int) -> tuple[list[Size], list[Size]]:
    """Returns the lengths and the steps of the parts of an effect that go along one axis of the
    tensor from which the effect selects."""
    atoms = [atom for dim in effect.dims for atom in dim if atom.axis == axis]
    return [atom.length for atom in atoms], [atom.step for atom in atoms]


def _inputs_unchanged(match: Match, flow: Dataflow) -> None:
    last = insertion_position(match, flow)
    vanishing = {value.node for value in match.scratch}
    for name, view in operands_of(match):
        if view.value in match.scratch:
            raise PatternError(
                f"pattern {match.pattern!r}: argument {name!r} is memory that scratch writes "
                "fill, and these writes vanish with the match; pass the written values instead"
            )
        if write := _vanishing_write(view, match, flow):
            message = f"{name} is read from memory whose writes would vanish with the match"
            _hazard(
                "ESCAPES", message, view, write, hint="give the tensor memory of its own: x.clone()"
            )
        if view.value.position >= last:
            message = f"{name} is computed only after {_place(match, flow)}"
            _hazard("ORDER", message, view, hint="compute every operand of the fused op earlier")
        for write in flow.changes(view, last):
            if write.node not in vanishing:
                message = f"{name} is changed in place before {_place(match, flow)}"
                _hazard("INPUT_MUTATED", message, write)


def _vanishing_write(view: View, match: Match, flow: Dataflow) -> Value | None:
    """Returns the match's scratch write that made a part of a view's value; None if there is no
    such write."""
    memory = flow.memory_of.get(flow.home(view.value))
    if memory is None:
        return None
    for write in match.scratch:
        assert write.store is not None
        same = write.store.memory.storage is memory.storage
        if same and write.position <= view.value.position:
            return write
    return None


def _scratch_is_private(match: Match, flow: Dataflow) -> None:
    """Checks that the graph allocated the memory of scratch writes, and that only absorbed nodes
    read it."""
    own = {v.node for v in (*match.scratch, *match.absorbed)}
    own |= {r.replaced.node for r in match.results}
    for value in match.scratch:
        assert value.store is not None
        for memory in flow.on_storage(value.store.memory.storage):
            first = flow.positions[value.node]
            readers = [n for _, n in flow.reads_between(memory, first - 1, len(flow.positions))]
            outside = [n for n in readers if n not in own and not _copied_for(n, own, flow)]
            outside += [w.node for w in flow.written.get(memory, ()) if w.node not in own]
            if memory.is_input or outside:
                message = f"{value} writes in place into memory that other nodes use"
                hint = "compute a new tensor there: y = x + 1 in place of x += 1"
                _hazard("ESCAPES", message, value, *outside, hint=hint)


def _copied_for(node: fx.Node, own: set[fx.Node], flow: Dataflow) -> bool:
    """Whether a node only copies the value that it reads into another layout (`reshape`), and only
    nodes of `own` read the copy."""
    view = flow.views.get(node)
    if not isinstance(view, View) or view.value.node is node or not node.users:
        return False
    return all(user in own or _copied_for(user, own, flow) for user in node.users)


def _nothing_escapes(match: Match, flow: Dataflow) -> None:
    inside = {*match.absorbed, *match.stores, *match.scratch}
    replaced = {r.replaced: r for r in match.results}
    for value in match.absorbed:
        if value in replaced:
            if isinstance(parts := replaced[value], Parts):
                _parts_are_held(parts, inside, flow)
            _consumed_late(value, inside, match, flow)
            continue
        users = [u for u in flow.users.get(value, ()) if u not in inside]
        if users or value in flow.output_values:
            who = ", ".join(sorted({u.op for u in users})) or "the graph's output"
            message = f"{value} is also used by {who}, so the fused op cannot absorb it"
            hint = "read keys and values back from the cache" if match.stores else ""
            _hazard("ESCAPES", message, value, *users, hint=hint)


def _parts_are_held(parts: Parts, inside: set[Value], flow: Dataflow) -> None:
    """Checks that the op's output holds every part of a vanishing value that others read, and that
    no part is changed in place."""
    value = parts.replaced
    users = [u for u in flow.users.get(value, ()) if u not in inside]
    reads = [(u.op, v) for u in users for v in u.operands if v.value is value]
    reads += [("the graph's output", v) for v in flow.outputs if v.value is value]
    for who, view in reads:
        try:
            parts.restate(view.effect)
        except InexpressibleError as error:
            _hazard("ESCAPES", f"{who} uses {value} across its parts: {error}", value)
    for node in flow.nodes_of(value):
        if flow.written.get(flow.memory_of[node]):
            _hazard("INPUT_MUTATED", f"the graph changes a part of {value} in place", value)


def _consumed_late(value: Value, inside: set[Value], match: Match, flow: Dataflow) -> None:
    last = insertion_position(match, flow)
    for user in flow.users.get(value, ()):
        if user not in inside and not _can_wait(user, last, flow):
            message = f"{value} is used by {user.op} before {_place(match, flow)}"
            hint = "write the cache before the query is used" if match.stores else ""
            _hazard("ORDER", message, user, hint=hint)


# Operations besides elementwise ones that may run later than they were written. They are pure
# functions of their operands.
_DEFERRABLE = {
    "aten.cat", "cast", "aten.roll", "aten.sum", "aten.mean", "aten.amax", "aten.rms_norm",
    "aten.layer_norm",
}  # fmt: skip


def _can_wait(user: Value, last: int, flow: Dataflow) -> bool:
    """Whether a reader of a replaced value comes after the op, or can be moved after it.

    The rewriter moves the reader with all nodes that depend on the reader. The memory that the
    moved nodes read must not change between their old place and their new place.
    """

    def stands_before(reader: Value) -> bool:
        return flow.positions[reader.node] <= last

    if not stands_before(user):
        return True
    return all(_can_move(v, last, flow) for v in flow.downstream(user, None, stands_before))


def _can_move(reader: Value, last: int, flow: Dataflow) -> bool:
    """Whether a value may be computed after the position `last` instead of at its own position."""
    plain = reader.op in _DEFERRABLE or _goes_by_element(reader.op)
    plain = plain and not reader.stands_in  # a spelled-out call stays in its place
    if not plain or reader in flow.output_values or reader.node in flow.store_nodes:
        return False
    position = flow.positions[reader.node]
    memories = [flow.memory_of.get(flow.home(v.value)) for v in reader.operands]
    for memory in (*memories, flow.memory_of.get(reader.node)):
        if memory is None:
            return False
        if flow.writes_between(memory.storage, position, last):
            return False
    return True


def _goes_by_element(op: str) -> bool:
    """Whether ATen's tags say that an operator is elementwise and uses no random numbers."""
    namespace, _, name = op.partition(".")
    tags = _compat.aten_tags(name) if namespace == "aten" else ()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _place(match: Match, flow: Dataflow) -> str:
    """Describes the place of the fused op for a message."""
    node = insertion_node(match, flow)
    what = "the cache is written" if match.stores else "the fused op's place"
    source = source_of(node)
    return f"{what} ({source})" if source else what


def _no_hidden_write(match: Match, flow: Dataflow) -> None:
    """Checks that no absorbed value is also a write. A node such as `y *= z` is a value and a write
    at once."""
    vanishing = {s.node for s in (*match.stores, *match.scratch)}
    for value in match.absorbed:
        if value.node in flow.store_nodes and value.node not in vanishing:
            message = (
                f"{value} is computed in place; if the fused op absorbed it, the write "
                "would be lost"
            )
            _hazard("INPUT_MUTATED", message, value)


def _keeps_its_layout(match: Match, flow: Dataflow) -> None:
    """Checks that no `set_` or resize changes a tensor of the match, because the graph records only
    one shape for each tensor."""
    read = [view.value for _, view in operands_of(match)]
    for value in (*read, *match.absorbed, *match.stores):
        memory = flow.memory_of.get(flow.home(value))
        if memory is not None and memory.storage in flow.reshaped:
            message = f"the graph changes the shape, strides or storage of {value} in place"
            _hazard("INPUT_MUTATED", message, value)


def _plain_tensors(match: Match, flow: Dataflow) -> None:
    """Checks that the op gets only plain tensors, and no subclasses that wrap other tensors."""
    read = [(name, flow.home(view.value)) for name, view in operands_of(match)]
    read += [(name, node) for name, node in match.arguments.items() if isinstance(node, fx.Node)]
    for name, node in read:
        held = node.meta.get("example_value")
        if _compat.is_subclass(held):
            what, hint = described(held)
            message = f"{name} is {what}: the graph does not show which memory it stands for"
            _hazard("SUBCLASS", message, match.anchor, hint=hint)


_RULES = (
    _plain_tensors,
    _keeps_its_layout,
    _no_read,
    _no_other_write,
    _no_alias,
    _caches_apart,
    _inputs_unchanged,
    _scratch_is_private,
    _nothing_escapes,
    _no_hidden_write,
)
