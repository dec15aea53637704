"""Times tile configs of the LoRA kernels. The planner's rules are based on these times.

    python benchmarks/lora_sweep.py CASES [--top 6]

CASES is a file of lines `hidden rank adapters tokens form config ...`. The form is groups (sorted,
with offsets), single (one adapter), rows (an id for each token, in any order) or expand (sorted). A
config is `t64x64/4w4s3` (tiled: rows, step of K, split, warps, stages; c128+64 after it: columns),
`f16x8x8*128w8s3` (few: rows, columns, slices, their step of K), `r1x1x4096w4` (row: rows, columns,
step) or, for expand, `e16x128x16w4`. Times are microseconds of CUDA graphs with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compiling import failures_of
from lora_shapes import LoraSet, LoraShape, make_set, make_sets
from timing import capture, interleaved_us

from tilewright.codegen.lora.kernels import (
    ExpandConfig,
    FewShrink,
    RowShrink,
    ShrinkConfig,
    TiledShrink,
)
from tilewright.codegen.spec import KernelSpec
from tilewright.codegen.targets import SM90
from tilewright.ops.lora.expand import ExpandArguments
from tilewright.ops.lora.lowering import expand_steps, shrink_steps
from tilewright.ops.lora.shrink import ShrinkArguments
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Planner, Steps, drive

Config = ShrinkConfig | ExpandConfig
FORMS: dict[str, tuple[re.Pattern[str], Callable[..., Config]]] = {
    "t": (re.compile(r"t(\d+)x(\d+)/(\d+)w(\d+)s(\d+)(?:c([\d+]+))?"), TiledShrink),
    "f": (re.compile(r"f(\d+)x(\d+)x(\d+)\*(\d+)w(\d+)s(\d+)"), FewShrink),
    "r": (re.compile(r"r(\d+)x(\d+)x(\d+)w(\d+)"), RowShrink),
    "e": (re.compile(r"e(\d+)x(\d+)x(\d+)w(\d+)"), ExpandConfig),
}


def read_config(text: str) -> Config:
    pattern, make = FORMS[text[0]]
    found = pattern.fullmatch(text)
    if found is None:
        raise SystemExit(f"config: expected one as at the top of this file, got {text!r}")
    if text[0] == "t":
        *sizes, widths = found.groups()
        return TiledShrink(*(int(n) for n in sizes), _widths(widths))
    numbers = [int(number) for number in found.groups()]
    if text[0] == "f":
        numbers[2], numbers[3] = numbers[3], numbers[2]
    return make(*numbers)


def _widths(text: str | None) -> tuple[int, ...]:
    return tuple(int(width) for width in text.split("+")) if text else ()


def arguments(form: str, one: LoraSet) -> ShrinkArguments | ExpandArguments:
    if form == "expand":
        s = torch.randn(3, one.x.shape[0], one.b[0].shape[2], device="cuda").bfloat16()
        return ExpandArguments(s, *one.bases, *one.b, one.offsets)
    if form == "rows":
        return ShrinkArguments(one.x, one.weights, None, one.ids[one.order])
    return ShrinkArguments(one.x, one.weights, None if form == "single" else one.offsets)


def steps_of(a: Any, config: Config) -> Steps:
    if isinstance(config, ExpandConfig):
        return expand_steps(a, SM90, config)
    return shrink_steps(a, SM90, config)


def kernel_of(a: Any, config: Config) -> KernelSpec:
    return drive(steps_of(a, config), Planner(SM90)).specs[-1]


def call_of(a: Any, config: Config) -> Callable[[], Any]:
    machine = machine_of(torch.device("cuda", 0))
    return lambda: drive(steps_of(a, config), machine).outcome.result


def is_wrong(form: str, one: LoraSet, call: Callable[[], Any]) -> bool:
    """Whether a shrink differs from fp32 arithmetic by more than rounding."""
    if form == "expand":
        return False
    ids = one.ids.long()
    if form == "rows":
        ids = ids[one.order]
    want = torch.empty(one.x.shape[0], one.weights.shape[1], device="cuda")
    for adapter in ids.unique().tolist():
        rows = (ids == adapter).nonzero().flatten()
        want[rows] = one.x[rows].float() @ one.weights[adapter].float().T
    got = call().permute(1, 0, 2).reshape(want.shape).float()
    return not float((got - want).norm() / want.norm()) < 4e-3


def sweep(shape: LoraShape, form: str, texts: list[str], bad: set[str], top: int) -> None:
    sets = make_sets(shape, expand=form == "expand")
    made = [arguments(form, one) for one in sets]
    graphs, wrong = {}, []
    for text in texts:
        config = read_config(text)
        if kernel_of(made[0], config).name in bad:
            continue
        try:
            calls = [call_of(a, config) for a in made]
            if is_wrong(form, sets[0], calls[0]):
                wrong.append(text)
            graphs[text] = capture(calls, warmup=1)
        except Exception as error:
            print(f"  {text}: {str(error)[:200]}", flush=True)
    times = interleaved_us(graphs, len(sets), rounds=3, replays=2)
    best = sorted(times, key=lambda text: times[text])
    shown = "  ".join(f"{text} {times[text]:.2f}" for text in best[:top])
    bytes_ = 2 * shape.hidden * (shape.tokens + 3 * shape.rank * sets[0].active)
    if form == "expand":
        bytes_ = 2 * sum(shape.widths) * (2 * shape.tokens + shape.rank * sets[0].active)
    rate = bytes_ / times[best[0]] * 1e-6
    print(f"{form} {shape}: {rate:.2f} TB/s  {shown}", flush=True)
    print("   rest:", "  ".join(f"{text} {times[text]:.2f}" for text in best[top:]), flush=True)
    if wrong:
        print("   WRONG:", *wrong, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=Path)
    parser.add_argument("--top", type=int, default=6)
    options = parser.parse_args()
    torch.manual_seed(0)
    cases = []
    for line in options.cases.read_text().splitlines():
        if line.strip():
            hidden, rank, adapters, tokens, form, *texts = line.split()
            cases.append(
                (LoraShape(int(hidden), int(rank), int(adapters), int(tokens)), form, texts)
            )
    specs: dict[KernelSpec, None] = {}
    for shape, form, texts in cases:
        a = arguments(form, make_set(shape, expand=form == "expand"))
        specs |= dict.fromkeys(kernel_of(a, read_config(text)) for text in texts)
    bad = set(failures_of(specs))
    for shape, form, texts in cases:
        sweep(shape, form, texts, bad, options.top)


if __name__ == "__main__":
    main()
