"""Divides a rewritten graph into units, each of which runs as one kernel or one op, and counts the
bytes that each unit moves.

Each fused op is a unit, and so is each product. The remaining nodes of a layer that pass values to
each other, with no fused op or product between them, count as one kernel of Inductor, even if
Inductor makes several. A view by itself moves nothing. A node that reads a view moves the bytes
that the view selects, and a lookup moves the bytes that it returns. A write in place reads its
target only if the new values are computed from the old ones, and it moves only the rows of a cache
that it writes. A tensor that several nodes of a unit read counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from networkx.utils import UnionFind
from torch import fx

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.codegen.kernel import role_of
from tilewright.codegen.targets import Target
from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import access_of, call_key
from tilewright.compiler.dataflow.spelling import IN_PLACE_ARITHMETIC, SHAPES, name_of
from tilewright.compiler.report import GraphReport, Site
from tilewright.compiler.report.puts import Put, put_of
from tilewright.compiler.report.work import (
    flop_rate,
    flops_of,
    is_grouped,
    is_product,
    reached,
    share_of_experts,
)
from tilewright.compiler.rewrite import arguments_of
from tilewright.compiler.scopes import layer_of
from tilewright.ops.cache.read import CacheRead
from tilewright.ops.contract import FusedOp, get_op, is_ours
from tilewright.patterns.dataflow import scope_of

# The name of a group lists this many of its functions.
_NAMED = 4
# The dtypes that store codes of weights. Other integers are indices and masks.
_CODE_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2}
)
# Calls that never move anything, even if their fake result has a storage of its own.
_VIEWS = frozenset({"squeeze", "unsqueeze"})
# Calls that read a table at indices that are known only at run time.
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index", "getitem", "take_along_dim"})


@dataclass(frozen=True)
class Unit:
    """A part of a graph that runs as one kernel or one op.

    scope: the layer of the unit.
    node: the name of the unit's first node.
    members: the names of all nodes of the unit.
    weights: the bytes of weights that the unit moves.
    activations: the bytes of activations that the unit moves.
    caches: the bytes of caches. Caches that an item of `cache_reads` describes do not count here.
    flops: the FLOPs of products with weights, which run at `flop_rate`. `cache_reads` has the FLOPs
        of attention.
    scratch: the bytes that a fused op writes and then reads itself.
    family: the folder of `ops/` that has the fused op; empty for other units.
    codes: the format of the weights that a kernel of the unit decodes while it multiplies by them,
        as a key of WEIGHT_FORMATS; empty if there are none.
    stores_codes: whether the unit reads weights that are stored as codes. The kernels or the graph
        decode these weights.
    preparations: the number of the unit's kernels that prepare x for a product with codes.
    """

    scope: str
    kind: Literal["fused", "library", "inductor"]
    name: str
    node: str
    nodes: int
    launches: int
    weights: int
    caches: int
    activations: int
    cache_reads: tuple[CacheRead, ...]
    flops: int
    flop_rate: float
    scratch: int
    symbols: tuple[str, ...]
    kernels: tuple[str, ...]
    members: tuple[str, ...]
    family: str = ""
    codes: str = ""
    stores_codes: bool = False
    preparations: int = 0


def units_of(graph: GraphReport, target: Target) -> list[Unit]:
    """Returns the units of a rewritten graph, in order."""
    sites = {site.node: site for site in graph.matches}
    memory = _Memory.of(graph.after.graph)
    groups = _groups(memory)
    moved, products = _Moved(memory, groups, sites), _Products(graph)
    units = ((nodes, moved.of(nodes)) for nodes in groups.members.values())
    return [
        _unit(nodes, traffic, sites.get(nodes[0].name), products, target)
        for nodes, traffic in units
        # The values of a factory such as `arange` cost nothing, because their readers generate
        # them.
        if traffic.moves or _kind(nodes[0]) != "inductor"
    ]


def _unit(
    nodes: Sequence[fx.Node],
    traffic: _Traffic,
    site: Site | None,
    products: _Products,
    target: Target,
) -> Unit:
    first = nodes[0]
    specs = [kernel.spec for kernel in site.kernels] if site is not None else []
    replaced = site.absorbed if site is not None else [node.name for node in nodes]
    return Unit(
        scope=layer_of(scope_of(first)),
        kind=_kind(first),
        name=_name(nodes, site),
        node=first.name,
        nodes=len(nodes),
        launches=max(site.launches if site is not None else 0, 1),
        weights=sum(traffic.weights.values()),
        caches=sum(traffic.caches.values()),
        activations=sum(traffic.activations.values()),
        cache_reads=tuple(traffic.reads),
        flops=sum(map(products.flops, replaced)) if traffic.flops is None else traffic.flops,
        flop_rate=flop_rate(_compat.tensors_of(*first.all_input_nodes), target),
        scratch=traffic.scratch,
        symbols=tuple(sorted(traffic.symbols)),
        kernels=tuple(spec.name for spec in specs),
        members=tuple(node.name for node in nodes),
        family=op.family if (op := op_of(first)) is not None else "",
        codes=_codes(site),
        stores_codes=traffic.codes,
        preparations=sum(role_of(spec) == "prepares x" for spec in specs),
    )


def _codes(site: Site | None) -> str:
    """Returns the format of a site's weights if the kernel that multiplies by them also decodes
    them. Returns an empty string if they are not codes, or if a separate kernel decodes them
    first."""
    if site is None or any(role_of(kernel.spec) == "decodes codes" for kernel in site.kernels):
        return ""
    named = (str(site.shapes.get(name, "")) for name in ("weights", "weight"))
    return next((name for name in named if name in WEIGHT_FORMATS), "")


def _kind(node: fx.Node) -> Literal["fused", "library", "inductor"]:
    if op_of(node) is not None:
        return "fused"
    return "library" if is_product(node) else "inductor"


def _name(nodes: Sequence[fx.Node], site: Site | None) -> str:
    if site is not None:
        return site.pattern
    op = op_of(nodes[0])
    if op is not None:
        return op.name
    names = list(dict.fromkeys(map(name_of, nodes)))
    return ", ".join(names[:_NAMED]) + ", ..." * (len(names) > _NAMED)


def op_of(node: fx.Node) -> FusedOp | None:
    called = node.target
    if isinstance(called, torch._ops.OpOverload) and is_ours(called):
        return get_op(called._schema.name)
    return None


# --- memory ---------------------------------------------------------------------------------------


@dataclass
class _Memory:
    """The storages of a graph, by key.

    owned: the storages of the model's parameters and buffers.
    given: the storages that the graph does not allocate.
    written: the storages that the graph writes.
    makers: for each (node, storage), the node that made the contents that this node reads from the
        storage.
    writes: for each node that computes, the tensors that it writes in place (most often none).
    puts: the writes by nodes that read at most the elements that they overwrite.
    """

    owned: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    makers: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    writes: dict[fx.Node, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    puts: dict[fx.Node, Put] = field(default_factory=dict)
    # Some views have a separate storage among the fake tensors. This dictionary maps such a storage
    # to the storage of the view's source.
    aliases: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph) -> _Memory:
        memory = cls()
        last: dict[int, fx.Node] = {}
        alive = _alive(graph)
        for node in graph.nodes:
            held = memory.keys(_tensors(node))
            if node.op in ("placeholder", "get_attr"):
                memory.given |= held
                memory.owned |= held if _compat.is_models_own(node) else set()
            elif node in alive:
                memory._add(node, held, last)
        return memory

    def _add(self, node: fx.Node, held: set[int], last: dict[int, fx.Node]) -> None:
        sources = self.keys(_tensors(*node.all_input_nodes))
        self.makers |= {(node, key): last[key] for key in sources if key in last}
        if node.op == "output":
            return
        if _moves_nothing(node):
            (source,) = sources
            self.aliases |= dict.fromkeys(held - sources, source)
            return
        written = access_of(node).written
        if written or held - sources:
            self.writes[node] = written
            put = put_of(node) if written else None
            if put is not None:
                self.puts[node] = put
            self.written |= self.keys(written)
            last.update(dict.fromkeys(self.keys(written) | held, node))

    def keys(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Returns the keys of the storages of `tensors`."""
        found = (key for tensor in tensors for key in _compat.storage_keys(tensor))
        return {self.aliases.get(key, key) for key in found}

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Returns the nodes that computed the contents of a node's arguments."""
        keys = self.keys(_tensors(*node.all_input_nodes))
        return list(dict.fromkeys(self.makers[node, k] for k in keys if (node, k) in self.makers))


