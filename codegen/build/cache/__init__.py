"""The kernel cache on disk: content-addressed, atomic, shared by any number of processes.

An entry is a folder of files, and the name of the folder is the entry's key. An entry is written to
a temporary folder and then moved into place, so a reader never sees half an entry. The manifest of
an entry has its kind, its key and the hash of every file. An entry that differs from its manifest
is deleted and made again. Possible causes are a full disk, a crashed machine, an entry under the
wrong name, or an extra file. Files are read into memory once: the bytes whose hashes were checked
are the bytes that run.

If the cache cannot be written or is not trusted, the process keeps its kernels in a private folder
and warns once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.codegen.build.cache import upkeep
from tilewright.codegen.build.cache.folder import (
    cache_dir,
    distrust,
    make_folders,
    new_folder,
    open_to_others,
    opened_folder,
    private_folder,
    refusal,
    set_aside,
    warn_once,
)

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = ["Entry", "KernelCache", "cache_dir", "key_of", "observers"]

MANIFEST = "manifest.json"
_FORMAT = 2

#: A process that has waited this many seconds for another process to make an entry makes the entry
#: itself.
_WAIT_S = 900.0
#: Functions that are called with the kind, key and files of each entry that is found or made.
observers: list[Callable[[str, str, Mapping[str, bytes]], None]] = []

# The time of last use of an entry is written at most once in this many seconds.
_USED_EVERY_S = 3600.0
# How often a process sets aside what is in the place of an entry before it gives up.
_MOVES = 3


def key_of(*parts: str) -> str:
    """Returns the key of an entry that these texts determine: their sha256 in hex."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """The files of one entry, by name. folder: the path of the entry; None if the entry could not
    be written."""

    files: Mapping[str, bytes] = field(repr=False)
    folder: Path | None

    def text(self, name: str) -> str:
        return self.files[name].decode()


class KernelCache:
    """Stores entries by kind and key under one root folder."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_dir()

    def entry(self, kind: str, key: str) -> Path:
        """Returns the path of the entry, whether or not it exists."""
        return _place(self.root, kind, key)

    def find(self, kind: str, key: str) -> Entry | None:
        """Returns the entry if it exists and matches its manifest, else None."""
        found = self._found(kind, key)
        if found is not None:
            _tell(kind, key, found.files)
        return found

    def has(self, kind: str, key: str) -> bool:
        """Whether :meth:`find` would find the entry. This method does not call the observers."""
        return self._found(kind, key) is not None

    def put_new(self, kind: str, key: str, files: Mapping[str, bytes]) -> None:
        """Stores an entry that was made elsewhere, unless the cache already has an entry with this
        key. Raises OSError if neither the cache nor the private folder can be written."""
        if self.has(kind, key):
            return
        with self._locked(kind, key):  # another process may be making the entry
            if not self.has(kind, key) and self._store(kind, key, files) is None:
                raise OSError("neither the cache nor the private folder can be written")

    def _found(self, kind: str, key: str) -> Entry | None:
        if self._usable():
            files = _read(self.entry(kind, key), kind, key)
            if files is not None:
                return Entry(files, self.entry(kind, key))
        private = _private_roots.get((os.getpid(), self.root))
        if private is None:
            return None
        files = _read(_place(private, kind, key), kind, key)
        return None if files is None else Entry(files, _place(private, kind, key))

    def get_or_make(
        self,
        kind: str,
        key: str,
        make: Callable[[], Mapping[str, bytes]],
        accept: Callable[[Entry], bool] = lambda entry: True,
    ) -> Entry:
        """Returns the entry. If it is missing or corrupt, calls `make()` for its files and stores
        them.

        If several processes call this function at the same time, one process makes the entry, and
        the other processes wait and then read the entry. If `make` raises an error, the error
        propagates and nothing is stored. If the files cannot be stored, they are returned
        nevertheless. accept: a function that returns whether the contents of an entry can be used.
        If it returns False, the entry is made again.
        """
        found = self._accepted(kind, key, accept)
        if found is not None:
            return found
        with self._locked(kind, key):
            found = self._accepted(kind, key, accept)
            if found is not None:
                return found
            files = dict(make())
            _tell(kind, key, files)
            return Entry(files, self._store(kind, key, files))

    def _accepted(self, kind: str, key: str, accept: Callable[[Entry], bool]) -> Entry | None:
        found = self._found(kind, key)
        if found is None or not accept(found):
            return None
        _tell(kind, key, found.files)
        return found

    def _usable(self) -> bool:
        reason = refusal(self.root)
        if reason is not None:
            trust = (
                ", or, if you trust all users who can write to this folder, set "
                "TILEWRIGHT_CACHE_TRUST=1"
                if self.root.is_dir()
                else ""
            )
            self._warn(f"{reason}. Set TILEWRIGHT_CACHE_DIR to another folder{trust}")
        return reason is None

    def _warn(self, reason: str) -> None:
        warn_once(
            str(self.root),
            f"the kernel cache {self.root} is not used; this process keeps its kernels in a "
            f"private folder until it ends: {reason}",
        )

    @contextlib.contextmanager
    def _locked(self, kind: str, key: str) -> Iterator[None]:
        """Lets only one process at a time make an entry. If the lock cannot be taken, two processes
        may make the same entry."""
        with contextlib.ExitStack() as stack:
            for root in self._roots():
                try:
                    lock = _lock(root, kind, key)
                    stack.enter_context(lock)
                except (OSError, NotImplementedError):  # filelock.Timeout is an OSError
                    continue
                # Waiting processes keep the file open, and find the entry when they get the lock.
                stack.callback(_unlink, lock.lock_file)
                break
            yield

    def _roots(self) -> Iterator[Path]:
        if self._usable():
            yield self.root
        with contextlib.suppress(OSError):
            yield self._private_root()

    def _private_root(self) -> Path:
        known = _private_roots.get((os.getpid(), self.root))
        if known is None or not known.is_dir():
            known = private_folder() / f"cache-{key_of(str(self.root))[:16]}"
            make_folders(known, known)
            _private_roots[os.getpid(), self.root] = known
        return known

    def _store(self, kind: str, key: str, files: Mapping[str, bytes]) -> Path | None:
        """Stores an entry and returns its path; None if neither the cache nor the private folder
        can be written."""
        for root in self._roots():
            try:
                _write(root, kind, key, files)
            except OSError as error:
                self._warn(f"{error.strerror}. Set TILEWRIGHT_CACHE_DIR to another folder")
                continue
            if root == self.root:
                upkeep.prune_hourly(root)
            return _place(root, kind, key)
        return None


