"""Runs benchmark cases as processes: all compile side by side, then each has the GPU to itself.

A case's process compiles, calls `has_turn`, measures its times, and prints its row as one line of
JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

READY = "ready"


def has_turn() -> bool:
    """Reports that this case is ready and waits for its turn; False if the parent has ended."""
    print(READY, flush=True)
    return bool(sys.stdin.readline())


def finished_rows(
    commands: Mapping[str, Sequence[str]], hold: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, row) of each case, in order; prints the names of cases that fail.

    hold: timing starts once this file exists.
    """
    processes = {name: _started(command) for name, command in commands.items()}
    ready = {name: _is_ready(process) for name, process in processes.items()}
    print(f"compiled: {sum(ready.values())} of {len(ready)}", flush=True)
    while hold is not None and not hold.exists():
        time.sleep(0.2)
    for name, process in processes.items():
        row = _finished(process) if ready[name] else None
        if row is None:
            print(f"{name}: failed", flush=True)
        else:
            yield name, row


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    line = [sys.executable, *command]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _is_ready(process: subprocess.Popen[str]) -> bool:
    """Waits until a case has compiled; False if it ends before that."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in process.stdout)


def _finished(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Lets a case measure its times; returns its row, or None if it failed."""
    written = process.communicate("go\n")[0].splitlines()
    lines = [line for line in written if line.startswith("{")]  # libraries may print other lines
    if process.returncode or not lines:
        return None
    row: dict[str, Any] = json.loads(lines[-1])
    return row
