"""Tests that a rank that waits for an ended rank is aborted, and that no other rank is.

The processes are real. The test itself decides whether this rank waits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tilewright.ops.runtime import watch

pytestmark = pytest.mark.skipif(
    watch.this_process(0) == watch.UNKNOWN, reason="needs Linux's pidfd_open"
)
_FILE = Path(watch.__file__)
_LONG = 20.0
# How often the thread checks for ended processes in these tests, in seconds.
_EVERY_S = 0.05


@contextmanager
def started(*command):
    """Starts a process that runs until it is told to end."""
    running = subprocess.Popen(command or ("cat",), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        running.stdin.close()
        running.stdout.close()


def told_of(process, rank=1):
    """Returns what another process, here a child, says about itself."""
    return watch.this_process(rank)._replace(
        pid=process.pid, started=watch._started(process.pid), rank=rank
    )


def until(condition):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < _LONG
        time.sleep(0.005)


@pytest.fixture
def watching():
    """Returns a watch that keeps its message, and counts how often it asked the GPU."""
    said, asked = [], []
    made = watch.Watch(_EVERY_S, 0.2, said.append)
    made.said, made.asked = said, asked

    def add(process, answer):
        def waits():
            asked.append(time.monotonic())
            return answer() if callable(answer) else answer

        made.add(process, waits)

    made.of = add
    yield made
    made.stop()
    before = len(asked)
    time.sleep(2 * _EVERY_S)
    assert len(asked) == before


@pytest.mark.parametrize("killed", [True, False])
def test_a_rank_that_waits_for_one_that_ended_is_ended(watching, killed):
    with started() as other:
        watching.of(told_of(other), True)
        time.sleep(3 * _EVERY_S)
        assert not watching.asked  # no GPU is asked while all processes live
        if killed:
            other.kill()
        else:
            other.stdin.close()
        until(lambda: watching.said)
        assert len(watching.asked) == 2
        assert f"rank 1 (pid {other.pid}) ended, and this rank waits for it" in watching.said[0]
        assert f"this process (pid {os.getpid()}) is aborted" in watching.said[0]


def test_a_gpu_that_does_not_answer_is_waited_for_no_longer(watching):
    held = threading.Event()
    with started() as other:
        watching.of(told_of(other), held.wait)
        other.kill()
        until(lambda: watching.said)
        held.set()
    assert "this rank's GPU has given no sign for 0.2 s" in watching.said[0]


def test_a_rank_that_waits_for_nobody_goes_on(watching):
    """A rank that waits for no other rank goes on. The watch checks again later, because the rank
    may then wait for the ended rank, or may only have seemed to wait."""
    answers = [False, True, False, False]
    with started() as other:
        watching.of(told_of(other), lambda: answers.pop(0) if answers else False)
        other.kill()
        until(lambda: len(watching.asked) > 6)
    assert not watching.said
    watching.of(told_of_this(), True)
    with started() as another:
        watching.of(told_of(another, 2), True)
        another.kill()
        until(lambda: watching.said)
    assert "rank 2" in watching.said[0]
    assert "rank 1" not in watching.said[0]


def told_of_this():
    return watch.this_process(3)


def test_what_cannot_say_whether_it_waits_ends_nothing(watching):
    with started() as other:
        watching.of(told_of(other), lambda: 1 / 0)
        other.kill()
        until(lambda: len(watching.asked) > 3)
    assert not watching.said


def test_one_process_is_watched_once_for_all_its_groups(watching):
    before = threading.active_count()
    with started() as other:
        watching.of(told_of(other), False)
        watching.of(told_of(other), True)
        assert threading.active_count() == before + 1
        other.kill()
        until(lambda: watching.said)
        watching.of(told_of(other), False)  # a new group is made after another rank has ended


def test_a_pid_that_was_given_again_is_not_the_rank(watching):
    with started() as other:
        gone = told_of(other)._replace(started=1)
        watching.of(gone, True)
        until(lambda: watching.said)
        assert other.poll() is None


def test_it_must_be_said_for_a_while():
    """The watch reports only after a while. A new group that contains the ended process does not
    shorten this time."""
    said, asked = [], []
    made = watch.Watch(60.0, _LONG, said.append)
    with started() as other:
        process = told_of(other)
        other.kill()
        other.wait()
    try:
        for _ in range(5):
            made.add(process, lambda: not asked.append(1))
        until(lambda: asked)
        time.sleep(_EVERY_S)
        assert not said
    finally:
        made.stop()


def test_what_cannot_be_watched_is_not_known(watching, monkeypatch):
    """Processes that cannot be watched are not remembered. Therefore the next group of the same
    ranks reports them, too. No descriptor stays open."""

    def full(thread):
        raise RuntimeError("can't start new thread")

    with started() as other:
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", full)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="can't start"):
                    watching.of(told_of(other), True)
        assert len(os.listdir("/proc/self/fd")) == before
        watching.of(told_of(other), True)
        other.kill()
        until(lambda: watching.said)


def test_without_a_thread_to_ask_nothing_is_ended(watching, monkeypatch):
    real, tried = threading.Thread.start, []

    def start(thread):
        if thread.name != "tilewright-watch-asks":
            return real(thread)
        tried.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with started() as other:
        watching.of(told_of(other), True)
        other.kill()
        until(lambda: len(tried) > 3)
        assert not watching.said
        monkeypatch.undo()
        until(lambda: watching.said)


def test_a_rank_that_ended_before_it_was_watched_is_seen(watching):
    with started() as other:
        process = told_of(other)
        other.kill()
        other.wait()
    watching.of(process, True)
    until(lambda: watching.said)
    assert f"rank 1 (pid {other.pid}) ended, and this rank waits for it" in watching.said[0]


def test_descriptors_are_closed_for_programs_that_are_started(watching):
    with started() as other:
        watching.of(told_of(other), False)
        assert watching._fds
        assert not any(os.get_inheritable(fd) for fd in watching._fds)


@pytest.fixture
def own(monkeypatch, caplog):
    monkeypatch.setattr(watch, "_watch", watch.Watch())
    monkeypatch.setattr(watch, "_told", set())
    yield caplog
    watch._watch.stop()


def test_threads_of_one_process_and_other_hosts_are_not_watched(own):
    here = watch.this_process(0)
    for _ in range(2):
        watch.watch([(here._replace(rank=1), lambda: True)], 0)
    assert (watch._watch._waits, own.text) == ({}, "")
    elsewhere = [here._replace(boot=1, pid=1), here._replace(names=1), watch.UNKNOWN]
    watch.watch([(one, lambda: True) for one in elsewhere * 2], 0)
    assert not watch._watch._waits
    assert own.text.count("cannot notice the end of some ranks") == 1


def test_without_descriptors_of_processes_nothing_is_watched(own, monkeypatch):
    with started() as other:
        process = told_of(other)
        monkeypatch.delattr(os, "pidfd_open")
        assert watch.this_process(0) == watch.UNKNOWN
        for _ in range(2):
            watch.watch([(process, lambda: True)], 0)
    assert not watch._watch._waits
    assert own.text.count("without pidfd_open") == 1


# --- processes that watch -------------------------------------------------------------------------

_RANK = f"""
import importlib.util, os, subprocess, sys, time
found = importlib.util.spec_from_file_location("watch", {str(_FILE)!r})
watch = sys.modules["watch"] = importlib.util.module_from_spec(found)
found.loader.exec_module(watch)
watch.SAY_S = 0.2
watch._watch = watch.Watch(0.05, 1.0)
other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
told = watch.this_process(1)._replace(pid=other.pid, started=watch._started(other.pid))
waits = sys.argv[1] == "waits"
watch.watch([(told, lambda: waits)], 0)
"""
_ENDS = "other.kill(); time.sleep(float(sys.argv[2]))"
_FORKS = """
fds = [*watch._watch._fds]
child = os.fork()
if not child:
    assert not watch._watch._waits
    for fd in fds:
        try:
            os.fstat(fd)
        except OSError:
            continue
        os._exit(1)
    time.sleep(0.3)
    os._exit(2 if waits else 0)
