"""Times tile configs of the two expert GEMMs and of the sort. The planner's rules are based on
these times.

    python benchmarks/moe_sweep.py CASES [--top 5]

CASES is a file of lines `model format tokens stage config ...`; the stage is up, down or order. The
config of a GEMM is written as GemmConfig prints it, without spaces, as in `s16x64x128w4s3p2`. Its
first letter names the kernel:

    s, t    swapped, not swapped
    d, c    with streamed codes: swapped, not swapped
    r, q    codes by codes: swapped, not swapped

At the end of a config, `f` stands for a flattened loop, `k256` for the size of the parts of K, `h`
for two halves, and `c` for a quantised result. The config of a sort is `c128kw4l512r32`, with k if
the routes are counted beforehand.

Times are microseconds of CUDA graphs with a cold L2 cache, with TFLOP/s and TB/s (of the weights of
the experts in use), beside torch._grouped_mm on sorted rows.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compiling import failures_of
from moe_layers import BY_NAME, WEIGHT_BYTES, Experts, MoeShape, arguments, make_experts
from moe_rows import launches
from timing import capture, interleaved_us

from tilewright.codegen.grouped.kernels import gemm_kernel
from tilewright.codegen.grouped.tiles import SCALED_K, CodesConfig, GemmConfig, ScaledConfig
from tilewright.codegen.moe.kernels import OrderConfig, sort_grids, sort_kernels, up_kernel
from tilewright.codegen.moe.plan import MoePlan, plan_moe
from tilewright.codegen.moe.problem import MoeProblem, down_problem
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90
from tilewright.ops.grouped.lowering import as_words
from tilewright.ops.moe.operands import moe_problem
from tilewright.ops.runtime.kernels import launch
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Launch, Planner

GEMM = re.compile(r"([stcdqr])(\d+)x(\d+)x(\d+)w(\d+)s(\d+)(?:p(\d+))?(f?)(?:k(\d+))?(h?)(c?)")
ORDER = re.compile(r"c(\d+)(k?)w(\d+)l(\d+)r(\d+)")


@dataclass(frozen=True)
class Case:
    shape: MoeShape
    form: str
    tokens: int
    stage: str
    configs: tuple[str, ...]


def read_cases(path: Path) -> list[Case]:
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    return [
        Case(next(s for n, s in BY_NAME.items() if n.startswith(model)), form, int(tokens), stage,
             tuple(configs))
        for model, form, tokens, stage, *configs in lines
    ]  # fmt: skip


def gemm_config(text: str, stage: str) -> GemmConfig:
    found = GEMM.fullmatch(text)
    if found is None:
        raise SystemExit(f"config: expected one like s16x64x128w4s3p2, got {text!r}")
    kind, m, n, k, warps, stages, programs, flat, part, halves, codes = found.groups()
    numbers = (int(m), int(n), int(k), int(warps), int(stages), int(programs or 1))
    if kind in "qr":
        parts = 2 if halves else 1
        return ScaledConfig(*numbers, swapped=kind == "r", parts=parts, codes=bool(codes))
    if kind in "cd":
        more = {"ordered": stage == "down", "swapped": kind == "d", "part_k": int(part or 128)}
        return CodesConfig(*numbers, **more)
    return GemmConfig(*numbers, swapped=kind == "s", flatten=bool(flat))


def order_config(text: str) -> OrderConfig:
    found = ORDER.fullmatch(text)
    if found is None:
        raise SystemExit(f"config: expected one like c128kw4l512r32, got {text!r}")
    chunk, counted, *rest = found.groups()
    return OrderConfig(int(chunk), bool(counted), *(int(number) for number in rest))


def stage_steps(
    case: Case, text: str, base: dict[str, Launch], problem: MoeProblem
) -> list[Launch]:
    """Returns the launches of a case's stage in one config.

    The launches use the scratch memory of `base`, which has the launches of a plain plan.
    """
    if case.stage == "order":
        return order_steps(order_config(text), base, problem)
    config = gemm_config(text, case.stage)
    up = case.stage == "up"
    kernel, statics = (
        up_kernel(problem, config) if up else gemm_kernel(down_problem(problem), config)
    )
    values = dict.fromkeys(pointer.tensor for pointer in kernel.pointers)
    values |= {"num_routes": None, **by_name(base[case.stage])}
    if isinstance(config, ScaledConfig) and config.codes:
        shape = SM90.num_sms * config.programs_per_sm, config.block_m, config.block_n
        values["tile"] = values["x"].new_empty(shape, dtype=torch.bfloat16)
        quantised = by_name(base["quantize_rows"])
        values |= {"hidden": quantised["codes"], "hidden_scale": quantised["scale"]}
    values = as_words(values, problem.down, config)
    known = {"distance": statics.distance} if up else {}
    return [launch(kernel, SM90, config.grid(SM90.num_sms), values, statics, **known)]


def order_steps(config: OrderConfig, base: dict[str, Launch], problem: MoeProblem) -> list[Launch]:
    """Returns the launches of the sort in one config."""
    values = by_name(base["moe_order"])
    grids = sort_grids(problem, config, values["num_routes"])
    values["num_chunks"] = grids["count"][0]
    if config.counted:
        size = values["num_routes"] * problem.experts
        values["counts"] = values["order"].new_empty(size)
        values["total"] = values["order"].new_empty(problem.experts)
    kernels = sort_kernels(problem, config)
    return [launch(kernel, SM90, grids[n], values, s) for n, (kernel, s) in kernels.items()]


def by_name(made: Launch) -> dict[str, Any]:
    """Returns the tensors and numbers of a launch by the names of the kernel's arguments."""
    return {name.removesuffix("_ptr"): value for name, value in made.values.items()}


