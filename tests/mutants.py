"""Mutation testing: plants one fault at a time in the code and runs the tests that should catch it.

`make mutants SEED=7 N=10` runs `python -m tests.mutants --seed 7 --count 10`. A fault changes one
operator, comparison or number, or removes one statement, in a function of `codegen`, `ops`,
`patterns` or `compiler`. The script plants it in a temporary copy of the repository. It runs the
tests that import the module, the tests of the family and the kernel net, up to the first failure,
and appends the result to `tests/mutants.json`. If no test catches a fault, a test is missing, or
the code is not needed. `--at FILE:LINE` plants every fault of a line. Each run of pytest is a fork
of a process that has imported torch and Triton, but nothing of the repository.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "mutants.json"
LAYERS = ("codegen", "ops", "patterns", "compiler")
#: The number of test files that import a module and are run. There is a limit because some modules
#: are imported everywhere.
MOST_FILES = 24
#: Test files of a family that take a few seconds. They are run first.
QUICK = ("test_graphs", "test_plan_steps")
#: Options of pytest. The deselected test fails for any change in the text of a template.
PYTEST = (
    *("-x", "-q", "-p", "no:cacheprovider"),
    *("--deselect", "tests/test_kernel_net.py::test_the_source_of_a_kernel_is_what_it_was"),
)
#: Modules outside the repository that the tests import. They are imported once, before the forks.
OTHERS_MODULES = (
    *("pytest", "_pytest.assertion.rewrite", "hypothesis", "numpy", "sympy", "networkx"),
    *("torch._dynamo", "torch._inductor.compile_fx", "triton.runtime.interpreter", "transformers"),
)
SHOWN = ("verdict", "file", "line", "before", "after", "by")
OTHER: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
#: Statements that a fault removes. Assignments are not among them, because a later read would raise
#: an error.
LEFT_OUT = (ast.AugAssign, ast.Expr, ast.Raise, ast.Continue, ast.Break, ast.Assert)


@dataclass(frozen=True)
class Fault:
    """A replacement of the bytes from `start` to `end` of a file."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def planted(self, text: bytes) -> bytes:
        return text[: self.start] + self.after.encode() + text[self.end :]


def faults_of(file: str) -> list[Fault]:
    """Yields the faults of the functions of a file, in the order of their places."""
    text, begins = (ROOT / file).read_bytes(), [0]
    for line in text.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found = {}
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            for node, after in changes(function.body):
                start = begins[node.lineno - 1] + node.col_offset
                end = begins[node.end_lineno - 1] + node.end_col_offset
                before = text[start:end].decode()
                found[start, end, after] = Fault(file, node.lineno, start, end, before, after)
    return [found[key] for key in sorted(found)]


def changes(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, str]]:
    """Yields pairs (node, new text) for a function's statements, without its docstring."""
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    for statement in body[documented:]:
        for node in without_annotations(statement):
            if isinstance(node, LEFT_OUT):
                yield node, "pass"
            elif isinstance(node, ast.expr):
                yield from ((node, f"({ast.unparse(other)})") for other in others(node))


def without_annotations(root: ast.AST) -> Iterator[ast.AST]:
    yield root
    for name, value in ast.iter_fields(root):
        if name not in ("annotation", "returns", "decorator_list", "format_spec"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST) and not isinstance(part, ast.JoinedStr):
                    yield from without_annotations(part)


