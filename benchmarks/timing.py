"""How every benchmark here measures, and what it keeps.

CUDA graphs, variants in turn, medians over rounds (`ops/gpu_timing.py`, as `tune` does); results
in JSON with the environment they were measured in.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from tilewright.ops.gpu_timing import Call, capture, interleaved_us

__all__ = ["Call", "capture", "environment", "interleaved_us", "keep"]

RESULTS = Path(__file__).parent / "results"


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
