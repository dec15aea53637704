"""Ends this process if its GPU waits for a rank whose process has ended.

A kernel that waits for another rank cannot see that the rank is gone. Therefore, for each other
rank on this host, a thread waits for the end of the rank's process. The thread uses Linux's
pidfd_open(2), which costs nothing and reacts immediately. After that, the thread checks every few
seconds whether this rank waits for the rank that has ended. If this rank waits at two checks in a
row, or if a check gets no answer, the thread logs a message and aborts this process. The launcher
then notices that the process has ended. PyTorch's watchdog of NCCL ends a rank whose collective is
lost in the same way (ProcessGroupNCCL.cpp, `terminateProcess`). A rank that does not wait keeps
running.

The threads need Python's global interpreter lock, like all threads of Python: if the code of a
process never releases the lock, the process is not ended. This module does not import torch.
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

#: How many seconds pass between two checks whether this rank waits for a rank that is gone.
EVERY_S = 5.0
#: How many seconds a check may take. Other driver calls, such as compiling PTX, may delay it.
DEADLINE_S = 60.0
#: How many seconds writing the message may take.
SAY_S = 5.0
# A check divides the time until its deadline into this many waits. If the process is stopped for a
# while (SIGSTOP), at most one wait ends in that time, and the check still has the other waits.
_PARTS = 20

Waits = Callable[[], bool]


class Process(NamedTuple):
    """The identity of a rank's process. It is sent to the other ranks as 64-bit numbers.

    Attributes:
        rank: The rank.
        boot, boot_low: The two halves of the boot id of the host's kernel.
        names: The number of the PID namespace.
        pid: The pid.
        started: The start time in ticks of the kernel, because a pid may be used again.
    """

    rank: int
    boot: int
    boot_low: int
    names: int
    pid: int
    started: int

    def is_beside(self, other: Process) -> bool:
        """Whether both processes are on one host and in one PID namespace, so that a pid that one
        process reports is valid for the other."""
        return self[1:4] == other[1:4]


#: Stands for a process that cannot be watched.
UNKNOWN = Process(-1, 0, 0, 0, 0, 0)


def this_process(rank: int) -> Process:
    """Returns the identity of this process. Returns UNKNOWN if this process cannot be watched or
    cannot watch other processes. Raises no error."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        if os.readlink("/proc/self") != str(os.getpid()):
            return UNKNOWN  # /proc belongs to another PID namespace
        boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).int
        high, low = (part - (1 << 63) for part in divmod(boot, 1 << 64))
        names = os.stat("/proc/self/ns/pid").st_ino
        return Process(rank, high, low, names, os.getpid(), _started(os.getpid()))
    except (OSError, AttributeError, ValueError):  # no Linux, an old kernel, or a sandbox
        return UNKNOWN


