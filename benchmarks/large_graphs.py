"""CPU time per node of large graphs that repeat one structure 512 to 4096 times.

    python benchmarks/large_graphs.py [--sizes 512 1024 2048 4096] [--only unbind] [--profile]

A size is about how many nodes a graph has. Each row has Dynamo's seconds and ours (all of `fuse`:
copy, view, match, rewrite, lint and plans), and ours for each node; `growth` is the time of a node
of the largest graph over that of the smallest: 1 where time is linear in the nodes. Needs no GPU.
Results go to benchmarks/results/large_graphs.json.
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
    """Seconds of Dynamo and ours for one structure of about `size` nodes."""
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
    parser.add_argument("--profile", action="store_true", help="print a profile; keep nothing")
    given = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1000
    rows = []
    for name in given.only:
        measure(name, 32)  # imports and first-use costs are not what is measured
        found = [measure(name, size, given.profile) for size in given.sizes]
        growth = found[-1]["us_per_node"] / found[0]["us_per_node"]
        rows += [row | {"growth": growth} for row in found]
        each = "  ".join(f"{row['nodes']:6} {row['us_per_node']:7.0f} us" for row in found)
        print(f"{name:22} {each}  {found[-1]['sites']:5} sites  growth {growth:.2f}", flush=True)
    if not given.profile and given.only == list(STRUCTURES):
        keep("large_graphs", rows, given.out)


if __name__ == "__main__":
    main()
