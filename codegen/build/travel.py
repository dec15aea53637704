"""Kernels on their way to another process: what this one used of the kernel cache, and what Triton
compiled of it, so that a container starts warm.

A parcel is one entry. Of the kernel cache: an emitted file ("source"), measured times ("tuned"). Of
Triton's own: the files of one compiled kernel ("triton"), by Triton's hash, which holds its
version, its compilers and the chip; a parcel for another machine lies there and is not used.

What is unpacked is run: take parcels from whom you would take code.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewright.codegen.build.cache import MANIFEST, KernelCache, observers
from tilewright.codegen.build.cache.folder import warn_once

Files = Mapping[str, bytes]

CACHED = ("source", "tuned")
TRITON = "triton"
#: A parcel is never larger, in bytes: Triton's files of one kernel are a few MB.
MOST_BYTES = 1 << 28
#: Where the parcels lie in a package of AOTInductor, below the folder that all of it is in.
FOLDER = "extra/tilewright"

_KEY = re.compile(r"[0-9a-f]{64}\Z")
_parcels: dict[str, bytes] = {}
#: Told of each new parcel: its name, `kind/key`, and its bytes.
listeners: list[Callable[[str, bytes], None]] = []


def parcels() -> dict[str, bytes]:
    """What this process has used so far, by `kind/key`."""
    return _parcels.copy()


def _add(kind: str, key: str, files: Files) -> None:
    name = f"{kind}/{key}"
    if name in _parcels:
        return
    data = packed(files)
    # No lock: a fork of another thread would find it held for ever.
    if _parcels.setdefault(name, data) is not data:
        return
    for told in listeners:
        told(name, data)


def _used(kind: str, key: str, files: Files) -> None:
    if kind in CACHED:
        _add(kind, key, files)


observers.append(_used)


def note_triton(kernel: Any) -> None:
    """What Triton compiled, or found in its cache, becomes a parcel.

    Asked of the kernel itself: a listener would be the whole process's, and other threads' too.
    """
    paths, key = getattr(kernel, "metadata_group", None), getattr(kernel, "hash", None)
    if not paths or not isinstance(key, str):
        return  # a Triton that says it otherwise: the kernel itself is good
    with contextlib.suppress(OSError):  # a cache that is being cleared
        _add(TRITON, key, {name: Path(path).read_bytes() for name, path in paths.items()})


def packed(files: Files) -> bytes:
    """Files as one text, compressed; ASCII, for torch reads as text what a package has besides."""
    texts = {name: data.decode("latin-1") for name, data in sorted(files.items())}
    return base64.b64encode(zlib.compress(json.dumps(texts).encode(), 1))


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of :func:`packed`. Raises ValueError for anything else, for names that would leave
    their folder or are a cache's own, and for more than MOST_BYTES."""
    try:
        opened = zlib.decompressobj()
        text = opened.decompress(base64.b64decode(data, validate=True), MOST_BYTES)
        if not opened.eof:
            raise ValueError(f"a parcel of kernels that is cut off, or over {MOST_BYTES} bytes")
        files = {name: text.encode("latin-1") for name, text in json.loads(text).items()}
    except (zlib.error, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"no parcel of kernels: {error}") from error
    if not files or not all(map(_is_plain, files)):
        raise ValueError(f"a parcel of kernels with files {sorted(files)}")
    return files


def _is_plain(name: str) -> bool:
    """Whether a file of this name lies in its folder, and is no file of the caches' own."""
    if name in ("", ".", "..", MANIFEST, "lock") or name.startswith(("__grp__", "tmp.")):
        return False
    return "\0" not in name and Path(name).name == name


def deliver(name: str, data: bytes) -> bool:
    """Puts a parcel where kernels are looked for; whether it could be. What is there stays."""
    try:
        kind, _, key = name.partition("/")
        if kind not in (*CACHED, TRITON) or not _KEY.match(key):
            raise ValueError(f"a parcel of kernels called {name!r}")
        files = unpacked(data)
        if kind == TRITON:
            _put_in_triton_s_cache(key, files)
        else:
            KernelCache().put_new(kind, key, files)
    except (OSError, ValueError, ImportError) as error:
        warn_once("parcels", f"kernels that were brought along are not used: {error}")
        return False
    return True


def _put_in_triton_s_cache(key: str, files: Files) -> None:
    from triton.runtime.cache import get_cache_manager

    # Triton asks for the group by the name of its description.
    groups = [name for name in files if name.endswith(".json")]
    if len(groups) != 1:
        raise ValueError(f"a parcel of one kernel with files {sorted(files)}")
    (group,) = groups
    description = json.loads(files[group])
    if not isinstance(description, dict) or description.get("hash") != key:
        raise ValueError("a parcel of one kernel under the name of another")
    manager = get_cache_manager(key)
    # By whatever name a group is asked for: its files may be those of one that is there.
    if not any(manager.get_file(name) for name in (*files, f"__grp__{group}")):
        manager.put_group(group, {name: manager.put(data, name) for name, data in files.items()})


def pack_kernels(package: str | Path) -> int:
    """Adds what this process has used to a package of AOTInductor (`model.pt2`), which runs as
    before; how many parcels there were. Run the package once before, so that its kernels are made.

    Raises OSError, and zipfile.BadZipFile for what is no package; the file stays as it was then.
    """
    found = parcels()
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        if not names:
            raise zipfile.BadZipFile("an empty archive is no package")
    place = f"{names[0].partition('/')[0]}/{FOLDER}"
    new = {f"{place}/{name}": data for name, data in found.items()}
    new = {path: data for path, data in new.items() if path not in names}
    if new:
        _append(Path(package), new)
    return len(found)


def _append(package: Path, files: Files) -> None:
    """Adds files to an archive. They are written over its directory of files, which is put back
    where that fails, as on a full disk."""
    with package.open("r+b") as file:
        with zipfile.ZipFile(file) as archive:
            start = archive.start_dir
        file.seek(start)
        end = file.read()
        try:
            with zipfile.ZipFile(file, "a") as archive:
                for path, data in files.items():
                    archive.writestr(path, data)
        except BaseException:
            file.seek(start)
            file.write(end)
            file.truncate()
            raise


def load_kernels(package: str | Path) -> int:
    """Puts the kernels and times of a package where they are looked for; how many could be. Call it
    before the package's first run.

    A package without any is no error. What it brings is run: it must come from whom you trust.
    Raises OSError, and zipfile.BadZipFile for what is no package.
    """
    with zipfile.ZipFile(package) as archive:
        found = [(path, path.partition(f"/{FOLDER}/")[2]) for path in archive.namelist()]
        return sum(deliver(name, _content(archive, path)) for path, name in found if name)


def _content(archive: zipfile.ZipFile, path: str) -> bytes:
    """A file of an archive; nothing, which is no parcel, for one that cannot be read."""
    try:
        with archive.open(path) as file:
            return file.read(MOST_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError):  # damaged, or with a password
        return b""
