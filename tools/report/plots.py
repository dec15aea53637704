"""Plots stored benchmark results as SVG. Each benchmark has an SVG file, and each model and layout
has a panel in the file.

Needs matplotlib (the extra `report`).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tilewright.tools.files import write_whole

#: For each column that may be the horizontal axis, the label of the axis. The first of these
#: columns whose values vary is used.
AXES = {"tokens": "tokens", "batch": "batch", "cache_mib": "cache, MiB", "layers": "layers"}
#: The columns with the times of variants, in the order of the legend.
TIMES = ("tilewright", "eager", "stock", "max_autotune", "grouped_mm", "gemm", "read", "bf16")
#: Text columns that do not divide the rows into panels.
WORDS = frozenset({"lowering", "reason"})
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 4.4, 3.0, 3


def draw_results(results: Path, names: Sequence[str], folder: Path) -> list[Path]:
    """Writes `folder/NAME.svg` for each named result that is stored and has times. Returns the
    paths."""
    drawn = []
    for path in (results / f"{name}.json" for name in names):
        if path.is_file() and (figure := figure_of(json.loads(path.read_text("utf-8")))):
            drawn.append(folder / f"{path.stem}.svg")
            write_whole(drawn[-1], svg(figure))
    return drawn


def figure_of(data: Mapping[str, Any]) -> Figure | None:
    """Returns the plot of one result file. Returns None if its rows have no times."""
    rows = data["rows"]
    lines = [name for name in TIMES if any(isinstance(row.get(name), (int, float)) for row in rows)]
    axis = next((name for name in AXES if len({row.get(name) for row in rows}) > 1), None)
    if not lines or axis is None:
        return None
    panels = _panels(rows)
    height = math.ceil(len(panels) / COLUMNS)
    width = min(len(panels), COLUMNS)
    figure = Figure(figsize=(PANEL_WIDTH * width, PANEL_HEIGHT * height), layout="constrained")
    for place, (title, members) in enumerate(panels.items(), 1):
        _draw_panel(figure.add_subplot(height, width, place), title, members, axis, lines)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncol=8)
    source = ", ".join(str(data[key]) for key in ("gpu", "torch", "triton", "date") if key in data)
    figure.suptitle(source, fontsize=9)
    return figure


def _panels(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Groups rows by the values of their text columns, such as model, layout and format. Each group
    is a panel."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        words = [v for k, v in row.items() if isinstance(v, str) and k not in WORDS]
        found.setdefault(", ".join(words), []).append(row)
    return found


def _draw_panel(
    axes: Axes, title: str, rows: Sequence[Mapping[str, Any]], axis: str, lines: Sequence[str]
) -> None:
    for number, name in enumerate(lines):
        points = sorted((row[axis], row[name]) for row in rows if row.get(name) is not None)
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, color=f"C{number}", label=name)
    axes.set(xscale="log", yscale="log", xlabel=AXES[axis], ylabel="µs", title=title)
    axes.set_xscale("log", base=2)
    axes.grid(True, alpha=0.3)


def svg(figure: Figure) -> str:
    """Returns a figure as the text of an SVG file. The text is the same in each run."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
