"""Times the kernels that make MLA's keys. The kernel of latents is compared with a copy, and the
up-projection is timed with several tiles.

    python benchmarks/mla_helpers.py [--heads 16 128] [--rows 1024 4096 16384] [--out FOLDER]

A batch has one sequence. "new" rows are stored, gathered and, as codes, quantised in one launch.
"cached" rows are gathered together with one new row. "stored" rows are only stored. Times are
microseconds of CUDA graphs. The L2 cache is cold if several sets of arguments exceed it. Bandwidth
is the bytes read and written, divided by the time. The bandwidth is compared with that of torch's
copy of as many bytes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compiling import failures_of
from timing import capture, interleaved_us, keep

from tilewright.codegen.mla.key_kernels import LatentConfig, UpConfig, UpProblem
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90
from tilewright.ops.formats import fp8_block
from tilewright.ops.formats.paged_cache import CacheWindow
from tilewright.ops.mla.arguments import MlaPrefillArguments
from tilewright.ops.mla.latents.lowering import empty_keys, latent_calls, latent_launch, up_launch
from tilewright.ops.mla.latents.operands import (
    Chunk,
    LatentCall,
    key_buffers,
    latent_call,
    up_problem,
)
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Launch, drive

RANK, ROPE, NOPE, V_DIM, PAGE = 512, 64, 128, 128, 128
DEVICE = torch.device("cuda", 0)
COLD_BYTES = 160e6
FP8 = torch.float8_e4m3fn
KINDS = ("values", "codes", "codes 8-bit core")
RESULTS: list[dict[str, Any]] = []
LATENT_CONFIGS = [LatentConfig(1, 1), LatentConfig(2, 1), LatentConfig(1, 2), LatentConfig(1, 4)]
VALUE_CONFIGS = [
    UpConfig(128, 128, 64, 8, 4),
    UpConfig(128, 256, 64, 8, 3, flatten=True),
]
CODE_CONFIGS = [
    UpConfig(128, 128, 128, 8, 3),
    UpConfig(128, 128, 128, 8, 4),
    UpConfig(128, 128, 128, 8, 3, flatten=True),
    UpConfig(64, 128, 128, 4, 3, 2),
    UpConfig(64, 256, 128, 8, 3),
]


def arguments(heads: int, rows: int, new: int, kind: str) -> MlaPrefillArguments:
    """Returns random arguments of one sequence with `rows` rows, of which `new` are new.

    `kind` is "values", "codes", or "codes 8-bit core" for keys of 8 bits.
    """
    coded, narrow = kind.startswith("codes"), kind.endswith("core")
    pages = rows // PAGE + 1
    pool = torch.randn(pages, PAGE, RANK + ROPE, device=DEVICE).bfloat16()
    entries = pool.unsqueeze(2)
    weight = torch.randn(heads * (NOPE + V_DIM), RANK, device=DEVICE) * RANK**-0.5
    values: dict[str, Any] = {"kv_b_weight": weight.bfloat16()}
    if coded:
        codes, scale = fp8_block.quantize_blocks(weight)
        values = {"kv_b_weight": codes, "kv_b_scale": scale, "scale_block": (128, 128)}
        values |= {"quantize_latent": True, "latent_scale_cap": 1200.0}
    latent = torch.randn(new, RANK + ROPE, device=DEVICE).bfloat16()
    table = torch.randn(rows, ROPE, device=DEVICE)

    def integers(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    return MlaPrefillArguments(
        q=torch.empty(new, heads, NOPE + ROPE, device=DEVICE, dtype=torch.bfloat16),
        latent=latent[:, :RANK],
        k_rope=latent[:, RANK:],
        latent_cache=pool,
        latent_window=CacheWindow.of(entries[..., :RANK], pool).to_ints(),
        rope_window=CacheWindow.of(entries[..., RANK:], pool).to_ints(),
        v_dim=V_DIM,
        scale=1.0,
        row_offsets=integers(0, new),
        keys="table",
        key_offsets=integers(0, rows),
        num_keys=rows,
        slots="ragged",
        lookup_table=torch.randperm(pages, device=DEVICE).int().unsqueeze(0),
        cache_lengths=integers(rows - new),
        norm_weight=torch.ones(RANK, device=DEVICE).bfloat16(),
        cos=table[:, ::2],
        sin=table[:, 1::2],
        rope_style="interleaved",
        rope_by_position=True,
        attention_dtype=FP8 if narrow else None,
        **values,
    )


def performed(steps: Any) -> Any:
    """Runs steps on this GPU and returns their outcome."""
    return drive(steps, machine_of(DEVICE)).outcome


def launched(launch: Launch) -> Callable[[], None]:
    return partial(machine_of(DEVICE).perform, launch)


def latent_bytes(form: str, rows: int, coded: bool) -> int:
    """Returns the number of bytes that the kernel of latents reads and writes for `rows` rows.

    The kernel reads the entry of a row, and writes it to the buffer, to the cache, or to both. For
    a new or stored row, the rotation is also read, in fp32.
    """
    entry, rotation = 2 * (RANK + ROPE), 4 * ROPE
    out = RANK + 4 * RANK // 128 + 2 * ROPE if coded else entry
    row = {"new": entry + rotation + out + entry, "cached": entry + out}
    return rows * (row | {"stored": entry + rotation + entry})[form]


def call_of(form: str, a: MlaPrefillArguments, rows: int) -> LatentCall:
    if form == "stored":
        return latent_call(a, store=True)
    chunk = Chunk(rows, a.key_offsets)
    (call,) = latent_calls(a, chunk, performed(key_buffers(a, chunk)))
    return call


def copies(count: int) -> int:
    return max(2, min(64, int(COLD_BYTES // max(count, 1)) + 1))


def time_latents(form: str, rows: int, kind: str, bad: set[str]) -> None:
    size = latent_bytes(form, rows, kind.startswith("codes"))
    new = 1 if form == "cached" else rows
    sets = [arguments(1, rows, new, kind) for _ in range(copies(size))]
    made = [call_of(form, a, rows) for a in sets]
    graphs = {}
    for config in LATENT_CONFIGS:
        if latent_launch(made[0], SM90, config).spec.name not in bad:
            calls = [launched(latent_launch(call, SM90, config)) for call in made]
            graphs[f"{config.block_t}w{config.num_warps}"] = capture(calls, warmup=1)
    half = size // 2
    sources = [torch.empty(half, dtype=torch.uint8, device=DEVICE) for _ in sets]
    targets = [torch.empty_like(s) for s in sources]
    graphs["copy"] = capture(
        [partial(t.copy_, s) for s, t in zip(sources, targets, strict=True)], warmup=1
    )
    times = interleaved_us(graphs, len(sets), rounds=3, replays=2)
    show(f"latents {kind} K={rows} {form}", times, size * 1e-6, "TB/s")


def time_up(heads: int, rows: int, kind: str, bad: set[str]) -> None:
    a = arguments(heads, rows, 16, kind)
    buffers = performed(key_buffers(a, Chunk(rows, a.key_offsets)))
    for tensor in (buffers.latent, buffers.scale):
        if tensor is not None:
            tensor.copy_(torch.rand(tensor.shape, device=DEVICE))
    problem = up_problem(a, buffers)
    graphs, calls = {}, {}  # keeps the calls, because a graph uses the memory of its call
    for config in configs_of(problem):
        step = up_step(a, problem, buffers, config)
        if step.spec.name in bad:
            continue
        try:
            calls[str(config)] = launched(step)
            graphs[str(config)] = capture([calls[str(config)]], warmup=1)
        except Exception as error:  # a config that cannot be launched is a result here
            print(f"  {config}: {str(error)[:150]}", flush=True)
    if kind == "values":
        out = torch.empty(rows, problem.rows, dtype=torch.bfloat16, device=DEVICE)
        library = partial(torch.mm, buffers.latent, a.kv_b_weight.T, out=out)
        graphs["cuBLAS"] = capture([library], warmup=1)
    times = interleaved_us(graphs, 1, rounds=3, replays=3)
    show(f"up {kind} H={heads} K={rows}", times, 2e-6 * rows * problem.rows * RANK, "TFLOP/s")


def up_step(a: Any, problem: UpProblem, buffers: Any, config: UpConfig) -> Launch:
    rows = buffers.latent.shape[0]
    keys, weight = performed(empty_keys(a, rows)), a.kv_b_weight
    return up_launch(a, problem, buffers, weight, keys, SM90, rows=rows, config=config)[0]


def configs_of(problem: UpProblem) -> list[UpConfig]:
    configs = CODE_CONFIGS if problem.scale_block else VALUE_CONFIGS
    return [c for c in configs if problem.joint or (c.block_n <= 128 and not c.flatten)]


def show(name: str, times: dict[str, float], work: float, unit: str) -> None:
    best = sorted(times, key=lambda text: times[text])
    named = "  ".join(f"{text} {times[text]:.1f}" for text in best)
    print(f"{name}: {work / times[best[0]]:.2f} {unit}  {named}", flush=True)
    RESULTS.append({"case": name, "unit": unit, "work": work, "us": times})


def forms_of(kind: str) -> tuple[str, ...]:
    return ("new", "cached", "stored") if kind == "values" else ("new", "cached")


def specs_of(head_counts: list[int]) -> dict[KernelSpec, None]:
    """Returns all kernels that will be timed."""
    specs: dict[KernelSpec, None] = {}
    for kind, heads in itertools.product(KINDS, head_counts):
        a = arguments(heads, 512, 16, kind)
        for form in forms_of(kind):
            call = call_of(form, a, 512)
            made = [latent_launch(call, SM90, config).spec for config in LATENT_CONFIGS]
            specs |= dict.fromkeys(made)
        buffers = performed(key_buffers(a, Chunk(512, a.key_offsets)))
        problem = up_problem(a, buffers)
        steps = (up_step(a, problem, buffers, config) for config in configs_of(problem))
        specs |= dict.fromkeys(step.spec for step in steps)
    return specs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    specs = specs_of(options.heads)
    bad = set(failures_of(specs))
    for rows, kind in itertools.product(options.rows, KINDS):
        for form in forms_of(kind):
            time_latents(form, rows, kind, bad)
    for heads, rows, kind in itertools.product(options.heads, options.rows, KINDS):
        time_up(heads, rows, kind, bad)
        keep("mla_helpers", RESULTS, options.out)


if __name__ == "__main__":
    main()
