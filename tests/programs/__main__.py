"""Runs random programs and keeps the counts.

    python -m tests.programs --more 6000                    # of every family, after those kept
    python -m tests.programs --family moe --seeds 1200:1240 # these, keeping nothing
    python -m tests.programs --table                        # docs/soundness.md's, of those kept

A family is one of `families.FAMILIES`, whose models are changed at random, or one of
`tasks.OTHERS`, which have separate programs and a separate judge. Counts go to
benchmarks/results/random_programs.json, with an entry for each run of a family; the next run
continues after the last seed. If a run is ended early, the counts so far are kept. If a piece of a
run raises, or its process dies, only the seeds of this piece are left out. The exit status is 1 if
a result was wrong, if a point of a census was silent, or if a piece was not run to its end.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from datetime import date
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.programs.families import FAMILIES
from tests.programs.run import PER_MODEL
from tests.programs.tally import Tally
from tests.programs.tasks import OTHERS, run_task

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "random_programs.json"
PER_TASK, PER_OTHER = 5 * PER_MODEL, 20


def kept() -> list[dict]:
    return json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []


def done(family: str) -> int:
    """Returns the first seed of a family that is in no stored run."""
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
    """Adds counts to the entry that ends at the first of these seeds, if both have the same commit
    and versions. Otherwise makes a new entry."""
    runs = kept()
    total = Tally()
    for known in runs:
        same = all(known[name] == value for name, value in facts.items())
        if known["family"] == family and known["seeds"][1] == first and same:
            runs.remove(known)
            first = known["seeds"][0]
            total = Tally.of(known)
            break
    total.add(tally)
    counts = {f.name: getattr(total, f.name) for f in fields(Tally)}
    made = {"family": family, "seeds": [first, stop], **facts, **counts}
    RESULTS.write_text(json.dumps({"runs": [*runs, made]}, indent=1) + "\n")


def line(family: str, tally: Tally) -> str:
    counts = ", ".join(f"{name} {n}" for name, n in tally.verdicts.most_common())
    dynamo = ", ".join(f"{name} {n}" for name, n in tally.through_dynamo.items())
    counts = f"{counts}; through Dynamo: {dynamo}" if dynamo else counts
    for name in ("silent", "unrecognised"):
        listed = ", ".join(f"{of} {n}" for of, n in getattr(tally, name).items())
        counts = f"{counts}; {name}: {listed}" if listed else counts
    return f"{family:12} {tally.programs:6} programs  {tally.fused:6} fused  {counts}"


#: The verdicts that are columns of the table.
COLUMNS = (
    "same", "nothing fused", "unstable", "undefined", "unseen", "tied", "both raise", "torch's",
    "lost, told", "refused", "raised", "wrong",
)  # fmt: skip


def table() -> str:
    """Returns the stored counts of each family and their sums as a Markdown table."""
    totals: dict[str, Tally] = {}
    for run in kept():
        totals.setdefault(run["family"], Tally()).add(Tally.of(run))
    every = Tally()
    for total in totals.values():
        every.add(total)
    names = ("programs", "models", "broken", "fused")
    rows = [["Family", *names, *COLUMNS, "of those through Dynamo, the same"]]
    rows.append(["---"] * len(rows[0]))
    for family, total in [
        *((f"`{name}`", total) for name, total in totals.items()),
        ("all", every),
    ]:
        row = [family, *(getattr(total, name) for name in names)]
        row += [total.verdicts[name] for name in COLUMNS]
        dynamo = total.through_dynamo
        told = f"{dynamo['same']} of {dynamo.total() - dynamo['not traced']}" if dynamo else "-"
        rows.append([*map(str, row), told])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


Task = tuple[str, int, int]


def pieces(family: str, seeds: str, more: int) -> list[Task]:
    """Returns the tasks for the seeds "first:stop" of a family, or for a number of seeds after the
    stored ones."""
    first, stop = map(int, seeds.split(":")) if seeds else (done(family), done(family) + more)
    step = PER_TASK if family in FAMILIES else PER_OTHER
    return [(family, start, min(start + step, stop)) for start in range(first, stop, step)]


def in_turns(each: Sequence[Sequence[Task]]) -> list[Task]:
    """Yields the first task of each family, then the second, so that all families progress
    equally."""
    return [task for row in zip_longest(*each) for task in row if task is not None]


def pool_of(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def outcomes(
    tasks: Sequence[Task], jobs: int, dynamo_every: int
) -> Iterator[tuple[Task, Tally | BaseException]]:
    """Yields each task in order, with its tally or with the exception that it raised.

    If a process dies, the pool and every task in it end. The tasks that may have run in the process
    then run again, each in a separate process, and the other tasks run in a new pool.
    """

    def alone(task: Task) -> Tally | BaseException:
        with pool_of(1) as pool:
            return _result(pool.submit(run_task, *task, dynamo_every))

    waiting = list(tasks)
    while waiting:
        with pool_of(jobs) as pool:
            running = [pool.submit(run_task, *task, dynamo_every) for task in waiting]
            done = 0
            for task, future in zip(waiting, running, strict=True):
                found = _result(future)
                if isinstance(found, BrokenProcessPool):
                    break
                yield task, found
                done += 1
        suspects, waiting = waiting[done : done + jobs], waiting[done + jobs :]
        with ThreadPoolExecutor(jobs) as threads:
            yield from zip(suspects, threads.map(alone, suspects), strict=True)


def _result(future: Future[Tally]) -> Tally | BaseException:
    return future.exception() or future.result()


def main() -> None:
    names = [*FAMILIES, *OTHERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", default="", help="first:stop; counts are not kept")
    parser.add_argument("--more", type=int, default=0, help="so many seeds more of each family")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--dynamo-every", type=int, default=100, metavar="N")
    parser.add_argument("--table", action="store_true", help="of the counts that are kept")
    given = parser.parse_args()
    if given.table:
        print(table())
        return
    if bool(given.seeds) == bool(given.more):
        parser.error("give one of --seeds, --more and --table")
    facts, totals = environment(), {family: Tally() for family in given.family}
    tasks = in_turns([pieces(family, given.seeds, given.more) for family in given.family])
    failed = 0
    for (family, first, stop), found in outcomes(tasks, given.jobs, given.dynamo_every):
        if isinstance(found, BaseException):
            failed += 1
            print(f"{family} {first}:{stop} was not run to its end:", flush=True)
            traceback.print_exception(found)
            continue
        totals[family].add(found)
        if given.more:
            keep(family, first, stop, found, facts)
    for family, total in totals.items():
        print(line(family, total))
        for seed, why in (*total.found.items(), *total.unaccounted.items()):
            print(f"  {seed}: {why}")
    wrong = sum(t.verdicts["wrong"] + t.verdicts["raised"] for t in totals.values())
    silent = sum(t.silent.total() for t in totals.values())
    sys.exit(bool(wrong or failed or silent))


if __name__ == "__main__":
    main()
