"""Compares plans with stored ones, at every count of rows at which a plan may change.

A test gives a function from a count to a plan. `steps` calls it with all small counts and the
counts beside powers of two, and tells from which counts on it returns what. The result of a test is
a file of such lines in `tilewright_snapshots/plans`; `--tilewright-update` writes it, and the diff
tells which calls get other kernels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tilewright.tools.pytest_plugin import UPDATE

FOLDER = Path(__file__).parent / "tilewright_snapshots" / "plans"
#: All small counts, and the counts beside powers of two and half-way between them.
FEW = (*range(1, 18), *(n + more for n in (*range(24, 257, 8), *range(288, 513, 32))
                        for more in (0, 1)))  # fmt: skip
MANY = tuple(n + more for power in range(9, 17) for n in (2**power, 3 * 2**power // 2)
             for more in (-1, 0, 1))  # fmt: skip
COUNTS = tuple(sorted({*FEW, *MANY}))


def said(plan: Any) -> str:
    """Returns all fields of a plan, also those that its description leaves out."""
    if is_dataclass(plan):
        values = (said(getattr(plan, one.name)) for one in fields(plan) if one.name != "statics")
        return f"{type(plan).__name__}({', '.join(values)})"
    if isinstance(plan, float):
        return f"{plan:.5g}"
    if isinstance(plan, (tuple, list)):
        return f"({', '.join(map(said, plan))})"
    return str(plan)


def short(plans: Iterable[Any]) -> str:
    """Returns the number of some plans, and a hash of them all."""
    lines = list(map(said, plans))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return f"{len(lines)} {digest[:12]}"


def steps(plan: Callable[[int], Any], counts: Iterable[int] = COUNTS) -> str:
    """Returns the plans of all counts; one plan for each run of counts that have the same."""
    runs = groupby(((count, said(plan(count))) for count in counts), key=lambda one: one[1])
    return "; ".join(f"{next(run)[0]}: {told}" for told, run in runs)


def check(name: str, lines: dict[str, str], config: Any) -> None:
    """Compares lines with the file of this name, or writes it."""
    path = FOLDER / f"{name}.snapshot"
    if config.getoption(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{key} => {line}\n" for key, line in lines.items()), "utf-8")
    stored = dict(line.split(" => ", 1) for line in path.read_text("utf-8").splitlines())
    changed = {key for key in stored | lines if stored.get(key) != lines.get(key)}
    told = [f"{key}: {lines.get(key)}, stored {stored.get(key)}" for key in sorted(changed)]
    assert not told, (told[:3], f"{len(told)} differ; if this is intended: {UPDATE}")
