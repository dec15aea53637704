"""Draws docs/pictures/chart-*.svg from benchmarks/results/*.json.

    python docs/charts.py

A chart has panels, and a panel has groups of bars. Each group has a separate scale: its longest
bar has the full width. The number of a bar stands at its end. A test fails if a picture differs
from the results.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from measured_tables import END_TO_END, GENERATE, RESULTS, place

PICTURES = Path(__file__).resolve().parent / "pictures"

#: The variants that are drawn: for each class in STYLE, the name of the variant in the legend.
VARIANTS = {
    "eager": "eager",
    "stock": "torch.compile (Inductor)",
    "bf16": "tilewright, bfloat16 weights",
    "codes": "tilewright, weights as codes",
    "tilewright": "tilewright",
    "floor": "floor: weights and caches read once",
}
#: The colour of each bar has a contrast of at least 3 to 1 with a page, light or dark.
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.small { font-size: 11px; fill: #57606a }
.eager { fill: #8c959f } .stock, .bf16 { fill: #57606a }
.tilewright, .codes { fill: #0f8a7e } .floor { fill: #bf8700 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 }
.eager { fill: #6e7681 } .stock, .bf16 { fill: #b1bac4 }
.tilewright, .codes { fill: #2bb5a6 } .floor { fill: #d4a72c }
}"""
BAR, GAP, GROUP_GAP, NUMBER, LINE = 13, 2, 12, 62, 18


@dataclass(frozen=True)
class Group:
    """Bars on one scale. `values` has the value of each variant, in the order of drawing."""

    label: str
    values: dict[str, float]


@dataclass(frozen=True)
class Panel:
    title: str
    groups: list[Group]


def svg(title: str, panels: list[Panel], note: str, width: int = 840) -> str:
    """Returns a chart of panels side by side, with `note` below it, as SVG."""
    each = width // len(panels)
    variants = list(dict.fromkeys(v for p in panels for g in p.groups for v in g.values))
    tops, bottom = 3 * LINE, 0
    parts: list[str] = [f'<text class="title" x="0" y="14">{escape(title)}</text>']
    parts += _legend(variants)
    for number, panel in enumerate(panels):
        drawn, end = _panel(panel, number * each, tops, each)
        parts += drawn
        bottom = max(bottom, end)
    parts.append(f'<text class="small" x="0" y="{bottom + LINE}">{escape(note)}</text>')
    height = bottom + LINE + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    head += f' aria-label="{escape(title)}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def _legend(variants: list[str]) -> list[str]:
    parts, x = [], 0
    for variant in variants:
        name = VARIANTS[variant]
        parts.append(f'<rect class="{variant}" x="{x}" y="24" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="34">{escape(name)}</text>')
        x += 45 + 7 * len(name)
    return parts


def _panel(panel: Panel, x: int, y: int, width: int) -> tuple[list[str], int]:
    parts = [f'<text class="title" x="{x}" y="{y + 12}">{escape(panel.title)}</text>']
    y += LINE + 4
    label = 12 + max(7 * len(group.label) for group in panel.groups)
    room = width - label - NUMBER
    for group in panel.groups:
        longest = max(group.values.values())
        middle = y + (len(group.values) * (BAR + GAP) + BAR) // 2 - 2
        parts.append(f'<text class="small" x="{x}" y="{middle}">{escape(group.label)}</text>')
        for variant, value in group.values.items():
            length = max(1, round(room * value / longest))
            at = f'x="{x + label}" y="{y}" width="{length}" height="{BAR}"'
            parts.append(f'<rect class="{variant}" {at}/>')
            end = f'x="{x + label + length + 4}" y="{y + BAR - 2}"'
            parts.append(f'<text class="small" {end}>{_number(value)}</text>')
            y += BAR + GAP
        y += GROUP_GAP
    return parts, y


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tokens_per_second() -> str:
    """Draws tokens per second of `generate()`, by model and batch."""
    found = [_kept(name) for name in GENERATE]
    panels = [
        Panel(
            data["rows"][0]["model"],
            [
                Group(
                    f"batch {row['batch']}",
                    {n: row[f"{n}_tokens"] for n in ("eager", "stock", "tilewright")},
                )
                for row in data["rows"]
            ],
        )
        for data in found
    ]
    first = found[0]["rows"][0]
    title = f"Tokens per second of generate(): {first['prompt']} prompt tokens, "
    title += f"{first['new']} new ones"
    return svg(title, panels, f"{_places(found)}. More is better. {_OWN_SCALE}")


