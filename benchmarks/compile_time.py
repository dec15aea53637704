"""Measures the time that tilewright adds to Dynamo's, for 8 to 80 layers of Llama-3-70B on the meta
device.

    python benchmarks/compile_time.py [--layers 8 16 32 80] [--model qwen3-30b-a3b --out DIR]

Dynamo's time runs from the call of the model to the call of the backend. tilewright's time is the
whole time of `fuse`: copy, view, match, rewrite, lint and the plans of the report. No GPU is
needed. Results go to benchmarks/results/compile_time.json; for another model of the zoo, give a
folder with --out.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from timing import keep

from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options
from tilewright.tools.zoo import build_zoo_model

MODEL = "llama3-70b"


def measure(layers: int, model: str = MODEL) -> dict[str, float]:
    """Measures one depth. Returns the seconds of Dynamo and of each phase of `fuse`, and the number
    of fused sites."""
    torch._dynamo.reset()
    loaded = build_zoo_model(model, layers=layers)
    row: dict[str, float] = {"layers": layers}
    start = time.perf_counter()

    def backend(gm, example_inputs):
        row["dynamo_s"] = time.perf_counter() - start
        begun = time.perf_counter()
        report = fuse(gm, Options(inner="eager", target="sm100"))
        row["ours_s"] = time.perf_counter() - begun
        row["nodes"] = len(gm.graph.nodes)
        row["sites"] = len(report.matches)
        row.update({f"{name}_s": s for name, s in report.seconds.items()})
        return gm.forward

    with torch.no_grad():
        torch.compile(loaded.model, backend=backend)(*loaded.args, **loaded.kwargs)
    row["ours_of_dynamo"] = row["ours_s"] / row["dynamo_s"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32, 80])
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--model", default=MODEL, help="a model of the zoo")
    given = parser.parse_args()
    if given.model != MODEL and given.out is None:
        parser.error("--model: another model than the default needs --out")
    measure(2, given.model)  # keeps imports and first-use costs out of the times
    rows = []
    for layers in given.layers:
        rows.append(measure(layers, given.model))
        r = rows[-1]
        print(
            f"{layers:3} layers {r['nodes']:5} nodes  Dynamo {r['dynamo_s']:6.2f} s  "
            f"tilewright {1e3 * r['ours_s']:6.0f} ms = {100 * r['ours_of_dynamo']:.1f} %  "
            f"{r['sites']} sites fused"
        )
    keep("compile_time", rows, given.out)


if __name__ == "__main__":
    main()
