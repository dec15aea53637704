"""Draws what each pattern family replaces: docs/pictures/PATTERN-before.svg and -after.svg.

    python docs/pattern_pictures.py [PATTERN ...]

The models are the examples of docs/patterns.md. The block of Python after
`<!-- example PATTERN -->` assigns a module and its arguments to `example`; the block
`<!-- example names -->` is run before it. A test fails if a picture differs from what the code
draws.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from graph_drawing import draw
from torch import fx

from tilewright.compiler import GraphReport, lower
from tilewright.tools.models.sharding import one_rank_of

PAGE = Path(__file__).with_name("patterns.md")
PICTURES = Path(__file__).parent / "pictures"
STYLE = (
    "<style>.node rect{fill:#fff;stroke:#9aa6b2}.node text{font:12px ui-monospace,monospace;"
    "text-anchor:middle;fill:#1c2530}polyline{fill:none;stroke:#9aa6b2}"
    ".node.fused rect{fill:#d8f0e2;stroke:#0b7a44}.node.op rect{fill:#0b7a44;stroke:#0b7a44}"
    ".node.op text{fill:#fff;font-weight:600}</style>"
)
_BLOCK = re.compile(r"<!-- example (\w+) -->\n```python\n(.*?)```", re.DOTALL)


def examples() -> dict[str, str]:
    """Returns the code of each pattern's example, in the order of the page. `names` is the code
    that they share."""
    return dict(_BLOCK.findall(PAGE.read_text("utf-8")))


def pictures(pattern: str, blocks: Mapping[str, str]) -> dict[str, str]:
    """Returns the SVG of each file, as the first of two ranks sees the graph. Raises ValueError if
    the example does not match."""
    torch._dynamo.reset()
    with one_rank_of(2):
        with torch.device("meta"):
            model, *args = _run(pattern, blocks)
        model.to(torch.bfloat16).requires_grad_(False)
        lowered = lower(model, tuple(args), {})
    for graph in lowered.graphs:
        if any(site.pattern == pattern for site in graph.matches):
            return {
                f"{pattern}-before.svg": _picture(graph, graph.before, f"{pattern}: before"),
                f"{pattern}-after.svg": _picture(graph, graph.after, f"{pattern}: after"),
            }
    raise ValueError(f"the example of {pattern} does not match it")


def _run(pattern: str, blocks: Mapping[str, str]) -> Any:
    """Returns the module and arguments of the example. Each block is compiled under a different
    file name, so that a picture names only lines of its example."""
    names: dict[str, Any] = {"__name__": "patterns"}
    for block in ("names", pattern):
        file = f"patterns.md, {block}"
        linecache.cache[file] = (len(blocks[block]), None, blocks[block].splitlines(True), file)
        exec(compile(blocks[block], file, "exec"), names)
    return names["example"]


def _picture(graph: GraphReport, module: fx.GraphModule, title: str) -> str:
    kept = {node.name for node in graph.after.graph.nodes}

    def css_class(node: fx.Node) -> str:
        return "op" if "tilewright" in node.meta else "" if node.name in kept else "fused"

    drawing = draw(list(module.graph.nodes), title, css_class)
    head, _, rest = drawing.partition(">")
    return f"{head}>{STYLE}{rest}\n"


def main(patterns: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    blocks = examples()
    for pattern in patterns or [name for name in blocks if name != "names"]:
        for name, svg in pictures(pattern, blocks).items():
            (PICTURES / name).write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
