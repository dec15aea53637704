"""Finds writes to a cache, splits a write that has both K and V, and pairs K with V."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torch import fx

from tilewright.ops.contract import all_ops
from tilewright.patterns import effects
from tilewright.patterns.arithmetic.equality import equal_values
from tilewright.patterns.cache.eight_bit import Written, before_rounding
from tilewright.patterns.cache.states import replaces_state
from tilewright.patterns.dataflow import Dataflow, Memory, Store, Value, View, upstream
from tilewright.patterns.effects import Effect
from tilewright.patterns.language import Sought
from tilewright.patterns.recognise.gemm import Gemm, match_gemm, piece_of

#: The description of the patterns that start from these writes.
CACHE_WRITES = Sought(
    "writes into a cache that is an input or a buffer (index_copy_, cache[slots] = k)",
    frozenset({"store", "aten.cat", "aten.index_put", "aten.index_copy", "aten.scatter"}),
    before=frozenset({"product"}),
    beside=True,
)


@dataclass(frozen=True)
class CacheWrite:
    """One write of K or V.

    Attributes:
        stores: The in-place writes. There are several if the model writes a dimension row by row.
        record: These writes combined into one.
        target: The part of the memory that this write covers, as in :class:`Store`.
        index: The index tensors of the target's dimensions, as in :class:`Store`.
        along: The dimension in which each row has its own slots, as in :class:`Store`; else None.
        written: The stored values; None if they are not known.
    """

    stores: tuple[Value, ...]
    record: Store
    target: Effect
    index: Mapping[int, View]
    written: Written | None
    along: int | None

    @property
    def store(self) -> Value:
        return self.stores[0]

    @property
    def memory(self) -> Memory:
        return self.record.memory

    @property
    def node(self) -> fx.Node:
        return self.store.node

    @property
    def rest(self) -> list[int]:
        """The dimensions of the target that have no index tensor and are not `along`."""
        return [d for d in range(len(self.target.dims)) if d not in self.index and d != self.along]

    @property
    def is_projected(self) -> bool:
        """Whether the graph itself projects the written values. If not, an earlier graph or the
        caller projected them."""
        source = self.record.source
        return source is None or source.value.projected


@dataclass(frozen=True)
class WritePair:
    """A K write and a V write of the same tokens, or a single write.

    Attributes:
        first: The write of K, or the single write.
        second: The write of V; None for a single write.
        unlike: For a single write, another write of the same tokens, whose heads have another
            width.
        again: Whether this is a single write that is also a part of another pair.
    """

    first: CacheWrite
    second: CacheWrite | None
    unlike: CacheWrite | None = None
    again: bool = False

    @property
    def stores(self) -> tuple[Value, ...]:
        second = () if self.second is None else self.second.stores
        return tuple(dict.fromkeys((*self.first.stores, *second)))

    @property
    def node(self) -> fx.Node:
        return self.first.store.node

    def apart(self) -> Iterator[WritePair]:
        """Yields each of the two writes as a single write. If one store writes both, yields
        nothing."""
        if self.second is not None and set(self.first.stores).isdisjoint(self.second.stores):
            yield WritePair(self.first, None, again=True)
            yield WritePair(self.second, None, again=True)


def cache_writes(flow: Dataflow) -> Iterator[CacheWrite]:
    """Yields the in-place writes that may fill a cache, in program order.

    The cache is an input of rank three or more. The written data come from a projection in the
    graph, or are an input of the graph. If they are an input, the write must fill only a part of
    the cache, as a write of new keys fills only their slots.
    """
    fused = {op.qualified_name for op in all_ops()}
    wanted = [value for value in flow.stores if _may_be_cache(value, flow, fused)]
    for stores, record in row_by_row(wanted):
        index, along = record.index, record.along
        write = CacheWrite(stores, record, record.target, index, _written(record), along)
        yield from _parts(_with_head(write))


def _may_be_cache(value: Value, flow: Dataflow, fused: set[str]) -> bool:
    """Whether a write goes to an input of rank three or more, and may store keys or values.

    fused: the names of the ops that write caches themselves. A graph has such an op if the user
    called the op, or if an earlier round rewrote a site to the op.
    """
    store = value.store
    assert store is not None
    if not store.memory.is_input or len(store.memory.shape) < 3 or replaces_state(store):
        return False
    if store.source is not None:
        return store.source.value.projected or _is_given(store, flow)
    return store.kind not in fused and any(v.value.projected for v in _inputs_of(flow, value))


# Operations between the projection of a key and its cache write: RoPE, the weight of a norm, and
# casts.
_PLAIN = frozenset(f"aten.{name}" for name in ("add", "sub", "mul", "neg", "cat")) | {"cast"}
_REACH = 32


def _is_given(store: Store, flow: Dataflow) -> bool:
    """Whether a part of a cache is written with an activation that is an input of the graph, or
    with simple arithmetic on such an input. An earlier graph or the caller has projected this
    activation."""
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
    """Adds a head dimension of length one to a cache that has none (for latents, the cache is
    [pages, slots, width])."""
    if write.written is None or not _lacks_heads(write):
        return write
    element = write.rest[-1]
    view = write.written.view
    return replace(
        write,
        target=effects.unsqueeze(write.target, element),
        index={d + (d >= element): index for d, index in write.index.items()},
        along=None if write.along is None else write.along + (write.along >= element),
        written=write.written.through(
            effects.unsqueeze(effects.identity(view.shape), len(view.shape) - 1)
        ),
    )


def _lacks_heads(write: CacheWrite) -> bool:
    """Whether the cache has no head dimension. It has none if index tensors leave one dimension, or
    if the target has three dimensions and each of its rows is a whole token."""
    if write.written is None:
        return False
    # If index tensors have different shapes, one of them may be an arange over heads.
    if len({view.shape for view in write.index.values()}) == 1 and len(write.rest) == 1:
        return True
    if len(write.target.dims) != 3 or not write.rest or _is_one(write, write.rest[-2:][0]):
        return False
    rows = effects.product(write.written.view.shape[:-1])
    made = [effects.product(gemm.shape[:-1]) for gemm in _products(write)]
    return bool(made) and all(tokens == rows for tokens in made)


def _is_one(write: CacheWrite, dim: int) -> bool:
    """Whether a dimension is a whole axis of length one. A slice that takes one token of many is
    not a whole axis."""
    one = write.target.dims[dim] == ()
    return one and (bool(write.index) or write.memory.shape[-2] == 1)


def _inputs_of(flow: Dataflow, value: Value) -> list[View]:
    """Returns the views that the node of a write reads, if it is not known what this node
    writes."""
    views = [flow.views[n] for n in value.node.all_input_nodes if n in flow.views]
    return [v for v in views if isinstance(v, View)]


def _written(store: Store) -> Written | None:
    """Returns the values that a write stores, in the cache's dtype, or before they were rounded to
    this dtype."""
    source, dtype = store.source, store.memory.dtype
    if source is None:
        return None
    if store.dtype == dtype:
        return before_rounding(Written(source), dtype)
    # The write goes through a view of another dtype, so the source must be reinterpreted in the
    # same way.
    value = source.value
    if value.op != "bitcast" or value.dtype != store.dtype or value.args[0].value.dtype != dtype:
        return None
    bits = Written(value.args[0].through(source.effect), between=(value,))
    return before_rounding(bits, dtype)


def _parts(write: CacheWrite) -> Iterator[CacheWrite]:
    """Splits a write of both K and V into two. The written value is a `stack`, such as in
    `cache[page, :, slot] = stack([k, v], 1)`, or a `cat` along the heads. Yields any other write
    unchanged."""
    written = write.written
    if written is None or written.view.value.op != "aten.cat":
        yield write
        return
    source = written.view
    pieces, axis = source.value.args
    at = [i for i, d in enumerate(source.effect.dims) if axis in [a.axis for a in d]]
    rest = write.rest
    lead = len(source.effect.dims) - len(rest)
    halves = len(pieces) == 2 and pieces[0].shape == pieces[1].shape
    # A `cat` along head_dim joins the halves of a rotated head. It does not join K and V.
    halves = halves and (pieces[0].shape[axis] == 1 or axis < len(source.value.shape) - 1)
    halves = halves and len(at) == 1 and lead <= at[0] < len(source.effect.dims) - 1
    if not halves or source.shape[at[0]] != source.value.shape[axis]:
        yield write
        return
    for part in range(2):
        yield _part(write, written, part, at[0], rest[at[0] - lead])


def joined_features(write: CacheWrite) -> Value | None:
    """Returns the `cat` that a write stores, if it joins two projections of equal width along the
    features, as for keys and values in one row. Returns None for anything else, such as the parts
    of a rotated head."""
    value = None if write.written is None else write.written.view.value
    if value is None or value.op != "aten.cat" or len(value.args[0]) != 2:
        return None
    one, other = value.args[0]
    made, more = ({gemm.value for gemm in _nearest(part.value)} for part in (one, other))
    last = value.args[1] == len(value.shape) - 1
    apart = made and more and made.isdisjoint(more)
    return value if last and apart and one.shape == other.shape else None


def _part(write: CacheWrite, written: Written, part: int, at: int, dim: int) -> CacheWrite:
    """Returns the write of one of the two pieces.

    at: the dimension of the source along which the pieces are joined. dim: the same dimension of
    the target. A piece of a `stack` has no such dimension.
    """
    pieces, axis = written.view.value.args
    length = pieces[0].shape[axis]

    def cut(effect: Effect, place: int) -> Effect:
        if length == 1:
            return effects.select(effect, place, part)
        return effects.narrow(effect, place, part * length, length)

    index, along = write.index, write.along
    if length == 1:
        index = {d - (d > dim): view for d, view in index.items()}
        along = None if along is None else along - (along > dim)
    piece = written.through(cut(effects.identity(written.view.shape), at))
    between = (*written.between, written.view.value)
    piece = replace(piece, view=piece_of(piece.view), between=between)
    half = before_rounding(piece, write.memory.dtype)
    return replace(write, target=cut(write.target, dim), index=index, written=half, along=along)


# --- writes row by row ----------------------------------------------------------------------------


def row_by_row(stores: Sequence[Value]) -> Iterator[tuple[tuple[Value, ...], Store]]:
    """Yields (writes, combined write) for each group of writes, in the order of their first writes.
    A group writes consecutive rows of one dimension of a memory, from the same rows of one
    value."""
    groups: list[list[Value]] = []
    records: list[Store] = []
    last: dict[Memory, int] = {}
    for value in stores:
        store = value.store
        assert store is not None
        at = last.get(store.memory)
        joined = None if at is None else _next_row(groups[at], records[at], store)
        if at is not None and joined is not None:
            groups[at].append(value)
            records[at] = joined
            continue
        last[store.memory] = len(groups)
        groups.append([value])
        records.append(store)
    return ((tuple(group), record) for group, record in zip(groups, records, strict=True))


def _next_row(group: Sequence[Value], record: Store, store: Store) -> Store | None:
    """Returns a write that combines a group of writes with the write of the next row. Returns None
    if `store` does not write the next row."""
    first = group[0].store
    assert first is not None
    count, source, more = len(group), first.source, store.source
    same = first.kind == store.kind and first.dtype == store.dtype
    plain = not (first.accumulate or store.accumulate or first.note or store.note)
    if not same or not plain or source is None or more is None or first.along is not None:
        return None
    target = _rows_of(first.target, store.target, count)
    read = _rows_of(source.effect, more.effect, count) if source.value is more.value else None
    if target is None or read is None or first.index.keys() != store.index.keys():
        return None
    if len(first.index) > 1:
        return None  # with a page index and a slot index, the writes are not combined
    whole = View(source.value, read)
    if not first.index:
        return replace(first, target=target, source=whole)
    index: dict[int, View] = {}
    if same_index(first.index, store.index):
        lead = len(next(iter(first.index.values())).shape)
        order = [*range(1, lead + 1), 0, *range(lead + 1, len(whole.shape))]
        index = {d + 1: view for d, view in first.index.items()}
        return replace(first, target=target, source=whole.permute(*order), index=index)
    for dim, view in first.index.items():
        other = store.index[dim]
        own = _rows_of(view.effect, other.effect, count) if view.value is other.value else None
        if own is None:
            return None
        index[dim + 1] = View(view.value, own)
    return replace(first, target=target, source=whole, index=index, along=0)


def _rows_of(first: Effect, other: Effect, count: int) -> Effect | None:
    """Returns an effect that selects the rows 0 to `count` of a dimension. The first dimension of
    the effect runs over these rows.

    first, other: the effects that select row 0 and row `count`. If these are not rows of one
    dimension, returns None.
    """
    apart = [a for a, (x, y) in enumerate(zip(first.start, other.start, strict=True)) if x != y]
    if first.dims != other.dims or len(apart) != 1:
        return None
    (axis,) = apart
    walked = any(atom.axis == axis for dim in first.dims for atom in dim)
    if walked or other.start[axis] - first.start[axis] != count:
        return None
    return Effect(((effects.Atom(axis, 1, count + 1),), *first.dims), first.start)


# --- pairs ----------------------------------------------------------------------------------------


# How many writes before and after an unpaired write are compared with it, to find heads of another
# width.
_NEAR = 4


def pairs(flow: Dataflow) -> Iterator[WritePair]:
    """Yields pairs of writes that have the same shape and the same slots, and writes that have no
    partner.

    The partner of a write goes to the same place in another cache, and stores a projection of the
    same activation. If there is no such write, the next write is the partner. The two parts of one
    store are partners.
    """
    writes = list(cache_writes(flow))
    projected = [_projected(write) for write in writes]
    taken: set[int] = set()

    def later(i: int) -> Iterator[int]:
        return (j for j in range(i + 1, len(writes)) if j not in taken)

    for i, write in enumerate(writes):
        if i in taken:
            continue
        mates = (j for j in later(i) if _of_one_input(projected[i], projected[j]))
        if _is_part(write):  # an op that performs one part of a store must perform all parts
            twin = next((j for j in later(i) if writes[j].store is write.store), None)
            if twin is None or not _belong(write, writes[twin]):
                continue
        else:
            twin = next((j for j in mates if _is_twin(write, writes[j])), None)
        if twin is None:
            known = (j for j in later(i) if _is_known(writes[j]) == _is_known(write))
            after = (j for j in islice(known, 1) if not _is_part(writes[j]))
            twin = next((j for j in after if _belong(write, writes[j])), None)
        if twin is not None:
            taken.add(twin)
            yield WritePair(write, writes[twin])
        elif _stands_alone(write):
            near = range(max(0, i - _NEAR), min(len(writes), i + _NEAR + 1))
            mates = (j for j in near if _of_one_input(projected[i], projected[j]))
            unlike = (j for j in mates if _differ_in_width(write, writes[j]))
            nearest = min(unlike, key=lambda j: abs(i - j), default=None)
            yield WritePair(write, None, None if nearest is None else writes[nearest])


def _is_part(write: CacheWrite) -> bool:
    """Whether the store of this write also writes something else."""
    everything = write.record.target.shape
    return effects.product(write.target.shape) != effects.product(everything)


def _is_known(write: CacheWrite) -> bool:
    """Whether the stored value is known. A memory that is only cleared has no stored value."""
    return write.written is not None


def _stands_alone(write: CacheWrite) -> bool:
    """Whether an unpaired write is reported. A write of an input of the graph to a memory of rank
    three is not reported, because the memory may be any buffer."""
    return write.is_projected or len(write.memory.shape) >= 4


def _is_twin(a: CacheWrite, b: CacheWrite) -> bool:
    """Whether two writes fill the same place of two caches, such as K[0] and V[0]."""
    return a.memory is not b.memory and a.target == b.target and _belong(a, b)


def _of_one_input(one: set[Value], other: set[Value]) -> bool:
    """Whether two writes may store projections of the same activation. Caches of different layers
    have projections of different activations."""
    return not one or not other or not one.isdisjoint(other)


def _projected(write: CacheWrite) -> set[Value]:
    """Returns the activations in the nearest products that a write is computed from. Products of
    positions and frequencies, which give the angles of a rotation, are ignored, because all layers
    share them."""
    return {gemm.flat_x.value for gemm in _products(write) if gemm.flat_x.shape[-1] != 1}


def _products(write: CacheWrite) -> list[Gemm]:
    """Returns the nearest products that a write is computed from."""
    return [] if write.written is None else _nearest(write.written.view.value)


def _nearest(value: Value) -> list[Gemm]:
    """Returns the nearest products that a value is computed from."""
    nearest = upstream(value, _REACH, lambda v: match_gemm(v) is None)
    return [gemm for value in nearest if (gemm := match_gemm(value)) is not None]


def _belong(a: CacheWrite, b: CacheWrite) -> bool:
    if a.written is None or b.written is None:
        return a.written is b.written and a.store.node is b.store.node
    same_shape = a.written.view.shape == b.written.view.shape
    if not same_shape or a.memory.dtype != b.memory.dtype or _are_rows(a.written, b.written):
        return False
    same_place = a.memory is b.memory and a.target == b.target
    return not same_place and same_slots(a, b)


def _differ_in_width(a: CacheWrite, b: CacheWrite) -> bool:
    """Whether two writes go to the same slots, and differ only in the width of their heads."""
    if a.written is None or b.written is None:
        return False
    one, other = a.written.view.shape, b.written.view.shape
    return one[:-1] == other[:-1] and one[-1] != other[-1] and same_slots(a, b)


def _are_rows(a: Written, b: Written) -> bool:
    """Whether two writes store different rows of one value, such as K[0] and K[1]."""
    one, other = a.view, b.view
    if one.value is not other.value or one.effect.dims != other.effect.dims:
        return False
    starts = zip(one.effect.start, other.effect.start, strict=True)
    apart = {axis for axis, (x, y) in enumerate(starts) if x != y}
    return bool(apart) and apart.isdisjoint(a.axis for dim in one.effect.dims for a in dim)


def same_slots(a: CacheWrite, b: CacheWrite) -> bool:
    """Whether two writes go to the same slots of their targets."""
    return a.along == b.along and same_index(a.index, b.index)


def same_index(a: Mapping[int, View], b: Mapping[int, View]) -> bool:
    """Whether the same dimensions have index tensors with the same numbers."""
    return set(a) == set(b) and all(equal_values(a[dim], b[dim]) for dim in a)
