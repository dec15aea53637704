"""Implements `make audit`, which compiles the emitted SM100 kernels with several Triton releases
and audits them.

Each release is installed without torch in a separate environment under `.audit/`. A kernel is
compiled there by codegen/build/worker.py, and its machine code is audited. The exit status is 1 if
any kernel fails to compile or breaks a rule.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from tilewright.codegen.build import compile_for
from tilewright.codegen.targets import Target, get_target
from tilewright.tools.audit.cases import AuditCase
from tilewright.tools.audit.families import all_cases as audit_cases
from tilewright.tools.audit.outcome import Audited, outcome_of
from tilewright.tools.matrix.environments import make_environment

RELEASES = ("3.6.0", "3.7.1", "3.9.0")
ENVIRONMENTS = Path(".audit")


@dataclass(frozen=True)
class Outcome(Audited):
    """The outcome of compiling one kernel with one Triton release and auditing it."""

    case: AuditCase = field(kw_only=True)
    release: str = field(kw_only=True)


def environment(release: str, root: Path = ENVIRONMENTS) -> Path:
    """Returns the Python of an environment that has only this release of Triton. Builds the
    environment if it is missing.

    Raises RuntimeError with pip's message if the release cannot be installed.
    """
    folder = root / release
    python = folder / "bin" / "python"
    if _version(python) != release:
        make_environment(sys.executable, folder, f"triton=={release}")
        if _version(python) != release:
            raise RuntimeError(f"{folder}: expected triton {release}, got {_version(python)!r}")
    return python.absolute()


def _version(python: Path) -> str:
    if not python.exists():
        return ""
    command = [str(python), "-c", "import triton; print(triton.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def audit_one(case: AuditCase, release: str, python: Path, target: Target) -> Outcome:
    """Compiles and audits one kernel in the environment of a release."""
    build = partial(compile_for, case.spec, target, python=str(python))
    found = outcome_of(build, target, case.expectations)
    return Outcome(**vars(found), case=case, release=release)


def run_matrix(
    cases: Sequence[AuditCase], releases: Sequence[str], target: Target, workers: int
) -> list[Outcome]:
    """Audits all cases with all releases. `workers` compilers run at a time. Returns the outcomes
    in the order of the table."""
    pythons = {release: environment(release) for release in releases}
    jobs = [(case, release, pythons[release], target) for case in cases for release in releases]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda job: audit_one(*job), jobs))


def as_table(outcomes: Sequence[Outcome], target: Target) -> Table:
    """Returns a table with one row for each kernel and release."""
    table = Table(title=f"{target.name}: emitted kernels by Triton release")
    for name in ("kernel", "triton", "ptxas", "tensor core", "TMA", "regs", "stack"):
        table.add_column(name, justify="left" if name in ("kernel", "tensor core") else "right")
    for name in ("shared", "tmem", "warps", "in flight", "result"):
        table.add_column(name, justify="left" if name == "result" else "right")
    for outcome in outcomes:
        table.add_row(*_row(outcome, target), style="" if outcome.good else "bold red")
    return table


def as_snapshot(outcomes: Sequence[Outcome]) -> str:
    """Returns one line for each kernel and release, with the facts that an upgrade of the compiler
    would change."""
    lines = []
    for outcome in outcomes:
        facts = outcome.audit.summary() if outcome.audit else "does not compile"
        lines.append(f"{outcome.case.name} | triton {outcome.release} | {facts}\n")
    return "".join(lines)


def _row(outcome: Outcome, target: Target) -> list[str]:
    audit = outcome.audit
    if audit is None:
        return [outcome.case.name, outcome.release, *["-"] * 9, "does not compile"]
    mma = " ".join(f"{name} {count}" for name, count in audit.mma.items())
    return [
        outcome.case.name,
        outcome.release,
        audit.ptxas,
        mma or "-",
        f"{audit.count('UTMALDG')}/{audit.count('UTMASTG')}",
        str(audit.registers),
        str(audit.stack_bytes),
        str(audit.shared_bytes),
        str(audit.tmem_columns),
        f"{audit.num_warps}{' ws' if audit.warp_specialized else ''}",
        str(audit.bytes_in_flight(target)),
        "; ".join(outcome.problems) or "; ".join(["ok", *outcome.notes]),
    ]


def main(
    target: str = typer.Option("sm100", help="The chip to compile for."),
    release: list[str] = typer.Option(list(RELEASES), help="The Triton releases to try."),  # noqa: B008
    only: str = typer.Option("", help="Compile only kernels whose name contains this text."),
    workers: int = typer.Option(2, help="The number of compilers that run at a time."),
    snapshot: str = typer.Option(
        "", help="Write one line per kernel and release to this file, to compare runs."
    ),
) -> None:
    """Compile the emitted kernels with several Triton releases and audit the machine code."""
    chip = get_target(target)
    cases = [case for case in audit_cases(chip) if only in case.name]
    if not cases:
        raise typer.BadParameter(f"no kernel's name contains {only!r}")
    started = time.monotonic()
    outcomes = run_matrix(cases, release, chip, workers)
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(as_table(outcomes, chip))
    if snapshot:
        Path(snapshot).write_text(as_snapshot(outcomes), "utf-8")
    bad = [outcome for outcome in outcomes if not outcome.good]
    for outcome in bad:
        console.print(f"[bold]{outcome.case.name}, triton {outcome.release}[/bold]")
        console.print(outcome.error or "\n".join(outcome.problems), markup=False)
    console.print(
        f"{len(outcomes) - len(bad)} of {len(outcomes)} good "
        f"({len(cases)} kernels, {len(release)} releases, {time.monotonic() - started:.0f} s)"
    )
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
