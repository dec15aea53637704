"""Turns views, sizes and small expressions back into graph nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import sympy
import torch
from torch import fx

from tilewright.compiler import _compat
from tilewright.compiler.dataflow.access import call_key
from tilewright.compiler.dataflow.spelling import shape_of
from tilewright.compiler.rewrite.writer import describe
from tilewright.ops.contract import get_op, is_ours
from tilewright.patterns import effects
from tilewright.patterns.dataflow import Computed, Dataflow, Value, View, source_of
from tilewright.patterns.effects import Atom, Effect, InexpressibleError, Size
from tilewright.patterns.language import Parts

_FUNCTIONS: dict[str, Callable[..., Any] | str] = {
    "add": operator.add,
    "getitem": operator.getitem,
    "mul": operator.mul,
    "arange": torch.arange,
    "full": torch.full,
    "reshape": "reshape",
    "to": "to",
    "bitcast": "view",
    "reciprocal": torch.reciprocal,
    "gather": torch.gather,
    "contiguous": "contiguous",
    "narrow": torch.narrow,
    "real": torch.real,
    "imag": torch.imag,
    "neg": operator.neg,
    "cat": torch.cat,
    "remainder": torch.remainder,
    "ge": operator.ge,
    "lt": operator.lt,
    "bitwise_and": operator.and_,
    "invert": operator.invert,
    "where": torch.where,
    "searchsorted": torch.searchsorted,
    "argsort": torch.argsort,
    "index_select": torch.index_select,
    "pad": torch.nn.functional.pad,
}

_SIZE_FUNCTIONS: dict[type, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.Pow: operator.pow,
    _compat.FloorDiv: operator.floordiv,
    _compat.CleanDiv: operator.floordiv,
}


class Materialiser:
    """Adds nodes at the graph's insertion point, or finds equal nodes that it added before.

    The fused op is inserted before the node `serving`. A new node gets the source line and the
    module of that node, and `meta["example_value"]`.
    """

    def __init__(self, graph: fx.Graph, flow: Dataflow) -> None:
        self.graph = graph
        self.flow = flow
        self.serving: fx.Node | None = None
        self._made: dict[Any, fx.Node] = {}
        # The results of our ops, by `call_key`. Most layers of a model make the same call.
        self._results: dict[Any, Any] = {}
        # The layouts of the views that reshapes return, by the arguments of the reshape and the
        # layout of its input.
        self._reshapes: dict[Any, tuple[Any, ...]] = {}
        # Maps each node that an earlier rewrite replaced to the node that replaced it. An absorbed
        # write is mapped to the node of the memory that it wrote.
        self.replaced: dict[fx.Node, fx.Node] = {}
        # Values of which an earlier rewrite left only parts. Each has the op's output that holds
        # these parts.
        self.parts: dict[Value, tuple[fx.Node, Parts]] = {}

    def argument(self, item: Any) -> Any:
        """Returns an argument of a match as a value that the `args` of a node can hold."""
        if isinstance(item, View):
            return self.view(item)
        if isinstance(item, Computed):
            return self._computed(item)
        if isinstance(item, (list, tuple)):
            return [self.argument(i) for i in item]
        if isinstance(item, sympy.Expr):
            return self.size(item)
        return item

    def view(self, view: View) -> fx.Node:
        """Returns a node whose tensor is `view`. If the graph already has such a node, returns that
        node."""
        known = self.flow.nodes_by_view.get(view)
        if known is not None and not known._erased and self._precedes(known):
            return known
        if view.value in self.parts:
            output, parts = self.parts[view.value]
            shape = shape_of(output.meta["example_value"])
            return self.select(output, shape, parts.restate(view.effect))
        home = self.flow.home(view.value)
        while home in self.replaced:
            home = self.replaced[home]
        return self.select(home, view.value.shape, view.effect)

    def _precedes(self, node: fx.Node) -> bool:
        assert self.serving is not None
        return node < self.serving

    def select(self, base: fx.Node, shape: Sequence[Size], effect: Effect) -> fx.Node:
        """Returns a node that selects `effect` of `base`, a tensor of `shape`."""
        if effects.is_identity(effect, shape):
            return base
        nothing = 0 in shape and 0 in effect.shape
        if nothing or _is_reshape(effect, shape):
            return self.call("reshape", base, self.sizes(effect.shape))
        node, atoms = self._cut_axes(base, shape, effect)
        node = self._ordered(node, atoms, effect)
        if shape_of(node.meta["example_value"]) == effect.shape:
            return node
        return self.call("reshape", node, self.sizes(effect.shape))

    def _cut_axes(
        self, node: fx.Node, shape: Sequence[Size], effect: Effect
    ) -> tuple[fx.Node, list[Atom]]:
        """Cuts every axis of the base down to the atoms of `effect` on this axis. An atom is a run
        of indices with equal steps. Returns the node and the atoms, in the order of the
        dimensions."""
        order: list[Atom] = []
        dim = 0
        for axis, size in enumerate(shape):
            taken = sorted(
                (a for d in effect.dims for a in d if a.axis == axis),
                key=lambda a: -_magnitude(a.step),
            )
            node, dim = self._cut(node, dim, size, effect.start[axis], taken)
            order += taken
        return node, order

    def _cut(
        self, node: fx.Node, dim: int, size: Size, start: Size, atoms: list[Atom]
    ) -> tuple[fx.Node, int]:
        """Splits dimension `dim` of `node` into `atoms`, whose steps descend. Returns the node and
        the next dimension."""
        if not atoms:
            return self.call("select", node, dim, self.argument(start)), dim
        outer, *inner = atoms
        if not inner:
            node = self._narrow(node, dim, size, start, outer)
            return node, dim + 1
        block = outer.step
        skip = _place_in_block(start, size, outer, inner)
        if skip is None:
            reach = 1 + sum(a.step * (a.length - 1) for a in inner)
            span = (outer.length - 1) * block + reach
            node = self._narrow(node, dim, size, start, Atom(outer.axis, 1, span))
            node = self.call("unfold", node, dim, reach, block)
            node = self.call("movedim", node, -1, dim + 1)
            return self._cut(node, dim + 1, reach, 0, inner)
        whole = Atom(outer.axis, 1, outer.length * block)
        node = self._narrow(node, dim, size, start - skip, whole)
        node = self.call("unflatten", node, dim, self.sizes((outer.length, block)))
        return self._cut(node, dim + 1, block, skip, inner)

    def _narrow(self, node: fx.Node, dim: int, size: Size, start: Size, atom: Atom) -> fx.Node:
        if atom.step == 1:
            if start == 0 and atom.length == size:
                return node
            return self.call("narrow", node, dim, self.argument(start), self.argument(atom.length))
        stop = start + (atom.length - 1) * atom.step + 1
        item = slice(self.argument(start), self.argument(stop), atom.step)
        return self.call(operator.getitem, node, (slice(None),) * dim + (item,))

    def _ordered(self, node: fx.Node, atoms: list[Atom], effect: Effect) -> fx.Node:
        """Returns the node with its cut dimensions in the order of the output, and with the
        repeated dimensions added."""
        wanted = [a for d in effect.dims for a in d]
        position = {id(a): i for i, a in enumerate(atoms)}
        order = [position[id(a)] for a in wanted if a.axis is not None]
        if order != list(range(len(order))):
            node = self.call("permute", node, order)
        if all(a.axis is not None for a in wanted):
            return node
        for dim, atom in enumerate(wanted):
            if atom.axis is None:
                node = self.call("unsqueeze", node, dim)
        return self.call("expand", node, self.sizes([a.length for a in wanted]))

    # --- sizes ---

    def sizes(self, sizes: Sequence[Size]) -> list[Any]:
        """Returns sizes as arguments of a node. They are ints, or nodes for symbolic sizes."""
        return [self.argument(n) for n in sizes]

    def size(self, size: sympy.Expr) -> Any:
        """Returns an int or a node for a symbolic size."""
        if size.is_Integer:
            return int(size)
        if size.is_Symbol:
            return self._symbol(size)
        function = _SIZE_FUNCTIONS.get(type(size))
        if function is None:
            raise InexpressibleError(f"no node computes the size {size}")
        total, *rest = [self.size(part) for part in size.args]
        for part in rest:
            total = self.call(function, total, part)
        return total

    def _symbol(self, symbol: sympy.Expr) -> fx.Node:
        for node, dim in self._symbols.get(symbol, ()):
            if not node._erased and self._precedes(node):
                return node if dim is None else self.call("size", node, dim)
        raise InexpressibleError(self._unknown(symbol))

    def _unknown(self, symbol: sympy.Expr) -> str:
        """Returns why no node in front of the fused op gives a size."""
        for node, _ in self._symbols.get(symbol, ()):
            place = source_of(node)
            where = f" ({place})" if place else ""
            return (
                f"the size {symbol} is computed from data{where}, but only after the place of "
                "the op"
            )
        return f"no input has the size {symbol}: it depends on data"

    @cached_property
    def _symbols(self) -> dict[sympy.Expr, list[tuple[fx.Node, int | None]]]:
        """Returns, for each symbol, the nodes that give it, in program order.

        Each node comes with the dimension that has the symbol as its size, or with None if the node
        is the number itself. The nodes are inputs and, if data decide a size, the node that
        computes it (`item`, `nonzero`).
        """
        found: dict[sympy.Expr, list[tuple[fx.Node, int | None]]] = {}
        for node in self.graph.nodes:
            held = node.meta.get("example_value")
            sizes: Sequence[Any] = held.shape if isinstance(held, torch.Tensor) else ()
            for dim, size in ((None, held), *enumerate(sizes)):
                for symbol in _compat.size_symbols(size):
                    found.setdefault(symbol, []).append((node, dim))
        for symbol, holders in found.items():
            # Numbers come before tensors that have the symbol as a size. Inputs are never erased.
            holders.sort(key=lambda holder: holder[1] is not None)
            inputs = [holder for holder in holders if holder[0].op == "placeholder"]
            found[symbol] = inputs[:1] or holders
        return found

    # --- nodes ---

    def _computed(self, item: Computed) -> fx.Node:
        operands = [self.argument(o) for o in item.operands]
        options = {name: self.argument(option) for name, option in item.options}
        function = item.function
        if isinstance(function, str):
            function = _FUNCTIONS.get(function) or get_op(function).torch_op
        return self.call(function, *operands, **options)

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """Returns a new node, or an equal node that was added earlier, stands before the insertion
        point, and would give the same result there."""
        key = (target, repr(args), repr(kwargs))
        known = self._made.get(key)
        if known is not None and not known._erased and self._precedes(known) and self._holds(known):
            return known
        if isinstance(target, str):
            # The name is passed because `call_method` would compute it again for each node.
            node = self.graph.create_node("call_method", target, args, kwargs, target)
        else:
            node = self.graph.call_function(target, args, kwargs)
        assert self.serving is not None
        describe(node, self.serving, self._result(node))
        self._made[key] = node
        return node

    def _result(self, node: fx.Node) -> Any:
        """Returns the fake result of a node. For equal calls, the fake implementation runs only
        once.

        For later calls of one of our ops, returns a copy of the first result in new memory. This is
        correct because the fake implementation reads nothing but the parts of `call_key`. For a
        reshape of equal layout, the result is an equal view.
        """
        called = node.target
        if called == "reshape":
            return self._reshaped(node)
        if not (isinstance(called, torch._ops.OpOverload) and is_ours(called)):
            return _compat.run_fake(node)
        key = call_key(node)
        if key in self._results:
            return _compat.made_again(self._results[key])
        made = _compat.run_fake(node)
        tensors = _compat.tensors_in(made)
        own = set(map(self.flow.storage_of, tensors))
        apart = len(own) == len(tensors) and own.isdisjoint(self._storages(*node.all_input_nodes))
        if apart and not any(map(_compat.is_symbolic, tensors)):
            self._results[key] = made
        return made

    def _reshaped(self, node: fx.Node) -> torch.Tensor:
        source = node.all_input_nodes[0].meta["example_value"]
        if not _compat.is_plain_fake(source):
            return cast(torch.Tensor, _compat.run_fake(node))
        key = (repr((node.args[1:], node.kwargs)), *_compat.layout_of(source))
        if key in self._reshapes:
            return _compat.strided_view(source, *self._reshapes[key])
        made = cast(torch.Tensor, _compat.run_fake(node))
        is_view = _compat.storage_keys(made) == _compat.storage_keys(source)
        if is_view and _compat.is_plain_fake(made):
            self._reshapes[key] = _compat.layout_of(made)
        return made

    def _holds(self, made: fx.Node) -> bool:
        """Whether a node that was added earlier has the result that an equal call would have here.

        The node must write nothing. It must be a view, or it must read only memory that nothing has
        written since.
        """
        target = made.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            return False
        storages = self._storages(*made.all_input_nodes)
        if not storages.isdisjoint(self._storages(made)):
            return True
        assert self.serving is not None
        here = self.flow.positions[self.serving]
        return not any(self.flow.writes_between(storage, -1, here) for storage in storages)

    def _storages(self, *nodes: fx.Node) -> set[int]:
        return set(map(self.flow.storage_of, _compat.tensors_of(*nodes)))


def _is_reshape(effect: Effect, shape: Sequence[Size]) -> bool:
    """Whether `effect` selects a whole tensor of `shape`, in row-major order."""
    try:
        return effects.reshape(effects.identity(shape), effect.shape) == effect
    except InexpressibleError:
        return False


def _place_in_block(start: Size, size: Size, outer: Atom, inner: Sequence[Atom]) -> Size | None:
    """Returns the index at which the inner atoms begin in a block of `outer.step` indices.

    Returns None if the base does not divide into such blocks, because the last block is incomplete,
    or because the selection in one block reaches into the next block.
    """
    block = outer.step
    reach = 1 + sum(a.step * (a.length - 1) for a in inner)
    if not all(isinstance(n, int) for n in (start, size, block, reach, outer.length)):
        return start % block if isinstance(start, int) else 0
    least = max(0, start + outer.length * block - size)
    most = min(start, block - reach)
    usual = start % block
    if least > most:
        return None
    return usual if least <= usual <= most else least


def _magnitude(step: Any) -> float:
    # Sorts the atoms of one axis. A symbolic step counts as larger than any number, because it
    # spans at least one inner atom.
    return step if isinstance(step, int) else float("inf")