def _alive(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes whose results the outputs of the graph depend on. Also returns the nodes
    that write to memory, if the graph does not allocate this memory or if the outputs depend on
    it."""
    shared = _shared_storages(graph)

    def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
        return {shared[key] for tensor in tensors for key in _compat.storage_keys(tensor)}

    inputs = (node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    used = storages(tensor for node in inputs for tensor in _tensors(node))
    alive: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            node.op == "output"
            or not alive.isdisjoint(node.users)
            or _writes_any(node, used, storages)
        ):
            alive.add(node)
            used |= storages(_tensors(*node.all_input_nodes))
    return alive


def _writes_any(
    node: fx.Node, used: Set[int], storages: Callable[[Iterable[torch.Tensor]], set[int]]
) -> bool:
    """Whether a node may write to one of the storages, or to memory about which nothing is
    known."""
    access = access_of(node)
    written = storages(access.written)
    unknown = access.everything or access.reshaped or (access.written and not written)
    return bool(unknown) or not written.isdisjoint(used)


def _shared_storages(graph: fx.Graph) -> UnionFind:
    """Returns the storages of a graph's tensors. The storage of a view is joined with that of its
    source if the two may be shared."""
    shared: UnionFind = UnionFind()
    for node in graph.nodes:
        if name_of(node) in SHAPES:
            tensors = _tensors(node, *node.all_input_nodes)
            shared.union(*(key for tensor in tensors for key in _compat.storage_keys(tensor)))
    return shared


def _moves_nothing(node: fx.Node) -> bool:
    """Whether a node only changes the shape of dense elements."""
    sources = _tensors(*node.all_input_nodes)
    if name_of(node) in _VIEWS:
        return len(sources) == 1
    return name_of(node) in SHAPES and len(sources) == 1 and sources[0].is_contiguous()


@dataclass(frozen=True)
class _Groups:
    """The nodes of each unit. `leader` maps each node to the first node of its unit."""

    members: Mapping[fx.Node, list[fx.Node]]
    leader: Mapping[fx.Node, fx.Node]


def _groups(memory: _Memory) -> _Groups:
    """Groups nodes into units. `depth` counts the fused ops and products on the way to a node, so
    that the nodes before such an op and the nodes after it get different units."""
    depth: dict[fx.Node, int] = {}
    joined: UnionFind = UnionFind()
    for node in memory.writes:
        sources = list(memory.sources(node))
        alone = _kind(node) != "inductor"
        depth[node] = max((depth[s] + (_kind(s) != "inductor") for s in sources), default=0)
        joined.union(node)
        if not alone:
            layer = layer_of(scope_of(node))
            for source in sources:
                near = depth[source] == depth[node] and layer_of(scope_of(source)) == layer
                if near and _kind(source) == "inductor":
                    joined.union(source, node)
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in memory.writes:
        members[joined[node]].append(node)
    by_first = {nodes[0]: nodes for nodes in members.values()}
    return _Groups(by_first, {n: first for first, nodes in by_first.items() for n in nodes})


# --- bytes ----------------------------------------------------------------------------------------


@dataclass
class _Traffic:
    """The bytes that a unit moves, by storage."""

    weights: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    caches: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    activations: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    reads: list[CacheRead] = field(default_factory=list)
    # The FLOPs that the fused op itself states (`ops.cache.read.Work`).
    flops: int | None = None
    scratch: int = 0
    # Whether some of the weights are stored as codes.
    codes: bool = False
    symbols: set[str] = field(default_factory=set)
    # The part of the bytes in `activations` that is written in place.
    _written: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def write(self, key: int, tensor: torch.Tensor, size: int) -> None:
        """Adds a write in place. A unit writes each byte of a storage at most once."""
        before = self._written[key]
        whole = tensor.untyped_storage().nbytes()
        self._written[key] += size
        if isinstance(whole, int):
            self._written[key] = min(self._written[key], whole)
        self.activations[key] += self._written[key] - before

    @property
    def moves(self) -> bool:
        return bool(self.weights or self.caches or self.activations or self.symbols)


class _Moved:
    """The bytes of each unit."""

    def __init__(self, memory: _Memory, groups: _Groups, sites: Mapping[str, Site]) -> None:
        self.memory, self.groups, self.sites = memory, groups, sites
        # Pairs (node, storage). One unit makes the contents that the storage has at this node.
        # Another unit reads these contents, or the graph returns them.
        self.handed_on: set[tuple[fx.Node, int]] = set()
        for (node, key), maker in memory.makers.items():
            # A view is in no unit. The node that reads the view is counted instead.
            computes = node in groups.leader or node.op == "output"
            if computes and groups.leader.get(node) is not groups.leader[maker]:
                self.handed_on.add((maker, key))

    def of(self, nodes: list[fx.Node]) -> _Traffic:
        traffic = _Traffic()
        seen: set[fx.Node] = set()
        for node in nodes:
            self._reads(node, seen, traffic)
            self._writes(node, traffic)
        return traffic

    def _reads(self, node: fx.Node, seen: set[fx.Node], traffic: _Traffic) -> None:
        op = op_of(node)
        skipped = self._cache_read(op, node, traffic) if op is not None else set()
        limit = sum(_sizes(_tensors(node), traffic)) if _looks_up(node) else None
        share = self._share(node)
        put = self.memory.puts.get(node)
        if put is not None and not put.also:
            skipped = {put.target}
        out = node.kwargs.get("out")
        if op is None and isinstance(out, fx.Node) and out not in node.args:
            skipped = {out}
        for source in node.all_input_nodes:
            if source in skipped or source in seen:
                continue
            seen.add(source)
            for tensor in _tensors(source):
                self._read(node, tensor, share, limit, traffic)

    def _read(
        self,
        node: fx.Node,
        tensor: torch.Tensor,
        share: float,
        limit: int | None,
        traffic: _Traffic,
    ) -> None:
        for key in self.memory.keys([tensor]):
            if self._makes(node, key):
                continue
            into = self._kind_of(key, traffic)
            if into is traffic.weights and tensor.dim() > 1:
                traffic.codes |= tensor.dtype in _CODE_DTYPES
            (size,) = _sizes([tensor], traffic)
            if into is traffic.weights and tensor.dim() == 3:
                size = int(share * size)
            size = size if limit is None else min(size, limit)
            whole = tensor.untyped_storage().nbytes()
            into[key] = into[key] + size
            if isinstance(whole, int):
                into[key] = min(into[key], whole)

    def _kind_of(self, key: int, traffic: _Traffic) -> dict[int, int]:
        if key in self.memory.given and key in self.memory.written:
            return traffic.caches
        return traffic.weights if key in self.memory.owned else traffic.activations

    def _makes(self, node: fx.Node, key: int) -> bool:
        """Whether the node's unit made everything that the node reads from a storage."""
        if key in self.memory.given:
            return False
        leader = self.groups.leader
        maker = self.memory.makers.get((node, key))
        while maker in self.memory.puts and leader[maker] is leader[node]:
            # This node made the elements that the write keeps.
            maker = self.memory.makers.get((maker, key))
        return maker is not None and leader[maker] is leader[node]

    def _writes(self, node: fx.Node, traffic: _Traffic) -> None:
        written = self.memory.writes[node] if op_of(node) is None else ()
        in_place = self.memory.keys(written)
        made = {key: tensor for tensor in _compat.tensors_of(node)
                for key in self.memory.keys([tensor])}  # fmt: skip
        for key, tensor in made.items():
            if (node, key) in self.handed_on and key not in self.memory.given | in_place:
                traffic.activations[key] += sum(_sizes([tensor], traffic))
        for tensor in written:
            for key in self.memory.keys([tensor]):
                if not self._makes(node, key):
                    self._writes_over(node, key, tensor, traffic)
                elif (node, key) in self.handed_on:
                    traffic.write(key, tensor, sum(_sizes([tensor], traffic)))

    def _writes_over(
        self, node: fx.Node, key: int, tensor: torch.Tensor, traffic: _Traffic
    ) -> None:
        """Counts a write in place to memory that another unit made or that is an input of the
        graph."""
        put = self.memory.puts.get(node)
        if put is not None:
            symbols = [s for n in put.shape for s in _symbol(n)]
            traffic.symbols.update(symbols)
            size = 0 if symbols else put.elements * tensor.element_size()
            if put.reads:
                self._kind_of(key, traffic)[key] += size
        else:
            (size,) = _sizes([tensor], traffic)
            given = [s for s in node.all_input_nodes if not self._holds(s, tensor)]
            # Arithmetic writes the whole target. An unknown op writes at most as many bytes as its
            # arguments have.
            if name_of(node) not in IN_PLACE_ARITHMETIC and "out" not in node.kwargs:
                size = min(size, sum(_sizes(_compat.tensors_of(*given), traffic)) or size)
        traffic.write(key, tensor, size)

    def _cache_read(self, op: FusedOp, node: fx.Node, traffic: _Traffic) -> Set[fx.Node]:
        """Returns the arguments of one of our ops whose sizes are not counted: the tensors that the
        op writes, and the caches. Records how much of the caches the op reads."""
        names = [argument.name for argument in op.torch_op._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        skipped = {given[name] for name in op.mutated if isinstance(given.get(name), fx.Node)}
        if op.work is None or self._has_symbols(op, node, traffic):
            return skipped
        work = op.work_of(arguments_of(op, node))
        traffic.flops, traffic.scratch = work.flops, work.scratch
        if work.cache is None:
            return skipped
        caches = [given[name] for name in work.cache.names if given.get(name) is not None]
        if not self.memory.keys(_compat.tensors_of(*caches)) <= self.memory.given:
            # If the graph computes the keys, their bytes count as activations, which one unit makes
            # and another reads.
            traffic.reads.append(replace(work.cache, token_bytes=0))
            return skipped
        traffic.reads.append(work.cache)
        return skipped | set(caches)

    def _has_symbols(self, op: FusedOp, node: fx.Node, traffic: _Traffic) -> bool:
        """Records the symbols in the sizes of a call. Returns whether there are any."""
        tensors = _compat.tensors_of(*node.all_input_nodes)
        symbols = [s for t in tensors for n in t.shape for s in _symbol(n)]
        traffic.symbols.update(symbols)
        return bool(symbols)

    def _holds(self, node: fx.Node, tensor: torch.Tensor) -> bool:
        keys = self.memory.keys
        return not keys(_tensors(node)).isdisjoint(keys([tensor]))

    def _share(self, node: fx.Node) -> float:
        """Returns the share of the stacked experts that a node uses; 1 for a node without
        experts."""
        site = self.sites.get(node.name)
        if site is not None:
            return share_of_experts(site)
        if is_grouped(node):
            rows, weight = _compat.tensors_of(*node.all_input_nodes)[:2]
            if isinstance(rows.shape[0], int):
                return reached(rows.shape[0], 1 / weight.shape[0])
        return 1.0


def _tensors(*nodes: fx.Node) -> list[torch.Tensor]:
    """Returns the plain tensors that nodes hold. For a DTensor, returns the part that this rank
    holds."""
    return [part for tensor in _compat.tensors_of(*nodes) for part in _compat.parts_of(tensor)]


def _looks_up(node: fx.Node) -> bool:
    return name_of(node) in _LOOKUPS


def _sizes(tensors: Iterable[torch.Tensor], traffic: _Traffic) -> list[int]:
    """Returns the number of bytes of each tensor. For a tensor with symbolic sizes, records the
    symbols and returns 0."""
    found = []
    for tensor in tensors:
        symbols = [s for n in tensor.shape for s in _symbol(n)]
        traffic.symbols.update(symbols)
        found.append(0 if symbols else tensor.numel() * tensor.element_size())
    return found


def _symbol(size: Any) -> list[str]:
    return [] if isinstance(size, int) else [str(size)]


# --- products -------------------------------------------------------------------------------------


class _Products:
    """The FLOPs of a graph's products with weights, by the names of the nodes in the captured
    graph."""

    def __init__(self, graph: GraphReport) -> None:
        self.nodes = {node.name: node for node in graph.before.graph.nodes}
        self.fixed = fixed_nodes(graph.before.graph)
        self.known: dict[Any, int] = {}

    def flops(self, name: str) -> int:
        node = self.nodes.get(name)
        if node is None or not is_product(node):
            return 0
        if not any(source in self.fixed for source in node.all_input_nodes):
            return 0
        key = call_key(node)
        if key not in self.known:
            self.known[key] = flops_of(node)
        return self.known[key]


def fixed_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that are computed only from the model's parameters and buffers and from
    results of factories, such as `arange`."""
    fixed: set[fx.Node] = set()
    made: set[fx.Node] = set()
    for node in graph.nodes:
        sources = {s for s in node.all_input_nodes if _compat.tensors_of(s)}
        if node.op in ("placeholder", "get_attr"):
            fixed |= {node} if _compat.is_models_own(node) else set()
        elif not sources:
            made |= {node} if node.op == "call_function" else set()
        elif sources <= made:
            made.add(node)
        elif sources <= fixed | made:
            fixed.add(node)
    return fixed
