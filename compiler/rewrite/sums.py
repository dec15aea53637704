"""Turns `y += delta` into `y = y + delta` where no one can see the difference: `y` is a product
that the graph made, that nothing read before and no other tensor shares memory with. So with
`w /= total`, where `w` are the largest numbers of rows, or gathered ones, and with `x *= factor`,
where x is a cast or a product, as norms in place have it; readers before it may stay. And with rows
that are added to zeros. Patterns then see one form of each."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import name_of


@dataclass(frozen=True)
class _Kind:
    """new: what makes a new tensor, by what works in place. made_by: what makes the tensor that is
    written to. read_before: whether it may have been read. added: which argument is the other
    tensor."""

    new: dict[Any, Any]
    made_by: frozenset[str]
    read_before: bool
    added: int = 1


_SUM = _Kind(
    {operator.iadd: operator.add, "add_": "add"},
    frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "add", "getitem"}),
    read_before=False,
)
_QUOTIENT = _Kind(
    {operator.itruediv: operator.truediv, "div_": "div"},
    frozenset({"topk", "gather"}),
    read_before=True,
)
_PRODUCT = _Kind(
    {operator.imul: operator.mul, "mul_": "mul"},
    frozenset({"mul", "to", "float", "type_as", "type", "bfloat16", "half", "double"}),
    read_before=True,
)
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_ROWS = _Kind(
    {"index_add_": "index_add", "scatter_add_": "scatter_add"},
    frozenset({*_ZEROS, *_SUM.made_by, "mul", "clone", "index_add", "scatter_add"}),
    read_before=False,
    added=3,
)
# y[rows] += delta reads the rows, by a copy, adds, and puts them back.
_PUT = _Kind(
    {operator.setitem: torch.index_put},
    frozenset({*_ZEROS, "index_put"}),
    read_before=True,
    added=2,
)


def make_sums_new(graph: fx.Graph) -> int:
    """Makes such sums, quotients and products of `graph` return a new tensor; returns how many
    there were."""
    if not any(map(_kind_of, graph.nodes)):
        return 0
    owners: dict[int, list[fx.Node]] = {}
    changed = 0
    for node in graph.nodes:
        kind = _kind_of(node)
        if kind and _is_private(base := node.args[0], node, owners, kind):
            if kind is _PUT:
                node.meta["example_value"] = base.meta["example_value"]
            # Later nodes share the result's memory, so what was written to gets its own.
            for storage in _compat.storages_of(base):
                owners[storage] = []
            _give_memory(base)
            base.replace_all_uses_with(node, partial(operator.lt, node))
            node.target = kind.new[node.target]
            if kind is _PUT:
                _, rows, source = node.args
                node.args = (base, (rows,), source)
            changed += 1
        for storage in _compat.storages_of(node):
            owners.setdefault(storage, []).append(node)
    return changed


def _kind_of(node: fx.Node) -> _Kind | None:
    """The kind of change in place that a node is."""
    base = node.args[0] if node.args else None
    if not isinstance(base, fx.Node):
        return None
    for kind in (_SUM, _QUOTIENT, _PRODUCT, _ROWS, _PUT):
        if node.target in kind.new and (kind is not _PUT or _names_rows(node.args[1])):
            return kind if _is_made_by(_maker(base), kind) else None
    return None


def _is_made_by(maker: fx.Node, kind: _Kind) -> bool:
    """Whether a tensor is made as the kind asks; rows that are taken by an index are rows of sums
    that are put back."""
    if maker.op not in ("call_function", "call_method") or name_of(maker) not in kind.made_by:
        return False
    if name_of(maker) != "getitem":
        return True
    source = maker.args[0]
    return isinstance(source, fx.Node) and name_of(_maker(source)) in _PUT.made_by


def _names_rows(index: Any) -> bool:
    """Whether an index is a list of numbers of rows."""
    held = index.meta.get("example_value") if isinstance(index, fx.Node) else None
    return isinstance(held, torch.Tensor) and held.dtype == torch.int64 and held.dim() == 1


def _maker(base: fx.Node) -> fx.Node:
    """The node that computes a tensor: of one of several results, that of all."""
    while base.target is operator.getitem and isinstance(base.args[0], fx.Node):
        held = base.args[0].meta.get("example_value")
        if isinstance(held, torch.Tensor):
            break
        base = base.args[0]
    return base


def _is_private(
    base: fx.Node, node: fx.Node, owners: dict[int, list[fx.Node]], kind: _Kind
) -> bool:
    """Whether the tensor that is written to shares memory with no other and was read only where the
    kind lets it, and the result has its dtype."""
    held = base.meta.get("example_value")
    if not isinstance(held, torch.Tensor):
        return False
    if not kind.read_before and any(user < node for user in base.users):
        return False
    names = ("src", "source") if kind.added == 3 else ("other",)
    named = next((node.kwargs[name] for name in names if name in node.kwargs), None)
    other = node.args[kind.added] if len(node.args) > kind.added else named
    if isinstance(other, fx.Node):
        other = other.meta.get("example_value")
    if not isinstance(other, torch.Tensor) or torch.result_type(held, other) != held.dtype:
        return False
    # Leading dimensions of one, which setitem takes off, are too many for index_put.
    if kind is _PUT and (other.dtype != held.dtype or other.dim() > held.dim()):
        return False
    storages, own = _compat.storages_of(base), {base, _maker(base)}
    return (
        bool(storages)
        and _is_taken_once(base)
        and all(
            base in owners.get(storage, []) and own.issuperset(owners[storage])
            for storage in storages
        )
    )


def _is_taken_once(part: fx.Node) -> bool:
    """Whether no one, also later, takes one of several results by another name, nor all of them."""
    if (maker := _maker(part)) is part:
        return True
    own = set(_compat.storages_of(part))
    others = [user for user in maker.users if user is not part]
    taken = all(user.target is operator.getitem for user in others)
    return taken and own.isdisjoint(_compat.storages_of(*others))


def _give_memory(base: fx.Node) -> None:
    """A tensor gets a fake tensor with memory of its own, laid out as the one that it had."""
    old = base.meta["example_value"]
    new = base.meta["example_value"] = _compat.empty_like(old)
    maker = _maker(base)
    if maker is not base:
        parts = [new if part is old else part for part in maker.meta["example_value"]]
        maker.meta["example_value"] = tuple(parts)