def plain_plan(problem: MoeProblem, case: Case) -> MoePlan:
    """Returns a plan whose GEMMs read the weights as they are stored."""
    tiles = GemmConfig(16, 64, 128, 4, 3, swapped=True)
    if problem.coded_rows:
        tiles = ScaledConfig(64, 64, 128, 4, 4)
    plan = plan_moe(problem, case.tokens, SM90)
    return replace(plan, up=tiles, down=tiles, decode=None)


def library(case: Case, experts: Experts, base: dict[str, Launch]) -> Any:
    """Returns a call of torch._grouped_mm for the stage on sorted rows. Returns None for codes."""
    if experts.gate_up is None or experts.down is None or case.stage == "order":
        return None
    values = base["up"].values
    rows, ends = base["moe_order"].values["num_routes"], values["ends_ptr"].chunk(2)[0]
    up = case.stage == "up"
    x = (
        torch.randn(rows, case.shape.hidden, device="cuda").bfloat16()
        if up
        else values["hidden_ptr"].view(rows, -1)
    )
    weight = experts.gate_up if up else experts.down
    weight = weight if case.shape.oss else weight.mT
    return lambda: torch._grouped_mm(x, weight, ends)


def measure(case: Case, experts: Experts, bad: dict[str, str], top: int) -> None:
    shape, machine = case.shape, machine_of(torch.device("cuda"))
    sets = [
        arguments(shape, experts, case.tokens)
        for _ in range(min(shape.argument_sets(case.tokens, case.form), 16))
    ]
    problem = moe_problem(sets[0])
    plan = plain_plan(problem, case)
    bases = [launches(a, plan) for a in sets]
    hit = sum(int(a.expert_ids.unique().numel()) for a in sets) / len(sets)
    calls = max(len(sets), 6 if case.tokens <= 1024 else 2)
    graphs: dict[str, Any] = {}
    result = "hidden_ptr" if case.stage == "up" else "y_ptr" if case.stage == "down" else "ends_ptr"
    want: torch.Tensor | None = None
    for text in case.configs:
        if text in bad:
            print(f"    {text}: {bad[text]}")
            continue
        runs = [stage_steps(case, text, base, problem) for base in bases]
        try:
            values = runs[0][-1].values
            got = values[result]
            if got.dtype != torch.float8_e4m3fn:
                got.fill_(0 if case.stage == "order" else torch.nan)
            for step in runs[0]:
                machine.perform(step)
            if got.dtype == torch.float8_e4m3fn:
                got = got.view(-1, SCALED_K).float() * values["hidden_scale_ptr"].view(-1, 1)
                got = got.flatten()[: want.numel()] if want is not None else got.flatten()
            # Kernels that read streamed codes need the hidden rows in another order.
            if want is None and not (case.stage == "down" and text[0] in "cd"):
                want = got.float().clone()
            checked = want is not None and not (case.stage == "down" and text[0] in "cd")
            error = float((got.float() - want).norm() / want.norm()) if checked else 0.0
            # Quantised activations add their own rounding.
            if not error < (4e-2 if case.form == "fp8fp8" else 1e-2):
                print(f"    {text}: WRONG, differs by {error:.3e}")
                continue

            def call(i: int, runs: Any = runs) -> None:
                for step in runs[i % len(runs)]:
                    machine.perform(step)

            graphs[text] = capture([lambda i=i, c=call: c(i) for i in range(calls)], warmup=1)
        except Exception as error:  # a config that cannot be launched is a result here
            print(f"    {text}: {type(error).__name__}: {str(error)[:150]}")
    peer = library(case, experts, bases[0])
    if peer is not None:
        peers = [library(case, experts, base) for base in bases]
        graphs["grouped_mm"] = capture([peers[i % len(peers)] for i in range(calls)], warmup=1)
    times = interleaved_us(graphs, calls, rounds=3, replays=2)
    per_route = (
        4 * shape.hidden * shape.inner if case.stage == "up" else (2 * shape.hidden * shape.inner)
    )
    flop = per_route * case.tokens * shape.num_slots
    read = hit * per_route / 2 * WEIGHT_BYTES[case.form]
    print(f"{shape.name} {case.form} T={case.tokens} {case.stage} ({hit:.1f} experts)")
    ranked = sorted(times, key=lambda name: times[name])
    for name in [*ranked[:top], *[n for n in ranked[top:] if n == "grouped_mm"]]:
        us = times[name]
        print(f"    {us:9.1f} us {flop / us / 1e6:6.0f} TF {read / us / 1e6:5.2f} TB/s  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--only-compile", action="store_true", help="measure nothing")
    parser.add_argument("--compiled", action="store_true", help="all kernels are already compiled")
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = read_cases(options.cases)
    groups: dict[tuple[MoeShape, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.shape, case.form), []).append(case)
    start = time.time()
    made: dict[Case, dict[str, tuple[KernelSpec, ...]]] = {}
    for case in cases:
        experts = make_experts(case.shape, case.form, "meta")
        a = arguments(case.shape, experts, case.tokens, device="meta")
        problem = moe_problem(a)
        base = launches(a, plain_plan(problem, case), Planner(SM90))
        made[case] = {
            text: tuple(step.spec for step in stage_steps(case, text, base, problem))
            for text in case.configs
        }
    wanted = list(dict.fromkeys(s for by in made.values() for specs in by.values() for s in specs))
    bad = {} if options.compiled else failures_of(wanted)
    print(f"{len(wanted)} kernels in {time.time() - start:.0f} s", flush=True)
    if options.only_compile:
        return
    for (shape, form), members in groups.items():
        experts = make_experts(shape, form)
        for case in members:
            failed = {
                text: next(bad[s.name] for s in specs if s.name in bad)
                for text, specs in made[case].items()
                if any(s.name in bad for s in specs)
            }
            measure(case, experts, failed, options.top)
            print(end="", flush=True)
        del experts
        torch.cuda.empty_cache()
    print(f"all in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
