"""Selects rows before a product where only those rows are read: `linear(x)[:, -1]` becomes
`linear(x[:, -1])`.

A language model's head gives a row of logits for every token of a prompt, and a step reads only the
last row. There may be elementwise operations between the product and the selection. If a reader can
see the strides of the selection, the result gets the same strides.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.spelling import CASTS, argument, calls_of, name_of
from tilewright.compiler.rewrite.strides import READS, same_steps, unbacked
from tilewright.compiler.rewrite.writer import Writer

# Elementwise operations.
_EACH = CASTS | {"add", "clamp", "div", "mul", "neg", "sub", "tanh"}
_PRODUCTS = ("linear", "matmul")
_OPERANDS = ("input", "weight", "bias")
_WHOLE = slice(None, None, None)


def take_rows_first(graph: fx.Graph) -> int:
    """Moves selections of rows in front of products that have no other reader. Returns the number
    of moved selections."""
    moved = 0
    for node in calls_of(graph, _PRODUCTS):
        if _is_of_rows(node):
            between, selection = _selected(node)
            if selection is not None and _takes_fewer(node, selection):
                _move(node, between, selection)
                moved += 1
    return moved


def _is_of_rows(product: fx.Node) -> bool:
    """Whether each row of a product is computed from one row of its first operand and from a
    weight."""
    source, weight, bias = (argument(product, at, name) for at, name in enumerate(_OPERANDS))
    given = [operand for operand in (source, weight, bias) if operand is not None]
    # The product may have further tensor arguments, such as `out`, which is written. One tensor may
    # also be both operands.
    if weight is None or set(given) != set(product.all_input_nodes):
        return False
    if len(set(given)) != len(given):
        return False
    if not all(map(_is_plain, (product, *given))):
        return False
    held, rows, columns, *added = (n.meta["example_value"] for n in (product, *given))
    if columns.dim() != 2 or any(tensor.dim() > 1 for tensor in added):
        return False
    return held.dim() == rows.dim() >= 2 and type(held.shape[-1]) is int


def _is_plain(node: fx.Node) -> bool:
    return _compat.is_plain(node.meta.get("example_value"))


def _selected(product: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """Returns the elementwise nodes after a product, and the selection of rows after these nodes.

    Each node is the only reader of the node before it. The selection is None if the product is read
    in another way.
    """
    between: list[fx.Node] = []
    node = product
    while len(node.users) == 1:
        (user,) = node.users
        if _kept(user, node) is not None:
            return between, user
        if not _works_on_each(user, node):
            break
        between.append(user)
        node = user
    return between, None


def _works_on_each(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node is an elementwise operation on `node`, and reads no other tensor."""
    if user.op == "output" or name_of(user) not in _EACH or user.all_input_nodes != [node]:
        return False
    made, held = user.meta.get("example_value"), node.meta["example_value"]
    if not isinstance(made, torch.Tensor) or made.device != held.device:
        return False
    return made.shape == held.shape and made.stride() == held.stride()


def _kept(user: fx.Node, node: fx.Node) -> list[tuple[int, int]] | None:
    """Returns the dimensions of `node` in which another node selects rows, each with the step.
    Returns None if the other node does anything else, or selects in the last dimension."""
    rank = node.meta["example_value"].dim()
    name = name_of(user)
    if name in ("select", "narrow"):
        dim = argument(user, 1, "dim")
        if type(dim) is not int or dim % rank == rank - 1 or argument(user, 0, "input") is not node:
            return None
        if not all(map(_is_number, (n for n in user.all_input_nodes if n is not node))):
            return None
        return [(d, 1) for d in range(rank) if name == "narrow" or d != dim % rank]
    if name != "getitem" or user.args[0] is not node:
        return None
    given = user.args[1]
    items: list[Any] = list(given) if isinstance(given, tuple) else [given]
    if items.count(...) > 1 or not all(map(_is_basic, items)):
        return None
    at = items.index(...) if ... in items else len(items)
    items[at : at + 1] = [_WHOLE] * (rank - len(items) + (at < len(items)))
    if items[-1] != _WHOLE or len(items) != rank:
        return None
    return [(d, item.step or 1) for d, item in enumerate(items) if isinstance(item, slice)]


def _is_basic(item: Any) -> bool:
    """Whether an index is a number, a slice by numbers with a constant step, or an ellipsis."""
    if isinstance(item, slice):
        known = item.step is None or type(item.step) is int
        return known and all(end is None or _is_number(end) for end in (item.start, item.stop))
    return item is ... or _is_number(item)


