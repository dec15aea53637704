"""Tests the sum of 2 and 4 ranks that share one device, also when one of the processes is killed.

`one_device.py` has what a rank does. The same is tried on the CPU with memory that processes share,
where 4 ranks are enough: sums of two numbers do not depend on their order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.collective.one_device import ENVIRONMENT, PARTS, be_fork
from tilewright.ops.runtime import watch

_ROOT = Path(__file__).resolve().parents[3]
_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]
_WORLDS = [("cpu", 4), ("cuda", 2), ("cuda", 4)]
#: Seconds after which ranks that still run are killed.
_LIMIT_S = {"cpu": 300, "cuda": 180}
#: The number of seconds within which a rank must end if it waits for a killed rank.
_BEREFT_S = 30


def _mark(device, *rest):
    return pytest.param(device, *rest, marks=_GPU if device == "cuda" else ())


@dataclass(frozen=True)
class World:
    """The ranks of a run, after they have ended. codes: exit codes; None for a rank that had to be
    killed. errors: what each rank wrote to standard error. parts: what each rank found, by part.
    waited: seconds from the last call of each surviving rank to its end."""

    codes: list[int | None]
    pids: list[int]
    errors: list[str]
    parts: dict[str, list[Any]]
    waited: list[float]
    folder: Path


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """Returns a function that starts the ranks of a world once."""
    known: dict[tuple[str, int], World] = {}

    def world(device: str, ranks: int) -> World:
        if (device, ranks) not in known:
            folder = tmp_path_factory.mktemp(f"{device}-{ranks}")
            known[device, ranks] = _run(device, ranks, folder)
        return known[device, ranks]

    return world


def _run(device: str, ranks: int, folder: Path) -> World:
    running = _started(device, ranks, folder)
    ended = _ended(running, _LIMIT_S[device])
    codes = [None if at is None else one.returncode for one, at in zip(running, ended, strict=True)]
    errors = [(folder / f"errors-{rank}.txt").read_text() for rank in range(ranks)]
    parts = {part.__name__: _found(part.__name__, ranks, folder) for part in PARTS[device]}
    begun = [folder / f"waits-{rank}" for rank in range(ranks)]
    waited = [
        at - float(file.read_text())
        for at, file in zip(ended, begun, strict=True)
        if at is not None and file.exists()
    ]
    return World(codes, [one.pid for one in running], errors, parts, waited, folder)


class _Fork:
    """A rank in a fork of this process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, *args: Any) -> None:
        forked = multiprocessing.get_context("fork")
        self._process = forked.Process(target=be_fork, args=args, daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.kill, self.wait = self._process.kill, self._process.join

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode


def _started(device: str, ranks: int, folder: Path) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: list[Any] = []
    for rank in range(ranks):
        path, of = folder / f"errors-{rank}.txt", (device, ranks, rank, folder, port)
        if device == "cpu":
            running.append(_Fork(path, *of))
            continue
        line = [sys.executable, "-m", "tests.ops.collective.one_device", *map(str, of)]
        with path.open("w") as errors:
            environment = os.environ | ENVIRONMENT
            running.append(
                subprocess.Popen(line, cwd=_ROOT, env=environment, stdout=errors, stderr=errors)
            )
    return running


def _ended(running: list[Any], limit_s: float) -> list[float | None]:
    """Waits for processes and returns the time at which each ended. Kills processes that run beyond
    the limit, and returns None for them."""
    ended: list[float | None] = [None] * len(running)
    limit = time.time() + limit_s
    while None in ended and time.time() < limit:
        for rank, one in enumerate(running):
            if ended[rank] is None and one.poll() is not None:
                ended[rank] = time.time()
        time.sleep(0.05)
    for one in running:
        one.kill()
        one.wait()
    return ended


def _found(part: str, ranks: int, folder: Path) -> list[Any]:
    files = [folder / f"{part}-{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.parametrize(
    ("device", "ranks", "part"),
    [_mark(*world, part.__name__) for world in _WORLDS for part in PARTS[world[0]]],
)
def test_ranks_get_the_right_sum_and_the_same_bits(worlds, device, ranks, part):
    """Tests eager calls, calls with delays, a captured graph, and compiled calls with and without
    CUDA graphs."""
    world = worlds(device, ranks)
    found = world.parts[part]
    assert None not in found, "\n".join(error[-2000:] for error in world.errors)
    for one in found:
        assert one["wrong"] == []
        assert one["bits"]
        assert one["bits"] == found[0]["bits"]
        assert one.get("memory", True)


@pytest.mark.skipif(watch.this_process(0) == watch.UNKNOWN, reason="needs Linux's pidfd_open")
@pytest.mark.parametrize(("device", "ranks"), [_mark(*world) for world in _WORLDS])
def test_ranks_that_wait_for_one_that_was_killed_end_and_name_it(worlds, device, ranks):
    world = worlds(device, ranks)
    expected = [-signal.SIGKILL if rank == 1 else -signal.SIGABRT for rank in range(ranks)]
    assert world.codes == expected, "\n".join(error[-2000:] for error in world.errors)
    named = f"rank 1 (pid {world.pids[1]}) ended, and this rank waits for it in a fused sum"
    for rank, error in enumerate(world.errors):
        assert (named in error) == (rank != 1), error[-2000:]
    assert len(world.waited) == ranks - 1
    assert max(world.waited) < _BEREFT_S
    assert not list(world.folder.glob("went-on-*"))
