"""Reads the in-place writes that the compiler understands, and finds what each write stores and
where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tilewright.compiler.dataflow.spelling import argument, index_effect, name_of
from tilewright.patterns import effects
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import Effect

# Converts an argument of a node to what patterns see: a view, a number, None.
Operand = Callable[[Any], Any]


@dataclass(frozen=True)
class Write:
    """The write `memory[target][index...] = source`; see
    :class:`tilewright.patterns.dataflow.Store`.

    `note` says why the source, or the place that it is written to, is not known.
    """

    target: Effect
    index: Mapping[int, View] = field(default_factory=dict)
    source: View | None = None
    accumulate: bool = False
    note: str = ""
    along: int | None = None


def _source(operand: Operand, item: Any, shape: Sequence[Any]) -> View | None:
    """Returns the written tensor, broadcast to the shape of the written window. Returns None for a
    number."""
    view = operand(item)
    if not isinstance(view, View):
        return None
    return View(view.value, effects.expand(view.effect, shape))


def _index_dims_first(index: dict[int, View], rank: int) -> list[int]:
    """Returns a permutation that puts index dimensions first, which is PyTorch's order of an
    indexed window."""
    dims = sorted(index)
    width = max(len(view.effect.dims) for view in index.values())
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    at = dims[0] if adjacent else 0
    total = rank - len(dims) + width
    lead = list(range(at, at + width))
    return lead + [d for d in range(total) if d not in lead]


def _indexed(
    operand: Operand, effect: Effect, index: dict[int, View], item: Any, accumulate: bool
) -> Write:
    rank = len(effect.dims)
    if not index:
        return Write(effect, {}, _source(operand, item, effect.shape), accumulate)
    if any(view.value.dtype == torch.bool for view in index.values()):
        return Write(effect, index, None, accumulate, "a boolean mask selects the slots")
    order = _index_dims_first(index, rank)
    width = max(len(view.effect.dims) for view in index.values())
    lead = _broadcast([view.shape for view in index.values()])
    rest = [effect.shape[d] for d in range(rank) if d not in index]
    by_position = [None] * (width + len(rest))
    for position, size in zip(order, [*lead, *rest], strict=True):
        by_position[position] = size
    source = _source(operand, item, by_position)
    if source is not None:
        source = View(source.value, effects.permute(source.effect, order))
    return Write(effect, index, source, accumulate)


def _broadcast(shapes: list[tuple[Any, ...]]) -> list[Any]:
    width = max(len(s) for s in shapes)
    padded = [(1,) * (width - len(s)) + tuple(s) for s in shapes]
    return [next((n for n in column if n != 1), 1) for column in zip(*padded, strict=True)]


def _setitem(operand: Operand, node: fx.Node, effect: Effect) -> Write:
    narrowed, tensors = index_effect(effect, node.args[1])
    index = {dim: operand(t) for dim, t in tensors.items()}
    return _indexed(operand, narrowed, index, node.args[2], False)


def _index_put(operand: Operand, node: fx.Node, effect: Effect) -> Write:
    indices = argument(node, 1, "indices")
    index = {d: operand(t) for d, t in enumerate(indices) if t is not None}
    accumulate = bool(argument(node, 3, "accumulate", False))
    return _indexed(operand, effect, index, argument(node, 2, "values"), accumulate)


def _index_copy(operand: Operand, node: fx.Node, effect: Effect) -> Write:
    dim = argument(node, 1, "dim") % len(effect.dims)
    index = operand(argument(node, 2, "index"))
    source = operand(argument(node, 3, "source"))
    rest = [d for d in range(len(effect.dims)) if d != dim]
    ordered = View(source.value, effects.permute(source.effect, (dim, *rest)))
    if argument(node, 4, "alpha", 1) != 1:
        return Write(effect, {dim: index}, None, True, "adds a multiple")
    return Write(effect, {dim: index}, ordered, name_of(node) == "index_add_")


def _scatter(operand: Operand, node: fx.Node, effect: Effect) -> Write:
    """Reads `scatter_`. The call equals `index_copy_` if its index only repeats along the
    dimensions other than `dim`. If the index varies along one of these dimensions, each row of that
    dimension has its own slots."""
    dim = argument(node, 1, "dim") % len(effect.dims)
    index = operand(argument(node, 2, "index"))
    source = operand(argument(node, 3, "src"))
    accumulate = name_of(node) == "scatter_add_" or "reduce" in node.kwargs
    if not isinstance(source, View):
        return Write(effect, {dim: index}, None, accumulate, "scatters a number")
    others = [d for d in range(len(effect.dims)) if d != dim]
    own = [d for d in others if index.effect.dims[d] not in ((), _repeated(index.shape[d]))]
    fills = all(index.shape[d] == effect.shape[d] for d in others) and source.shape == index.shape
    if len(own) > 1 or not fills:
        return Write(effect, {dim: index}, None, accumulate, "it scatters element by element")
    lead, rest = [*own, dim], [d for d in others if d not in own]
    slots = Effect(tuple(index.effect.dims[d] for d in lead), index.effect.start)
    ordered = View(source.value, effects.permute(source.effect, (*lead, *rest)))
    along = own[0] if own else None
    return Write(effect, {dim: View(index.value, slots)}, ordered, accumulate, along=along)


def _repeated(length: Any) -> tuple[Any, ...]:
    return (effects.Atom(None, 0, length),)


def _copy(operand: Operand, node: fx.Node, effect: Effect) -> Write:
    return _indexed(operand, effect, {}, argument(node, 1, "src"), False)


def _fill(operand: Operand, node: fx.Node, effect: Effect) -> Write:
    return Write(effect, note="it fills the memory with a number")


WRITES: dict[str, Callable[[Operand, fx.Node, Effect], Write]] = {
    "setitem": _setitem,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "index_copy_": _index_copy,
    "index_add_": _index_copy,
    "scatter_": _scatter,
    "scatter_add_": _scatter,
    "copy_": _copy,
    "fill_": _fill,
    "zero_": _fill,
}
