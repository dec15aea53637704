"""Builds the read-only dataflow view of a Dynamo graph, without retracing or changing the graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tilewright.codegen.targets import Target
from tilewright.compiler import _compat
from tilewright.compiler.dataflow import spelling
from tilewright.compiler.dataflow.access import Access, access_of, given
from tilewright.compiler.dataflow.joins import copied_whole, split_before, without_rests
from tilewright.compiler.dataflow.memory import MemoryMap, Storages
from tilewright.compiler.dataflow.operations import Operations, meets_subclasses
from tilewright.compiler.dataflow.products import projects
from tilewright.compiler.dataflow.selections import selections
from tilewright.compiler.dataflow.spelling import (
    argument,
    index_effect,
    name_of,
    shape_of,
    size_of,
    with_rows,
)
from tilewright.compiler.dataflow.writes import WRITES, Write
from tilewright.patterns import effects
from tilewright.patterns.dataflow import (
    REINTERPRETED,
    WRAPPED,
    Dataflow,
    Memory,
    Store,
    Value,
    View,
    iter_views,
)
from tilewright.patterns.effects import Effect, InexpressibleError


def build_view(graph: fx.Graph, target: Target | None = None) -> Dataflow:
    """Returns the dataflow view of a Dynamo graph.

    `graph` is the graph that a `torch.compile` backend receives; its nodes carry
    `meta["example_value"]`. `target` is the chip for which the graph is compiled, if it is known.

    Returns a :class:`Dataflow`. An unknown operation becomes an opaque value in it, and `unknown`
    lists the operation; no exception is raised.
    """
    builder = _Builder(graph, target)
    for position, node in enumerate(graph.nodes):
        builder.visit(position, node)
    return builder.finish()


class _Builder:
    def __init__(self, graph: fx.Graph, target: Target | None) -> None:
        self.graph = graph
        self.target = target
        self.memory = MemoryMap(Storages(graph))
        self.values: list[Value] = []
        self.users: dict[Value, list[Value]] = defaultdict(list)
        self.others: dict[fx.Node, Any] = {}
        self.positions: dict[fx.Node, int] = {}
        self.visited: tuple[int, fx.Node]
        self.outputs: tuple[View, ...] = ()
        self.unknown: list[fx.Node] = []
        self.opaque: list[fx.Node] = []
        self.homes: dict[Value, fx.Node] = {}
        self.reshaped: set[int] = set()
        self.operations = Operations(self._operand, self.unknown)
        self.failed: list[tuple[fx.Node, Exception]] = []
        #: Maps a node whose tensor is a subclass to another node that holds the same elements: to
        #: the node with the plain tensor inside, or to an earlier node whose tensor is a subclass,
        #: too.
        self.inner: dict[fx.Node, fx.Node] = {}

    # --- one node ---

    def visit(self, position: int, node: fx.Node) -> None:
        self.positions[node] = position
        self.visited = position, node
        if spelling.PASSED_OVER in node.meta:
            return
        result = node.meta.get("example_value")
        if node.op == "output":
            self.outputs = tuple(iter_views(self._operand(node.args)))
        elif node.op in ("placeholder", "get_attr"):
            if isinstance(result, torch.Tensor):
                op = "constant" if isinstance(result, torch.nn.Parameter) else "input"
                value = self._value(op, (), result, node)
                self.memory.allocate(node, result, value.whole, is_input=True)
        else:
            try:
                self._call(node, name_of(node), result)
            except Exception as error:  # a node that was not read may do anything
                self.failed.append((node, error))
                everything = Access(tuple(given(node)), everything=True)
                self._unknown_call(node, name_of(node), result, everything)

    def _call(self, node: fx.Node, name: str, result: Any) -> None:
        access = access_of(node)
        if access.everything:
            self.opaque.append(node)
        if node.op == "call_module" or self._meets(self.memory.storages.wrapped, node):
            self._unknown_call(node, name, result, access)
            return
        if name in spelling.NOISE:
            return
        if name == "getitem" and isinstance(node.args[0], fx.Node):
            picked = self.others.get(node.args[0])
            if isinstance(picked, tuple):
                self._pick(node, picked)
                return
        if name == "getattr":
            if self._takes_out(node, result):
                return
            name = str(node.args[1])
            if name not in spelling.LAYOUT and not isinstance(result, torch.Tensor):
                return
        of = self._first_tensor(node)
        if of is not None and name in WRITES:
            self._write(node, of, name, result)
        elif of is not None and name in spelling.IN_PLACE_ARITHMETIC:
            self._in_place(node, of, name[:-1], result)
        elif access or (name == "getitem" and of is None):
            self._unknown_call(node, name, result, access)
        elif (
            isinstance(result, torch.Tensor)
            and self._meets(self.memory.storages.subclasses, node)
            and self._unwraps(node, result)
        ):
            return
        elif of is not None and name in spelling.SPLITS and isinstance(result, (tuple, list)):
            self._split(node, of, name, result)
        elif (
            name not in spelling.LISTED
            and not meets_subclasses(node)
            and self._selects(node, result)
        ):
            return
        elif not isinstance(result, torch.Tensor):
            self._opaque(node, name, result)
        elif of is None or not (
            self._layout(node, of, name, result) or self._bitcast(node, of, name, result)
        ):
            self._compute(node, name, result)

    def _meets(self, nodes: set[fx.Node], node: fx.Node) -> bool:
        """Whether a node is one of `nodes`, or reads one of them."""
        return bool(nodes) and (node in nodes or not nodes.isdisjoint(node.all_input_nodes))

    # --- layout ---

    def _layout(self, node: fx.Node, of: fx.Node, name: str, result: torch.Tensor) -> bool:
        """Adds the view of a node that only selects or copies. Returns whether the node does
        nothing else."""
        source = of.meta["example_value"]
        same = name in spelling.IDENTITY or (name in spelling.CASTS and _same_kind(source, result))
        if name in spelling.DROPOUT:
            same = not argument(node, 2, "training", True) or argument(node, 1, "p", 0.5) == 0
        if name == "view" and result.dtype != source.dtype:
            return False
        shape = shape_of(result)

        def rule(effect: Effect) -> Effect:
            if same or (not effect.dims and effects.product(shape) == 1):
                return effects.reshape(effect, shape)
            if name == "getitem":
                picked, tensors = index_effect(effect, node.args[1])
                if tensors:
                    raise InexpressibleError("advanced indexing")
                return picked
            return spelling.selected(effect, name, node, shape)

        if not (same or name == "getitem" or name in spelling.LAYOUT):
            return False
        if name == "getitem" and _has_index_tensor(node.args[1]):
            return False
        self._select(node, of, result, rule)
        return True

    def _select(
        self, node: fx.Node, of: fx.Node, result: torch.Tensor, rule: Callable[[Effect], Effect]
    ) -> None:
        """Adds a node whose tensor is a selection from the tensor of another node. `rule` computes
        the selection."""
        base = self._read(of)
        try:
            view = View(base.value, rule(base.effect))
        except InexpressibleError:
            kwargs = _selection(rule, base.shape)
            view = self._value("opaque:" + name_of(node), (base,), result, node, kwargs).whole
            self.unknown.append(node)
        place = self.memory.shared_with(result, of)
        if place is None:
            self._note_read(of)
            self.memory.allocate(node, result, view, is_input=False)
            return
        local, why = None, place.why
        if place.effect is base.effect and view.value is base.value:
            local = view.effect
        elif place.effect is not None:
            try:
                local = rule(place.effect)
            except InexpressibleError as error:
                why = str(error)
        self.memory.alias(node, place, local, view, why)

    def _selects(self, node: fx.Node, result: Any) -> bool:
        """Adds the views of a call that is in no table. Returns whether the call only selects."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(r, torch.Tensor) for r in results) or not any(
            spelling.is_tensor_node(source) for source in node.all_input_nodes
        ):
            return False  # it may change torch's state, as entering vmap does
        found, sources = self.operations.alone(node, selections)
        if not found or len(found) != len(results):
            return False
        parts = tuple((sources[s.of], r, s) for s, r in zip(found, results, strict=True))
        if isinstance(result, torch.Tensor):
            self._select(node, *parts[0])
        else:
            self.others[node] = parts
        return True

    def _takes_out(self, node: fx.Node, result: Any) -> bool:
        """Adds a tensor that a node takes from inside a subclass. Returns whether the node takes
        out such a tensor."""
        (wrapper, *_) = node.all_input_nodes or (None,)
        if wrapper not in self.memory.places or not isinstance(result, torch.Tensor):
            return False
        parts = _compat.parts_of(wrapper.meta["example_value"])
        if result is wrapper or not any(part is result for part in parts):
            return False
        self._first_inner(node, wrapper, result)
        return True

    def _unwraps(self, node: fx.Node, result: torch.Tensor) -> bool:
        """Adds the plain tensor inside a subclass, and returns whether `result` is that tensor.

        `DTensor.to_local` returns this tensor, and so does a `full_tensor` or `redistribute` that
        moves nothing. A call that writes nothing and returns its input's elements at the same
        addresses is the identity.
        """
        given = [n for n in node.all_input_nodes if n in self.memory.places]
        held = ((n, n.meta["example_value"]) for n in given)
        same = [
            n
            for n, tensor in held
            if (_compat.is_subclass(tensor) or _compat.is_subclass(result))
            and _compat.holds_in_place(tensor, result)
        ]
        if not same:
            return False
        inner = same[0]
        while inner in self.inner:
            inner = self.inner[inner]
        if _compat.is_subclass(result):
            self.inner[node] = inner
            return False  # a call of the subclass may do anything
        if _compat.is_subclass(inner.meta["example_value"]):
            self._first_inner(node, inner, result)
            self.inner[inner] = node
        else:
            place = self.memory.places[inner]
            self.memory.alias(node, place, place.effect, self._read(inner), place.why)
        return True

    def _first_inner(self, node: fx.Node, wrapper: fx.Node, result: torch.Tensor) -> None:
        """Adds the first plain tensor that a node takes from inside a subclass. If the subclass is
        an input of the graph, the tensor counts as an input too, with its own shape. The graph does
        not say which elements of the subclass the inner tensor holds."""
        memory = self.memory.places[wrapper].memory
        if not memory.is_input:
            self._define(node, "opaque:" + name_of(node), (self._read(wrapper),), result, {})
            return
        untouched = memory.root is wrapper and not self.memory.is_written(memory.storage)
        held = self._read(wrapper)
        op = held.value.op if untouched else "opaque:" + name_of(node)
        value = self._value(op, () if untouched else (held,), result, node)
        self.memory.allocate(node, result, value.whole, True, memory.is_constant)

    def _bitcast(self, node: fx.Node, of: fx.Node, name: str, result: torch.Tensor) -> bool:
        """Adds `x.view(dtype)` for a dtype of the same width. The result has the same bytes, read
        as another dtype. Returns whether a value was added."""
        if name != "view" or of.meta["example_value"].shape != result.shape:
            return False
        place = self.memory.shared_with(result, of)
        if place is None:
            return False
        value = self._value("bitcast", (self._read(of),), result, node)
        self.memory.alias(node, place, place.effect, value.whole, place.why, result.dtype)
        return True

    def _split(self, node: fx.Node, of: fx.Node, name: str, result: Sequence[torch.Tensor]) -> None:
        parts = spelling.Parts(name, node, [shape_of(part) for part in result])
        self.others[node] = tuple(
            (of, part, partial(parts.select, at=i)) for i, part in enumerate(result)
        )

    def _pick(self, node: fx.Node, parts: tuple[Any, ...]) -> None:
        part = parts[size_of(node.args[1])]
        if isinstance(part, Value):
            result = node.meta["example_value"]
            if isinstance(result, torch.Tensor):
                self.memory.allocate(node, result, part.whole, is_input=False)
                self.homes.setdefault(part, node)
        elif part is not None:
            self._select(node, *part)

    # --- compute ---

    def _compute(self, node: fx.Node, name: str, result: torch.Tensor) -> None:
        op, args, kwargs = self.operations.of(node, name, result)
        whole = None
        if op == "aten.cat":
            pieces = without_rests(args[0], args[1])
            args = (pieces, args[1])
            whole = copied_whole(pieces, result) or split_before(*args, shape_of(result))
        if whole is None:
            self._define(node, op, args, result, kwargs)
            return
        self._note_reads(node)
        self.memory.allocate(node, result, whole, is_input=False)

    def _define(
        self,
        node: fx.Node,
        op: str,
        args: tuple[Any, ...],
        result: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> Value:
        self._note_reads(node)
        value = self._value(op, args, result, node, kwargs)
        storage, places = self.memory.storages.of(result), self.memory.places
        given = ((a, places.get(a)) for a in node.all_input_nodes)
        sources = [a for a, place in given if place and place.memory.storage == storage]
        if not sources:
            self.memory.allocate(node, result, value.whole, is_input=False)
            return value
        place = places[sources[0]]
        if self._stays(sources[0], result):
            self.memory.alias(node, place, place.effect, value.whole, place.why)
        else:
            why = WRAPPED if meets_subclasses(node) else REINTERPRETED
            self.memory.alias(node, place, None, value.whole, why)
        return value

    def _stays(self, source: fx.Node, result: torch.Tensor) -> bool:
        """Whether a plain result lies exactly where the plain operand `source` lies, as the result
        of a wait for a collective does. Such a result still gets a value of its own, so that no
        node reads it before the wait."""
        both = source.meta["example_value"], result
        return all(map(_compat.is_plain, both)) and _compat.holds_in_place(*both)

    def _opaque(self, node: fx.Node, name: str, result: Any) -> None:
        """Adds a node that returns no tensor, or several."""
        self._note_reads(node)
        if not any(spelling.is_tensor_node(a) for a in node.all_input_nodes):
            return
        op = f"aten.{name}" if name in spelling.PLAIN else f"opaque:{name}"
        args, kwargs = self.operations.arguments(node), self.operations.keywords(node)
        if not isinstance(result, (tuple, list)):
            like = next(a for a in node.all_input_nodes if spelling.is_tensor_node(a))
            self._value(op, args, like.meta["example_value"], node, kwargs)
            return
        self.others[node] = tuple(
            self._value(op, args, part, node, kwargs | {"output": i})
            if isinstance(part, torch.Tensor)
            else None
            for i, part in enumerate(result)
        )

    # --- in-place writes ---

    def _write(self, node: fx.Node, target: fx.Node, name: str, result: Any) -> None:
        place = self.memory.places[target]
        try:
            if place.effect is None:
                raise InexpressibleError(place.why)
            written = WRITES[name](self._operand, node, place.effect)
        except InexpressibleError as error:
            whole = place.effect or effects.identity(place.memory.shape)
            written = Write(whole, note=str(error))
        record = Store(place.memory, **vars(written), kind=name, dtype=place.dtype)
        self._store(node, target, record, result)

    def _store(
        self, node: fx.Node, target: fx.Node, store: Store, result: Any, others: tuple = ()
    ) -> None:
        """Adds one write. `others` are further values from which the node may compute the written
        data, if it is not known what the node writes."""
        before = self._read(target)
        args = (before, store.source, tuple(store.index.values()), others)
        value = self._value("store", args, store.memory.root.meta["example_value"], node, {}, store)
        self.memory.write(store, value)
        memory = store.memory
        self.homes[value] = memory.root
        if not memory.is_input:
            self._join_slices(node, store)
        if isinstance(result, torch.Tensor):
            place = self.memory.places[target]
            now = self._read(target)
            self.memory.alias(node, place, place.effect, now)

    def _join_slices(self, node: fx.Node, store: Store) -> None:
        slices = self.memory.slices[store.memory]
        slices.add(store)
        joined = slices.joined(store.memory.shape)
        if joined is not None and len(joined[1]) > 1:
            axis, pieces = joined
            result = store.memory.root.meta["example_value"]
            cat = self._value("aten.cat", (tuple(pieces), axis), result, node)
            self.memory.state[store.memory] = cat.whole
            self.homes[cat] = store.memory.root

    def _in_place(self, node: fx.Node, target: fx.Node, name: str, result: Any) -> None:
        args, kwargs = self.operations.arguments(node), self.operations.keywords(node)
        computed = self._value(f"aten.{name}", args, result, node, kwargs)
        place = self.memory.places[target]
        effect = place.effect or effects.identity(place.memory.shape)
        known = computed.whole if place.effect is not None else None
        self.homes[computed] = target
        record = Store(place.memory, effect, {}, known, f"{name}_", place.dtype)
        self._store(node, target, record, result)

    def _unknown_call(self, node: fx.Node, name: str, result: Any, access: Access) -> None:
        """Adds an operation with unknown values. It may read all its arguments, and it writes what
        `access` says."""
        self._note_reads(node)
        self.reshaped.update(map(self.memory.storages.of, access.reshaped))
        others = (self.operations.arguments(node), tuple(self.operations.keywords(node).values()))
        for memory, was_given in self._written_memories(node, access):
            whole = effects.identity(memory.shape)
            record = Store(memory, whole, {}, None, name, memory.dtype)
            self._store(node, memory.root, record, None, others if was_given else ())
        if isinstance(result, torch.Tensor):
            if node not in self.memory.places:
                args, kwargs = self.operations.arguments(node), self.operations.keywords(node)
                self._define(node, f"opaque:{name}", args, result, kwargs)
        elif not access or result is not None:
            self._opaque(node, name, result)

    def _written_memories(self, node: fx.Node, access: Access) -> list[tuple[Memory, bool]]:
        """Returns one memory of each written storage, and whether that memory belongs to an
        argument of the node."""
        places = self.memory.places
        given = {p.memory.storage: p.memory for n in node.all_input_nodes if (p := places.get(n))}
        written = [*access.written, *access.reshaped]
        keys = dict.fromkeys(map(self.memory.storages.of, written))
        if access.everything:
            keys |= dict.fromkeys(self.memory.by_storage)
        known = [key for key in keys if key in self.memory.by_storage]
        return [(given.get(k) or self.memory.by_storage[k][-1], k in given) for k in known]

    # --- pieces ---

    def _value(
        self,
        op: str,
        args: tuple[Any, ...],
        result: torch.Tensor,
        node: fx.Node,
        kwargs: dict[str, Any] | None = None,
        store: Store | None = None,
    ) -> Value:
        value = Value(
            op=op,
            args=args,
            shape=shape_of(result),
            dtype=result.dtype,
            device=result.device,
            node=node,
            position=self.positions[node],
            kwargs=kwargs or {},
            store=store,
        )
        if any(v.value.projected for v in value.operands) or projects(value):
            object.__setattr__(value, "projected", True)
        self.values.append(value)
        for operand in {v.value: None for v in value.operands}:
            self.users[operand].append(value)
        return value

    def _read(self, node: fx.Node) -> View:
        view = self.memory.read(node)
        if view is None:
            view = self._value("opaque:memory", (), node.meta["example_value"], node).whole
        return view

    def _operand(self, item: Any) -> Any:
        """Returns an argument as patterns see it, that is, as views, sizes and plain Python
        values."""
        if isinstance(item, fx.Node):
            held = item.meta.get("example_value")
            if isinstance(held, torch.Tensor) and item in self.memory.places:
                self._note_read(item)
                return self._read(item)
            if isinstance(held, (torch.SymInt, int)) and not isinstance(held, bool):
                return size_of(held)
            return item if isinstance(held, (torch.SymFloat, float)) else None
        if isinstance(item, (tuple, list)):
            return tuple(self._operand(i) for i in item)
        if isinstance(item, dict):
            return {key: self._operand(i) for key, i in item.items()}
        return size_of(item) if isinstance(item, torch.SymInt) else item

    def _note_read(self, node: fx.Node) -> None:
        """Records that the node being visited reads another node's tensor."""
        self.memory.note_read(self.memory.places[node].memory, self.visited)

    def _note_reads(self, node: fx.Node) -> None:
        """Records that a node reads all its tensor arguments, including the tensors inside
        containers."""
        for source in node.all_input_nodes:
            if source in self.memory.places:
                self._note_read(source)
                continue
            for tensor in _compat.tensors_of(source):
                for memory in self.memory.by_storage.get(self.memory.storages.of(tensor), ())[-1:]:
                    self.memory.note_read(memory, self.visited)

    def _first_tensor(self, node: fx.Node) -> fx.Node | None:
        first = node.args[0] if node.args else node.kwargs.get("input")
        known = isinstance(first, fx.Node) and first in self.memory.places
        return first if known else None  # type: ignore[return-value]

    def finish(self) -> Dataflow:
        places = self.memory.places
        return Dataflow(
            graph=self.graph,
            values=tuple(self.values),
            users=self.users,
            views={node: place.view for node, place in places.items()},
            memory_of={node: place.memory for node, place in places.items()},
            written=self.memory.stores,
            read=self.memory.reads,
            outputs=self.outputs,
            positions=self.positions,
            homes=self.homes,
            same_size=_compat.size_comparison(
                n.meta.get("example_value") for n in self.graph.nodes if n.op == "placeholder"
            ),
            storage_of=self.memory.storages.of,
            unknown=tuple(self.unknown),
            opaque=tuple(self.opaque),
            reshaped=frozenset(self.reshaped),
            failed=tuple(self.failed),
            target=self.target,
        )


def _same_kind(source: torch.Tensor, result: torch.Tensor) -> bool:
    return source.dtype == result.dtype and source.device == result.device


def _has_index_tensor(index: Any) -> bool:
    items = index if isinstance(index, (tuple, list)) else [index]
    return with_rows(index) is not None or any(spelling.is_tensor_node(i) for i in items)


def _selection(rule: Callable[[Effect], Effect], shape: Sequence[Any]) -> dict[str, Any]:
    """Returns what a node selects from a tensor of this shape, as the keyword argument `selection`.
    Returns an empty dictionary if no effect can express that."""
    try:
        return {"selection": rule(effects.identity(shape))}
    except InexpressibleError:
        return {}
