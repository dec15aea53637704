"""Splits the graph of a model into its layers. Equal layers are listed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from tilewright.compiler import GraphReport
from tilewright.compiler.scopes import layer_of
from tilewright.patterns.dataflow import scope_of


@dataclass(frozen=True)
class Layer:
    """Layers with equal nodes. The first of them represents all.

    scope: the path of the first layer, such as "model.layers.0"; "" for nodes outside all layers.
    scopes: the paths of all these layers.
    """

    scope: str
    scopes: tuple[str, ...]
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]

    @property
    def title(self) -> str:
        return title_of(self.scopes)


def title_of(scopes: Sequence[str]) -> str:
    """Returns a title for layers that are alike, such as `model.layers.3 … 60 (58 layers)`."""
    if not scopes[0]:
        return "outside the layers"
    last = scopes[-1].rpartition(".")[2]
    more = f" … {last} ({len(scopes)} layers)" if len(scopes) > 1 else ""
    return scopes[0] + more


def layers(graph: GraphReport) -> list[Layer]:
    """Returns the distinct layers of a graph, in order. Layers are distinct if their nodes or their
    fused ops differ."""
    before, after = _by_layer(graph.before), _by_layer(graph.after)
    groups: dict[tuple[object, ...], list[str]] = {}
    for scope, nodes in before.items():
        alike = bool(scope), _signature(nodes), _signature(_fused(after.get(scope, ())))
        groups.setdefault(alike, []).append(scope)
    return [
        Layer(scopes[0], tuple(scopes), tuple(before[scopes[0]]), tuple(after.get(scopes[0], ())))
        for scopes in groups.values()
    ]


def _by_layer(module: fx.GraphModule) -> dict[str, list[fx.Node]]:
    found: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            found.setdefault(layer_of(scope_of(node)), []).append(node)
    return found


def _fused(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if "tilewright" in node.meta]


def _signature(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(str(node.target) for node in nodes)
