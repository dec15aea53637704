"""Writes into a cache: found, paired, and reduced to a window and a slot mapping.

Dimension letters: P pages, S slots per page, H key-value heads, D head_dim, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.ops.contract import all_ops
from tilewright.patterns import effects
from tilewright.patterns.dataflow import REINTERPRETED, Dataflow, Memory, Value, View
from tilewright.patterns.effects import Effect, Size
from tilewright.patterns.language import Stage, reject


@dataclass(frozen=True)
class CacheWrite:
    """One K or V write. joined: the stack that a write of both at once goes through."""

    store: Value
    memory: Memory
    target: Effect
    index: Mapping[int, View]
    source: View | None
    joined: Value | None = None

    @property
    def node(self) -> fx.Node:
        return self.store.node


@dataclass(frozen=True)
class WritePair:
    """A K and a V write of the same tokens, or a write without its twin."""

    first: CacheWrite
    second: CacheWrite | None

    @property
    def stores(self) -> tuple[Value, ...]:
        both = (self.first.store,) if self.second is None else (self.first.store, self.second.store)
        return tuple(dict.fromkeys(both))

    @property
    def node(self) -> fx.Node:
        return self.first.store.node


@dataclass(frozen=True)
class Computed:
    """A small integer expression over tensors, e.g. page * page_size + offset."""

    function: str
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Addressing:
    """Where a write's tokens go.

    window: num_pages, page_size, num_kv_heads, head_dim, page_stride, slot_stride, head_stride,
    dim_stride, offset, in elements from the cache tensor's first. slots: `flat` or `per_sequence`.
    source: the written heads, [tokens..., H, D]. token_rank: how many of its dimensions are tokens.
    """

    window: tuple[Size, ...]
    slot_mapping: View | Computed
    slots: str
    source: View
    token_rank: int


def cache_writes(flow: Dataflow) -> Iterator[CacheWrite]:
    """In-place writes of projected data into inputs of rank three or more, in program order."""
    fused = {op.qualified_name for op in all_ops()}
    for value in flow.stores:
        store = value.store
        assert store is not None
        memory = store.memory
        if not memory.is_input or memory.is_constant or len(memory.shape) < 3:
            continue
        if store.source is not None and not store.source.value.projected:
            continue
        if store.source is None and store.kind in fused:
            continue  # called by hand, or the work of an earlier round
        if store.source is None and not any(v.value.projected for v in _inputs_of(flow, value)):
            continue
        yield from _parts(CacheWrite(value, memory, store.target, store.index, store.source))


def _inputs_of(flow: Dataflow, value: Value) -> list[View]:
    """What the node behind an unknown write reads."""
    views = [flow.views[n] for n in value.node.all_input_nodes if n in flow.views]
    return [v for v in views if isinstance(v, View)]


def _parts(write: CacheWrite) -> Iterator[CacheWrite]:
    """`cache[page, :, slot] = stack([k, v], 1)` is two writes in one."""
    source = write.source
    if source is None or source.value.op != "aten.cat" or len(source.value.args[0]) != 2:
        yield write
        return
    pieces, axis = source.value.args
    at = [i for i, d in enumerate(source.effect.dims) if [a.axis for a in d] == [axis]]
    rest = [d for d in range(len(write.target.dims)) if d not in write.index]
    lead = len(source.effect.dims) - len(rest)
    halves = all(p.shape[axis] == 1 for p in pieces)
    if len(at) != 1 or at[0] < lead or not halves:
        yield write
        return
    dim = rest[at[0] - lead]
    index = {d - (d > dim): view for d, view in write.index.items()}
    for part, piece in enumerate(pieces):
        target = effects.select(write.target, dim, part)
        picked = effects.select(source.effect, at[0], part)
        start = tuple(0 if a == axis else s for a, s in enumerate(picked.start))
        half = piece.through(Effect(picked.dims, start))
        yield CacheWrite(write.store, write.memory, target, index, half, source.value)


def pairs(flow: Dataflow) -> Iterator[WritePair]:
    """Neighbouring writes of the same shape at the same slots belong together."""
    pending: CacheWrite | None = None
    for write in cache_writes(flow):
        if pending is not None and _belong(pending, write):
            yield WritePair(pending, write)
            pending = None
            continue
        if pending is not None:
            yield WritePair(pending, None)
        pending = write
    if pending is not None:
        yield WritePair(pending, None)


def _belong(a: CacheWrite, b: CacheWrite) -> bool:
    if a.source is None or b.source is None:
        return a.source is b.source and a.store.node is b.store.node
    if a.source.shape != b.source.shape or a.memory.dtype != b.memory.dtype:
        return False
    same_place = a.memory is b.memory and a.target == b.target
    return not same_place and _same_index(a.index, b.index)


def _same_index(a: Mapping[int, View], b: Mapping[int, View]) -> bool:
    return set(a) == set(b) and all(equal_values(a[dim], b[dim]) for dim in a)


# Memory: two of these hold the same numbers only where they are one value.
_NEVER_EQUAL = {
    "input", "constant", "store", "aten.empty", "aten.empty_like", "aten.new_empty"
}  # fmt: skip


def equal_values(a: View, b: View) -> bool:
    """Whether two index views hold the same numbers: the same operation on the same operands.

    Dynamo does not merge common subexpressions: K's and V's slots may be computed twice.
    """
    if a == b:
        return True
    left, right = a.value, b.value
    if a.effect != b.effect or left.op != right.op or left.op.startswith("opaque"):
        return False
    if left.op in _NEVER_EQUAL or len(left.args) != len(right.args):
        return False
    if not _repeatable(left.op):
        return False
    return left.kwargs.keys() == right.kwargs.keys() and _equal_args(
        (*left.args, *left.kwargs.values()), (*right.args, *right.kwargs.values())
    )


def _repeatable(op: str) -> bool:
    """Whether the same operands give the same result again: not so for random numbers."""
    packet = getattr(torch.ops.aten, op.removeprefix("aten."), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet else []
    return not any(torch.Tag.nondeterministic_seeded in o.tags for o in overloads)


def _equal_args(a: Sequence[Any], b: Sequence[Any]) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if isinstance(x, View) and isinstance(y, View):
            if not equal_values(x, y):
                return False
        elif isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
            if not _equal_args(x, y):
                return False
        elif x != y:
            return False
    return True


def address(write: CacheWrite) -> Addressing:
    """The window and slots of one write; raises Reject for addressing that is not understood."""
    store = write.store.store
    assert store is not None
    if write.source is None:
        _reject_unknown(write)
    assert write.source is not None
    if store.accumulate:
        reject("ACCUMULATED_WRITE", Stage.ANCHORED, "the write accumulates", write.store)
    if not write.index:
        reject(
            "SLICE_WRITE",
            Stage.ANCHORED,
            f"{store.kind} writes a slice of the cache whose start is not a tensor",
            write.store,
            hint="write through an index tensor: index_copy_, or cache[slots] = k",
        )
    index = dict(write.index)
    head_axis = _explicit_heads(write, index)
    if len(index) == 1:
        return _one_index(write, index, head_axis)
    if len(index) == 2:
        return _two_indices(write, index, head_axis)
    reject("SLOT_INDEX", Stage.ANCHORED, f"{len(index)} index tensors", write.store)


def _reject_unknown(write: CacheWrite) -> None:
    store = write.store.store
    assert store is not None
    if any(v.value.dtype == torch.bool for v in store.index.values()):
        reject(
            "MASKED_WRITE",
            Stage.ANCHORED,
            "a boolean mask selects the slots, so their number is not known",
            write.store,
            hint="give skipped tokens a spare slot and write all of them",
        )
    if store.note == REINTERPRETED:
        reject(
            "CACHE_LAYOUT",
            Stage.ANCHORED,
            f"{store.kind} writes through {store.note} of the cache",
            write.store,
            hint="give the cache tensor the dtype it is written in",
        )
    if store.note:
        reject("CACHE_LAYOUT", Stage.ANCHORED, f"{store.kind}: {store.note}", write.store)
    reject(
        "OPAQUE_WRITE",
        Stage.ANCHORED,
        f"{store.kind} writes the cache; what it does is not known to tilewright",
        write.store,
        hint="write the cache in PyTorch: cache.view(-1, H, D)[slots] = k",
    )


def _explicit_heads(write: CacheWrite, index: dict[int, View]) -> int | None:
    """`cache[page, head, slot]` with head = arange(H): drops that index, names its dimension."""
    widest = max(len(v.effect.dims) for v in index.values())
    if widest == 1:
        return None
    found = None
    for dim, view in list(index.items()):
        if _counts_up(view, write.target.shape[dim]):
            found = dim
            del index[dim]
    if found is None:
        reject(
            "SLOT_INDEX", Stage.ANCHORED, "index tensors of more than one dimension", write.store
        )
    for dim, view in index.items():
        if view.effect.dims[-1] != ():
            reject("SLOT_INDEX", Stage.ANCHORED, "slots vary from head to head", view)
        index[dim] = View(view.value, effects.squeeze(view.effect, [len(view.effect.dims) - 1]))
    return found


def _counts_up(view: View, length: Size) -> bool:
    """Whether an index is 0, 1, ..., length - 1 along its last dimension alone."""
    last = len(view.effect.dims) - 1
    whole = Effect(((),) * last + effects.identity((length,)).dims, (0,))
    value = view.value
    if value.op != "aten.arange" or view.effect != whole or value.shape != (length,):
        return False
    numbers = [a for a in value.args if isinstance(a, int)]
    named = (value.kwargs.get("start", 0), value.kwargs.get("step", 1))
    return named == (0, 1) and numbers in ([length], [0, length], [0, length, 1], [])


def _roles(
    write: CacheWrite, index: Mapping[int, View], head_axis: int | None
) -> tuple[int | None, int, int, dict[int, int]]:
    """(page dimension or None, head dimension, element dimension) of the target, and the source's
    dimensions in that order."""
    source = write.source
    assert source is not None
    lead = max(len(v.effect.dims) for v in index.values())
    rest = [d for d in range(len(write.target.dims)) if d not in index]
    # With explicit heads the source is [tokens, H, other dimensions].
    order = rest if head_axis is None else [head_axis, *[d for d in rest if d != head_axis]]
    at = {dim: lead + i for i, dim in enumerate(order)}
    wide = [d for d in order if write.target.dims[d] != () or len(order) <= 3]
    if len(wide) < 2 or len(wide) > 3:
        reject(
            "CACHE_LAYOUT", Stage.ANCHORED, f"{len(wide)} dimensions beside the slots", write.store
        )
    *others, element = wide
    head = others[-1]
    page = others[0] if len(others) == 2 else None
    return page, head, element, at


def _stride(write: CacheWrite, dim: int) -> tuple[Size, Size]:
    """(length, stride in elements) of a target dimension that is one run."""
    atoms = write.target.dims[dim]
    if atoms == ():
        return 1, 0
    if len(atoms) != 1 or atoms[0].axis is None:
        reject("CACHE_LAYOUT", Stage.ANCHORED, "a cache dimension is split in memory", write.store)
    return atoms[0].length, atoms[0].step * write.memory.strides[atoms[0].axis]


def _offset(write: CacheWrite) -> Size:
    total: Size = 0
    for start, stride in zip(write.target.start, write.memory.strides, strict=True):
        total = total + start * stride
    return total


def _one_index(write: CacheWrite, index: dict[int, View], head_axis: int | None) -> Addressing:
    (slot_dim, slots), *_ = index.items()
    page, head, element, at = _roles(write, index, head_axis)
    lead = list(range(len(slots.effect.dims)))
    if page is None:
        pages = _flat_slots(write, slot_dim)
        return _addressing(write, pages, (head, element), at, lead, slots, "flat")
    num_pages, page_stride = _stride(write, page)
    page_size, slot_stride = _stride(write, slot_dim)
    pages = (num_pages, page_size, page_stride, slot_stride)
    lead = [at[page], *lead]
    return _addressing(write, pages, (head, element), at, lead, slots, "per_sequence")


def _addressing(
    write: CacheWrite,
    pages: tuple[Size, Size, Size, Size],
    head: tuple[int, int],
    at: Mapping[int, int],
    lead: list[int],
    slot_mapping: View | Computed,
    slots: str,
) -> Addressing:
    """Puts the window together; `lead` are the source's token dimensions, outermost first."""
    source = write.source
    assert source is not None
    num_pages, page_size, page_stride, slot_stride = pages
    (_, head_stride), (_, dim_stride) = (_stride(write, d) for d in head)
    # The written heads' sizes: the cache's own may be symbols, which have to equal them.
    num_heads, head_dim = (source.effect.shape[at[d]] for d in head)
    order = [*lead, *(at[d] for d in head)]
    dropped = [d for d in range(len(source.effect.dims)) if d not in order]
    effect = effects.permute(source.effect, [*order, *dropped])
    effect = effects.squeeze(effect, range(len(order), len(effect.dims)))
    sizes = (num_pages, page_size, num_heads, head_dim)
    strides = (page_stride, slot_stride, head_stride, dim_stride)
    window = (*sizes, *strides, _offset(write))
    return Addressing(window, slot_mapping, slots, View(source.value, effect), len(lead))


