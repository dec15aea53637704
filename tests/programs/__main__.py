"""Runs random programs and keeps the counts.

    python -m tests.programs --more 6000                    # of every family, after those kept
    python -m tests.programs --family moe --seeds 1200:1240 # these, keeping nothing

A family is one of `families.FAMILIES`, whose models are broken at random, or one of OTHERS, which
have programs and a judge of their own. Counts go to benchmarks/results/random_programs.json, one
entry for each run of a family; the next run goes on behind the last seed. Exits with 1 where a
result was wrong. `python -m tests.programs.table` prints what docs/soundness.md shows of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.programs import exported, modes, outside
from tests.programs.families import FAMILIES
from tests.programs.run import PER_MODEL, task
from tests.programs.tally import Tally

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "random_programs.json"
PER_TASK = 5 * PER_MODEL

OTHERS: dict[str, Callable[[Iterable[int]], Tally]] = {
    "outside": outside.run,
    "exported": exported.run_all,
    "modes": modes.run,
}


def run_task(family: str, first: int, stop: int, dynamo_every: int) -> Tally:
    """Runs the seeds of a family in a process of its own."""
    if family in FAMILIES:
        return task(family, first, stop, dynamo_every)
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    return OTHERS[family](range(first, stop))


def kept() -> list[dict]:
    return json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []


def done(family: str) -> int:
    """The first seed of a family that no kept run has."""
    return max((r["seeds"][1] for r in kept() if r["family"] == family), default=0)


def environment() -> dict:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def keep(family: str, first: int, stop: int, tally: Tally, facts: dict) -> None:
    """Adds counts to the entry that ends at the first seed under equal facts, or as a new one."""
    runs = kept()
    total = Tally()
    for known in runs:
        same = all(known[name] == value for name, value in facts.items())
        if known["family"] == family and known["seeds"][1] == first and same:
            runs.remove(known)
            first = known["seeds"][0]
            total = Tally(**{f.name: known[f.name] for f in fields(Tally)})
            break
    total.add(tally)
    counts = {f.name: getattr(total, f.name) for f in fields(Tally)}
    made = {"family": family, "seeds": [first, stop], **facts, **counts}
    RESULTS.write_text(json.dumps({"runs": [*runs, made]}, indent=1) + "\n")


def line(family: str, tally: Tally) -> str:
    counts = ", ".join(f"{name} {n}" for name, n in tally.verdicts.most_common())
    dynamo = ", ".join(f"{name} {n}" for name, n in tally.through_dynamo.items())
    counts = f"{counts}; through Dynamo: {dynamo}" if dynamo else counts
    return f"{family:12} {tally.programs:6} programs  {tally.fused:6} fused  {counts}"


def main() -> None:
    names = [*FAMILIES, *OTHERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", default="", help="first:stop; counts are not kept")
    parser.add_argument("--more", type=int, default=0, help="so many seeds more of each family")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--dynamo-every", type=int, default=100, metavar="N")
    given = parser.parse_args()
    if bool(given.seeds) == bool(given.more):
        parser.error("give one of --seeds and --more")
    wrong, facts = 0, environment()
    for family in given.family:
        if given.seeds:
            first, stop = map(int, given.seeds.split(":"))
        else:
            first = done(family)
            stop = first + given.more
        cuts = [*range(first, stop, PER_TASK), stop]
        ends = cuts[1:]
        total = Tally()
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            results = pool.map(
                run_task, [family] * len(ends), cuts[:-1], ends, [given.dynamo_every] * len(ends)
            )
            for start, end, tally in zip(cuts, ends, results, strict=False):
                total.add(tally)
                if given.more:
                    keep(family, start, end, tally, facts)
        print(line(family, total), flush=True)
        for seed, why in total.found.items():
            print(f"  {seed}: {why}")
        wrong += total.verdicts["wrong"] + total.verdicts["raised"]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
