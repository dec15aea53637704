"""Benchmark of `grouped_matmul` against torch's grouped_mm, and of `quantize_nvfp4` against a copy.

    python benchmarks/grouped_matmul.py [CASE ...] [--out F]

A case is `model/stage/form/tokens,tokens`, for instance `qwen3/up/dense/1,16`. The stage is up or
down. The form is dense, fp16, fp8_rows (both operands are codes) or a format of
ops.formats.expert_weight. With a + after a number of tokens, tiles other than the planner's are
also timed. `quantise` (or `quantise+`) measures the quantiser. Without cases, those of the kept
results are measured.

Routing is random. Times are microseconds of CUDA graphs with a cold L2 cache; TB/s count the
weights of the experts in use. float16 is also timed without graphs: for float16, torch loops over
the groups and waits for the GPU, so its call cannot be captured.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compiling import failures_of
from moe_layers import BY_NAME, COLD_BYTES, WEIGHT_BYTES, MoeShape, coded, dense, routes
from timing import Call, capture, environment, interleaved_us

from tilewright.codegen.arithmetic import next_power_of_2
from tilewright.codegen.grouped.nvfp4_kernels import QuantizeConfig
from tilewright.codegen.grouped.plan import DECODED_ROWS, GroupedPlan, grouped_config
from tilewright.codegen.grouped.tiles import DequantizeConfig, GemmConfig
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90
from tilewright.ops.formats import fp8_block
from tilewright.ops.grouped.arguments import GroupedMatmulArguments
from tilewright.ops.grouped.lowering import grouped_matmul_steps
from tilewright.ops.grouped.matmul import OP
from tilewright.ops.grouped.quantize_nvfp4 import OP as QUANTIZE
from tilewright.ops.grouped.quantize_nvfp4 import QuantizeNvfp4Arguments, quantize_nvfp4_steps
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Planner, drive

KEPT = (
    "qwen3/up/dense/1,16,128,1024,8192", "qwen3/down/dense/1,16,128,1024,8192",
    "mixtral/up/dense/1,16,128,1024,8192", "gpt/up/dense/16,1024,8192",
    "deepseek/down/dense/16,1024,8192", "qwen3/up/fp16/16,1024,8192",
    "qwen3/up/nvfp4/16,512,1024,8192", "qwen3/up/mxfp4/16,512,1024,8192",
    "qwen3/up/fp8/16,512,1024,8192", "qwen3/up/int4/16,512,1024,8192", "quantise",
    "qwen3/up/fp8_rows/16,1024,8192",
)  # fmt: skip
DEVICE = torch.device("cuda")
MANY_ROWS = (
    GemmConfig(64, 128, 64, 4, 3, 2), GemmConfig(64, 128, 64, 4, 4, 2),
    GemmConfig(64, 128, 64, 4, 4, 2, swapped=True), GemmConfig(64, 256, 64, 8, 4, flatten=True),
    GemmConfig(128, 128, 64, 4, 3, 2), GemmConfig(128, 128, 64, 8, 4, flatten=True),
    GemmConfig(128, 256, 64, 8, 3, flatten=True), GemmConfig(128, 256, 64, 8, 4, flatten=True),
)  # fmt: skip
DECODERS = (DequantizeConfig(), DequantizeConfig(64, 128, 8), DequantizeConfig(16, 256, 4),
            DequantizeConfig(32, 256, 8), DequantizeConfig(8, 512, 4))  # fmt: skip
QUANTISERS = (
    (32, 256, 4), (32, 128, 4), (16, 256, 4), (32, 64, 1), (32, 64, 2), (64, 128, 8), (16, 512, 4),
    (128, 64, 4),
)  # fmt: skip


def few_rows(block_m: int) -> tuple[GemmConfig, ...]:
    tiles = ((128, 128, 8, 4), (64, 128, 4, 4, 2), (128, 64, 4, 4, 2), (128, 128, 4, 4),
             (64, 256, 4, 3, 2))  # fmt: skip
    return tuple(GemmConfig(block_m, *numbers, swapped=True) for numbers in tiles)


def candidates(rows: int) -> tuple[GemmConfig, ...]:
    """Returns the configs to try for groups of `rows` rows on average."""
    if rows <= 16:
        return few_rows(16)
    if rows <= 96:
        size = min(next_power_of_2(rows), 64)
        return (*few_rows(size)[:3], *MANY_ROWS[:4])
    return MANY_ROWS


@dataclass(frozen=True)
class Case:
    """One GEMM of a model's experts at a number of tokens."""

    shape: MoeShape
    stage: str
    tokens: int
    form: str
    sweep: bool = False

    @property
    def dims(self) -> tuple[int, int, int]:
        """(E, N, K)"""
        s = self.shape
        return (s.num_experts, 2 * s.inner, s.hidden) if self.stage == "up" else (
            s.num_experts, s.hidden, s.inner
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return self.tokens * self.shape.num_slots


def cases_of(text: str) -> list[Case]:
    """Returns the cases of one argument."""
    model, stage, form, tokens = text.split("/")
    shape = next(s for name, s in BY_NAME.items() if name.startswith(model))
    numbers = tokens.split(",")
    return [Case(shape, stage, int(n.rstrip("+")), form, n.endswith("+")) for n in numbers]


def weight_bytes(case: Case) -> float:
    return WEIGHT_BYTES.get(case.form.removesuffix("_rows"), 2.0)


def weights(case: Case) -> dict[str, Any]:
    if case.form in ("dense", "fp16"):
        weight = dense(*case.dims)
        return {"weight": weight.half() if case.form == "fp16" else weight}
    form = case.form.removesuffix("_rows")
    codes, scale, block = coded(form, *case.dims)
    return {"weight": codes, "weight_format": form, "weight_scale": scale,
            "scale_block": block}  # fmt: skip


def arguments(case: Case, given: dict[str, Any]) -> list[GroupedMatmulArguments]:
    """Returns calls whose weights and rows together exceed the L2 cache."""
    experts, n, k = case.dims
    share = 1 - (1 - case.shape.num_slots / experts) ** case.tokens
    read = share * experts * n * k * weight_bytes(case)
    made = []
    for _ in range(min(max(2, -(-int(COLD_BYTES) // int(read))), 12)):
        ids, _weights = routes(case.shape, case.tokens, "random")
        ends = torch.bincount(ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)
        x = torch.randn(case.rows, k, device=DEVICE).to(
            torch.float16 if case.form == "fp16" else torch.bfloat16
        )
        own: dict[str, Any] = {"x": x}
        if case.form.endswith("_rows"):
            own["x"], own["x_scale"] = fp8_block.quantize_rows(x)
        made.append(GroupedMatmulArguments(group_offsets=ends, end_offsets=True, **own, **given))
    return made


def forced(a: GroupedMatmulArguments, plan: GroupedPlan) -> Call:
    """Returns a call with a plan in place of the planner's."""
    machine = machine_of(DEVICE)
    return lambda: drive(grouped_matmul_steps(a, SM90, plan), machine)


def peer(a: GroupedMatmulArguments) -> Call:
    return lambda: torch.nn.functional.grouped_mm(a.x, a.weight.mT, offs=a.group_offsets)


def forced_plans(case: Case) -> dict[str, GroupedPlan]:
    """Returns the plans that are timed next to the op: other tiles, and tiles after a kernel that
    decodes all weights first."""
    if not case.sweep:
        return {}
    rows = -(-case.rows // case.shape.num_experts)
    plans = {str(config): GroupedPlan(config, None, "") for config in candidates(rows)}
    if case.form not in DECODED_ROWS:
        return plans
    # This is the planner's config for decoded weights.
    config = grouped_config(-(-next_power_of_2(case.rows) // case.shape.num_experts), dense=True)
    for tiles in DECODERS:
        name = f"decoded by {tiles.block_n}x{tiles.block_k} w{tiles.num_warps}"
        plans[name] = GroupedPlan(config, tiles, "")
    return plans


def measure(case: Case, given: dict[str, Any]) -> dict[str, Any]:
    sets = arguments(case, given)
    calls = max(len(sets), 4 if case.tokens <= 1024 else 2)
    graphs: dict[str, Any] = {}
    x_scale = sets[0].x_scale
    few = replace(
        sets[0], x=sets[0].x[:64], group_offsets=sets[0].ends.clamp(max=64),
        x_scale=None if x_scale is None else x_scale[:64],
    )  # fmt: skip
    want = OP.reference(few)
    for name, plan in forced_plans(case).items():
        try:
            # Each call decodes into separate memory, so there is room for fewer calls.
            runs = [forced(a, plan) for a in (sets[:2] if plan.decode else sets)]
            graphs[name] = capture([runs[i % len(runs)] for i in range(calls)], warmup=1)
        except Exception as error:  # the error of a config is its result
            print(f"    {name}: {type(error).__name__}: {str(error)[:150]}")
    got = OP.call(sets[0])[:64]
    error = float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-9))
    graphs["op"] = capture([lambda i=i: OP.call(sets[i % len(sets)]) for i in range(calls)], 1)
    if case.form == "dense":
        peers = [peer(a) for a in sets]
        graphs["grouped_mm"] = capture([peers[i % len(peers)] for i in range(calls)], warmup=1)
    times = interleaved_us(graphs, calls, rounds=4, replays=2)
    if case.form == "fp16":
        times["grouped_mm"] = eager_us(peer(sets[0]))
        times["op, eager"] = eager_us(lambda: OP.call(sets[0]))
    return report(case, sets, times, error)


def eager_us(call: Call, runs: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / runs


def report(case: Case, sets: list[Any], times: dict[str, float], error: float) -> dict[str, Any]:
    _, n, k = case.dims
    hit = sum(int((a.ends.diff(prepend=a.ends.new_zeros(1)) > 0).sum()) for a in sets) / len(sets)
    flop, read = 2 * case.rows * n * k, hit * n * k * weight_bytes(case)
    print(f"{case.shape.name} {case.stage} {case.form} T={case.tokens} {hit:.0f} experts, "
          f"error {error:.1e}")  # fmt: skip
    for name in sorted(times, key=lambda name: times[name]):
        us = times[name]
        rates = f"{flop / us / 1e6:6.0f} TF {read / us / 1e6:5.2f} TB/s"
        print(f"    {us:9.1f} us {rates}  {name}")
    print(end="", flush=True)
    return {"model": case.shape.name, "stage": case.stage, "form": case.form, "error": error,
            "tokens": case.tokens, "us": times}  # fmt: skip


QUANTISED = ((128, 2048), (8192, 2048), (65536, 2048), (65536, 7168))


def quantise_specs() -> list[KernelSpec]:
    made = []
    for _, inner in QUANTISED:
        x = torch.empty(256, inner, dtype=torch.bfloat16, device=DEVICE)
        ends = torch.empty(129, dtype=torch.int32, device=DEVICE)
        grouped = QuantizeNvfp4Arguments(x, ends, torch.ones(128, device=DEVICE))
        for a in (grouped, QuantizeNvfp4Arguments(x)):
            made += QUANTIZE.plan_for(a, SM90.name).specs
    return made


def quantise(sweep: bool) -> list[dict[str, Any]]:
    """Measures `quantize_nvfp4` on the rows of Qwen3's and DeepSeek's experts."""
    kept = []
    for rows, inner in QUANTISED:
        # The operands of all calls of a graph together exceed the L2 cache.
        count = max(1, min(8, int(COLD_BYTES) // (rows * inner * 2)))
        ends = torch.arange(0, 129, device=DEVICE) * (rows // 128)
        sets = [
            QuantizeNvfp4Arguments(torch.randn(rows, inner, device=DEVICE).bfloat16(),
                                   ends.to(torch.int32), torch.ones(128, device=DEVICE))
            for _ in range(count)
        ]  # fmt: skip
        graphs = {"planned": capture([lambda a=a: QUANTIZE.call(a) for a in sets], warmup=1)}
        configs = [QuantizeConfig(*c) for c in QUANTISERS] if sweep else []
        for config in configs:
            calls = [codes(a, config) for a in sets]
            name = f"{config.block_r}x{config.block_c} w{config.num_warps}"
            graphs[name] = capture(calls, warmup=1)
        alone = [QuantizeNvfp4Arguments(a.x) for a in sets]
        graphs["one group"] = capture([lambda a=a: QUANTIZE.call(a) for a in alone], warmup=1)
        graphs["copy"] = capture([lambda a=a: a.x.clone() for a in sets], warmup=1)
        times = interleaved_us(graphs, count, rounds=4, replays=2)
        print(f"quantize_nvfp4 {rows} x {inner}")
        for name, us in times.items():
            moved = rows * inner * (4 if name == "copy" else 2 + 0.5625)
            print(f"    {us:9.1f} us {moved / us / 1e3:6.0f} GB/s  {name}", flush=True)
        kept.append({"rows": rows, "inner": inner, "us": times})
    return kept


def codes(a: QuantizeNvfp4Arguments, config: QuantizeConfig) -> Call:
    machine = machine_of(DEVICE)
    return lambda: drive(quantize_nvfp4_steps(a, SM90, config), machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=KEPT)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    start = time.time()
    grids = [cases_of(text) for text in options.cases if text not in ("quantise", "quantise+")]
    wanted = []
    for cases in grids:
        given = weights(cases[0])
        for case in cases:
            a = arguments(case, given)[0]
            for plan in (None, *forced_plans(case).values()):
                steps = grouped_matmul_steps(a, SM90, plan)
                wanted += drive(steps, Planner(SM90), keep=True).specs
        del given, a
        torch.cuda.empty_cache()
    if any(text.startswith("quantise") for text in options.cases):
        wanted += quantise_specs()
    failures_of(list(dict.fromkeys(wanted)))
    print(f"{len(set(wanted))} kernels in {time.time() - start:.0f} s", flush=True)
    kept: dict[str, Any] = {"environment": environment(), "grouped_matmul": []}
    for text in options.cases:
        if text in ("quantise", "quantise+"):
            kept["quantize_nvfp4"] = quantise(text.endswith("+"))
    for cases in grids:
        given = weights(cases[0])
        kept["grouped_matmul"] += [measure(case, given) for case in cases]
        del given
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(kept, indent=1))
    print(f"all in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
