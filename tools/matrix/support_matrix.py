"""Implements `make matrix`, which tests tilewright with other releases of torch, Triton and
transformers.

Each row of `releases` is a virtual environment under `.matrix/`, in which the checkout is
installed. The demo and the tests that depend most on a release run there. Their outcome is a line
of the table in docs/support.md. The exit status is 1 if the demo or any test of a row fails.

    make matrix                  every row
    make matrix ROWS=newest      one, or several with commas between them
    make matrix ROWS=released    what PyPI has today; not kept in the table
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

import typer

from tilewright.tools.matrix.environments import make_environment
from tilewright.tools.matrix.releases import RELEASED, ROWS, Row

ENVIRONMENTS = Path(".matrix")
TABLE = Path("docs/support.md")
#: The packages that the tests and the demo need in addition to the packages of the row.
BESIDES = ("peft", "accelerate", "hypothesis", "jsonschema", "pytest", "pytest-xdist", "grandalf",
           "matplotlib")  # fmt: skip
#: The tests to run, for each column of the table that counts them.
TESTS = {
    "graphs": (
        "tests/compiler/test_spelling.py",
        "tests/compiler/test_access.py",
        "tests/tools/test_zoo_snapshots.py",
    ),
    "ops": (
        "tests/ops/test_schemas.py",
        "tests/ops/test_contract.py",
        "tests/ops/lora/test_lora.py",
    ),
    "interpreter": (
        "tests/codegen/build/test_interpreter.py",
        "tests/codegen/emit/test_emit.py",
        "tests/codegen/lora/test_templates.py",
        "tests/ops/test_lowerings.py",
    ),
    "quantised": (
        "tests/compiler/test_prepare.py",
        "tests/compiler/test_prepared_bitsandbytes.py",
        "tests/compiler/test_prepared_linears.py",
        "tests/compiler/test_weights.py",
        "tests/tools/test_blocks.py",
    ),
    "serving": (
        "tests/compiler/test_engine.py",
        "tests/compiler/test_engine_compiled.py",
        "tests/compiler/test_engine_enabled.py",
        "tests/compiler/test_engine_told.py",
        "tests/compiler/test_serving.py",
    ),
}
COLUMNS = ("row", "Python", "torch", "Triton", "transformers", "demo", *TESTS, "tried", "differs")
HEADER = f"| {' | '.join(COLUMNS)} |"


@dataclass(frozen=True)
class Count:
    """The counts of one kind of tests: the number of tests that passed, and the names of the tests
    that failed."""

    passed: int
    failed: tuple[str, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"{len(self.failed)} of {self.passed + len(self.failed)} fail" if self.failed else (
            f"{self.passed} pass")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row. `demo` is the last line of the demo's output if the demo failed, the
    last line of the reason if the environment could not be made, and otherwise ""."""

    row: Row
    versions: dict[str, str]
    demo: str
    counts: dict[str, Count]

    @property
    def good(self) -> bool:
        return not self.demo and all(not c.failed and not c.error for c in self.counts.values())


def interpreter(version: str) -> str | None:
    """Returns the path of a working Python of this version, from PATH or pyenv. Returns None if
    there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return str(candidate)
    return None


def requirements(row: Row) -> list[str]:
    """Returns the packages that pip installs for a row. pip installs them in one call so that their
    versions agree."""
    named = [("torch", row.torch), ("triton", row.triton), ("transformers", row.transformers)]
    own = [f"{name}=={version}" if version else name for name, version in named]
    return [*own, *BESIDES, *row.besides]


def made_of(row: Row, checkout: Path) -> str:
    """Returns a description of the environment of a row, which is stored in the environment.

    It has the path of the checkout, because an editable install refers to it. It also has the
    packages of the row, and a hash of the project's pyproject.toml.
    """
    project = hashlib.sha256((checkout / "pyproject.toml").read_bytes()).hexdigest()
    parts = {"python": row.python, "installed": requirements(row)}
    return json.dumps(parts | {"checkout": str(checkout), "pyproject": project}, indent=1)


def environment(row: Row, root: Path = ENVIRONMENTS) -> Path:
    """Returns the Python of the environment of a row. The environment is made again if its
    description has changed; for the row RELEASED, it is made again every time.

    Raises RuntimeError if this machine has no such Python. Also raises RuntimeError, with pip's
    message, if pip fails.
    """
    folder, checkout = root / row.name, Path.cwd()
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = made_of(row, checkout)
    if row is RELEASED or not stamp.exists() or stamp.read_text("utf-8") != wanted:
        base = interpreter(row.python)
        if base is None:
            raise RuntimeError(f"no Python {row.python} on this machine")
        make_environment(base, folder, *requirements(row), "-e", str(checkout))
        stamp.write_text(wanted, "utf-8")
    return python.absolute()


def try_row(row: Row, workers: int) -> Outcome:
    """Runs the demo and the chosen tests in a row's environment."""
    try:
        python = environment(row)
    except RuntimeError as error:
        return Outcome(row, {}, str(error).strip().splitlines()[-1], {})
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    demo = subprocess.run(
        [str(python), "examples/demo.py"], capture_output=True, text=True, env=plain, check=False
    )
    log = ENVIRONMENTS / row.name / "demo.log"
    log.write_text(f"{demo.stdout}\n{demo.stderr}", "utf-8")
    words = (demo.stderr or demo.stdout).strip().splitlines()[-1:] if demo.returncode else []
    counts = {kind: _count(python, kind, row, workers, plain) for kind in row.runs}
    return Outcome(row, _versions(python), " ".join(words), counts)


