"""Ends this process where its GPU waits for a rank whose process has ended.

A kernel that waits for another rank cannot see that it is gone. So one thread of each process waits
for the ends of the other ranks' processes on its host (Linux's pidfd_open(2): at no cost, and at
once), and from the first end on asks every few seconds whether this rank waits for that one. If so,
or if there is no answer, it says so and aborts the process, whose starter sees it end. That is how
PyTorch's watchdog of NCCL ends a rank whose collective is lost (ProcessGroupNCCL.cpp,
`terminateProcess`). A rank that waits for nobody is left alone.

The thread waits for Python's lock as any other: code that never gives it back is not ended. This
module knows nothing of torch.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("tilewright")

#: How often it is asked whether this rank waits for one that is gone. It must say so for as long.
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


@dataclass(eq=False)
class _Peer:
    """waits: say whether this rank waits for it. since: the first look of those up to the last that
    all said so."""

    process: Process
    waits: list[Waits] = field(default_factory=list)
    since: float = math.inf


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


@dataclass
class Watch:
    """The thread of a process, and what it watches. Starts at the first rank that is added.

    Raises OSError or AttributeError where the system has no such descriptors.
    """

    every_s: float = EVERY_S
    deadline_s: float = DEADLINE_S
    end: Callable[[str], None] = _abort

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[Process, _Peer] = {}
        self._alive: dict[int, _Peer] = {}
        self._gone: list[_Peer] = []
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._events = select.epoll()  # takes more descriptors while it is waited for
        self._wake = os.eventfd(0)
        self._events.register(self._wake, select.EPOLLIN)

    def add(self, process: Process, waits: Waits) -> None:
        """Watches a process. waits: whether this rank waits for it now; called from a thread of its
        own, once the process has ended. Raises OSError where it cannot be watched, RuntimeError
        where no thread can be started."""
        with self._lock:
            peer = self._peers.get(process) or self._new(process)
            peer.waits.append(waits)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tilewright-watch", daemon=True)
                thread.start()
                self._thread = thread
        os.eventfd_write(self._wake, 1)

    def _new(self, process: Process) -> _Peer:
        """Under the lock. Known only once it is watched."""
        peer, fd = _Peer(process), _opened(process)
        if fd is None:
            self._gone.append(peer)
        else:
            try:
                self._events.register(fd, select.EPOLLIN)
            except OSError:
                os.close(fd)
                raise
            self._alive[fd] = peer
        self._peers[process] = peer
        return peer

    def stop(self) -> None:
        """Nothing is ended from now on; waits for what is asked."""
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(1.0)

    def close(self) -> None:
        """In a fork, which has no such thread: the descriptors."""
        self._events.close()
        for fd in (self._wake, *self._alive):
            with suppress(OSError):
                os.close(fd)

    def _run(self) -> None:
        while not self._stopped:
            for fd, _ in self._events.poll(self.every_s if self._gone else None):
                if fd == self._wake:
                    os.eventfd_read(fd)
                else:
                    self._has_ended(fd)
            if self._gone and not self._stopped:
                self._look()

    def _has_ended(self, fd: int) -> None:
        with self._lock:
            self._gone.append(self._alive.pop(fd))
        self._events.unregister(fd)
        os.close(fd)

    def _look(self) -> None:
        """Ends the process where it waits for one that is gone."""
        with self._lock:
            asked = [(peer, tuple(peer.waits)) for peer in self._gone]
        now = time.monotonic()
        waiting = _answer(asked, self.deadline_s)
        if self._stopped:
            return
        for peer, _ in asked:
            peer.since = min(peer.since, now) if peer in (waiting or ()) else math.inf
        if waiting is None:
            gone = [peer for peer, _ in asked]
            self.end(_message(gone, f"this rank's GPU says nothing for {self.deadline_s:g} s"))
        elif lost := [peer for peer in waiting if now - peer.since >= self.every_s]:
            self.end(_message(lost, "this rank waits for it in a fused sum over ranks"))


def _answer(asked: Sequence[tuple[_Peer, Sequence[Waits]]], deadline_s: float) -> list | None:
    """The peers that this rank waits for; None where none can be told of in time."""
    said: list[list[_Peer]] = []

    def ask() -> None:
        try:
            said.append([peer for peer, waits in asked if any(wait() for wait in waits)])
        except Exception as error:  # the GPU has failed, and whoever uses it is told
            log.debug("nothing is known of what this rank waits for: %s", error)
            said.append([])

    thread = threading.Thread(target=ask, name="tilewright-watch-asks", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads, for now
        log.debug("nothing is asked of what this rank waits for: %s", error)
        return []
    for _ in range(_PARTS):
        thread.join(deadline_s / _PARTS)
        if said:
            return said[0]
    return None


def _message(gone: Sequence[_Peer], why: str) -> str:
    ended = ", ".join(f"rank {peer.process.rank} (pid {peer.process.pid})" for peer in gone)
    return (
        f"{ended} ended, and {why}: this process (pid {os.getpid()}) is aborted. What ended the "
        f"other rank is in its own output, or in the kernel's log where it was killed; start all "
        f"ranks again"
    )


# --- the process's own ----------------------------------------------------------------------------

_lock = threading.Lock()
_watch: Watch | None = None
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
                _of_this_process().add(process, waits)
        except (OSError, AttributeError, RuntimeError) as error:
            apart.append(str(error))
    for why in set(apart) - _told:
        _told.add(why)
        log.warning("that some ranks end is not noticed here, which waits for them: %s", why)


def _of_this_process() -> Watch:
    global _watch
    with _lock:
        if _watch is None:
            _watch = Watch()
        return _watch


def _stop() -> None:
    """At exit: no thread is in a driver's call when the interpreter goes."""
    if _watch is not None:
        _watch.stop()


def _forked() -> None:
    """Threads end at a fork. Its process is no rank, or becomes another one."""
    global _watch, _lock
    _lock, kept, _watch = threading.Lock(), _watch, None
    if kept is not None:
        kept.close()


atexit.register(_stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
