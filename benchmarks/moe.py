"""The routed experts of one layer: the fused op, eager, stock torch.compile, and the GEMMs alone.

    python benchmarks/moe.py [--out DIR] [--models qwen3-30b-a3b ...] [--tokens 1 16 ...]
        [--formats dense fp8fp8 ...]

Microseconds per call, CUDA graphs, L2 cold; routing outside. Eager is Hugging Face's `grouped_mm`
chain (sort, gather, GEMM, activation, GEMM, weights, un-permute, sum), stock torch.compile of it at
the token count: with counts as symbols it is slower than eager. over_best is the faster of the two
over ours. Each model has a process of its own, so that all compile at once; rows are measured one
at a time, when all have. up and down are our two GEMMs alone, sorting done: up gathers its rows and
applies the activation; grouped_up and grouped_down are torch._grouped_mm on rows that are sorted
already. TB/s count the weights of the experts in use, rows in and rows out; of_copy is their share
of the copy bandwidth measured in the same run. Quantised weights (fp8fp8: and activations) have no
peer in eager or stock but dequantisation, so theirs is our own bf16: `bf16` is the dense op of the
same routes in the same run. Errors are the root of the mean squared difference from float64, over
the rms of the result; cpu is what a repeated call takes of the CPU, outside of a graph. Dense rows
go to moe.json, quantised ones to moe_quantized.json, each as soon as it is measured.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from bounds import copy_bytes_per_s
from moe_layers import (
    BY_NAME,
    EXPERT_SHARE,
    WEIGHT_BYTES,
    Experts,
    MoeShape,
    arguments,
    glu,
    make_experts,
)
from timing import capture, cpu_us, interleaved_us, keep
from tune_qkv import compile_quietly

from tilewright.codegen.qkv_heads import next_power_of_2
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90
from tilewright.ops.lowerings import device_target
from tilewright.ops.moe import OP, FusedMoeArguments, reference
from tilewright.ops.moe_lowerings import Step, cached_plan, moe_steps, specs
from tilewright.ops.moe_problems import moe_problem

TOKENS = (1, 16, 64, 1024, 4096)
MORE_TOKENS = (4, 256, 8192)
ZIPF_TOKENS = (16, 1024, 4096)
# Which formats are measured beside bf16 and at how many tokens, where their checkpoints exist or
# targets name them.
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
MAX_SETS = 16
# float64 of more routes than this takes longer than all the rest.
CHECKED_TOKENS = 64


def chain(shape: MoeShape) -> Callable[..., torch.Tensor]:
    """Hugging Face's `grouped_mm_experts_forward`, without expert parallelism."""

    def experts(x, ids, weights, gate_up, down, gate_up_bias, down_bias):
        num_slots = ids.shape[-1]
        sorted_ids, perm = torch.sort(ids.reshape(-1))
        counts = torch.histc(
            sorted_ids.int(), bins=shape.num_experts, min=0, max=shape.num_experts - 1
        )
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        both = torch._grouped_mm(x[perm // num_slots], gate_up, ends)
        if gate_up_bias is not None:
            both.add_(gate_up_bias[sorted_ids])
        out = torch._grouped_mm(glu(shape, both), down, ends)
        if down_bias is not None:
            out.add_(down_bias[sorted_ids])
        out = out * weights.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0), device=x.device)
        return out[inverse].view(*ids.shape, -1).sum(1).to(x.dtype)

    # Dynamo counts what it compiled by code object, and each model is a program of its own.
    code = experts.__code__.replace(co_name=f"experts_{shape.num_experts}_{shape.hidden}")
    return FunctionType(code, globals(), code.co_name, None, experts.__closure__)


def stored(shape: MoeShape, experts: Experts) -> tuple[Any, ...]:
    """gate_up and down [E, K, N] with their biases, as `chain` takes them."""
    assert experts.gate_up is not None
    assert experts.down is not None
    pair = (experts.gate_up, experts.down)
    if not shape.oss:
        pair = (pair[0].mT, pair[1].mT)
    return (*pair, experts.gate_up_bias, experts.down_bias)


