"""Finds how each product of a rewritten graph reads its weights. A product may read codes, plain
numbers, or numbers that the graph decodes from codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from tilewright.codegen.formats import WEIGHT_FORMATS
from tilewright.compiler import _compat
from tilewright.compiler.report import GraphReport
from tilewright.compiler.report.traffic import Unit, fixed_nodes, op_of
from tilewright.compiler.report.work import is_product, share_of_experts
from tilewright.compiler.rewrite import arguments_of
from tilewright.ops.contract import FusedOp
from tilewright.ops.formats.expert_weight import ExpertWeight
from tilewright.ops.formats.weight import StoredWeight
from tilewright.ops.groups import OptionalGroup
from tilewright.patterns.dataflow import scope_of

#: How a product reads weights: as codes, as numbers that the graph has decoded from codes, or as
#: numbers that the model stores. "hidden" means that an operator takes codes, and that nothing
#: tells how it reads them.
How = Literal["codes", "decoded", "hidden", "numbers"]
Role = Literal["codes", "scales", "zeros"]
#: Maps the fields of a StoredWeight that hold tensors to the roles of these tensors.
_ROLES: Mapping[str, Role] = {
    "data": "codes",
    "scale": "scales",
    "factor": "scales",
    "expert_scale": "scales",
    "zero": "zeros",
}
_CODES = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
#: Dtypes in which each element is one code. An element of another dtype may hold several codes.
_WHOLE = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}


@dataclass(frozen=True)
class WeightRead:
    """The weights that one node reads in one way.

    node: the name of the node in the rewritten graph.
    unit: the name of the first node of the unit to which the node belongs.
    by: the pattern of a fused op, or the name of the function.
    form: the stored format, in words.
    numbers: the number of weights; for experts, only the weights of the experts in use.
    codes, scales, zeros: the bytes of each that a step reads. The bytes of weights that are not
        codes count as `codes`.
    stored: the number of these bytes that the model stores. The graph computes the other bytes.
    """

    node: str
    unit: str
    scope: str
    by: str
    how: How
    form: str
    numbers: int
    codes: int = 0
    scales: int = 0
    zeros: int = 0
    stored: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of codes, scales and zeros."""
        return self.codes + self.scales + self.zeros


@dataclass(frozen=True)
class GraphWeights:
    """The weights of a rewritten graph.

    decoding: the names of the nodes that compute numbers or scales from codes.
    rounds: whether a product reads its activation as codes, too.
    """

    reads: tuple[WeightRead, ...]
    decoding: Set[str]
    rounds: bool


def weights_of(graph: GraphReport, units: Iterable[Unit]) -> GraphWeights:
    """Returns how a graph reads its weights. `units` are the units of the graph. Skips tensors with
    symbolic sizes."""
    return _Reader(graph, units).read()


@dataclass
class _Tensors:
    """The tensors of all weights that a node reads as codes. `roles` maps the node of each tensor
    to the tensor's role, `numbers` is the number of weights, and `forms` has their formats in
    words."""

    roles: dict[fx.Node, Role] = field(default_factory=dict)
    numbers: int = 0
    forms: dict[str, None] = field(default_factory=dict)


