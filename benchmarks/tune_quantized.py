"""Measures the lowerings of quantised projections, and writes the table that the planner reads.

    python benchmarks/tune_quantized.py [--formats int4 ...] [--models llama3-8b ...]

For each row, the program times every config of `plan.candidates` and the library lowering, in CUDA
graphs with a cold L2 cache, as `tune_qkv.py` does for dense weights. Rows that are not measured
again are kept.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compiling import failures_of
from qkv_shapes import Shape, paged_cache
from quantized_layers import (
    BY_NAME,
    SHAPES,
    Format,
    argument_sets,
    make_quantized,
    quantized_arguments,
)
from timing import capture, environment, interleaved_us

from tilewright.codegen.qkv import plan as qkv_plan
from tilewright.codegen.qkv.candidates import candidates
from tilewright.codegen.qkv.measured import CODES_FILE, row_key, table_text, write_config
from tilewright.codegen.qkv.plan import LoweringChoice
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import Target
from tilewright.ops.qkv.choices import run, specs_of
from tilewright.ops.qkv.operands import FusedCall, prepare
from tilewright.ops.runtime.device import device_target

TOKENS = (16, 32, 64, 128, 256, 512, 1024, 4096)
FINALISTS = 5


@dataclass(frozen=True)
class Job:
    """A row of the table that is to be measured."""

    form: Format
    shape: Shape
    num_tokens: int

    @cached_property
    def call(self) -> FusedCall:
        return prepare(self.prepared(1)[0])

    def prepared(self, num_layers: int) -> list[Any]:
        """Returns the arguments of `num_layers` layers that share one cache."""
        cache = paged_cache(self.shape, 0.1)
        layers = [make_quantized(self.form, self.shape, self.num_tokens) for _ in range(num_layers)]
        return [quantized_arguments(self.form, self.shape, layer, cache) for layer in layers]

    def choices(self, target: Target) -> dict[str, LoweringChoice]:
        """Returns all lowerings to try, by name."""
        problem = self.call.problem
        tried = {
            str(config): qkv_plan.fused_choice(problem, config, 0.0)
            for config in candidates(problem, self.num_tokens, target)
        }
        if self.form.x == "bf16":  # for fp8 x, the library could only multiply in fp32
            library = qkv_plan.library_choice(problem, self.num_tokens, target, True, None)
            tried["library"] = library
        return tried


def measure(job: Job, choices: dict[str, LoweringChoice], target: Target) -> dict[str, Any]:
    """Measures a row. Returns the fastest config, its time, and the time of the library."""
    arguments = job.prepared(argument_sets(job.form, job.shape, job.num_tokens))
    calls = max(len(arguments), 10 if job.num_tokens < 2048 else 2)
    turns = [arguments[i % len(arguments)] for i in range(calls)]
    graphs = {
        name: capture([lambda a=a, c=c: run(a, c) for a in turns], warmup=1)
        for name, c in choices.items()
    }
    first = interleaved_us(graphs, calls, rounds=2, replays=2)
    ranked = sorted(first, key=lambda name: first[name])
    finalists = {*ranked[:FINALISTS], *({"library"} & set(first))}
    times = interleaved_us({name: graphs[name] for name in finalists}, calls)
    fused = {name: us for name, us in times.items() if name != "library"}
    best = min(fused, key=lambda name: fused[name])
    library = round(times["library"], 2) if "library" in times else None
    config = choices[best].config
    assert config is not None
    return {
        **row_key(prepare(arguments[0]).problem, target),
        "num_tokens": job.num_tokens,
        "fused_us": round(fused[best], 2),
        "library_us": library,
        "packed_library_us": library,
        "config": write_config(config),
    }


def compiled(jobs: dict[Job, dict[str, LoweringChoice]], target: Target) -> dict[str, str]:
    """Compiles all kernels in parallel. Returns the failures by kernel name."""
    every = ((job, choice) for job, choices in jobs.items() for choice in choices.values())
    specs: dict[KernelSpec, None] = dict.fromkeys(
        spec for job, choice in every for spec in specs_of(job.call, choice, target)
    )
    return failures_of(specs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=CODES_FILE)
    parser.add_argument("--formats", nargs="+", default=list(BY_NAME))
    parser.add_argument("--models", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options = parser.parse_args()
    torch.manual_seed(0)
    target = device_target(torch.device("cuda", 0))
    if target is None:
        raise SystemExit("this GPU is not in codegen/targets.py")
    shapes = [shape for shape in SHAPES if shape.name in options.models]
    jobs = {
        (job := Job(BY_NAME[name], shape, tokens)): job.choices(target)
        for name in options.formats
        for shape in shapes
        for tokens in options.tokens
    }
    bad = compiled(jobs, target)
    rows = json.loads(CODES_FILE.read_text())["rows"]
    for job, choices in jobs.items():
        good = {
            name: choice
            for name, choice in choices.items()
            if not any(spec.name in bad for spec in specs_of(job.call, choice, target))
        }
        row = measure(job, good, target)
        keys = row.keys() - {"fused_us", "library_us", "packed_library_us", "config"}
        same = {key: row[key] for key in keys}
        rows = [old for old in rows if not same.items() <= old.items()] + [row]
        options.out.write_text(table_text(environment(), rows))
        print(
            f"{job.form.name} {job.shape.name} T={job.num_tokens}: fused {row['fused_us']} "
            f"library {row['library_us']} {row['config']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