def planned(a: FusedMoeArguments) -> dict[str, Step]:
    """The launches that a call of the op makes, sorted and multiplied once."""
    problem = moe_problem(a)
    target = device_target(a.x.device) or SM90
    plan = cached_plan(problem, next_power_of_2(a.x.shape[0]), target)
    steps = moe_steps(a, problem, plan, target, torch.empty_like(a.x))
    for step in steps.values():
        step.run(a.x.device)
    return steps


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def measure(
    shape: MoeShape, experts: Experts, form: str, num_tokens: int, kind: str, copy: float,
    bf16: Experts | None, stock: Callable[..., torch.Tensor] | None,
) -> dict[str, Any]:  # fmt: skip
    """One row. bf16: the dense experts that a quantised row is compared with."""
    count = min(shape.argument_sets(num_tokens, form), MAX_SETS)
    calls = [arguments(shape, experts, num_tokens, kind) for _ in range(count)]
    steps = [planned(a) for a in calls]
    split = [OP.split(a) for a in calls]
    device = calls[0].x.device
    variants: dict[str, Callable[[int], Any]] = {
        "tilewright": lambda i: OP.torch_op(*split[i][0], **split[i][1]),
        "up": lambda i: steps[i]["up"].run(device),
        "down": lambda i: steps[i]["down"].run(device),
    }
    if stock is not None:
        weights = stored(shape, experts)
        given = [(a.x, a.expert_ids, a.expert_weights, *weights) for a in calls]
        eager = chain(shape)
        rows = [x[ids.flatten().sort().indices // shape.num_slots] for x, ids, *_ in given]
        ends = [s["up"].values["ends_ptr"][: shape.num_experts] for s in steps]
        hidden = [
            s["down"].values["x_ptr"].view(len(r), -1) for s, r in zip(steps, rows, strict=True)
        ]
        variants |= {
            "eager": lambda i: eager(*given[i]),
            "stock": lambda i: stock(*given[i]),
            "grouped_up": lambda i: torch._grouped_mm(rows[i], weights[0], ends[i]),
            "grouped_down": lambda i: torch._grouped_mm(hidden[i], weights[1], ends[i]),
        }
    if bf16 is not None:
        plain = {"weight_format": "dense", "scale_block": (), **_no_scales(), **bf16.given}
        dense = [replace(a, **plain) for a in calls]
        dense_split = [OP.split(a) for a in dense]
        variants["bf16"] = lambda i: OP.torch_op(*dense_split[i][0], **dense_split[i][1])
    row: dict[str, Any] = {
        "model": shape.name, "format": form, "tokens": num_tokens, "routing": kind,
        "experts": sum(len(a.expert_ids.unique()) for a in calls) / count,
        "most_rows": int(calls[0].expert_ids.flatten().bincount().max()),
    }  # fmt: skip
    if num_tokens <= CHECKED_TOKENS:
        exact = reference(replace(calls[0], x=calls[0].x.double()))
        for name in ("tilewright", "eager"):
            if name in variants:
                row[f"{name}_error"] = error(variants[name](0), exact)
    if num_tokens <= 16:
        row["cpu"] = cpu_us(lambda: variants["tilewright"](0))
    per_graph = max(count, 10 if num_tokens <= 64 else 4 if num_tokens <= 1024 else 2)
    graphs = {
        name: capture([lambda i=i, v=v: v(i % count) for i in range(per_graph)], warmup=1)
        for name, v in variants.items()
    }
    row |= interleaved_us(graphs, per_graph, rounds=5, replays=2 if num_tokens <= 1024 else 1)
    return row | rates(shape, form, row, copy) | {"lowering": _reason(calls[0])}


def _no_scales() -> dict[str, None]:
    parts = ("gate", "up", "down")
    return {f"{part}_{kind}scale": None for part in parts for kind in ("", "expert_")}


def _reason(a: FusedMoeArguments) -> str:
    problem = moe_problem(a)
    return cached_plan(problem, next_power_of_2(a.x.shape[0]), SM90).reason


def rates(shape: MoeShape, form: str, row: dict[str, Any], copy: float) -> dict[str, Any]:
    """TFLOP/s and TB/s of the GEMMs alone, and how they compare."""
    routes = row["tokens"] * shape.num_slots
    matrix = shape.hidden * shape.inner
    # What the second GEMM reads of the first is as wide as what that wrote.
    size = 1 if form == "fp8fp8" else 2
    bytes_in = {"up": size * shape.hidden * row["tokens"], "down": size * shape.inner * routes}
    bytes_out = {"up": size * shape.inner * routes, "down": 2 * shape.hidden * routes}
    made: dict[str, Any] = {}
    for name, matrices in (("up", 2), ("down", 1)):
        read = row["experts"] * matrices * matrix * WEIGHT_BYTES[form]
        moved = read + bytes_in[name] + bytes_out[name]
        seconds = 1e-6 * row[name]
        made[f"{name}_tflops"] = 2 * routes * matrices * matrix / seconds / 1e12
        made[f"{name}_tb_per_s"] = moved / seconds / 1e12
        made[f"{name}_of_copy"] = moved / seconds / copy
        if f"grouped_{name}" in row:
            made[f"{name}_speedup"] = row[f"grouped_{name}"] / row[name]
    if "stock" in row:
        made["over_best"] = min(row["eager"], row["stock"]) / row["tilewright"]
    if "bf16" in row:
        made["over_bf16"] = row["bf16"] / row["tilewright"]
    return made


def describe(row: dict[str, Any]) -> str:
    peers = "  ".join(f"{p} {row[p]:7.1f}" for p in ("eager", "stock", "bf16") if p in row)
    gemms = "  ".join(
        f"{n} {row[n]:7.1f} ({row[f'{n}_tflops']:.0f} TF {row[f'{n}_of_copy']:.2f}"
        + (f" {row[f'{n}_speedup']:.2f}x)" if f"{n}_speedup" in row else ")")
        for n in ("up", "down")
    )
    ratios = " ".join(f"{row[k]:.2f}x" for k in ("over_best", "over_bf16") if k in row)
    errors = "/".join(f"{row[k]:.4f}" for k in ("tilewright_error", "eager_error") if k in row)
    return (
        f"{row['model'][:12]:12} {row['format']:5} {row['routing']:6} T={row['tokens']:4} "
        f"({row['experts']:5.1f}): ours {row['tilewright']:7.1f}  {peers}  {ratios}  {gemms}  "
        f"err {errors}" + (f" cpu {row['cpu']:.0f}" if "cpu" in row else "")
    )


def kernels(shape: MoeShape, form: str, tokens: Sequence[int]) -> set[KernelSpec]:
    """What the op launches at these token counts."""
    experts = make_experts(shape, form, "meta")
    found: set[KernelSpec] = set()
    for num_tokens in tokens:
        problem = moe_problem(arguments(shape, experts, num_tokens, device="meta"))
        plan = cached_plan(problem, next_power_of_2(num_tokens), SM90)
        found |= set(specs(problem, plan, SM90.name).values())
    return found


# --- a process for each model ---------------------------------------------------------------------


class Layer:
    """One model's weights and compiled peer, made when first needed."""

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
    """Compiles the peer, says so, then measures what it is asked for until that is None."""
    torch.manual_seed(0)
    # One program for each token count.
    torch._dynamo.config.recompile_limit = 64
    with torch.no_grad():
        layer = Layer(shape)
        layer.compile_stock(tokens)
        torch.cuda.synchronize()
        connection.send("ready")
        while (asked := connection.recv()) is not None:
            try:
                connection.send(layer.row(*asked))
            except Exception as error:  # a row that fails does not take the others with it
                connection.send(f"{type(error).__name__}: {error}")


class Run:
    """The processes of a run, and the rows so far."""

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
        """Until all have compiled. The copy rate is measured when nothing else runs."""
        for end in self.ends.values():
            end.recv()
        self.copy = copy_bytes_per_s()

    def row(self, shape: MoeShape, form: str, count: int, kind: str = "random") -> None:
        end = self.ends[shape]
        end.send((form, count, kind, self.copy))
        row = end.recv()
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
            end.send(None)


def compile_all(wanted: set[KernelSpec]) -> None:
    """Our kernels, beside what the models' processes compile."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for spec, outcome in zip(wanted, pool.map(compile_quietly, wanted), strict=True):
            if outcome:
                print(f"{spec.name}: {outcome}")


def asked_for(
    shapes: Sequence[MoeShape], tokens: Sequence[int], formats: Sequence[str]
) -> Iterator[tuple[MoeShape, str, int, str]]:
    """The rows in the order of their weight: a run may be cut short."""
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
    compile_all(wanted)
    print(f"{len(wanted)} kernels compiled after {time.time() - start:.0f} s", flush=True)
    run.wait()
    print(f"peers compiled after {time.time() - start:.0f} s", flush=True)
    for row in rows:
        run.row(*row)
    run.end()
    print(f"{len(rows)} rows after {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
