"""Ends this process where its GPU waits for a rank whose process has ended.

A kernel that waits for another rank cannot see that it is gone. So a thread for each other rank on
this host waits for the end of its process (Linux's pidfd_open(2): at no cost, and at once). From
then on it asks every few seconds whether this rank waits for that one. If it does twice in a row,
or if there is no answer, the thread says so and aborts the process, whose starter sees it end. That
is how PyTorch's watchdog of NCCL ends a rank whose collective is lost (ProcessGroupNCCL.cpp,
`terminateProcess`). A rank that does not wait is left alone.

The threads need Python's lock as any other: code that never gives it back is not ended. This module
knows nothing of torch.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("tilewright")

#: How often it is asked whether this rank waits for one that is gone.
EVERY_S = 5.0
#: How long the answer may take: other calls of the driver, as one that compiles PTX, may be before.
DEADLINE_S = 60.0
#: How long the message may take to be written.
SAY_S = 5.0
# The deadline goes by in so many parts: a process that was stopped for a while has the rest left.
_PARTS = 20

Waits = Callable[[], bool]


class Process(NamedTuple):
    """What a rank tells the others of itself, as numbers of 64 bits. boot, boot_low: of the
    kernel. names: the PID namespace. started: in the kernel's ticks, as a pid is given again."""

    rank: int
    boot: int
    boot_low: int
    names: int
    pid: int
    started: int

    def is_beside(self, other: Process) -> bool:
        """Whether a pid means the same process to both."""
        return self[1:4] == other[1:4]


#: What a rank tells of which nothing is known.
UNKNOWN = Process(-1, 0, 0, 0, 0, 0)


def this_process(rank: int) -> Process:
    """This process; UNKNOWN where it cannot be watched, or watch. Raises nothing."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        if os.readlink("/proc/self") != str(os.getpid()):
            return UNKNOWN  # the /proc of another PID namespace
        boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int
        high, low = (part - (1 << 63) for part in divmod(boot, 1 << 64))
        names = os.stat("/proc/self/ns/pid").st_ino
        return Process(rank, high, low, names, os.getpid(), _started(os.getpid()))
    except (OSError, AttributeError, ValueError):  # no Linux, an old kernel, or a sandbox
        return UNKNOWN


def _started(pid: int) -> int:
    """Raises OSError where there is no such process, or none that this one may see."""
    # Behind the name, which may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _opened(process: Process) -> int | None:
    """A descriptor that is readable when the process has ended; None where it has. Raises OSError
    where nobody can tell."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        if _started(process.pid) == process.started:
            return fd
    except OSError:
        if not select.select([fd], [], [], 0)[0]:  # there, and not to be seen
            os.close(fd)
            raise
    os.close(fd)
    return None


def _abort(message: str) -> None:
    """The message, and SIGABRT.

    Whoever prints a tensor in a handler of logging holds that handler, and waits for the GPU: then
    the message goes to standard error as it is.
    """
    try:
        for say in (_logged, _written):
            said = threading.Thread(target=say, args=(message,), daemon=True)
            said.start()
            said.join(SAY_S)
            if not said.is_alive():
                break
    finally:
        os.abort()


def _logged(message: str) -> None:
    log.critical("%s", message)


def _written(message: str) -> None:
    os.write(2, f"{message}\n".encode())


