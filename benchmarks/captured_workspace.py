"""Tests, without tilewright, whether a CUDA graph that was captured by hand still works after
PyTorch has recorded graphs of its own.

    python benchmarks/captured_workspace.py [--seconds 55] [--out DIR]

cuBLAS uses a workspace for products that it splits over K. During a capture, the workspace comes
from the graph's memory pool, and later captures on the same stream use it too. When PyTorch records
graphs of its own (mode="reduce-overhead"), it frees these workspaces and returns unused memory to
the driver. Each case is a process that captures the same products as a graph twice, by hand, and
replays the second graph at the end. The cases differ in what happens between capture and replay:

    alone                    nothing
    first-deleted            the first graph is deleted
    recorded                 PyTorch records graphs of its own
    deleted-recorded         the first graph is deleted, then PyTorch records
    deleted-recorded-filled  then memory is allocated and filled, too
    recorded-before          PyTorch records before the first capture; the first graph is deleted

A row has the kernels of the products, the error of the replay if it raised one, the difference of
its results from eager's, and the number of filled tensors that it overwrote. If `compute-sanitizer`
is on the path, "deleted-recorded" also runs under it, without PyTorch's check of its memory pool.
(In the run of 2026-11-28, this check ended the process before the replay.) Results go to
results/captured_workspace.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from timing import keep
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

CASES = {
    "alone": (),
    "first-deleted": ("delete",),
    "recorded": ("record",),
    "deleted-recorded": ("delete", "record"),
    "deleted-recorded-filled": ("delete", "record", "fill"),
    "recorded-before": ("before", "delete"),
}
#: The sizes of the products: (rows of x, columns of x, rows of the weight). Each product has few
#: tiles and a long sum, so that cuBLAS splits the sum.
SHAPES = ((1, 16384, 512), (16, 16384, 512), (32, 8192, 256), (64, 16384, 1024), (128, 28672, 256))
FILLED_BYTES, FILLED = 32 << 20, 16


def products() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    return [(torch.randn(m, k, **made), torch.randn(n, k, **made)) for m, k, n in SHAPES]


def captured(operands: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, list[torch.Tensor]]:
    """Captures all products, as `torch.cuda.graph` in user code does, and returns graph and
    results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [linear(x, weight) for x, weight in operands]
    return graph, results


def record() -> None:
    """Lets PyTorch record and replay its own graphs."""
    step = torch.compile(lambda x: torch.relu(x @ x) + 1, mode="reduce-overhead")
    x = torch.randn(256, 256, device="cuda")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        step(x)
    torch.cuda.synchronize()


def kernels(operands: list[tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    """Returns the names of the kernels that sum parts of a product."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for x, weight in operands:
            linear(x, weight)
        torch.cuda.synchronize()
    names = {event.name[:80] for event in profiled.events()}
    return sorted(name for name in names if "split" in name.lower() or "reduce" in name.lower())


def run_case(name: str, profiles: bool) -> None:
    does, operands = CASES[name], products()
    row: dict[str, Any] = {"case": name}
    if not profiles:  # under compute-sanitizer
        torch._inductor.config.triton.slow_path_cudagraph_asserts = False
    with torch.no_grad():
        if "before" in does:
            record()
        wanted = [linear(x, weight) for x, weight in operands]
        if profiles:
            row["kernels"] = kernels(operands)
        first = captured(operands)
        graph, results = captured(operands)
        if "delete" in does:
            del first
            gc.collect()
        if "record" in does:
            record()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        full = partial(torch.full, (FILLED_BYTES,), 77, device="cuda", dtype=torch.uint8)
        filled = [full() for _ in range(FILLED)] if "fill" in does else []
        try:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            norms = [
                ((made.double() - one.double()).norm() / one.double().norm()).item()
                for made, one in zip(results, wanted, strict=True)
            ]
            row["differences"] = [float(f"{norm:.1e}") for norm in norms]
            row["overwritten"] = sum(bool((one != 77).any()) for one in filled)
        except RuntimeError as error:
            row["error"] = str(error).splitlines()[0]
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), help="one case; set by the parent process")
    parser.add_argument("--unprofiled", action="store_true", help="no names of kernels")
    parser.add_argument("--seconds", type=float, default=55)
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    if given.case:
        run_case(given.case, not given.unprofiled)
        return
    lines = {name: [sys.executable, __file__, "--case", name] for name in CASES}
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer:
        line = [*lines["deleted-recorded"], "--unprofiled"]
        lines["deleted-recorded, under compute-sanitizer"] = [sanitizer, *line]
    end = time.monotonic() + given.seconds
    running = {
        name: subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, line in lines.items()
    }
    rows: list[dict[str, Any]] = []
    for name, process in running.items():
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        told = [line for line in out.splitlines() if line.startswith("=========")][:12]
        row = found[-1] if found else {"failed": err[-600:], "code": process.returncode}
        rows.append(row | {"case": name} | ({"sanitizer": told} if told else {}))
        print(json.dumps(rows[-1]), flush=True)
    keep("captured_workspace", rows, given.out)


if __name__ == "__main__":
    main()