def _tell(kind: str, key: str, files: Mapping[str, bytes]) -> None:
    for told in observers:
        told(kind, key, files)


# Maps (process, root of a cache) to the private folder of this process for entries that cannot be
# written to this cache.
_private_roots: dict[tuple[int, Path], Path] = {}


def _place(root: Path, kind: str, key: str) -> Path:
    return root / kind / key[:2] / key


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _lock(root: Path, kind: str, key: str) -> FileLock:
    """Returns the lock of one entry. The lock file has the permissions of the entry's parent
    folder."""
    from filelock import FileLock  # imported here: a warm cache needs no lock

    place = _place(root, kind, key)
    make_folders(root, place.parent)
    mode = stat.S_IMODE(place.parent.stat().st_mode) & 0o666
    return FileLock(f"{place}.lock", timeout=_WAIT_S, mode=mode)


def _write(root: Path, kind: str, key: str, files: Mapping[str, bytes]) -> None:
    """Stores an entry and replaces an existing one."""
    place = _place(root, kind, key)
    make_folders(root, place.parent)
    manifest = json.dumps(_manifest(kind, key, files), indent=1).encode()
    with new_folder(place.parent, key[:16]) as (fresh, descriptor):
        for name, data in {**files, MANIFEST: manifest}.items():
            _write_file(descriptor, name, data)
        _move(fresh, place)


def _move(fresh: Path, place: Path) -> None:
    for _ in range(_MOVES):
        try:
            os.rename(fresh, place)
            return
        except OSError:
            set_aside(place)  # an entry of another process, or an entry that could not be read
    os.rename(fresh, place)


def _write_file(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(name, flags, open_to_others(0o666), dir_fd=folder)
    with open(descriptor, "wb") as file:
        file.write(data)


def _manifest(kind: str, key: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    return {"format": _FORMAT, "kind": kind, "key": key, "files": digests}


def _read(place: Path, kind: str, key: str) -> dict[str, bytes] | None:
    """Returns the files of an entry; None unless they are exactly the files that a trusted user
    stored under this key."""
    try:
        with opened_folder(place) as folder:
            status = os.fstat(folder)
            if distrust(status) is not None:
                return None
            files = {name: _read_file(folder, name) for name in os.listdir(folder)}
            manifest = json.loads(files.pop(MANIFEST, b""))
            if not files or manifest != _manifest(kind, key, files):
                return None
            _note_use(folder, status)
            return files
    except (OSError, ValueError, RecursionError):
        return None


def _read_file(folder: int, name: str) -> bytes:
    """Returns the contents of a file. Raises OSError if it is not a regular file or is not
    trusted."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe of this name must not block
    descriptor = os.open(name, flags, dir_fd=folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        reason = distrust(status)
        if reason is not None or not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name}: {reason or 'it is not a file'}")
        return file.read()


def _note_use(folder: int, status: os.stat_result) -> None:
    if time.time() - status.st_mtime > _USED_EVERY_S:
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(folder)