def others(node: ast.expr) -> Iterator[ast.expr]:
    """Yields variants of an expression that differ in one operator or number."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            yield replaced(node, ops=[OTHER[type(op)]()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            yield replaced(node, op=OTHER[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)


def replaced(node: ast.expr, **parts: object) -> ast.expr:
    made = deepcopy(node)
    vars(made).update(parts)
    return made


def tests_of(root: Path, file: str) -> tuple[list[str], list[str]]:
    """Returns the test files for a source file: those that import its module, those of the families
    that contain or import it, and the kernel net. The first list has the quick ones and the one
    named after the module."""
    layer, *rooms, _ = Path(file).parts
    module = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    parent, _, name = module.rpartition(".")
    whole, above = re.escape(f"tilewright.{module}"), re.escape(f"tilewright.{parent}")
    named = re.compile(rf"{whole}\b|from {above} import .*\b{name}\b")
    files = [path for path in sorted(root.glob("tests/**/test_*.py")) if imports(path, named)]
    files, families = files[:MOST_FILES], rooms[:1]
    users = (path for path in sorted((root / layer).glob("*/**/*.py")) if imports(path, named))
    families += [path.relative_to(root / layer).parts[0] for path in users]
    for family, upper in product(dict.fromkeys(families), LAYERS[LAYERS.index(layer) :]):
        found = (root / "tests" / upper / family).rglob("test_*.py")
        files += [path for path in sorted(found) if path not in files]
    first = (*QUICK, f"test_{name}")
    if not files:
        whole_layer = (root / "tests" / layer).glob("test_*.py")
        files = sorted(whole_layer, key=lambda path: (path.stem not in first, path))[:MOST_FILES]
    near = [str(path.relative_to(root)) for path in files if path.stem in first]
    rest = [str(path.relative_to(root)) for path in files if path.stem not in first]
    return near, [*rest, "tests/test_kernel_net.py"]


def imports(path: Path, named: re.Pattern[str]) -> bool:
    return named.search(path.read_text("utf-8")) is not None


def run(root: Path, fault: Fault, limit: float, passing: set[str]) -> dict[str, object]:
    """Returns the result of the tests with a fault planted in a copy of the repository.

    `passing` has the tests that passed without a fault. A test that now fails is run again without
    the fault, and is added to `passing` if it passes.
    """
    path = root / fault.file
    text = path.read_bytes()
    started, by = time.monotonic(), ""
    try:
        path.write_bytes(fault.planted(text))
        near, rest = tests_of(root, fault.file)
        # To collect all of the tests takes longer than to run the near ones.
        code, printed = tested(root, near, limit) if near else (0, "")
        if code == 0:
            code, printed = tested(root, rest, limit)
    finally:
        path.write_bytes(text)
    if code is None:
        verdict = "out of time"
    else:
        verdict = "caught" if code else "survived"
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
        # If the output has no test's name, pytest could not import a module, or the process was
        # killed.
        by = found[1] if found else f"exit code {code}" if code else ""
        if found and by not in passing:
            if tested(root, [by], limit)[0]:
                verdict = "fails without the fault"
            else:
                passing.add(by)
    told = {key: vars(fault)[key] for key in ("file", "line", "before", "after")}
    return told | {"verdict": verdict, "by": by, "seconds": round(time.monotonic() - started)}


def tested(root: Path, tests: list[str], limit: float) -> tuple[int | None, str]:
    """Returns pytest's exit code and output, or None if it had to be stopped."""
    printed = root.parent / "printed"
    child = os.fork()
    if not child:
        os.setsid()
        with printed.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(root)
        sys.path[:] = [str(root / "src"), str(root), *sys.path]
        os.environ["PYTHONPATH"] = str(root / "src")
        code = 1
        try:
            code = int(pytest_main([*PYTEST, *tests]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    ends, code = time.monotonic() + limit, None
    while code is None and time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else time.sleep(0.05)
    # Ends all processes that the tests started, too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    return code, printed.read_text("utf-8", errors="replace")


def pytest_main(arguments: list[str]) -> int:
    import pytest

    return pytest.main(arguments)


def drawn(seed: int, count: int) -> list[Fault]:
    """Returns random faults of all files."""
    files = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]
    found = [fault for path in files for fault in faults_of(str(path.relative_to(ROOT)))]
    return random.Random(seed).sample(found, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one fault")
    parser.add_argument("--at", action="append", default=[], metavar="FILE:LINE")
    given = parser.parse_args()
    faults = drawn(given.seed, given.count) if not given.at else []
    for place in given.at:
        file, _, line = place.partition(":")
        faults += [fault for fault in faults_of(file) if fault.line == int(line)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "repository"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(".*", "site"))
        passing: set[str] = set()
        for name in OTHERS_MODULES:
            importlib.import_module(name)
        for fault in faults:
            result = {"seed": given.seed} | run(root, fault, given.limit, passing)
            known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else []
            known.append(result)
            RECORD.write_text("[\n" + ",\n".join(map(json.dumps, known)) + "\n]\n", "utf-8")
            print(*(result[key] for key in SHOWN), sep="  ", flush=True)


if __name__ == "__main__":
    main()
