"""Cases as processes: all compile side by side, then each has the GPU to itself.

A case's process calls `has_turn` when it has compiled, times what it has, and prints its row as one
line of JSON.
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
    """In a case's process: says that it is ready and waits; False where its driver is
    gone."""
    print(READY, flush=True)
    return bool(sys.stdin.readline())


def finished_rows(
    commands: Mapping[str, Sequence[str]], hold: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, row) of each case, in order; those that fail are named and left out.

    hold: nothing is timed before this file exists.
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
    """Waits for a case to have compiled; False where it ended before."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in process.stdout)


def _finished(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Lets a case time itself; its row, None where it failed."""
    written = process.communicate("go\n")[0].splitlines()
    lines = [line for line in written if line.startswith("{")]  # libraries say goodbye, too
    if process.returncode or not lines:
        return None
    row: dict[str, Any] = json.loads(lines[-1])
    return row
