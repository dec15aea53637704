"""Runs each benchmark case in a separate process: all processes compile side by side, then each
process has the GPU to itself.

A case's process compiles, calls `has_turn`, measures its times, and prints its row as one line of
JSON.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

READY = "ready"


def has_turn() -> bool:
    """Reports that this case is ready, and waits for its turn. Returns False if the parent has
    ended."""
    print(READY, flush=True)
    return bool(sys.stdin.readline())


def finished_rows(
    commands: Mapping[str, Sequence[str]], hold: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, row) of each case in order. Prints the names of cases that fail.

    Timing starts once the file `hold` exists.
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
    """Waits until a case has compiled. Returns False if it ends before that."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in process.stdout)


def _finished(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Lets a case measure its times. Returns its row, or None if it failed."""
    written = process.communicate("go\n")[0].splitlines()
    lines = [line for line in written if line.startswith("{")]  # libraries may print other lines
    if process.returncode or not lines:
        return None
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def printed_rows(
    commands: Mapping[str, Sequence[str]], seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name, row) as soon as a case prints a row. A case may print any number of rows.

    `seconds` is the time for all cases. A case is ended if it is not ready by then, or if it takes
    more than its share of the remaining time. The rows that it printed before are kept.
    """
    end = time.monotonic() + seconds
    cases = {name: _Case(name, command) for name, command in commands.items()}
    try:
        ready = [case for case in cases.values() if case.is_ready(end)]
        print(f"compiled: {len(ready)} of {len(cases)}", flush=True)
        for number, case in enumerate(ready):
            left = end - time.monotonic()
            yield from case.rows(time.monotonic() + left / (len(ready) - number))
    finally:
        for case in cases.values():
            case.process.kill()


class _Case:
    """A process whose lines are read while it runs."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self.process = name, _started(command)
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put(None)

    def _next(self, end: float) -> str | None:
        """Returns the next line. Returns None after the last line, or at the time `end`."""
        try:
            return self.lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            print(f"{self.name}: out of time", flush=True)
            self.process.kill()
            return None

    def is_ready(self, end: float) -> bool:
        """Waits until the case has compiled. Returns False if it ends before that."""
        while (line := self._next(end)) is not None:
            if line == READY:
                return True
        print(f"{self.name}: failed before its turn", flush=True)
        return False

    def rows(self, end: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Lets the case measure, and yields its rows."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        while (line := self._next(end)) is not None:
            if line.startswith("{"):  # libraries may print other lines
                yield self.name, json.loads(line)
        if self.process.wait():
            print(f"{self.name}: ended with {self.process.returncode}", flush=True)