def _is_number(item: Any) -> bool:
    if isinstance(item, fx.Node):
        return isinstance(item.meta.get("example_value"), (int, torch.SymInt))
    return type(item) is int


def _takes_fewer(product: fx.Node, selection: fx.Node) -> bool:
    """Whether a selection takes fewer rows than there are, and can be moved in front of the
    product.

    A number of rows that is known only in a call counts as fewer, unless it is the number of all
    rows. For example, a selection cannot be moved if another argument of it is computed after the
    product, or if the product of the selected rows would add a guard.
    """
    others = [n for n in selection.all_input_nodes if "example_value" in n.meta]
    if any(product < other for other in others if not _is_plain(other)):
        return False
    whole, part = (n.meta["example_value"] for n in (product, selection))
    if unbacked(product) or unbacked(selection) or not whole.is_contiguous():
        return False
    if not _is_as_made(product) or _is_read_by_strides(selection):
        return False
    if _compat.is_symbolic(whole) or _compat.is_symbolic(part):
        same = tuple(map(str, whole.shape)) == tuple(map(str, part.shape))
        return not same and not _asks_for_guards(selection, whole, part)
    return part.numel() < whole.numel()


def _asks_for_guards(selection: fx.Node, whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether the product of the selected rows would add a guard.

    The product asks whether its operands are dense. If the number of rows is symbolic and, in the
    traced call, is 1 or equals the number of all rows, the answer would hold for that number alone.
    """
    kept = _kept(selection, selection.all_input_nodes[0]) or []
    for (dim, _), size in zip(kept, part.shape, strict=False):
        if str(size) != str(whole.shape[dim]) and not isinstance(whole.shape[dim], int):
            taken, there = _compat.hints_of((size, whole.shape[dim]))
            if taken == there or (taken == 1 and not isinstance(size, int)):
                return True
    return False


def _is_read_by_strides(selection: fx.Node) -> bool:
    """Whether a node that reads by strides, such as `as_strided`, may read rows that are not
    selected."""
    own = set(_compat.storages_of(selection))
    return any(
        name_of(node).startswith(READS)
        and not own.isdisjoint(_compat.storages_of(*node.all_input_nodes))
        for node in selection.graph.nodes
        if node.op in ("call_function", "call_method")
    )


def _is_as_made(product: fx.Node) -> bool:
    """Whether a product has the dtype that its operands imply. Under autocast it has another
    dtype."""
    try:
        made = _compat.run_fake(product)
    except (RuntimeError, ValueError):
        return False
    return bool(made.dtype == product.meta["example_value"].dtype)


def _move(product: fx.Node, between: Sequence[fx.Node], selection: fx.Node) -> None:
    write, source = Writer(product), argument(product, 0, "input")
    front = between[-1] if between else product
    made = write.again(selection, {front: source})
    made = write.again(product, {source: made})
    for old in between:
        made = write.again(old, {old.all_input_nodes[0]: made})
    selection.replace_all_uses_with(_laid_out(write, made, selection, product))
    for gone in (selection, *reversed(between), product):
        product.graph.erase_node(gone)


def _laid_out(write: Writer, made: fx.Node, selection: fx.Node, product: fx.Node) -> fx.Node:
    """Returns the result, with the strides that the selection had."""
    now, old = (node.meta["example_value"] for node in (made, selection))
    if same_steps(now, old):
        return made
    sizes = [write.size(made, dim) for dim in range(now.dim())]
    strides = _strides(write, selection, product)
    room = write.call(torch.empty_strided, sizes, strides, dtype=now.dtype, device=now.device)
    return write.call("copy_", room, made)


def _strides(write: Writer, selection: fx.Node, product: fx.Node) -> list[Any]:
    """Returns the strides that the selected rows have in a dense tensor of all rows."""
    source, held = argument(product, 0, "input"), product.meta["example_value"]
    strides: list[Any] = [1]
    for dim in reversed(range(1, held.dim())):
        size = held.shape[-1] if dim == held.dim() - 1 else write.size(source, dim)
        strides.insert(0, _product(write, strides[0], size))
    kept = _kept(selection, selection.all_input_nodes[0]) or []
    return [_product(write, strides[dim], by) for dim, by in kept]


def _product(write: Writer, one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if 1 in (one, other):
        return other if one == 1 else one
    return write.call(operator.mul, one, other)
