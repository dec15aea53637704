"""Tests that modules import each other without cycles, and use only public names of torch.

tests/tools/test_layers.py checks that imports between layers run downwards.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("codegen", "ops", "patterns", "compiler", "tools")
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("tilewright", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports(tree: ast.Module) -> Iterator[str]:
    """Yields every name that a file imports, also in functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph_of(sources: dict[str, str]) -> nx.DiGraph:
    """Returns a graph with an edge from each module to each module of this package that it
    imports."""
    graph = nx.DiGraph()
    graph.add_nodes_from(sources)
    for module, source in sources.items():
        for name in imports(ast.parse(source)):
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and target != module:
                graph.add_edge(module, target)
    return graph


def read(path: Path) -> str:
    return path.read_text("utf-8")


def test_no_module_imports_itself_round_a_corner():
    graph = graph_of({module_of(path): read(path) for path in FILES})
    assert graph.number_of_edges() > len(FILES)
    assert list(nx.simple_cycles(graph)) == []


def test_a_cycle_would_be_seen():
    sources = {
        "tilewright.a": "from tilewright.b import one",
        "tilewright.b": "def f():\n    from tilewright import c",
        "tilewright.c": "import tilewright.a",
        "tilewright.d": "import tilewright.a",
    }
    (cycle,) = nx.simple_cycles(graph_of(sources))
    assert sorted(cycle) == ["tilewright.a", "tilewright.b", "tilewright.c"]


def private_imports(source: str) -> list[str]:
    """Returns the names that a file imports from torch's private modules."""
    names = [n for n in imports(ast.parse(source)) if n.split(".")[0] == "torch"]
    return [n for n in names if any(part.startswith("_") for part in n.split(".")[1:])]


@pytest.mark.parametrize("layer", ["patterns", "compiler"])
def test_private_parts_of_torch_are_imported_in_one_place(layer):
    found = {
        module_of(path): names
        for path in FILES
        if path.relative_to(ROOT).parts[0] == layer and (names := private_imports(read(path)))
    }
    room = "tilewright.compiler._compat"
    assert [name for name in found if name != room and not name.startswith(f"{room}.")] == []
    assert bool(found) == (layer == "compiler")
