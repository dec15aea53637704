"""The kernel cache on disk: content-addressed, atomic, shared by any number of processes.

An entry is a folder of files named by its key. It is written in a temporary folder and moved into
place whole, so a reader never sees half of one. Its manifest has kind, key and the hash of every
file; an entry that differs from its manifest (a full disk, a killed machine, another entry moved to
its place, a file too many) is deleted and made again. Files are read into memory once: the bytes
whose hashes were compared are the bytes that run.

Where the cache cannot be written, or is not trusted, a process keeps its kernels in a private
folder, and warns once.
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

#: A process that has waited this long for another one's build makes the entry itself.
_WAIT_S = 900.0
#: Told of each entry that is found or made: its kind, its key and its files.
observers: list[Callable[[str, str, Mapping[str, bytes]], None]] = []

# An entry's time of last use is written no more often than this.
_USED_EVERY_S = 3600.0
_MOVES = 3


def key_of(*parts: str) -> str:
    """The key of what these texts alone determine; sha256 in hex."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """The files of one entry, by name. folder: where they lie; None where none could be written."""

    files: Mapping[str, bytes] = field(repr=False)
    folder: Path | None

    def text(self, name: str) -> str:
        return self.files[name].decode()


class KernelCache:
    """Entries by kind and key under one root."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_dir()

    def entry(self, kind: str, key: str) -> Path:
        """Where the entry lies, whether or not it exists."""
        return _place(self.root, kind, key)

    def find(self, kind: str, key: str) -> Entry | None:
        """The entry if it exists and matches its manifest, else None."""
        found = self._found(kind, key)
        if found is not None:
            _tell(kind, key, found.files)
        return found

    def has(self, kind: str, key: str) -> bool:
        """Whether :meth:`find` would find it; nobody is told."""
        return self._found(kind, key) is not None

    def put_new(self, kind: str, key: str, files: Mapping[str, bytes]) -> None:
        """Stores an entry that was made elsewhere under this key, unless there is one. Raises
        OSError where it can be stored nowhere."""
        if self.has(kind, key):
            return
        with self._locked(kind, key):  # another process may be making it
            if not self.has(kind, key) and self._store(kind, key, files) is None:
                raise OSError("neither cache nor private folder can be written")

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
        """The entry; where it is missing or corrupt, `make()` gives its files.

        Many processes may ask at once: one makes the entry, the others wait and read it. What
        `make` raises is raised here, and nothing is stored. Files that cannot be stored are
        returned all the same. accept: whether an entry's contents can be used; if not, it is made
        again.
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
            self._warn(
                f"{reason}. TILEWRIGHT_CACHE_DIR names another folder; where all who can write to "
                "this one are trusted, set TILEWRIGHT_CACHE_TRUST=1"
            )
        return reason is None

    def _warn(self, reason: str) -> None:
        warn_once(
            str(self.root),
            f"the kernel cache {self.root} is not used, kernels of this process are kept in a "
            f"private folder until it ends: {reason}",
        )

    @contextlib.contextmanager
    def _locked(self, kind: str, key: str) -> Iterator[None]:
        """One maker at a time; where no lock can be taken, an entry may be made twice."""
        with contextlib.ExitStack() as stack:
            for root in self._roots():
                try:
                    lock = _lock(root, kind, key)
                    stack.enter_context(lock)
                except (OSError, NotImplementedError):  # filelock.Timeout is an OSError
                    continue
                # Those who wait hold it open, and find the entry when they get the lock.
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
        """Where the entry lies now; None if neither cache nor private folder can be written."""
        for root in self._roots():
            try:
                _write(root, kind, key, files)
            except OSError as error:
                self._warn(f"{error.strerror}. TILEWRIGHT_CACHE_DIR names another folder")
                continue
            if root == self.root:
                upkeep.prune_hourly(root)
            return _place(root, kind, key)
        return None


def _tell(kind: str, key: str, files: Mapping[str, bytes]) -> None:
    for told in observers:
        told(kind, key, files)


# Where a process keeps entries that it cannot write to a cache, by process and the cache's root.
_private_roots: dict[tuple[int, Path], Path] = {}


def _place(root: Path, kind: str, key: str) -> Path:
    return root / kind / key[:2] / key


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _lock(root: Path, kind: str, key: str) -> FileLock:
    """The lock of one entry, open to whoever its folder is open to."""
    from filelock import FileLock  # where something is made; a warm cache needs none

    place = _place(root, kind, key)
    make_folders(root, place.parent)
    mode = stat.S_IMODE(place.parent.stat().st_mode) & 0o666
    return FileLock(f"{place}.lock", timeout=_WAIT_S, mode=mode)


def _write(root: Path, kind: str, key: str, files: Mapping[str, bytes]) -> None:
    """Stores an entry; replaces what lies there."""
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
            set_aside(place)  # another maker's, or what could not be read
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
    """The files of an entry; None where they are not exactly what a trusted user stored under this
    key."""
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
    """A regular file's contents. Raises OSError for anything else and for untrusted files."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in its place must not block
    descriptor = os.open(name, flags, dir_fd=folder)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        reason = distrust(status)
        if reason is not None or not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name}: {reason or 'it is no file'}")
        return file.read()


def _note_use(folder: int, status: os.stat_result) -> None:
    if time.time() - status.st_mtime > _USED_EVERY_S:
        with contextlib.suppress(OSError):  # a cache that is only read
            os.utime(folder)
