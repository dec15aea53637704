"""Compares the times of the planner's tiles with those of similar tiles.

    python benchmarks/plans.py [--ops linear qkv attention latents mla experts lora]
        [--cases TEXT ...] [--unfitted] [--most 16] [--seconds 90] [--list] [--out DIR]

Each row is one call of an op at the sizes of a published model. The op runs with the tiles that the
planner chooses, and with other tiles. For linears, attention, experts and LoRA, the other tiles are
the plan's tiles with one or two numbers changed: sizes and splits halved or doubled, warps halved
or doubled, one pipeline stage or program more or less; at most `--most` of them. Linears try the
planner's tilings first, and rounded latents try several numbers of parts and warps. For the QKV
projection, the others are the configs that `tune` measures, and the library. For MLA, the others
are attention to the latents themselves, and attention to expanded keys in several tiles. Tiles that
do not compile, or whose result differs from the plan's by more than rounding, are left out.

Times are microseconds of CUDA graphs with a cold L2 cache: all tiles in three rounds, then the plan
and the fastest five in fifteen. ratio: the time of the plan over that of the fastest tiles. us: the
time of each of the tiles; the stored files have the eight fastest. fitted: whether a rule of the
planner was fitted to a measurement of this call; the other rows test the rules. Results go to
results/plans.json. --cases selects the rows whose name contains one of the texts, and --unfitted
those that no rule was fitted to. After --seconds no further row is measured. --list prints the rows
and the number of their tiles, and needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compiling import compile_quietly, processes
from plans_cases import CASES, TARGET, Absorbed, Expanded, Row, chosen_cases
from timing import capture, interleaved_us, keep
from triton.runtime.errors import OutOfResources

from tilewright.codegen.moe.plan import MoePlan
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.runtime.launch import machine_of
from tilewright.ops.runtime.program import Planner, drive

PLAN = "plan"
FLUSH_BYTES = 2**28
# A result is wrong, and not only rounded in another way, if its relative difference from the plan's
# result, in the norm, is larger than this.
WRONG = 2.0**-6
FINALISTS = 5


def named(row: Row) -> dict[str, Any]:
    """Returns the tiles to try by name. The plan's tiles come first."""
    return {PLAN: None} | {_name(one): one for one in row.tried}


def _name(one: Any) -> str:
    if isinstance(one, MoePlan):
        return f"up {one.up}, down {one.down}"
    if isinstance(one, Absorbed | Expanded):
        return type(one).__name__.lower() + f" {getattr(one, 'tiles', None) or ''}".rstrip()
    return str(getattr(one, "config", one) or "library")


def specs_of(row: Row, a: Any, config: Any) -> tuple[KernelSpec, ...]:
    """Returns the kernels of a call with the tiles `config`. Returns no kernels if the op refuses
    the tiles."""
    try:
        return drive(row.steps(a, config), Planner(TARGET), keep=True).specs
    except Exception:  # an error of the emitter means that the op cannot use these tiles
        return ()


def compiled(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Any]]:
    """Compiles the kernels of all rows, and returns the tiles of each row that compile. Raises
    RuntimeError for a row whose op refuses all tiles but the plan's."""
    kernels = {}
    for row in rows:
        a = row.make()
        made = {name: (one, specs_of(row, a, one)) for name, one in named(row).items()}
        if not any(specs for name, (_, specs) in made.items() if name != PLAN):
            raise RuntimeError(f"{row.op} {row.case}: the op refuses all tiles but the plan's")
        kernels[row.op, row.case] = made
    specs = {spec for tried in kernels.values() for _, made in tried.values() for spec in made}
    ordered = sorted(specs, key=lambda spec: spec.name)
    with processes() as pool:
        outcomes = dict(zip(ordered, pool.map(compile_quietly, ordered, chunksize=4), strict=True))
    print(f"{len(ordered)} kernels, {sum(map(bool, outcomes.values()))} do not compile", flush=True)
    return {
        key: {
            name: one
            for name, (one, made) in tried.items()
            if name == PLAN or (made and not any(outcomes[spec] for spec in made))
        }
        for key, tried in kernels.items()
    }


def result_of(row: Row, a: Any, config: Any) -> torch.Tensor:
    made = drive(row.steps(a, config), machine_of(torch.device("cuda", 0))).outcome.result
    assert isinstance(made, torch.Tensor)
    return made


def measured(row: Row, tried: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of results."""
    sets = [row.make() for _ in range(row.sets)]
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    wanted = result_of(row, sets[0], None).double()
    for name, config in tried.items():
        try:
            made = result_of(row, sets[0], config).double()
            if not float((made - wanted).norm() / wanted.norm()) < WRONG:
                print(f"{row.case}: {name} differs", flush=True)
                continue
            calls = [partial(result_of, row, a, config) for a in sets]
            graphs[name] = capture(calls, warmup=1)
        except (RuntimeError, ValueError, NotImplementedError, OutOfResources) as error:
            print(f"{row.case}: {name}: {str(error).splitlines()[0][:120]}", flush=True)
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    timed = partial(interleaved_us, replays=1, before_round=flushed.zero_)
    first = timed(graphs, row.sets, rounds=3)
    finalists = sorted(first, key=lambda name: first[name])[:FINALISTS]
    final = {name: graphs[name] for name in dict.fromkeys((PLAN, *finalists))}
    us = timed(final, row.sets, rounds=15)
    best = min(us, key=lambda name: us[name])
    return {
        "op": row.op,
        "case": row.case,
        "fitted": row.fitted,
        "tried": len(graphs),
        "plan": round(us[PLAN], 2),
        "best": round(us[best], 2),
        "ratio": round(us[PLAN] / us[best], 3),
        "plan_tiles": str(drive(row.steps(sets[0], None), Planner(TARGET)).outcome.reason),
        "best_tiles": best,
        "us": {name: round(time, 2) for name, time in (first | us).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--cases", nargs="+", metavar="TEXT", default=[])
    parser.add_argument("--unfitted", action="store_true")
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    given = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    cases = chosen_cases(given.ops, given.cases, given.unfitted)
    rows = [case.row(given.most) for case in cases]
    if given.list:
        for row in rows:
            a = row.make()
            made = [specs_of(row, a, one) for one in named(row).values()]
            print(f"{row.op:>10} {row.case:<40} {sum(map(bool, made))} of {len(made)} tiles")
        return
    tried, results = compiled(rows), []
    gc.freeze()  # shortens the garbage collection of every capture
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    for row in rows:
        if time.monotonic() - started > given.seconds:
            print("out of time", flush=True)
            break
        results.append(measured(row, tried[row.op, row.case]))
        print(" ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
        keep("plans", results, given.out)
    for which in (True, False):
        ratios = [one["ratio"] for one in results if one["fitted"] == which]
        near, whose = sum(ratio <= 1.05 for ratio in ratios), "fitted" if which else "other"
        print(f"{near} of {len(ratios)} {whose} rows within 5 % of the best", flush=True)


if __name__ == "__main__":
    main()
