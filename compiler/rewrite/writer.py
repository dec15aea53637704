"""Adds nodes to a graph in front of one of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from tilewright.compiler import _compat


class Writer:
    """Adds nodes before one node of a graph, with the source line and the module of that node. Each
    new node has `marks` in its `meta`."""

    def __init__(self, before: fx.Node, *marks: str) -> None:
        self.graph, self.before, self.marks = before.graph, before, marks
        self.added: list[fx.Node] = []

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a call of a function, or of a method that is given by its name."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node(kind, target, args, kwargs)
        self.added.append(node)
        describe(node, self.before, _compat.run_fake(node))
        node.meta.update(dict.fromkeys(self.marks, True))
        return node

    def again(self, node: fx.Node, instead: Mapping[fx.Node, Any]) -> fx.Node:
        """Adds a copy of a node, with the inputs in `instead` replaced."""
        target: Any = node.target
        args, kwargs = with_inputs(node, instead)
        return self.call(target, *args, **kwargs)

    def size(self, node: fx.Node, dim: int) -> Any:
        """Returns a size of a node's tensor. It is a number, or a node if the size is symbolic."""
        size = node.meta["example_value"].shape[dim]
        return size if isinstance(size, int) else self.call("size", node, dim)

    def undo(self) -> None:
        """Erases all nodes that were added."""
        for node in reversed(self.added):
            self.graph.erase_node(node)
        self.added.clear()


def with_inputs(node: fx.Node, instead: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    """Returns the arguments and keyword arguments of a node, with the inputs in `instead`
    replaced."""
    return fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: instead.get(n, n))


def describe(node: fx.Node, serving: fx.Node, held: Any) -> None:
    """Sets the example value of a new node, and copies the source line and the module from
    `serving`, the node for which it was added."""
    kept = ("nn_module_stack", "stack_trace", "source_fn_stack")
    node.meta.update((name, serving.meta[name]) for name in kept if name in serving.meta)
    node.meta["example_value"] = held