def _flat_slots(write: CacheWrite, dim: int) -> tuple[Size, Size, Size, Size]:
    """(num_pages, page_size, page_stride, slot_stride) of a flattened slot dimension."""
    atoms = write.target.dims[dim]
    strides = [a.step * write.memory.strides[a.axis] for a in atoms if a.axis is not None]
    if len(strides) != len(atoms) or len(atoms) > 2:
        reject("CACHE_LAYOUT", Stage.ANCHORED, "the slots are not pages of slots", write.store)
    if len(atoms) == 2:
        return atoms[0].length, atoms[1].length, strides[0], strides[1]
    if not atoms:
        return 1, 1, 0, 0
    # Slots that follow each other without a gap are one long page.
    return 1, atoms[0].length, atoms[0].length * strides[0], strides[0]


def _paged_slot(pages: View, offsets: View, num_pages: Size, page_size: Size) -> Computed:
    """page * page_size + offset, with PyTorch's meaning of an offset that is not in its page.

    A negative offset counts from the page's end; one out of range becomes a slot out of range,
    which the op refuses or skips, and never a slot of the next page.
    """
    start = Computed("mul", (pages, page_size))
    if _stays_inside(offsets, page_size):
        return Computed("add", (start, offsets))
    inside = Computed(
        "bitwise_and",
        (Computed("ge", (offsets, -page_size)), Computed("lt", (offsets, page_size))),
    )
    slot = Computed("add", (start, Computed("remainder", (offsets, page_size))))
    return Computed("where", (inside, slot, num_pages * page_size))


def _stays_inside(offsets: View, page_size: Size) -> bool:
    """Whether the offsets are a remainder of the page size, so in 0 .. page_size - 1."""
    value = offsets.value
    if value.op == "aten.remainder":
        return bool(value.args[1] == page_size)
    return value.op == "aten.bitwise_and" and bool(value.args[1] == page_size - 1)


def _two_indices(write: CacheWrite, index: dict[int, View], head_axis: int | None) -> Addressing:
    (page_dim, pages), (slot_dim, offsets) = sorted(index.items())
    page, head, element, at = _roles(write, index, head_axis)
    if page is not None:
        reject("CACHE_LAYOUT", Stage.ANCHORED, "pages, slots and one dimension more", write.store)
    num_pages, page_stride = _stride(write, page_dim)
    page_size, slot_stride = _stride(write, slot_dim)
    if pages.shape != offsets.shape or len(pages.shape) != 1:
        reject("SLOT_INDEX", Stage.ANCHORED, "page and offset differ in shape", pages, offsets)
    slot = _paged_slot(pages, offsets, num_pages, page_size)
    geometry = (num_pages, page_size, page_stride, slot_stride)
    return _addressing(write, geometry, (head, element), at, [0], slot, "flat")
