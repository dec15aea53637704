"""Measurements of all benchmarks here, and the results that they keep.

CUDA graphs, variants in turn, medians over rounds (`ops/runtime/timing.py`, as `tune` does);
results in JSON with the environment they were measured in.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from tilewright.ops.runtime.timing import Call, capture, interleaved_us

__all__ = ["Call", "capture", "cpu_us", "environment", "interleaved_us", "keep"]

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """The facts that a reader needs to repeat the run."""
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


def cpu_us(call: Callable[[], Any], calls: int = 100) -> float:
    """CPU time of a repeated call, in microseconds; too few calls to fill the GPU's queue."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * seconds / calls


def keep(name: str, rows: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Path:
    """Writes `name`.json with the environment and the rows; returns its path."""
    path = (folder or RESULTS) / f"{name}.json"
    path.write_text(json.dumps(environment() | {"rows": list(rows)}, indent=2) + "\n")
    return path
