"""Writes into a cache: found, taken apart where K and V are written at once, and paired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from tilewright.ops.contract import all_ops
from tilewright.patterns import effects
from tilewright.patterns.cache.eight_bit import Written, before_rounding
from tilewright.patterns.dataflow import Dataflow, Memory, Store, Value, View, upstream
from tilewright.patterns.effects import Effect
from tilewright.patterns.recognise.equality import equal_values
from tilewright.patterns.recognise.gemm import piece_of


@dataclass(frozen=True)
class CacheWrite:
    """One K or V write; `written` None where what is stored is not known."""

    store: Value
    memory: Memory
    target: Effect
    index: Mapping[int, View]
    written: Written | None

    @property
    def node(self) -> fx.Node:
        return self.store.node

    @property
    def record(self) -> Store:
        assert self.store.store is not None
        return self.store.store

    @property
    def is_projected(self) -> bool:
        """Whether the graph projects what is written; else an earlier graph did, or the caller."""
        source = self.record.source
        return source is None or source.value.projected


@dataclass(frozen=True)
class WritePair:
    """A K and a V write of the same tokens, or one of them alone."""

    first: CacheWrite
    second: CacheWrite | None

    @property
    def stores(self) -> tuple[Value, ...]:
        both = (self.first.store,) if self.second is None else (self.first.store, self.second.store)
        return tuple(dict.fromkeys(both))

    @property
    def node(self) -> fx.Node:
        return self.first.store.node


def cache_writes(flow: Dataflow) -> Iterator[CacheWrite]:
    """In-place writes into inputs of rank three or more, in program order: of projected data, and
    of what the graph is given, where that goes to slots as keys and values do."""
    fused = {op.qualified_name for op in all_ops()}
    for value in flow.stores:
        store = value.store
        assert store is not None
        memory = store.memory
        if not memory.is_input or len(memory.shape) < 3:
            continue
        source = store.source
        if source is not None and not source.value.projected and not _is_given(store, flow):
            continue
        if store.source is None and store.kind in fused:
            continue  # the user's own call of a fused op, or a site rewritten in an earlier round
        if store.source is None and not any(v.value.projected for v in _inputs_of(flow, value)):
            continue
        write = CacheWrite(value, memory, store.target, store.index, _written(store))
        yield from _parts(_with_head(write))


# Steps between a key's projection and its cache write: RoPE, a norm's weight, casts.
_PLAIN = frozenset(f"aten.{name}" for name in ("add", "sub", "mul", "neg", "cat")) | {"cast"}
_REACH = 32


def _is_given(store: Store, flow: Dataflow) -> bool:
    """Whether part of a cache is written with what is, or plainly comes from, an activation among
    the graph's inputs: its projection lies before the graph."""
    source = store.source
    assert source is not None
    part = bool(store.index) or not effects.is_identity(store.target, store.memory.shape)
    if (
        not part
        or store.accumulate
        or len(source.shape) < 3
        or not source.value.dtype.is_floating_point
    ):
        return False
    values = list(upstream(source.value, _REACH, lambda value: value.op in _PLAIN))
    given = [v for v in values if v.op == "input" and len(v.shape) >= 2]
    plain = all(v.op in _PLAIN or v.op in ("input", "constant") for v in values[:1])
    untouched = all(not flow.written.get(flow.memory_of[v.node]) for v in given)
    return bool(given) and plain and untouched


def _with_head(write: CacheWrite) -> CacheWrite:
    """Adds the head dimension, of one, to a cache without one (latents: [pages, slots, width])."""
    rest = [d for d in range(len(write.target.dims)) if d not in write.index]
    # Index tensors of different shapes: one of them is the heads' arange.
    shapes = {view.shape for view in write.index.values()}
    if len(shapes) != 1 or write.written is None or len(rest) != 1:
        return write
    (element,) = rest
    view = write.written.view
    return replace(
        write,
        target=effects.unsqueeze(write.target, element),
        index={d + (d >= element): index for d, index in write.index.items()},
        written=write.written.through(
            effects.unsqueeze(effects.identity(view.shape), len(view.shape) - 1)
        ),
    )