class _Reader:
    def __init__(self, graph: GraphReport, units: Iterable[Unit]) -> None:
        self.graph = graph.after.graph
        self.sites = {site.node: site for site in graph.matches}
        self.unit_of = {name: unit.node for unit in units for name in unit.members}
        self.fixed = fixed_nodes(self.graph)
        inputs = (n for n in self.graph.nodes if n.op in ("placeholder", "get_attr"))
        self.owned = {key for n in inputs if _compat.is_models_own(n)
                      for key in _compat.storages_of(n)}  # fmt: skip
        self.of_codes: dict[fx.Node, bool] = {}
        self.decoding: set[fx.Node] = set()
        self.rounds = False

    def read(self) -> GraphWeights:
        reads = [read for node in self.graph.nodes if node.name in self.unit_of
                 for read in self._at(node)]  # fmt: skip
        return GraphWeights(tuple(reads), {node.name for node in self.decoding}, self.rounds)

    def _at(self, node: fx.Node) -> Iterator[WeightRead]:
        if node in self.fixed:
            return
        op = op_of(node)
        yield from self._of_op(op, node) if op is not None else self._of_call(node)

    # --- fused ops --------------------------------------------------------------------------------

    def _of_op(self, op: FusedOp, node: fx.Node) -> Iterator[WeightRead]:
        given = op.arguments(*node.args, **node.kwargs)
        coded, dense = _Tensors(), list[fx.Node]()
        known: set[str] = set()
        for weight, nodes in _groups(op, node, given):
            known.add(nodes.named("data"))
            if weight.is_coded:
                self._add(coded, weight, nodes)
            else:
                dense.append(nodes.data)
        for name in (f.name for f in fields(given) if f.name not in known):
            value = getattr(given, name)
            if _names_weight(name) and isinstance(value, fx.Node):
                if (form := _WHOLE.get(_tensor(value).dtype)) is None:
                    dense.append(value)
                else:
                    scale = getattr(given, name.replace("weight", "scale"), None)
                    _add_whole(coded, value, [scale], f"{form} codes")
        site = self.sites.get(node.name)
        share = share_of_experts(site) if site is not None else 1.0
        self.rounds |= getattr(given, "x_scale", None) is not None
        if coded.roles:
            yield self._coded(node, coded, share)
        for weight_node in dict.fromkeys(dense):
            yield from self._dense(node, weight_node, share)

    def _add(self, into: _Tensors, weight: StoredWeight, nodes: Any) -> None:
        if nodes.data in into.roles or not _is_known(*weight.shape):
            return
        for name, role in _ROLES.items():
            value = getattr(nodes, name, None)
            if isinstance(value, fx.Node):
                into.roles.setdefault(value, role)
        into.numbers += prod(weight.shape)
        into.forms[form_in_words(weight)] = None

    # --- what is not fused ------------------------------------------------------------------------

    def _of_call(self, node: fx.Node) -> Iterator[WeightRead]:
        held = [s for s in node.all_input_nodes if s in self.fixed and self._is_matrix(s)]
        if not is_product(node):
            # An operator that does not belong to ATen may multiply by its arguments.
            if _is_foreign(node) and any(_tensor(s).dtype in _CODES for s in held):
                yield self._read(node, "hidden", "codes that an operator takes", 0, {})
            return
        rows = [t for s in node.all_input_nodes if s not in self.fixed
                for t in _compat.tensors_of(s)]  # fmt: skip
        self.rounds |= any(tensor.dtype in _WHOLE for tensor in rows)
        stored = [weight for weight in held if self._is_stored_codes(weight)]
        for weight in stored or held:
            tensor = _tensor(weight)
            if len(_compat.parts_of(tensor)) > 1:
                form = f"codes in a {type(tensor).__name__}"
                yield self._read(node, "hidden", form, tensor.numel(), {weight: "codes"})
            elif tensor.dtype in _WHOLE:
                coded = _Tensors()
                _add_whole(coded, weight, self._scales(node), f"{_WHOLE[tensor.dtype]} codes")
                yield self._coded(node, coded, 1.0)
            elif tensor.dtype in _CODES:
                yield self._read(node, "hidden", "codes that an operator takes", 0, {})
            else:
                yield from self._dense(node, weight, 1.0)

    def _scales(self, node: fx.Node) -> list[fx.Node]:
        """Returns the model's tensors that a product of codes reads, except the codes themselves
        and the bias."""
        given = [
            s for s in node.all_input_nodes if s in self.fixed and s is not node.kwargs.get("bias")
        ]
        return [s for s in given if not self._is_stored_codes(s)]

    def _is_stored_codes(self, node: fx.Node) -> bool:
        """Whether a product's argument holds codes, as a plain tensor or in a tensor subclass."""
        tensors = _compat.tensors_of(node)
        return any(t.dtype in _CODES or len(_compat.parts_of(t)) > 1 for t in tensors)

    def _is_matrix(self, node: fx.Node) -> bool:
        tensors = _compat.tensors_of(node)
        return len(tensors) == 1 and tensors[0].dim() > 1 and _is_known(*tensors[0].shape)

    # --- records ----------------------------------------------------------------------------------

    def _coded(self, node: fx.Node, coded: _Tensors, share: float) -> WeightRead:
        for part in coded.roles:
            self._note_decoding(part)
        form = ", ".join(coded.forms)
        return self._read(node, "codes", form, coded.numbers, coded.roles, share)

    def _dense(self, node: fx.Node, weight: fx.Node, share: float) -> Iterator[WeightRead]:
        if not self._is_matrix(weight) or weight not in self.fixed:
            return
        tensor = _tensor(weight)
        how: How = "decoded" if self._made_of_codes(weight) else "numbers"
        if how == "decoded":
            self._note_decoding(weight)
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield self._read(node, how, dtype, tensor.numel(), {weight: "codes"}, share)

    def _read(
        self,
        node: fx.Node,
        how: How,
        form: str,
        numbers: int,
        roles: Mapping[fx.Node, Role],
        share: float = 1.0,
    ) -> WeightRead:
        sizes: dict[str, int] = {"codes": 0, "scales": 0, "zeros": 0, "stored": 0}
        experts = False
        for part, role in roles.items():
            tensor = _tensor(part)
            size = sum(map(_bytes, _compat.parts_of(tensor)))
            if tensor.dim() == 3:
                size, experts = int(share * size), True
            sizes[role] += size
            if self.owned.issuperset(_compat.storage_keys(tensor)):
                sizes["stored"] += size
        site = self.sites.get(node.name)
        by = site.pattern if site is not None else _called(node)
        numbers = int(share * numbers) if experts else numbers
        unit = self.unit_of[node.name]
        return WeightRead(node.name, unit, scope_of(node), by, how, form, numbers, **sizes)

    def _made_of_codes(self, node: fx.Node) -> bool:
        """Whether the graph computes a tensor from codes that the model stores."""
        if node not in self.of_codes:
            tensors = _compat.tensors_of(node)
            stored = node.op in ("placeholder", "get_attr")
            self.of_codes[node] = (
                any(t.dtype in _CODES and t.dim() > 0 for t in tensors)
                if stored
                else any(map(self._made_of_codes, node.all_input_nodes))
            )
        return self.of_codes[node]

    def _note_decoding(self, node: fx.Node) -> None:
        """Records the nodes that compute a tensor from stored tensors."""
        if node.op in ("placeholder", "get_attr") or node in self.decoding:
            return
        self.decoding.add(node)
        for source in node.all_input_nodes:
            self._note_decoding(source)