def _count(python: Path, kind: str, row: Row, workers: int, env: dict[str, str]) -> Count:
    results = ENVIRONMENTS / row.name / f"{kind}.xml"
    results.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider"]
    command += [f"--junitxml={results}", *TESTS[kind]]
    log = ENVIRONMENTS / row.name / f"{kind}.log"
    with log.open("w") as out:
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=env, check=False)
    if not results.exists():
        return Count(0, error=f"pytest did not finish: {log}")
    return counted(results)


def counted(results: Path) -> Count:
    """Counts the tests of a JUnit file, without those that were skipped."""
    cases = list(ElementTree.parse(results).iter("testcase"))
    tags = {f"{c.get('classname')}::{c.get('name')}": {part.tag for part in c} for c in cases}
    failed = tuple(name for name, found in tags.items() if found & {"failure", "error"})
    ran = [name for name, found in tags.items() if "skipped" not in found]
    return Count(len(ran) - len(failed), failed)


def _versions(python: Path) -> dict[str, str]:
    code = "import importlib.metadata as m, platform; print(platform.python_version()," + ",".join(
        f"m.version({name!r})" for name in ("torch", "triton", "transformers")
    ) + ")"  # fmt: skip
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return dict(
        zip(("python", "torch", "triton", "transformers"), done.stdout.split(), strict=False)
    )


def line(outcome: Outcome, day: str) -> str:
    """Returns the table row of an outcome."""
    row, versions = outcome.row, outcome.versions
    found = [
        versions.get(n) or getattr(row, n) for n in ("python", "torch", "triton", "transformers")
    ]
    counts = [
        str(outcome.counts.get(kind, "not run")) if kind in row.runs else "-" for kind in TESTS
    ]
    cells = [row.name, *found, outcome.demo or "good", *counts, day, row.differs]
    return f"| {' | '.join(cells)} |"


def with_lines(text: str, lines: Sequence[str]) -> str:
    """Returns the document `text` with new table rows. Each line of `lines` replaces the row of the
    same name, or is added. The rows are in the order of ROWS, and other rows are removed."""
    before, _, rest = text.partition(HEADER)
    rule, *body = rest.strip("\n").splitlines()
    table = list(takewhile(lambda row: row.startswith("| "), body))
    after = body[len(table) :]
    named = {row.split("|")[1].strip(): row for row in (*table, *lines)}
    kept = [named[row.name] for row in ROWS if row.name in named]
    return before + "\n".join([HEADER, rule, *kept, *after]) + "\n"


def main(
    rows: str = typer.Option("", help="Comma-separated names of rows; empty for all rows."),
    workers: int = typer.Option(2, help="The number of test processes that run at a time."),
    keep: bool = typer.Option(False, help="Keep the environments (some 5 GB each)."),
) -> None:
    """Try tilewright with the releases of torch, Triton and transformers that it supports."""
    known = {row.name: row for row in (*ROWS, RELEASED)}
    names = [name for name in rows.split(",") if name] or [row.name for row in ROWS]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no row {unknown[0]!r}; there are {', '.join(known)}")
    bad = False
    for name in names:
        started = time.monotonic()
        outcome = try_row(known[name], workers)
        print(line(outcome, datetime.date.today().isoformat()))
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        for count in outcome.counts.values():
            print(*(f"  {test}" for test in count.failed), sep="\n", end="\n" * bool(count.failed))
        if known[name] is not RELEASED:
            today = line(outcome, datetime.date.today().isoformat())
            TABLE.write_text(with_lines(TABLE.read_text("utf-8"), [today]), "utf-8")
        if not keep:
            shutil.rmtree(ENVIRONMENTS / name, ignore_errors=True)
        bad |= not outcome.good
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
