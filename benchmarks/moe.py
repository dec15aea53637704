"""Benchmark of one layer's routed experts: fused op, eager, stock torch.compile, and the GEMMs
alone.

    python benchmarks/moe.py [--out DIR] [--models qwen3-30b-a3b ...] [--tokens 1 16 ...]
        [--formats dense fp8fp8 ...]

Times are microseconds per call, in CUDA graphs with a cold L2 cache, without the routing. Each
model has its own process: all processes compile at once, then rows are measured one at a time.

eager: Hugging Face's `grouped_mm` chain (sort, gather, GEMM, activation, GEMM, weights, un-permute,
sum). stock: torch.compile of that chain for each token count; with symbolic token counts it is
slower than eager. over_best: the time of the faster of these two over tilewright's. up, down:
tilewright's two GEMMs alone, after the sort; up gathers its rows and applies the activation.
grouped_up, grouped_down: torch._grouped_mm on rows that are already sorted. bf16: the dense op on
the same routes in the same run. Quantised weights (and, in fp8fp8, quantised activations) are
compared with it, because eager and stock could only dequantise them. TB/s count the weights of the
experts in use, input rows and output rows; of_copy is their share of the copy bandwidth of the same
run. Errors are the root mean square of the difference from float64, divided by the root mean square
of the result. cpu: CPU time of a repeated call, outside of a graph.

Dense rows go to moe.json and quantised rows to moe_quantized.json, each as soon as it is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from bounds import copy_bytes_per_s
from compiling import failures_of
from moe_layers import (
    BY_NAME,
    EXPERT_SHARE,
    Experts,
    MoeShape,
    arguments,
    make_experts,
)
from moe_rows import chain, describe, measure, stored
from timing import keep

from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90
from tilewright.ops.moe.moe import OP

TOKENS = (1, 16, 64, 1024, 4096)
MORE_TOKENS = (4, 256, 8192)
ZIPF_TOKENS = (16, 1024, 4096)
# For each model, the formats that are measured next to bf16. Checkpoints of the model have these
# formats, or the formats are of interest for the model. The constants below have the numbers of
# tokens for these formats.
FORMATS = {
    "qwen3-30b-a3b": ("nvfp4", "fp8fp8", "int4", "fp8"),
    "mixtral-8x7b": ("nvfp4", "fp8fp8"),
    "deepseek-v3 over 8 GPUs": ("fp8fp8", "fp8"),
    "gpt-oss-120b": ("mxfp4",),
    EXPERT_SHARE.name: ("fp8fp8",),
}
FORMAT_TOKENS = {
    "fp8fp8": (1, 16, 64, 1024, 4096, 8192),
    **dict.fromkeys(("nvfp4", "mxfp4", "int4", "fp8"), (1, 4, 16, 64, 1024, 4096)),
}


def kernels(shape: MoeShape, form: str, tokens: Sequence[int]) -> set[KernelSpec]:
    """Returns the kernels that the op launches at these token counts."""
    experts = make_experts(shape, form, "meta")
    calls = [arguments(shape, experts, num_tokens, device="meta") for num_tokens in tokens]
    return {spec for a in calls for spec in OP.plan_for(a, SM90.name).specs}


# --- a process for each model ---------------------------------------------------------------------


class Layer:
    """The weights of one model, which are made when they are first needed, and the compiled PyTorch
    version of the layer."""

    def __init__(self, shape: MoeShape) -> None:
        self.shape = shape
        self.made: dict[str, Experts] = {}
        self.stock = torch.compile(chain(shape), dynamic=False)

    def experts(self, form: str) -> Experts:
        if form not in self.made:
            for other in [name for name in self.made if name != "dense"]:
                del self.made[other]
            self.made[form] = make_experts(self.shape, form)
        return self.made[form]

    def compile_stock(self, tokens: Sequence[int]) -> None:
        experts = self.experts("dense")
        for num_tokens in tokens:
            a = arguments(self.shape, experts, num_tokens)
            self.stock(a.x, a.expert_ids, a.expert_weights, *stored(self.shape, experts))

    def row(self, form: str, num_tokens: int, kind: str, copy: float) -> dict[str, Any]:
        dense, stock = self.experts("dense"), self.stock
        if form == "dense":
            return measure(self.shape, dense, form, num_tokens, kind, copy, None, stock)
        return measure(self.shape, self.experts(form), form, num_tokens, kind, copy, dense, None)


def serve(connection: Connection, shape: MoeShape, tokens: Sequence[int]) -> None:
    """Compiles the PyTorch version, sends "ready", and then measures the requested rows until it
    receives None."""
    torch.manual_seed(0)
    # Dynamo compiles one program for each token count.
    torch._dynamo.config.recompile_limit = 64
    with torch.no_grad():
        layer = Layer(shape)
        layer.compile_stock(tokens)
        torch.cuda.synchronize()
        connection.send("ready")
        while (asked := connection.recv()) is not None:
            try:
                connection.send(layer.row(*asked))
            except Exception as error:  # the run goes on with the other rows
                connection.send(f"{type(error).__name__}: {error}")


class Run:
    """Processes of a run, and the rows measured so far."""

    def __init__(self, folder: Path | None, shapes: Sequence[MoeShape], tokens: Sequence[int]):
        self.folder = folder
        self.rows: dict[str, list[dict[str, Any]]] = {"moe": [], "moe_quantized": []}
        context = multiprocessing.get_context("spawn")
        self.ends: dict[MoeShape, Connection] = {}
        for shape in shapes:
            ours, theirs = context.Pipe()
            peers = () if shape is EXPERT_SHARE else tokens
            context.Process(target=serve, args=(theirs, shape, peers)).start()
            self.ends[shape] = ours

    def wait(self) -> None:
        """Waits until all processes have compiled, then measures the copy rate."""
        for shape, end in self.ends.items():
            try:
                end.recv()
            except EOFError:
                print(f"{shape.name}: its process has ended", flush=True)
        self.copy = copy_bytes_per_s()

    def row(self, shape: MoeShape, form: str, count: int, kind: str = "random") -> None:
        try:
            self.ends[shape].send((form, count, kind, self.copy))
            row = self.ends[shape].recv()
        except (EOFError, BrokenPipeError):
            row = "its process has ended"
        if isinstance(row, str):
            print(f"{shape.name} {form} {count} {kind}: {row}", flush=True)
            return
        print(describe(row), flush=True)
        name = "moe" if form == "dense" else "moe_quantized"
        self.rows[name].append(row)
        order = list(BY_NAME)
        sorted_rows = sorted(
            self.rows[name],
            key=lambda r: (order.index(r["model"]), r["format"], r["routing"], r["tokens"]),
        )
        keep(name, sorted_rows, self.folder)

    def end(self) -> None:
        for end in self.ends.values():
            with suppress(BrokenPipeError):
                end.send(None)


def asked_for(
    shapes: Sequence[MoeShape], tokens: Sequence[int], formats: Sequence[str]
) -> Iterator[tuple[MoeShape, str, int, str]]:
    """Yields the rows to measure. The most important come first, because a run may be cut short."""
    forms = [(s, f) for s in shapes for f in FORMATS[s.name] if f in formats]
    dense = [s for s in shapes if s is not EXPERT_SHARE] if "dense" in formats else ()
    yield from ((s, "dense", t, "random") for s in dense for t in tokens if t not in MORE_TOKENS)
    for first in ("fp8fp8", "nvfp4", "mxfp4", "int4", "fp8"):
        for shape, form in forms:
            if form == first:
                least = 1024 if shape is EXPERT_SHARE else 1
                wanted = [t for t in tokens if t in FORMAT_TOKENS[form] and t >= least]
                yield from ((shape, form, t, "random") for t in wanted)
    yield from ((s, "dense", t, "zipf") for s in dense for t in tokens if t in ZIPF_TOKENS)
    yield from ((s, "dense", t, "random") for s in dense for t in tokens if t in MORE_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=(*TOKENS, *MORE_TOKENS))
    parser.add_argument("--models", nargs="+", default=list(BY_NAME))
    parser.add_argument("--formats", nargs="+", default=["dense", *FORMAT_TOKENS])
    options = parser.parse_args()
    start = time.time()
    shapes = [shape for name, shape in BY_NAME.items() if name in options.models]
    rows = list(asked_for(shapes, sorted(options.tokens), options.formats))
    peers = sorted(options.tokens) if "dense" in options.formats else ()
    run = Run(options.out, shapes, peers)
    wanted: set[KernelSpec] = set()
    for shape, form in dict.fromkeys((shape, form) for shape, form, _, _ in rows):
        counts = [count for s, f, count, _ in rows if (s, f) == (shape, form)]
        wanted |= kernels(shape, form, counts)
        if form != "dense":
            wanted |= kernels(shape, "dense", counts)
    failures_of(wanted)
    print(f"{len(wanted)} kernels compiled after {time.time() - start:.0f} s", flush=True)
    run.wait()
    print(f"peers compiled after {time.time() - start:.0f} s", flush=True)
    for row in rows:
        run.row(*row)
    run.end()
    print(f"{len(rows)} rows after {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
