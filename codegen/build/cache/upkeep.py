"""Lists the contents of the kernel cache, and prunes the cache: leftovers of killed processes are
removed first, then the least recently used entries.

An entry is renamed before it is deleted. A process that looks for the entry afterwards makes the
entry again.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilewright.codegen.build.cache.folder import (
    STALE_AFTER_S,
    is_stale,
    remove,
    set_aside,
    sweep_private,
    warn_once,
)

#: Kinds of entries. Nothing else in the cache folder is counted or removed.
KINDS = ("binary", "source", "ttgir", "tuned")

DEFAULT_BOUND = 2 * 2**30
#: Pruning removes entries until the cache takes at most this fraction of the size bound, so that
#: the next entry does not require pruning again.
_LEFT = 0.9
# `prune_hourly` does nothing if the cache was pruned less than this many seconds ago.
_EVERY_S = 3600.0
# The file whose modification time is the time of the last pruning.
_MARK = "last-prune"

# Matches the names of entries. The pattern is strict because the folder may also hold files of
# other programs.
_KEY = re.compile(r"[0-9a-f]{64}\Z")
# Matches the names of temporary folders and locks. The last line matches the names that the first
# format of the cache used.
_LEFTOVER = re.compile(
    r"[0-9a-f]{16}\.[0-9a-f]{12}\.tmp\Z|[0-9a-f]{64}\.lock\Z|"
    r"([0-9a-f]{16}|corrupt)\.[a-z0-9_]{8}\Z"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\Z", re.IGNORECASE)
_UNITS = " KMGT"


@dataclass(frozen=True)
class Stored:
    """One entry on disk.

    Attributes:
        kind: The kind of the entry.
        path: The folder of the entry.
        size: The number of bytes that the entry takes on disk.
        used: The time of last use in seconds since the epoch, accurate to an hour.
    """

    kind: str
    path: Path
    size: int
    used: float


@dataclass(frozen=True)
class Survey:
    """The contents of a cache. stale: temporary folders and locks that no process has locked."""

    entries: tuple[Stored, ...]
    stale: tuple[Path, ...]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class Pruned:
    """Counts of what pruning removed.

    Attributes:
        entries: The number of removed entries.
        size: The number of bytes of the removed entries.
        stale: The number of removed leftovers of killed processes.
    """

    entries: int
    size: int
    stale: int


def parse_size(text: str) -> int:
    """Parses a size such as "500MB", "2GiB", "1.5 G" or "4096" to bytes. Raises ValueError for
    other texts."""
    found = _SIZE.match(text.strip())
    if found is None:
        raise ValueError(f"expected a size such as 500MB or 2GiB, got {text!r}")
    number, unit, binary = found.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** _UNITS.index((unit or " ").upper()))


def size_bound() -> int:
    """Returns the largest number of bytes that the cache may take: TILEWRIGHT_CACHE_SIZE if it is
    set, else 2 GiB. Raises ValueError if the variable is not a size."""
    chosen = os.environ.get("TILEWRIGHT_CACHE_SIZE")
    if not chosen:
        return DEFAULT_BOUND
    try:
        return parse_size(chosen)
    except ValueError as error:
        raise ValueError(f"TILEWRIGHT_CACHE_SIZE: {error}") from error


def survey(root: Path, stale_after: float = STALE_AFTER_S) -> Survey:
    """Lists the contents of a cache folder; empty if the folder does not exist."""
    entries: list[Stored] = []
    stale: list[Path] = []
    for kind in KINDS:
        for prefix in _folders(root / kind):
            for item in _items(prefix):
                path = Path(item.path)
                if _LEFTOVER.match(item.name):
                    stale += [path] if is_stale(path, stale_after) else []
                elif _KEY.match(item.name) and item.name.startswith(prefix.name):
                    entries += _stored(kind, path)
    return Survey(tuple(entries), tuple(stale))


def prune(
    root: Path,
    max_size: int,
    older_than: float | None = None,
    stale_after: float = STALE_AFTER_S,
) -> Pruned:
    """Removes leftovers, then entries that were not used for `older_than` seconds, then the least
    recently used entries until the remaining entries take at most `max_size` bytes."""
    found = survey(root, stale_after)
    stale = sum(remove(path) for path in found.stale)
    gone = list(_surplus(found, max_size, older_than))
    removed = [entry for entry in gone if _taken_out(entry.path)]
    size = sum(entry.size for entry in removed)
    return Pruned(len(removed), size, stale)


def prune_hourly(root: Path) -> None:
    """Prunes the cache to its size bound, at most once an hour for all processes together. Callers
    call this after they store an entry: a cache that does not grow needs no check."""
    mark = root / _MARK
    with contextlib.suppress(OSError):
        if mark.exists() and time.time() - mark.stat().st_mtime < _EVERY_S:
            return
        mark.touch()
        try:
            bound = size_bound()
        except ValueError as error:
            warn_once(
                "TILEWRIGHT_CACHE_SIZE", f"{error}; the default of {DEFAULT_BOUND} bytes is used"
            )
            bound = DEFAULT_BOUND
        sweep_private()
        found = survey(root)
        if found.size > bound or found.stale:
            prune(root, bound if found.size <= bound else int(_LEFT * bound))


def _surplus(found: Survey, max_size: int, older_than: float | None) -> Iterator[Stored]:
    oldest = -float("inf") if older_than is None else time.time() - older_than
    left = found.size
    for entry in sorted(found.entries, key=lambda entry: entry.used):
        if entry.used > oldest and left <= max_size:
            return
        left -= entry.size
        yield entry


def _taken_out(path: Path) -> bool:
    try:
        set_aside(path)
    except OSError:
        return False
    return True


def _items(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        return list(items)
    return []


def _folders(folder: Path) -> list[Path]:
    return [Path(item.path) for item in _items(folder) if item.is_dir(follow_symlinks=False)]


def _stored(kind: str, path: Path) -> list[Stored]:
    """Returns a list with the entry at a path; empty if the entry is gone."""
    try:
        status = os.lstat(path)
        return [Stored(kind, path, _size(path, status), status.st_mtime)]
    except OSError:
        return []


def _size(path: Path, status: os.stat_result) -> int:
    """Returns the number of bytes that a file, or a folder with its contents, takes on disk."""
    own = status.st_blocks * 512
    if not stat.S_ISDIR(status.st_mode):
        return own
    below = (_size(Path(item.path), item.stat(follow_symlinks=False)) for item in _items(path))
    return own + sum(below)