class Watch:
    """What a process watches: other processes, each by a thread that starts as it is added.

    every_s: between two questions to this rank's GPU. deadline_s: of an answer. end: ends this
    process with a message.
    """

    def __init__(
        self,
        every_s: float = EVERY_S,
        deadline_s: float = DEADLINE_S,
        end: Callable[[str], None] = _abort,
    ) -> None:
        self.every_s, self.deadline_s, self.end = every_s, deadline_s, end
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._waits: dict[Process, list[Waits]] = {}
        self._fds: set[int] = set()
        self._stopped = threading.Event()

    def add(self, process: Process, waits: Waits) -> None:
        """Watches a process. waits: whether this rank waits for it now; called from a thread of its
        own, once the process has ended. Raises OSError where it cannot be watched, RuntimeError
        where no thread can be started."""
        with self._lock:
            if process not in self._waits:
                self._start(process, [waits])
            else:
                self._waits[process].append(waits)

    def _start(self, process: Process, waits: list[Waits]) -> None:
        fd = _opened(process)
        run = partial(self._run, process, waits, fd)
        if fd is not None:
            self._fds.add(fd)
        try:
            threading.Thread(target=run, name="tilewright-watch", daemon=True).start()
        except RuntimeError:
            self._close(fd)
            raise
        self._waits[process] = waits

    def stop(self) -> None:
        """Nothing is ended from now on; waits for what is asked."""
        self._stopped.set()
        self._asking.acquire(timeout=1.0)

    def close(self) -> None:
        """In a fork, which has no such threads: the descriptors."""
        for fd in tuple(self._fds):
            self._close(fd)

    def _close(self, fd: int | None) -> None:
        if fd is not None:
            self._fds.discard(fd)
            os.close(fd)

    def _run(self, process: Process, waits: list[Waits], fd: int | None) -> None:
        """Waits for the end of a process; then ends this one if it waits for that."""
        if fd is not None:
            ended = select.poll()  # takes descriptors of any number
            ended.register(fd, select.POLLIN)
            ended.poll()
            self._close(fd)
        waited = False
        while not self._stopped.is_set():
            with self._asking:
                waited = self._look(process, waits, waited)
            self._stopped.wait(self.every_s)

    def _look(self, process: Process, waits: list[Waits], waited: bool) -> bool:
        """Whether this rank waits for a process that has ended. waited: it did at the last look."""
        waiting = _answer(tuple(waits), self.deadline_s)
        if self._stopped.is_set():
            return False
        if waiting is None:
            self.end(_message(process, f"this rank's GPU says nothing for {self.deadline_s:g} s"))
        elif waiting and waited:
            self.end(_message(process, "this rank waits for it in a fused sum over ranks"))
        return bool(waiting)


def _answer(waits: Sequence[Waits], deadline_s: float) -> bool | None:
    """Whether one of them says that this rank waits; None where they do not answer in time."""
    said: list[bool] = []

    def ask() -> None:
        try:
            said.append(any(wait() for wait in waits))
        except Exception as error:  # the GPU has failed, and whoever uses it is told
            log.debug("nothing is known of what this rank waits for: %s", error)
            said.append(False)

    thread = threading.Thread(target=ask, name="tilewright-watch-asks", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads, for now
        log.debug("nothing is asked of what this rank waits for: %s", error)
        return False
    for _ in range(_PARTS):
        thread.join(deadline_s / _PARTS)
        if said:
            return said[0]
    return None


def _message(gone: Process, why: str) -> str:
    return (
        f"rank {gone.rank} (pid {gone.pid}) ended, and {why}: this process (pid {os.getpid()}) is "
        f"aborted. What ended the other rank is in its own output, or in the kernel's log where it "
        f"was killed; start all ranks again"
    )


# --- the process's own ----------------------------------------------------------------------------

_watch = Watch()
_told: set[str] = set()


def watch(processes: Sequence[tuple[Sequence[int], Waits]], rank: int) -> None:
    """Has the thread of this process, of this rank, watch those of other ranks: numbers of a
    `Process` each. Those that it cannot watch are logged, once."""
    own, apart = this_process(rank), []
    for numbers, waits in processes:
        process = Process(*numbers)
        if process.is_beside(own) and process.pid == own.pid != 0:
            continue  # a thread of this one
        try:
            if UNKNOWN in (own, process) or not process.is_beside(own):
                apart.append("on another host, in another PID namespace, or without pidfd_open")
            else:
                _watch.add(process, waits)
        except (OSError, AttributeError, RuntimeError) as error:
            apart.append(str(error))
    for why in set(apart) - _told:
        _told.add(why)
        log.warning("that some ranks end is not noticed here, which waits for them: %s", why)


def _stop() -> None:
    """At exit: no thread is in a driver's call when the interpreter goes."""
    _watch.stop()


def _forked() -> None:
    """Threads end at a fork. Its process is no rank, or becomes another one."""
    global _watch
    _watch.close()
    _watch = Watch()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
