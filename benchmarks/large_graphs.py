"""Measures the compile time per node of large graphs, which repeat one structure up to thousands of
nodes.

    python benchmarks/large_graphs.py [--sizes 512 1024 2048 4096] [--only unbind] [--profile]

A size is the approximate number of nodes of a graph. Each row has the seconds of Dynamo and of
tilewright (all of `fuse`: copy, view, match, rewrite, lint and plans), and tilewright's time per
node. `growth` is the time per node of the largest graph divided by that of the smallest; it is 1 if
the time is linear in the number of nodes. No GPU is needed. Results go to
benchmarks/results/large_graphs.json.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path
from typing import Any

import torch
from timing import keep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.models.large import STRUCTURES
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options


def measure(name: str, size: int, profile: bool = False) -> dict[str, Any]:
    """Measures the seconds of Dynamo and of tilewright for one structure of about `size` nodes."""
    structure = STRUCTURES[name]
    torch._dynamo.reset()
    function, args = structure.make(max(2, size // structure.nodes))
    row: dict[str, Any] = {"structure": name, "size": size}
    profiler = cProfile.Profile()
    start = time.perf_counter()

    def backend(gm, example_inputs):
        row["dynamo_s"] = time.perf_counter() - start
        if profile:
            profiler.enable()
        begun = time.process_time()
        report = fuse(gm, Options(inner="eager", target="sm100", everywhere=True))
        row["ours_s"] = time.process_time() - begun
        profiler.disable()
        row["nodes"] = len(gm.graph.nodes)
        row["sites"] = len(report.matches)
        row.update({f"{phase}_s": s for phase, s in report.seconds.items()})
        return lambda *given: gm.forward(*given)

    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False)(*args)
    row["us_per_node"] = 1e6 * row["ours_s"] / row["nodes"]
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--only", nargs="+", default=list(STRUCTURES), choices=list(STRUCTURES))
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--profile", action="store_true", help="print a profile; write no results")
    given = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1000
    rows = []
    for name in given.only:
        measure(name, 32)  # keeps imports and first-use costs out of the times
        found = [measure(name, size, given.profile) for size in given.sizes]
        growth = found[-1]["us_per_node"] / found[0]["us_per_node"]
        rows += [row | {"growth": growth} for row in found]
        each = "  ".join(f"{row['nodes']:6} {row['us_per_node']:7.0f} us" for row in found)
        print(f"{name:22} {each}  {found[-1]['sites']:5} sites  growth {growth:.2f}", flush=True)
    if not given.profile and given.only == list(STRUCTURES):
        keep("large_graphs", rows, given.out)


if __name__ == "__main__":
    main()