def _inputs_of(flow: Dataflow, value: Value) -> list[View]:
    """What the node behind an unknown write reads."""
    views = [flow.views[n] for n in value.node.all_input_nodes if n in flow.views]
    return [v for v in views if isinstance(v, View)]


def _written(store: Store) -> Written | None:
    """What a write stores, in the cache's own dtype or before it was rounded to it."""
    source, dtype = store.source, store.memory.dtype
    if source is None:
        return None
    if store.dtype == dtype:
        return before_rounding(Written(source), dtype)
    # Written through a view of another dtype: the source must be reinterpreted in the same way.
    value = source.value
    if value.op != "bitcast" or value.dtype != store.dtype or value.args[0].value.dtype != dtype:
        return None
    bits = Written(value.args[0].through(source.effect), between=(value,))
    return before_rounding(bits, dtype)


def _parts(write: CacheWrite) -> Iterator[CacheWrite]:
    """`cache[page, :, slot] = stack([k, v], 1)` is two writes in one; `cat` along the heads too."""
    written = write.written
    if written is None or written.view.value.op != "aten.cat":
        yield write
        return
    source = written.view
    pieces, axis = source.value.args
    at = [i for i, d in enumerate(source.effect.dims) if axis in [a.axis for a in d]]
    rest = [d for d in range(len(write.target.dims)) if d not in write.index]
    lead = len(source.effect.dims) - len(rest)
    halves = len(pieces) == 2 and pieces[0].shape == pieces[1].shape
    # A cat along head_dim joins the halves of a rotated head, not K and V.
    halves = halves and (pieces[0].shape[axis] == 1 or axis < len(source.value.shape) - 1)
    halves = halves and len(at) == 1 and lead <= at[0] < len(source.effect.dims) - 1
    if not halves or source.shape[at[0]] != source.value.shape[axis]:
        yield write
        return
    for part in range(2):
        yield _part(write, written, part, at[0], rest[at[0] - lead])


def _part(write: CacheWrite, written: Written, part: int, at: int, dim: int) -> CacheWrite:
    """One of the two pieces: `at` is the source's dimension that tells them apart, `dim` the
    target's. Of a stack that dimension is dropped."""
    pieces, axis = written.view.value.args
    length = pieces[0].shape[axis]

    def cut(effect: Effect, place: int) -> Effect:
        if length == 1:
            return effects.select(effect, place, part)
        return effects.narrow(effect, place, part * length, length)

    index = write.index
    if length == 1:
        index = {d - (d > dim): view for d, view in index.items()}
    piece = written.through(cut(effects.identity(written.view.shape), at))
    between = (*written.between, written.view.value)
    piece = replace(piece, view=piece_of(piece.view), between=between)
    half = before_rounding(piece, write.memory.dtype)
    return replace(write, target=cut(write.target, dim), index=index, written=half)


def pairs(flow: Dataflow) -> Iterator[WritePair]:
    """Neighbouring writes of the same shape at the same slots belong together."""
    pending: CacheWrite | None = None
    for write in cache_writes(flow):
        if pending is not None and _belong(pending, write):
            yield WritePair(pending, write)
            pending = None
            continue
        if pending is not None and _stands_alone(pending):
            yield WritePair(pending, None)
        pending = write
    if pending is not None and _stands_alone(pending):
        yield WritePair(pending, None)


def _stands_alone(write: CacheWrite) -> bool:
    """Whether an unpaired write is reported: one of the graph's inputs may go to any buffer."""
    return write.is_projected or len(write.memory.shape) >= 4


def _belong(a: CacheWrite, b: CacheWrite) -> bool:
    if a.written is None or b.written is None:
        return a.written is b.written and a.store.node is b.store.node
    same_shape = a.written.view.shape == b.written.view.shape
    if not same_shape or a.memory.dtype != b.memory.dtype:
        return False
    same_place = a.memory is b.memory and a.target == b.target
    return not same_place and same_index(a.index, b.index)


def same_index(a: Mapping[int, View], b: Mapping[int, View]) -> bool:
    """Whether the same dimensions are indexed by the same numbers."""
    return set(a) == set(b) and all(equal_values(a[dim], b[dim]) for dim in a)
