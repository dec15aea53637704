"""Decides whether a graph could tell, from strides, that one tensor stands in the place of another.

Strides decide which views are possible, and which elements `as_strided` reads. They decide whether
`reshape` returns a view or a copy, and therefore what a later write changes. They also decide what
a user's Triton kernel does, because Dynamo has put strides as numbers into the kernel's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import name_of, shape_of
from tilewright.ops.checks import proven

#: Prefixes of the names of functions that read a tensor's memory by its strides.
READS = ("as_strided", "stride", "is_contiguous", "storage_offset", "data_ptr", "untyped_storage",
         "set_", "resize_", "triton_kernel_wrapper")  # fmt: skip


class Writes(Protocol):
    """An object that lists the writes to a storage, as a Dataflow does."""

    def writes_on(self, storage: int) -> Iterator[Any]: ...


def same_steps(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors have equal strides. Dimensions that are known to have size 1 do not
    count. Adds no guard."""
    a, b = _steps(one), _steps(two)
    return len(a) == len(b) and all(proven(x == y) for x, y in zip(a, b, strict=True))


def _steps(tensor: torch.Tensor) -> list[Any]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if not proven(size == 1)]


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one run of memory, whatever the order of its dimensions."""
    return tensor.is_contiguous() or is_packed_as(tensor, tensor)


def is_packed_as(like: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is packed, and its dimensions have the order that the dimensions of `like`
    have in memory."""
    return tensor.permute(_order(like)).is_contiguous()


def packed_as(like: torch.Tensor, node: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
    """Returns a copy of `node` in packed memory. Its dimensions have the order that the dimensions
    of `like` have in memory.

    `call` adds a call of a method to the graph.
    """
    if like.is_contiguous():
        return call("contiguous", node)
    order = _order(like)
    packed = call("contiguous", call("permute", node, order))
    return call("permute", packed, [order.index(dim) for dim in range(like.dim())])


def _order(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def strides_matter(old: fx.Node, now: torch.Tensor, flow: Writes, *, returned: bool = True) -> bool:
    """Whether a graph with `now`, a fake tensor, in place of the tensor of `old` would compute
    another result or raise an error.

    If `returned` is set, a returned tensor with other strides counts, too.
    """
    changed: dict[fx.Node, Any] = {old: now}
    front = [old]
    while front:
        for user in front.pop().users:
            if user.op == "output" and not returned:
                continue
            if user.op == "output" or name_of(user).startswith(READS):
                return True
            if isinstance(user.target, torch._ops.HigherOrderOperator) or _has_new_sizes(user):
                continue  # its result is dense for all strides of its inputs
            held = _compat.tensors_of(user)
            if not held:
                continue
            try:
                made = _compat.run_fake(user, changed)
            except (RuntimeError, ValueError):
                return True
            tensors = _compat.tensors_in(made)
            if _shares_otherwise(user, tensors, changed, flow):
                return True
            if not all(same_steps(a, b) for a, b in zip(held, tensors, strict=True)):
                changed[user] = made
                front.append(user)
    return False


def _has_new_sizes(node: fx.Node) -> bool:
    """Whether data decide the sizes of a node's result. Running such a node again would give new
    symbols."""
    return not unbacked(node) <= set().union(*map(unbacked, node.all_input_nodes))


def unbacked(node: fx.Node) -> set[str]:
    """Returns the unbacked symbols in a node's shapes, that is, sizes that depend on data alone."""
    sizes = [size for t in _compat.tensors_of(node) for size in shape_of(t)]
    symbols = {str(s) for n in sizes if not isinstance(n, int) for s in n.free_symbols}
    return {name for name in symbols if name.startswith("u")}


def _shares_otherwise(
    user: fx.Node, tensors: list[torch.Tensor], changed: dict[fx.Node, Any], flow: Writes
) -> bool:
    """Whether a view becomes a copy, or a copy becomes a view, and a reader could see the
    difference. A reader could see it if the graph writes to the memory, or returns both tensors."""
    own = _keys(_compat.tensors_of(user))
    for source in user.all_input_nodes:
        if source not in changed:
            continue
        theirs = _keys(_compat.tensors_of(source))
        shared = not _keys(tensors).isdisjoint(_keys(_compat.tensors_in(changed[source])))
        if shared == (not own.isdisjoint(theirs)):
            continue
        if any(next(flow.writes_on(storage), None) for storage in own | theirs):
            return True
        returned = set(_compat.storages_of(*user.graph.output_node().all_input_nodes))
        if own & returned and theirs & returned:
            return True
    return False


def _keys(tensors: list[torch.Tensor]) -> set[int]:
    return {key for tensor in tensors for key in _compat.storage_keys(tensor)}
