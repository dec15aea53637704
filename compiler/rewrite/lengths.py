"""Advances the lengths of all layers of a cache in one call at the graph's end. In the captured
graph, each layer advances its own length.

Each layer of transformers' StaticCache holds its length as a tensor, computes positions from it,
and adds the number of new tokens. On a GPU, that addition is a small kernel in each layer, between
two fused kernels. If nothing else sees the lengths, one call at the graph's end advances them all.
Until then, the position of a single new token, `arange(1) + length`, is the length itself.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import name_of


@dataclass(frozen=True)
class _Length:
    """The length of a layer of a cache.

    node: the input that holds the length, a single integer.
    advance: the node that adds `step` to the length in place.
    sums: the nodes that add to the length out of place. All of them come before `advance`.
    """

    node: fx.Node
    advance: fx.Node
    step: int
    sums: tuple[fx.Node, ...]


def advance_lengths_last(graph: fx.Graph) -> int:
    """Moves additions of constants to lengths to the graph's end. Returns the number of moved
    additions.

    `graph` is the rewritten graph, in which fused ops read the positions.
    """
    lengths = list(_lengths(graph))
    together: dict[tuple[int, torch.dtype, torch.device], list[fx.Node]] = defaultdict(list)
    for length in lengths:
        for position in filter(_is_the_length, length.sums):
            if all(_reads(user, position) for user in position.users):
                _put_in_place(length.node, position)
        graph.erase_node(length.advance)
        held = length.node.meta["example_value"]
        together[length.step, held.dtype, held.device].append(length.node)
    with graph.inserting_before(graph.output_node()):
        for (step, *_), nodes in together.items():
            graph.call_function(torch._foreach_add_, (nodes, step))
    return len(lengths)


def _lengths(graph: fx.Graph) -> Iterator[_Length]:
    inputs = graph.find_nodes(op="placeholder")
    integers = [node for node in inputs if _is_one_integer(node.meta.get("example_value"))]
    found = [length for length in map(_length, integers) if length is not None]
    if not found:
        return
    holders: dict[int, set[fx.Node]] = defaultdict(set)
    for node in graph.nodes:
        for storage in _compat.storages_of(node):
            holders[storage].add(node)
    yield from (length for length in found if _is_seen_by_none(length, holders))


def _is_one_integer(held: object) -> bool:
    return (
        isinstance(held, torch.Tensor)
        and not _compat.is_subclass(held)
        and held.dtype in (torch.int32, torch.int64)
        and not any(isinstance(size, torch.SymInt) for size in held.shape)
        and held.numel() == 1
    )


def _length(node: fx.Node) -> _Length | None:
    """Returns the length that an input holds. Returns None unless the readers of the input are
    sums, followed by one addition of a constant in place."""
    advances = [user for user in node.users if user.target in ("add_", operator.iadd)]
    sums = tuple(user for user in node.users if name_of(user) == "add")
    if len(advances) != 1 or len(sums) + 1 != len(node.users):
        return None
    (advance,) = advances
    steps = advance.args[1:]
    if advance.args[0] is not node or advance.kwargs or advance.users or len(steps) != 1:
        return None
    if type(steps[0]) is not int or any(advance < one for one in sums):
        return None
    return _Length(node, advance, steps[0], sums)


def _is_seen_by_none(length: _Length, holders: Mapping[int, set[fx.Node]]) -> bool:
    """Whether no other tensor of the graph shares the memory of the length."""
    storages = _compat.storages_of(length.node)
    return bool(storages) and all(
        holders[storage] <= {length.node, length.advance} for storage in storages
    )


def _is_the_length(total: fx.Node) -> bool:
    """Whether a sum is `arange(1) + length` in the length's own dtype, and so equals the length."""
    terms = [*total.args, *total.kwargs.values()]
    lengths = [t for t in terms if isinstance(t, fx.Node) and t.op == "placeholder"]
    if len(terms) != 2 or len(lengths) != 1:
        return False
    held, length = (n.meta["example_value"] for n in (total, *lengths))
    other = next(term for term in terms if term is not lengths[0])
    same = held.dtype == length.dtype and held.device == length.device
    return same and held.numel() == 1 and _is_arange_of_one(other)


def _is_arange_of_one(node: object) -> bool:
    """Whether a term is `arange(1)`, that is, 0, and only sums read this term, so that nothing
    writes into it."""
    if not isinstance(node, fx.Node) or node.target is not torch.arange:
        return False
    if any(name_of(user) != "add" or "out" in user.kwargs for user in node.users):
        return False
    return node.args in ((1,), (0, 1)) and set(node.kwargs) <= {"device", "dtype"}


def _reads(user: fx.Node, value: fx.Node) -> bool:
    """Whether a node is a fused op that reads a value or a view of the value, and does not write to
    it."""
    if user.target == "reshape":
        return all(_reads(later, user) for later in user.users)
    if not isinstance(user.target, torch._ops.OpOverload) or user.target.namespace != "tilewright":
        return False
    specs = user.target._schema.arguments
    named = ((spec, user.kwargs[spec.name]) for spec in specs if spec.name in user.kwargs)
    given = (*zip(specs, user.args, strict=False), *named)
    return all(held is not value or spec.alias_info is None for spec, held in given) and not any(
        isinstance(held, (list, tuple)) and value in held for _, held in given
    )


def _put_in_place(length: fx.Node, position: fx.Node) -> None:
    shape = list(position.meta["example_value"].shape)
    with position.graph.inserting_before(position):
        same = position.graph.call_method("reshape", (length, shape))
    same.meta = dict(position.meta)
    position.replace_all_uses_with(same)
    position.graph.erase_node(position)
