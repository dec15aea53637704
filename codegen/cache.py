"""The kernel cache on disk: content-addressed, atomic, shared by any number of processes.

An entry is a folder named by its key. It is filled aside and moved into place whole, under a lock
per key, so a reader never sees half of one. Every file's hash is kept with it; an entry that does
not match (a full disk, a killed machine) is thrown away and built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

_MANIFEST = "manifest.json"


def cache_dir() -> Path:
    """TILEWRIGHT_CACHE_DIR, else `tilewright` in the user's XDG cache folder."""
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tilewright"


def key_of(*parts: str) -> str:
    """The key of whatever is decided by these texts alone; sha256 in hex."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(f"{len(encoded)}:".encode() + encoded)
    return digest.hexdigest()


class KernelCache:
    """Folders by key under one root."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or cache_dir()

    def entry(self, kind: str, key: str) -> Path:
        """Where the entry lies, whether or not it exists."""
        return self.root / kind / key[:2] / key

    def intact(self, kind: str, key: str) -> Path | None:
        """The folder of an entry that is there and whole."""
        entry = self.entry(kind, key)
        return entry if _is_intact(entry) else None

    def get_or_build(
        self,
        kind: str,
        key: str,
        build: Callable[[Path], None],
        accept: Callable[[Path], bool] = lambda folder: True,
    ) -> Path:
        """The folder of an entry; `build(folder)` fills it where it is missing or corrupt.

        Many processes may ask at once: one builds, the others wait for it and read. What `build`
        raises is raised here, and nothing is stored then. accept: whether the contents of a whole
        entry can be used; where not, it is built again.
        """
        entry = self.entry(kind, key)
        if _is_intact(entry) and accept(entry):
            return entry
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not (_is_intact(entry) and accept(entry)):
                self._build(entry, build)
        return entry

    def _build(self, entry: Path, build: Callable[[Path], None]) -> None:
        fresh = Path(tempfile.mkdtemp(prefix=f"{entry.name[:16]}.", dir=entry.parent))
        try:
            build(fresh)
            _write_manifest(fresh)
            _discard(entry)
            os.replace(fresh, entry)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _discard(entry: Path) -> None:
    """Move a corrupt entry out of the way at once, then delete it."""
    if entry.exists():
        aside = Path(tempfile.mkdtemp(prefix="corrupt.", dir=entry.parent))
        with contextlib.suppress(FileNotFoundError):
            os.replace(entry, aside / entry.name)
        shutil.rmtree(aside, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _MANIFEST and "__pycache__" not in path.parts
    }


def _write_manifest(folder: Path) -> None:
    (folder / _MANIFEST).write_text(json.dumps(_digests(folder), indent=1), "utf-8")


def _is_intact(folder: Path) -> bool:
    """Whether all files an entry was stored with are there, with the contents they had."""
    try:
        stored = json.loads((folder / _MANIFEST).read_text("utf-8"))
        present = _digests(folder)
    except (OSError, ValueError):
        return False
    return isinstance(stored, dict) and all(present.get(k) == v for k, v in stored.items())