assert os.waitpid(child, 0)[1] == (512 if waits else 0)
"""


def rank(program, *args):
    done = subprocess.run(
        [sys.executable, "-c", _RANK + program, *args],
        capture_output=True,
        text=True,
        timeout=_LONG,
    )
    return done.returncode, done.stderr


def test_the_process_is_aborted_and_says_why():
    begun = time.monotonic()
    code, said = rank(_ENDS, "waits", "60")
    assert code == -signal.SIGABRT
    assert said.count("\n") == 1
    assert "rank 1 (pid " in said
    assert "start all ranks again" in said
    assert time.monotonic() - begun < _LONG / 2


def test_a_handler_that_waits_for_the_gpu_does_not_keep_it_alive():
    """A handler of the abort may wait for the GPU, for example to write a tensor's number, while it
    holds its lock. This must not keep the process alive."""
    held = "import logging; kept = logging.StreamHandler(); watch.log.addHandler(kept); "
    code, said = rank(held + "kept.acquire(); " + _ENDS, "waits", "60")
    assert code == -signal.SIGABRT
    assert said.count("start all ranks again") == 1


def test_a_normal_end_says_nothing():
    """A normal end of the process reports nothing, before and after the end of another rank for
    which this rank does not wait. No thread keeps the process alive."""
    assert rank("", "waits") == (0, "")
    assert rank(_ENDS, "alone", "0.4") == (0, "")


def test_a_fork_watches_nothing_and_its_parent_goes_on_watching():
    assert rank(_FORKS, "alone") == (0, "")
    code, said = rank(_FORKS + _ENDS, "waits", "60")
    assert code == -signal.SIGABRT
    assert "rank 1 (pid " in said