def form_in_words(weight: StoredWeight) -> str:
    """Returns the stored format in words: `int4 codes in groups of 128`."""
    name = weight.weight_format.partition("_")[0]
    fixed = WEIGHT_FORMATS[weight.weight_format].expert_block
    block = list(weight.scale_block) or list(fixed or ())
    if len(block) != 2:
        return f"{name} codes"
    experts, columns = isinstance(weight, ExpertWeight), weight.shape[-1]
    rows = weight.shape[-2] if experts else prod(weight.shape[:-1])
    bn, bk = block
    if bk < columns:
        return f"{name} codes in " + (f"groups of {bk}" if bn == 1 else f"blocks of {bn} x {bk}")
    if bn == 1:
        return f"{name} codes with a scale for each row"
    if bn < rows:
        return f"{name} codes in blocks of {bn} x {bk}"
    return f"{name} codes with a scale for {'each expert' if experts else 'all'}"


def _groups(op: FusedOp, node: fx.Node, given: Any) -> Iterator[tuple[StoredWeight, Any]]:
    """Yields the weights of an op's call. Each is given as its tensors and as the nodes that hold
    these tensors."""
    tensors = arguments_of(op, node)
    groups = {name: g for name, g in vars(op.arguments).items() if isinstance(g, OptionalGroup)}
    # If an op takes elements of a node's tensor, the node stands for each of these elements.
    divided = {name for group in groups.values() for name in group.divided}
    whole = {n: _Elements(value) for n in divided if (value := getattr(given, n)) is not None}
    given = replace(given, **whole)
    for name in groups:
        weight = getattr(tensors, name)
        if isinstance(weight, StoredWeight):
            yield weight, getattr(given, name)


@dataclass(frozen=True)
class _Elements:
    """Stands for the elements of a node. Every index returns the node itself."""

    node: fx.Node

    def __getitem__(self, index: int) -> fx.Node:
        return self.node


def _add_whole(
    into: _Tensors, weight: fx.Node, scales: Iterable[fx.Node | None], form: str
) -> None:
    into.roles[weight] = "codes"
    into.roles |= {scale: "scales" for scale in scales if isinstance(scale, fx.Node)}
    into.numbers += _tensor(weight).numel()
    into.forms[form] = None


def _names_weight(name: str) -> bool:
    """Whether an op's argument with this name is a matrix."""
    return name == "weight" or (name.endswith("_weight") and "norm" not in name)


def _called(node: fx.Node) -> str:
    called = node.target
    return called if isinstance(called, str) else str(getattr(called, "__name__", called))


def _is_foreign(node: fx.Node) -> bool:
    called = node.target
    return isinstance(called, torch._ops.OpOverload) and called.namespace not in ("aten", "prims")


def _tensor(node: fx.Node) -> torch.Tensor:
    (tensor,) = _compat.tensors_of(node)
    return tensor


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the stored bytes of a tensor. An axis that repeats one element counts as one
    element."""
    if not _is_known(*tensor.shape, *tensor.stride()):
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * prod(1 if stride == 0 else size for size, stride in pairs)


def _is_known(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)
