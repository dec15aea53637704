"""Times calls, and writes the results of all benchmarks.

Variants are captured as CUDA graphs and timed in turn, and times are medians over rounds.
(`ops/runtime/timing.py` implements this; `tune` uses the same functions.) Results are JSON files
that also describe the environment of the run.
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
    """Returns date, command, versions and GPU of this run."""
    facts = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *_named(sys.argv)]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    if "transformers" in sys.modules:
        facts["transformers"] = sys.modules["transformers"].__version__
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _named(words: Sequence[str]) -> list[str]:
    """Returns a command's words without the options that name folders of this machine."""
    folders = ("--out", "--hold")
    return [
        word
        for before, word in zip(("", *words), words, strict=False)
        if word.partition("=")[0] not in folders and before not in folders
    ]


def cpu_us(call: Callable[[], Any], calls: int = 100) -> float:
    """Returns the CPU microseconds of a repeated call.

    `calls` must be too few to fill the GPU's queue, because a full queue makes the CPU wait.
    """
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
    """Writes `name`.json with the environment and the rows. Returns its path."""
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(environment() | {"rows": list(rows)}, indent=2) + "\n")
    return path
