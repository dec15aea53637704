"""Draws what each pattern family replaces: docs/pictures/PATTERN-before.svg and -after.svg.

    python docs/pattern_pictures.py

A test says when a picture is no longer what the code makes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pattern_examples import EXAMPLES
from torch import fx

from tilewright.compiler import GraphReport, lower
from tilewright.tools.graph_drawing import draw
from tilewright.tools.sharding import one_rank_of

PICTURES = Path(__file__).parent / "pictures"
STYLE = (
    "<style>.node rect{fill:#fff;stroke:#9aa6b2}.node text{font:12px ui-monospace,monospace;"
    "text-anchor:middle;fill:#1c2530}polyline{fill:none;stroke:#9aa6b2}"
    ".node.fused rect{fill:#d8f0e2;stroke:#0b7a44}.node.op rect{fill:#0b7a44;stroke:#0b7a44}"
    ".node.op text{fill:#fff;font-weight:600}</style>"
)
Example = Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def pictures(pattern: str, example: Example) -> dict[str, str]:
    """File name to SVG, as the first of two ranks sees it. Raises ValueError where the example does
    not match."""
    torch._dynamo.reset()
    with one_rank_of(2):
        model, args, kwargs = example()
        lowered = lower(model, args, kwargs)
    for graph in lowered.graphs:
        if any(site.pattern == pattern for site in graph.matches):
            return {
                f"{pattern}-before.svg": _picture(graph, graph.before, f"{pattern}: before"),
                f"{pattern}-after.svg": _picture(graph, graph.after, f"{pattern}: after"),
            }
    raise ValueError(f"the example of {pattern} does not match it")


def _picture(graph: GraphReport, module: fx.GraphModule, title: str) -> str:
    kept = {node.name for node in graph.after.graph.nodes}

    def css_class(node: fx.Node) -> str:
        return "op" if "tilewright" in node.meta else "" if node.name in kept else "fused"

    drawing = draw(list(module.graph.nodes), title, css_class)
    head, _, rest = drawing.partition(">")
    return f"{head}>{STYLE}{rest}\n"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for pattern, example in EXAMPLES.items():
        for name, svg in pictures(pattern, example).items():
            (PICTURES / name).write_text(svg)


if __name__ == "__main__":
    main()