def _started(pid: int) -> int:
    """Returns the start time of a process. Raises OSError if the process does not exist or is not
    visible."""
    # Fields follow the process name, which may contain anything.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _opened(process: Process) -> int | None:
    """Returns a file descriptor that becomes readable when the process ends; None if it has ended.
    Raises OSError if this cannot be determined."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        if _started(process.pid) == process.started:
            return fd
    except OSError:
        if not select.select([fd], [], [], 0)[0]:  # the process exists but is not visible
            os.close(fd)
            raise
    os.close(fd)
    return None


def _abort(message: str) -> None:
    """Writes the message and sends SIGABRT.

    Another thread may hold a logging handler while it waits for the GPU, for example to print a
    tensor. In this case, the message is written directly to standard error.
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
    """The processes that this process watches, with one thread for each.

    every_s: the seconds between two checks of this rank's GPU. deadline_s: how many seconds a check
    may take. end: a function that ends this process with a message.
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
        """Watches a process. Raises OSError if it cannot be watched, and RuntimeError if no thread
        can be started.

        waits: a function that returns whether this rank now waits for the process. It is called in
        a separate thread, after the process has ended.
        """
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
        """Stops all checks, so that no thread ends this process any more. Waits for a check that is
        in progress."""
        self._stopped.set()
        self._asking.acquire(timeout=1.0)

    def close(self) -> None:
        """Closes the file descriptors. This is called in a forked child, in which the threads do
        not exist."""
        for fd in tuple(self._fds):
            self._close(fd)

    def _close(self, fd: int | None) -> None:
        if fd is not None:
            self._fds.discard(fd)
            os.close(fd)

    def _run(self, process: Process, waits: list[Waits], fd: int | None) -> None:
        """Waits for the end of another process. Then ends this process if this rank waits for the
        process that ended."""
        if fd is not None:
            ended = select.poll()  # poll takes descriptors of any number, unlike select
            ended.register(fd, select.POLLIN)
            ended.poll()
            self._close(fd)
        waited = False
        while not self._stopped.is_set():
            with self._asking:
                waited = self._look(process, waits, waited)
            self._stopped.wait(self.every_s)

    def _look(self, process: Process, waits: list[Waits], waited: bool) -> bool:
        """Whether this rank waits for a process that has ended. If this rank waited at the previous
        check too (`waited`), or if the check gets no answer in time, ends this process."""
        waiting = _answer(tuple(waits), self.deadline_s)
        if self._stopped.is_set():
            return False
        if waiting is None:
            self.end(
                _message(process, f"this rank's GPU has given no sign for {self.deadline_s:g} s")
            )
        elif waiting and waited:
            self.end(_message(process, "this rank waits for it in a fused sum over ranks"))
        return bool(waiting)


def _answer(waits: Sequence[Waits], deadline_s: float) -> bool | None:
    """Whether one of the functions `waits` says that this rank waits. Returns None if the functions
    do not return in time."""
    said: list[bool] = []

    def ask() -> None:
        try:
            said.append(any(wait() for wait in waits))
        except Exception as error:  # the GPU has failed, which its users see as well
            log.debug("cannot tell whether this rank waits for others: %s", error)
            said.append(False)

    thread = threading.Thread(target=ask, name="tilewright-watch-asks", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads at the moment
        log.debug("cannot start a thread that asks whether this rank waits: %s", error)
        return False
    for _ in range(_PARTS):
        thread.join(deadline_s / _PARTS)
        if said:
            return said[0]
    return None


def _message(gone: Process, why: str) -> str:
    return (
        f"rank {gone.rank} (pid {gone.pid}) ended, and {why}: this process (pid {os.getpid()}) is "
        f"aborted. The output of the other rank may say why it ended; if it was killed, the "
        f"kernel's log may say why. To continue, start all ranks again"
    )


# --- the watch of this process --------------------------------------------------------------------

_watch = Watch()
_told: set[str] = set()


def watch(processes: Sequence[tuple[Sequence[int], Waits]], rank: int) -> None:
    """Makes threads of this process, which is rank `rank`, watch the processes of other ranks. Logs
    once which processes cannot be watched.

    processes: for each process, the numbers of its `Process`, and a function that returns whether
    this rank waits for it.
    """
    own, apart = this_process(rank), []
    for numbers, waits in processes:
        process = Process(*numbers)
        if process.is_beside(own) and process.pid == own.pid != 0:
            continue  # a thread of this process
        try:
            if UNKNOWN in (own, process) or not process.is_beside(own):
                apart.append("on another host, in another PID namespace, or without pidfd_open")
            else:
                _watch.add(process, waits)
        except (OSError, AttributeError, RuntimeError) as error:
            apart.append(str(error))
    for why in set(apart) - _told:
        _told.add(why)
        log.warning("cannot notice the end of some ranks that this rank waits for: %s", why)


def _stop() -> None:
    """Prevents threads from making driver calls while the interpreter shuts down."""
    _watch.stop()


def _forked() -> None:
    """Resets the state after a fork. Threads do not survive a fork, and the child is not this
    rank."""
    global _watch
    _watch.close()
    _watch = Watch()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