_OWN_SCALE = "Each group of bars has its own scale."


def decode_steps() -> str:
    """Draws the time of one decode step of a captured graph with one sequence, by model."""
    found = [_kept(name) for name in END_TO_END]
    groups = []
    for data in found:
        row = next(r for r in data["rows"] if (r["batch"], r["tokens"]) == (1, 1))
        label = row["model"].replace("DeepSeek-", "DS-")
        groups.append(Group(label, {n: row[n] for n in _STEP}))
    half = (len(groups) + 1) // 2
    panels = [Panel("µs per step", groups[:half]), Panel("µs per step", groups[half:])]
    title = "One decode step, one sequence, CUDA graphs, 8 or 2 layers of each model"
    return svg(title, panels, f"{_places(found)}. Less is better. {_OWN_SCALE}")


_STEP = ("eager", "stock", "tilewright", "floor")


def batches() -> str:
    """Draws the time of one decode step by batch."""
    found = [_kept(name) for name in END_TO_END[:3]]
    panels = [
        Panel(
            data["rows"][0]["model"],
            [
                Group(f"batch {row['batch']}", {n: row[n] for n in _STEP})
                for row in data["rows"]
                if row["tokens"] == 1 and row["kind"] == "mask"
            ],
        )
        for data in found
    ]
    title = "One decode step by batch, µs, 8 layers"
    return svg(title, panels, f"{_places(found)}. Less is better. {_OWN_SCALE}")


def cache_sizes() -> str:
    """Draws the time of projections and cache write of a layer, by the size of its cache."""
    data = _kept("cache_size.json")
    groups = [
        Group(f"{row['cache_mib']:,} MiB", {n: row[n] for n in ("eager", "stock", "tilewright")})
        for row in data["rows"]
    ]
    title = "Projections, rotation and cache write of one layer, 64 tokens, by the cache's size, µs"
    note = f"{place(data)}. Less is better. {_OWN_SCALE}"
    return svg(title, [Panel("size of the K cache, and of the V cache", groups)], note)


def quantised_steps() -> str:
    """Draws the time of a decode step with weights in each format, next to bfloat16 weights."""
    data = _kept("quantised_step.json")
    by_format: dict[str, dict[int, Group]] = {}
    for row in data["rows"]:
        batch, _, tokens = row["case"].partition("x")
        if row["model"] == "llama3-8b" and tokens == "1":
            values = {"bf16": row["bf16"], "codes": row["tilewright"]}
            group = Group(f"batch {batch}", values)
            by_format.setdefault(row["format"], {})[int(batch)] = group
    whole = {name: groups for name, groups in by_format.items() if list(groups) == [1, 16, 64]}
    panels = [Panel(name, list(groups.values())) for name, groups in whole.items()]
    title = "One decode step of Llama-3-8B (4 layers) with quantised weights, µs"
    return svg(title, panels, f"{place(data)}. Less is better. {_OWN_SCALE}")


def _kept(name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return kept


def _places(found: list[dict[str, Any]]) -> str:
    """Returns the GPUs and versions of several results, with the days on which they were
    measured."""
    where = {place(data).rpartition(", ")[0] for data in found}
    days = sorted({data["date"] for data in found})
    return f"{'; '.join(sorted(where))}, {' and '.join(days)}"


CHARTS: dict[str, Callable[[], str]] = {
    "chart-tokens.svg": tokens_per_second,
    "chart-steps.svg": decode_steps,
    "chart-batches.svg": batches,
    "chart-cache.svg": cache_sizes,
    "chart-quantised.svg": quantised_steps,
}


def main() -> None:
    for name, draw in CHARTS.items():
        (PICTURES / name).write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
