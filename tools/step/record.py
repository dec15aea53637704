"""Records steps of a model on the GPU of this machine, as a trace of torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tilewright.ops.runtime.timing import capture
from tilewright.tools.zoo import LoadedModel


def record(loaded: LoadedModel, steps: int, graphs: bool) -> dict[str, Any]:
    """Returns the trace of a number of steps on a GPU. The model is compiled by tilewright.

    `graphs` says whether each step replays a CUDA graph, as in serving. Otherwise Python launches
    the kernels, and the gaps between kernels are due to Python.
    """
    compiled = torch.compile(loaded.model, backend="tilewright")
    with torch.no_grad():
        step: Callable[[], Any] = lambda: compiled(*loaded.args, **loaded.kwargs)  # noqa: E731
        if graphs:
            step = capture([step]).replay
        for _ in range(2):  # the first call compiles, the second warms up
            step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found
