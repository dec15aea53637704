"""Measures the lowerings of `fused_qkv_paged`, and writes the table that the planner reads.

    python benchmarks/tune_qkv.py [--out codegen/qkv/measured_qkv.json]

For each set of dims and token count, the program times every config of `plan.candidates`, and the
library lowering over three weights and over one packed weight. Times are microseconds of CUDA
graphs with a cold L2 cache. Rows of the table for other chips are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from compiling import failures_of
from qkv_shapes import Layer, Shape, fair_us, fused_arguments, make_layer, paged_cache
from timing import capture, environment, interleaved_us

from tilewright.codegen.qkv import measured
from tilewright.codegen.qkv import plan as qkv_plan
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.qkv.plan import LoweringChoice
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.qkv.choices import run, specs_of
from tilewright.ops.qkv.operands import prepare
from tilewright.ops.qkv.tuning import NanMemory
from tilewright.ops.runtime.device import device_target

SHAPES = (
    Shape("llama3-8b", 4096, 32, 8),
    Shape("llama3-70b", 8192, 64, 8),
    Shape("qwen3-30b-a3b", 2048, 32, 4, norm=True),
    Shape("gpt-oss", 2880, 64, 8, 64, bias=True),
    Shape("llama3-70b over 8 GPUs", 8192, 8, 1),
    Shape("llama3.2-1b", 2048, 32, 8, 64),
    Shape("qwen3-8b", 4096, 32, 8, norm=True),
)
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FINALISTS = 6


def choices(
    problem: Any, num_tokens: int, target: Target, packed: bool
) -> dict[str, LoweringChoice]:
    """Returns all lowerings to try, by their names in the output."""
    if packed:
        return {"library": qkv_plan.library_choice(problem, num_tokens, target, True, None)}
    fused = {
        str(config): qkv_plan.fused_choice(problem, config, 0.0)
        for config in candidates(problem, num_tokens, target)
    }
    library = qkv_plan.library_choice(problem, num_tokens, target, False, None)
    return {**fused, "library": library}


def calls_of(
    shape: Shape, layers: list[Layer], cache: Any, choice: LoweringChoice
) -> list[Callable[[], None]]:
    arguments = [fused_arguments(shape, layer, cache) for layer in layers]
    calls = shape.calls_per_graph(layers[0].x.shape[0])
    turns = [arguments[i % len(layers)] for i in range(calls)]
    return [lambda a=a: run(a, choice) for a in turns]


def wrong(shape: Shape, layer: Layer, cache: Any, choice: LoweringChoice) -> bool:
    """Whether a lowering differs from a plain fp32 computation by more than rounding."""
    a = fused_arguments(shape, layer, cache)
    made = run(a, choice, NanMemory(a.x.device))
    q = (layer.x.float() @ layer.weights[0].float().t()).view(made.shape)
    if layer.biases is not None:
        q = q + layer.biases[0].float()
    if layer.norms is not None:
        scale = torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
        q = q * scale * layer.norms[0].float()
    low, high = q.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    q = q * layer.cos.float().unsqueeze(1) + turned * layer.sin.float().unsqueeze(1)
    difference = float((made.float() - q).norm() / q.norm())
    return not difference < 4e-3


def measure(shape: Shape, num_tokens: int, target: Target, bad: dict[str, str]) -> dict[str, Any]:
    """Measures one row of the table."""
    cache = paged_cache(shape, 0.25)
    times: dict[str, float] = {}
    configs: dict[str, Any] = {}
    for packed in (False, True):
        layers = [
            make_layer(shape, num_tokens, packed) for _ in range(shape.argument_sets(num_tokens))
        ]
        call = prepare(fused_arguments(shape, layers[0], cache))
        tried = choices(call.problem, num_tokens, target, packed)
        graphs = {}
        for name, choice in tried.items():
            if any(spec.name in bad for spec in specs_of(call, choice, target)):
                continue
            if wrong(shape, layers[0], cache, choice):
                raise AssertionError(f"{shape.name}, {num_tokens} tokens: {name} is wrong")
            graphs[name] = capture(calls_of(shape, layers, cache, choice), warmup=1)
        count = shape.calls_per_graph(num_tokens)
        first = interleaved_us(graphs, count, rounds=2, replays=2)
        finalists = [*sorted(first, key=lambda name: first[name])[:FINALISTS], "library"]
        final = fair_us({name: graphs[name] for name in finalists}, count)
        times |= {f"{'packed_' if packed else ''}{name}": us for name, us in final.items()}
        configs |= {name: choice.config for name, choice in tried.items() if choice.config}
    fused = {name: times[name] for name in configs if name in times}
    best = min(fused, key=lambda name: fused[name])
    return {
        "target": target.name,
        "dtype": "bf16",
        **{key: value for key, value in asdict(shape).items() if key != "name"},
        "num_tokens": num_tokens,
        "fused_us": round(fused[best], 2),
        "library_us": round(times["library"], 2),
        "packed_library_us": round(times["packed_library"], 2),
        "config": measured.write_config(configs[best]),
    }


def compile_all(target: Target, tokens: list[int]) -> dict[str, str]:
    """Compiles every kernel that will be timed, in parallel. Returns the failures by kernel
    name."""
    specs: dict[KernelSpec, None] = {}
    for shape in SHAPES:
        cache = paged_cache(shape, 0.25)
        for num_tokens in tokens:
            for packed in (False, True):
                layer = make_layer(shape, num_tokens, packed)
                call = prepare(fused_arguments(shape, layer, cache))
                for choice in choices(call.problem, num_tokens, target, packed).values():
                    specs |= dict.fromkeys(specs_of(call, choice, target))
    return failures_of(specs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=measured.NUMBERS_FILE)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = parser.parse_args()
    torch.manual_seed(0)
    target = device_target(torch.device("cuda", 0))
    if target is None:
        raise SystemExit("this GPU is not in codegen/targets.py")
    bad = compile_all(target, options.tokens)
    others = [
        row
        for row in measured.measured_table(measured.NUMBERS_FILE)
        if row["target"] != target.name
    ]
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for num_tokens in options.tokens:
            rows.append(measure(shape, num_tokens, target, bad))
            row = rows[-1]
            print(
                f"{shape.name} T={num_tokens}: fused {row['fused_us']} library "
                f"{row['library_us']} packed {row['packed_library_us']} {row['config']}",
                flush=True,
            )
            options.out.write_text(measured.table_text(environment(), [*others, *rows]))


if __name__ == "__main__":
    main()
