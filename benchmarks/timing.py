"""How every benchmark here measures: CUDA graphs, interleaved rounds, medians, results kept.

A variant is a list of calls on independent argument sets that together touch more than the L2
cache holds, captured in one CUDA graph. Variants are timed in turn, round after round, so that
clocks and temperature are shared; the median over rounds is reported.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

RESULTS = Path(__file__).parent / "results"
Call = Callable[[], Any]


def capture(calls: Sequence[Call], warmup: int = 3) -> torch.cuda.CUDAGraph:
    """One CUDA graph of all calls, after `warmup` uncaptured runs of each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def interleaved_us(
    graphs: Mapping[str, torch.cuda.CUDAGraph],
    calls_per_graph: int,
    rounds: int = 7,
    replays: int = 5,
    before_round: Call | None = None,
) -> dict[str, float]:
    """Median microseconds per call of each variant, over rounds in which all take their turn.

    The order rotates and turns round: whoever runs after the hottest variant gets the lowest
    clocks (a fixed order cost the last of three variants 3 % on an H200).
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for round_number in range(rounds + 1):
        for name in _order(list(graphs), round_number):
            graph = graphs[name]
            if before_round is not None:
                before_round()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            if round_number:  # the first round warms up
                times[name].append(1e3 * start.elapsed_time(end) / (replays * calls_per_graph))
    return {name: statistics.median(values) for name, values in times.items()}


def _order(names: list[str], round_number: int) -> list[str]:
    shift = round_number // 2 % len(names)
    turned = names[shift:] + names[:shift]
    return turned[::-1] if round_number % 2 else turned


def environment() -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    facts = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def keep(name: str, rows: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Path:
    """Writes `name`.json with the environment and the rows; returns its path."""
    path = (folder or RESULTS) / f"{name}.json"
    path.write_text(json.dumps(environment() | {"rows": list(rows)}, indent=2) + "\n")
    return path
