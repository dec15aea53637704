"""Inserts statements into graphs in which something is fused. A statement is any operator of ATen
that writes or aliases a tensor, applied to any tensor of the graph, at any place, and written in
any way. The fused graph must give the same results as the graph as it was written, including caches
and other inputs.

    python -m tests.compiler.statements --seeds 0:20000     # a table of what was tried
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

import torch

from tests.compiler.statement_programs import (
    FAMILIES,
    Program,
    Spoiled,
    Undrawn,
    base,
    run,
    turn_of,
    turns,
)
from tilewright.compiler.fuse import fuse
from tilewright.compiler.options import Options
from tilewright.ops.checks import ArgumentError

OPTIONS = Options(inner="eager")
PER_PROCESS = 100
DICE, AWAY = 20, 10**6

#: The largest difference between two correct results. Results of mixtures are rounded to bfloat16
#: at different places.
ROUNDING = {"moe": 0.05}
#: Families whose numbers are small integers.
EXACT = {"qkv", "qkv_plain", "cache_store"}
NUDGE = {"moe": 2.0**-8}


def is_float(item):
    return isinstance(item, torch.Tensor) and item.is_floating_point()


def off(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Returns the largest relative error of a tensor. It is infinite if NaN or the shapes
    differ."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        if torch.equal(a, b):
            continue
        x, y = (
            a.double().nan_to_num(9e99, 9e100, -9e100),
            b.double().nan_to_num(9e99, 9e100, -9e100),
        )
        error = (x - y).abs().max() / y.abs().clamp(max=1e30).max().clamp(min=1e-30)
        worst = max(worst, float(error))
    return worst


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    patterns: the patterns that matched.
    wrong: the error of the fused graph, or 0.
    unclear: the error, if the graph itself changes as much when its inputs change by a rounding.
    """

    said: tuple[str, ...]
    family: str
    patterns: tuple[str, ...]
    codes: tuple[str, ...]
    wrong: float
    unclear: bool


def tried(seed: int) -> Outcome | None:
    """Runs one program, both as written and fused. Returns None if no valid program was drawn."""
    try:
        program = Program(seed)
    except (Undrawn, Spoiled):
        return None
    try:
        expected = run(program.module, program.base.inputs)
    except Exception:  # it reads memory that nothing wrote, and happened to run when it was drawn
        return None
    try:
        report = fuse(program.module, OPTIONS)
    except Exception as error:
        return Outcome((*program.said, repr(error)), program.family, (), (), float("inf"), False)
    failed = [str(miss) for miss in report.misses if miss.code == "INTERNAL"]
    if failed:
        return Outcome((*program.said, *failed), program.family, (), (), float("inf"), False)
    patterns = tuple(sorted(site.pattern for site in report.matches))
    wrong, unclear = 0.0, False
    if patterns:
        try:
            actual = run(report.after, program.base.inputs)
        except ArgumentError:  # PyTorch's operators accept these bad values silently
            return Outcome((*program.said, "refused"), program.family, (), (), 0.0, True)
        except Exception as error:  # the original graph did not fail
            failed = (*program.said, f"{type(error).__name__}: {error}".partition("\n")[0])
            return Outcome(failed, program.family, patterns, (), float("inf"), False)
        wrong = off(actual, expected)
    allowed = ROUNDING.get(program.family, 1e-4)
    unclear = wrong > allowed and (
        wrong <= 100 * _sensitivity(program, expected)
        or _reads_what_nothing_wrote(program, expected)
    )
    wrong = 0.0 if wrong <= allowed or unclear else wrong
    codes = tuple(sorted({miss.code for miss in report.misses}))
    return Outcome(tuple(program.said), program.family, patterns, codes, wrong, unclear)


def _reads_what_nothing_wrote(program: Program, expected: list[torch.Tensor]) -> bool:
    """Whether the original graph gives another result if uninitialised memory is filled with
    NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return off(run(program.module, program.base.inputs), expected) > 0
    except Exception:  # an index that nothing wrote
        return True
    finally:
        torch.use_deterministic_algorithms(False)


def _sensitivity(program: Program, expected: list[torch.Tensor]) -> float:
    """Returns how much the result of the original graph changes if its inputs change by a rounding.

    For example, the sign or floor of a number near zero can change, which is no fault of a rewrite.
    Integers are exact and stay as they are.
    """
    if program.family in EXACT:
        return 0.0
    nudged = [
        t * (1 + NUDGE.get(program.family, 2.0**-20)) if is_float(t) else t
        for t in program.base.inputs
    ]
    try:
        return off(run(program.module, nudged), expected)
    except Exception:  # an index in uninitialised memory has changed
        return float("inf")


def tried_all(seeds: range) -> list[tuple[int, Outcome]]:
    """Runs programs one by one in a separate process, because torch may crash it. If a seed gives
    no valid program, another seed with the same turn is used."""
    found = []
    for seed in seeds:
        same_turn = (seed + again * AWAY * len(turns()) for again in range(DICE))
        outcomes = ((s, outcome) for s in same_turn if (outcome := tried(s)) is not None)
        found += [*islice(outcomes, 1)]
    return found


@dataclass(frozen=True)
class Tally:
    """The outcomes of some seeds.

    programs, fused: the number of programs, and of those with a rewrite, by family.
    wrong: the seeds whose fused graphs give wrong results.
    unclear: the number of programs whose results are no evidence.
    left: the turns of which no program was drawn.
    crashed: the first of each `PER_PROCESS` seeds whose process torch took down.
    """

    programs: Counter[str]
    fused: Counter[str]
    wrong: list[int]
    unclear: int
    left: set[tuple[str, str, str]]
    crashed: list[int]


def tallied(every: range) -> Tally:
    """Tries seeds in forks of this process, and prints each wrong outcome."""
    for family in FAMILIES:
        base(family)  # all processes share this trace
    outcomes: list[tuple[int, Outcome]] = []
    crashed = []
    for place in range(0, len(every), PER_PROCESS):
        seeds = every[place : place + PER_PROCESS]
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            try:
                tried_here = pool.submit(tried_all, seeds).result()
            except BrokenProcessPool:  # an operator of torch crashed on unusual arguments
                crashed.append(seeds.start)
                continue
        outcomes += tried_here
        for seed, outcome in tried_here:
            if outcome.wrong:
                print(f"wrong by {outcome.wrong:.2e}, seed {seed}: {outcome}", flush=True)
    return Tally(
        programs=Counter(outcome.family for _, outcome in outcomes),
        fused=Counter(outcome.family for _, outcome in outcomes if outcome.patterns),
        wrong=[seed for seed, outcome in outcomes if outcome.wrong],
        unclear=sum(outcome.unclear for _, outcome in outcomes),
        left=set(map(turn_of, every)) - {turn_of(seed) for seed, _ in outcomes},
        crashed=crashed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    given = "first:last or first:last:step, the last left out"
    parser.add_argument("--seeds", default="0:1000", help=given)
    every = range(*map(int, parser.parse_args().seeds.split(":")))
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    start = time.time()
    found = tallied(every)
    for family, count in sorted(found.programs.items()):
        print(f"{family:12} {count:7} programs, {found.fused[family]:7} with a rewrite")
    print(
        f"{found.programs.total()} programs, {found.fused.total()} with a rewrite, "
        f"{found.unclear} unclear, {len(found.wrong)} wrong: {found.wrong}"
    )
    print(f"of (family, kind, spelling) not drawn: {sorted(found.left)}")
    if found.crashed:
        print(f"torch took its process down: {PER_PROCESS} seeds each from {found.crashed}")
    print(f"seeds {every}, {time.time() - start:.0f} s")
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
