"""Names the operation of a node in ATen's terms: its name, its arguments and its keywords."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler._compat.autocast import autocast_at, autocast_at_devices
from tilewright.compiler.dataflow import spelling
from tilewright.compiler.dataflow.access import has_symbols, remembered
from tilewright.compiler.dataflow.aten_names import Hole, aten_call, fill
from tilewright.compiler.dataflow.joins import piece_of_rank
from tilewright.compiler.dataflow.spelling import argument, index_effect, shape_of, with_rows
from tilewright.patterns.arithmetic.constants import one_number
from tilewright.patterns.dataflow import View
from tilewright.patterns.effects import InexpressibleError
from tilewright.patterns.recognise.gemm import is_weight

T = TypeVar("T")
_ASKED: dict[Any, Any] = {}

#: The name, arguments and keywords of an operation, as patterns see them.
Operation = tuple[str, tuple[Any, ...], dict[str, Any]]


class Operations:
    """Reads the operations of one graph.

    operand: a function that converts an argument of a node to what patterns see.
    unknown: a list of the nodes that are in no table and are not a single ATen operation.
    """

    def __init__(self, operand: Callable[[Any], Any], unknown: list[fx.Node]) -> None:
        self.operand = operand
        self.unknown = unknown
        self._asked: dict[Any, Any] = {}

    def of(self, node: fx.Node, name: str, result: torch.Tensor) -> Operation:
        """Returns the operation of a node that computes `result`. `name` is the name of the called
        function."""
        if name in spelling.CASTS or (name == "view" and argument(node, 1, "dtype") is not None):
            op = "bitcast" if name == "view" else "cast"
            return op, (self.operand(node.args[0]),), self.keywords(node)
        rule = _RULES.get(name)
        found = None if rule is None else rule(self, node, result)
        if found is None and name in spelling.PLAIN:
            found = f"aten.{name}", self.arguments(node), self.keywords(node)
        op, args, kwargs = found or self._ask(node, name)
        return op, _with_numbers(op, args, result.dtype), kwargs

    def arguments(self, node: fx.Node) -> tuple[Any, ...]:
        """Returns a node's arguments. If `input` and `other` are given as keywords, this function
        moves them to the arguments."""
        named = [node.kwargs[name] for name in _leading(node)]
        return tuple(self.operand(a) for a in (*node.args, *named))

    def keywords(self, node: fx.Node) -> dict[str, Any]:
        """Returns the keywords that :meth:`arguments` does not move."""
        moved = _leading(node)
        return {k: self.operand(a) for k, a in node.kwargs.items() if k not in moved}

    # --- rules ---

    def _linear(self, node: fx.Node, _: torch.Tensor) -> Operation:
        names = ("input", "weight", "bias")
        given = (self.operand(argument(node, at, name)) for at, name in enumerate(names))
        return "aten.linear", tuple(given), {}

    def _product(self, node: fx.Node, _: torch.Tensor) -> Operation | None:
        """Returns the linear (x, weight [N, K], bias or None) that equals a product with a
        two-dimensional weight. Returns None for other products."""
        added = spelling.name_of(node) == "addmm"
        first, keyword = (1, "mat1") if added else (0, "input")
        if added and (node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1):
            return None
        x = self.operand(argument(node, first, keyword))
        weight = self.operand(argument(node, first + 1, "mat2"))
        if not isinstance(weight, View):
            weight = self.operand(argument(node, first + 1, "other"))
        if not isinstance(weight, View) or not isinstance(x, View):
            return None
        if len(weight.effect.dims) != 2 or weight.value.projected:
            return None
        if not added and is_weight(x) and not is_weight(weight):
            return None
        bias = self.operand(argument(node, 0, "input")) if added else None
        return "aten.linear", (x, weight.permute(1, 0), bias), {}

    def _stack(self, node: fx.Node, _: torch.Tensor) -> Operation:
        tensors = [self.operand(t) for t in argument(node, 0, "tensors")]
        dim = argument(node, 1, "dim", 0) % (len(tensors[0].effect.dims) + 1)
        return "aten.cat", (tuple(t.unsqueeze(dim) for t in tensors), dim), {}

    def _cat(self, node: fx.Node, result: torch.Tensor) -> Operation:
        dim, shape = argument(node, 1, "dim", 0) % len(result.shape), shape_of(result)
        tensors = map(self.operand, argument(node, 0, "tensors"))
        return "aten.cat", (tuple(piece_of_rank(t, dim, shape) for t in tensors), dim), {}

    def _hstack(self, node: fx.Node, result: torch.Tensor) -> Operation:
        tensors, shape = argument(node, 0, "tensors"), shape_of(result)
        # torch.hstack looks only at the first tensor. That tensor may be of rank one and empty
        # although other tensors are not.
        dim = int(tensors[0].meta["example_value"].dim() > 1)
        pieces = tuple(piece_of_rank(self.operand(t), dim, shape) for t in tensors)
        return "aten.cat", (pieces, dim), {}

    def _embedding(self, node: fx.Node, _: torch.Tensor) -> Operation | None:
        if node.target is not torch.nn.functional.embedding:
            return None
        ids, table = argument(node, 0, "input"), argument(node, 1, "weight")
        return "aten.embedding", (self.operand(table), self.operand(ids)), {}

    def _one_hot(self, node: fx.Node, _: torch.Tensor) -> Operation | None:
        if node.all_input_nodes[0].meta["example_value"].dtype == torch.int64:
            return None
        # Eager raises an error for other integer dtypes, and fake tensors do not. The call
        # therefore stays, so that it raises the error.
        return "opaque:one_hot", self.arguments(node), self.keywords(node)

    def _getitem(self, node: fx.Node, _: torch.Tensor) -> Operation:
        return *self._gather(*node.args), self.keywords(node)

    def _gather(self, of: Any, given: Any) -> tuple[str, tuple[Any, ...]]:
        base = self.operand(of)
        try:
            effect, tensors = index_effect(base.effect, with_rows(given) or given)
        except InexpressibleError:
            return "opaque:getitem", (base,)
        indices = tuple((dim, self.operand(t)) for dim, t in tensors.items())
        return "aten.index", (View(base.value, effect), indices)

    # --- what is in no table ---

    def _ask(self, node: fx.Node, name: str) -> Operation:
        """Returns the operation of a node that is in no table. The function finds the operation by
        tracing the ATen calls that the node makes."""
        if not meets_subclasses(node):
            call, sources = self.alone(node, aten_call)
            if call is None and has_symbols(node):
                call, sources = self.alone(node, aten_call, symbols=True)
            if call is not None:
                operands = fill((call.args, call.kwargs), sources)
                if call.name == "aten.index":  # its list of indices has None for a whole dimension
                    of, places = operands[0]
                    every = tuple(slice(None) if i is None else i for i in places)
                    return *self._gather(of, every), {}
                return call.name, self.operand(operands[0]), self.operand(operands[1])
        self.unknown.append(node)
        return f"opaque:{name}", self.arguments(node), self.keywords(node)

    def alone(
        self, node: fx.Node, trace: Callable[..., T], symbols: bool = False
    ) -> tuple[T | None, list[fx.Node]]:
        """Traces a node by itself on its fake tensors. Returns two values: the answer of `trace`,
        or None if the node cannot be traced; and the nodes of the inputs.

        With `symbols`, symbolic sizes become inputs of the trace, too. The answer of `trace` may
        then contain them.
        """
        sources: list[fx.Node] = []
        kinds = (torch.Tensor, torch.SymInt) if symbols else torch.Tensor

        def leaf(item: fx.Node) -> Any:
            held = item.meta.get("example_value")
            if isinstance(held, kinds):
                sources.append(item)
                return Hole(len(sources) - 1)
            return held

        args = fx.node.map_arg(node.args, leaf)
        kwargs = fx.node.map_arg(node.kwargs, leaf)
        inputs = [source.meta["example_value"] for source in sources]
        tensors = [held for held in inputs if isinstance(held, torch.Tensor)]
        described = tuple((t.dtype, tuple(t.shape), str(t.device)) for t in tensors)
        autocast = autocast_at_devices(node, {t.device.type for t in tensors})
        key = (trace, node.target, repr(args), repr(kwargs), repr(described), autocast)

        def ask() -> T | None:
            # A node that cannot be traced is opaque.
            with contextlib.suppress(Exception), autocast_at(node):
                return trace(node, args, kwargs, inputs)
            return None

        if not isinstance(node.target, str) and not spelling.is_torch_function(node.target):
            return ask(), sources
        # A symbol may stand for another size in another graph.
        known = self._asked if has_symbols(node) else _ASKED
        return remembered(known, key, ask), sources


_RULES: dict[str, Callable[[Operations, fx.Node, torch.Tensor], Operation | None]] = {
    "linear": Operations._linear,
    **dict.fromkeys(("addmm", "mm", "matmul"), Operations._product),
    "stack": Operations._stack,
    "cat": Operations._cat,
    "hstack": Operations._hstack,
    "embedding": Operations._embedding,
    "one_hot": Operations._one_hot,
    "getitem": Operations._getitem,
}


_ARITHMETIC = frozenset(f"aten.{name}" for name in ("add", "sub", "mul", "div", "pow"))


def _with_numbers(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns the arguments of arithmetic, with numbers in place of constant tensors that have no
    dimensions.

    In arithmetic with a floating-point tensor of the result's dtype, a number and a constant tensor
    without dimensions give the same result, because neither decides the dtype.
    """
    if op not in _ARITHMETIC or not dtype.is_floating_point:
        return args
    views = [a for a in args if isinstance(a, View)]
    if len(views) != 2 or not any(v.value.dtype == dtype and v.shape for v in views):
        return args
    return tuple(_number_or_view(a) if isinstance(a, View) else a for a in args)


def _number_or_view(view: View) -> Any:
    whole = view.value.shape == () and not view.value.dtype.is_complex
    number = one_number(view) if whole and view.value.dtype != torch.bool else None
    return view if number is None else number


def meets_subclasses(node: fx.Node) -> bool:
    """Whether a tensor subclass (a DTensor, a quantised weight) decides what a node does."""
    return any(map(_compat.is_subclass, _compat.tensors_of(node, *node.all_input_nodes)))


def _leading(node: fx.Node) -> list[str]:
    """Returns which of `input` and `other` are given as keywords instead of positional
    arguments."""
    if not node.kwargs or len(node.args) > 1 or (node.args and "input" in node.kwargs):
        return []
    names = ("other",) if node.args else ("input", "other")
    return list(takewhile(node.kwargs.__contains__, names))
