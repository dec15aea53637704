"""Moves kernels to another process, so that a container starts with a warm cache.

A parcel is one cache entry that this process used. An emitted file ("source") or measured times
("tuned") come from the kernel cache, and the files of one compiled kernel ("triton") come from
Triton's cache. The key of a "triton" parcel is Triton's hash, which covers Triton's version, its
compilers and the chip. Therefore another kind of machine stores the parcel but does not use it.

Unpacked kernels are executed. Take parcels only from people whose code you would run.
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
#: The largest number of bytes of a parcel. Triton's files of one kernel take a few MB.
MOST_BYTES = 1 << 28
#: The folder that holds the parcels in an AOTInductor package, relative to the package's top
#: folder.
FOLDER = "extra/tilewright"

_KEY = re.compile(r"[0-9a-f]{64}\Z")
_parcels: dict[str, bytes] = {}
#: Functions that are called for each new parcel, with the parcel's name (`kind/key`) and its bytes.
listeners: list[Callable[[str, bytes], None]] = []


def parcels() -> dict[str, bytes]:
    """Returns the parcels that this process has used so far, by `kind/key`."""
    return _parcels.copy()


def _add(kind: str, key: str, files: Files) -> None:
    name = f"{kind}/{key}"
    if name in _parcels:
        return
    data = packed(files)
    # `setdefault` is used instead of a lock. If a process were forked while another thread held the
    # lock, the child could never acquire it.
    if _parcels.setdefault(name, data) is not data:
        return
    for told in listeners:
        told(name, data)


def _used(kind: str, key: str, files: Files) -> None:
    if kind in CACHED:
        _add(kind, key, files)


observers.append(_used)


def note_triton(kernel: Any) -> None:
    """Makes a parcel of a kernel that Triton compiled or found in its cache.

    This function reads the files from the kernel object. A listener in Triton would apply to the
    whole process and all its threads.
    """
    paths, key = getattr(kernel, "metadata_group", None), getattr(kernel, "hash", None)
    if not paths or not isinstance(key, str):
        return  # this Triton release lacks these attributes; the kernel itself works
    with contextlib.suppress(OSError):  # Triton's cache may be cleared meanwhile
        _add(TRITON, key, {name: Path(path).read_bytes() for name, path in paths.items()})


def packed(files: Files) -> bytes:
    """Packs files into compressed ASCII text. torch reads the extra files of a package as text."""
    texts = {name: data.decode("latin-1") for name, data in sorted(files.items())}
    return base64.b64encode(zlib.compress(json.dumps(texts).encode(), 1))


def unpacked(data: bytes) -> dict[str, bytes]:
    """Unpacks the files that :func:`packed` packed.

    Raises ValueError for any other data, for file names that lead out of the folder or that a cache
    reserves, and if the files take more than MOST_BYTES bytes.
    """
    try:
        opened = zlib.decompressobj()
        text = opened.decompress(base64.b64decode(data, validate=True), MOST_BYTES)
        if not opened.eof:
            raise ValueError(
                f"the parcel of kernels is truncated, or has more than {MOST_BYTES} bytes"
            )
        files = {name: text.encode("latin-1") for name, text in json.loads(text).items()}
    except (zlib.error, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"the data is not a parcel of kernels: {error}") from error
    if not files or not all(map(_is_plain, files)):
        raise ValueError(f"a parcel of kernels cannot have the files {sorted(files)}")
    return files


def _is_plain(name: str) -> bool:
    """Whether a file of this name would be in the folder of its entry, and no cache reserves the
    name."""
    if name in ("", ".", "..", MANIFEST, "lock") or name.startswith(("__grp__", "tmp.")):
        return False
    return "\0" not in name and Path(name).name == name


def deliver(name: str, data: bytes) -> bool:
    """Stores a parcel in the cache that it belongs to, unless the cache has the entry already. If
    the parcel cannot be stored, warns and returns False."""
    try:
        kind, _, key = name.partition("/")
        if kind not in (*CACHED, TRITON) or not _KEY.match(key):
            raise ValueError(f"{name!r} is not a name of a parcel of kernels")
        files = unpacked(data)
        if kind == TRITON:
            _put_in_triton_s_cache(key, files)
        else:
            KernelCache().put_new(kind, key, files)
    except (OSError, ValueError, ImportError) as error:
        warn_once("parcels", f"packed kernels are not used: {error}")
        return False
    return True


def _put_in_triton_s_cache(key: str, files: Files) -> None:
    from triton.runtime.cache import get_cache_manager

    # Triton's cache stores the files of a kernel as a group, which has the name of its only JSON
    # file.
    groups = [name for name in files if name.endswith(".json")]
    if len(groups) != 1:
        raise ValueError(f"the parcel of one kernel cannot have the files {sorted(files)}")
    (group,) = groups
    description = json.loads(files[group])
    if not isinstance(description, dict) or description.get("hash") != key:
        raise ValueError("the parcel of one kernel has the name of another kernel")
    manager = get_cache_manager(key)
    # Check every file and not only the group, because a group of another name may have some of the
    # same files.
    if not any(manager.get_file(name) for name in (*files, f"__grp__{group}")):
        manager.put_group(group, {name: manager.put(data, name) for name, data in files.items()})


def pack_kernels(package: str | Path) -> int:
    """Adds the kernels and times that this process has used to an AOTInductor package
    (`model.pt2`). Returns the number of parcels.

    Run the package once before you call this function, so that the package's kernels exist. Raises
    OSError if the file cannot be read or written, and zipfile.BadZipFile if the file is not a
    package. In both cases, the file is unchanged.
    """
    found = parcels()
    with zipfile.ZipFile(package) as archive:
        names = archive.namelist()
        if not names:
            raise zipfile.BadZipFile("the archive is empty, so it is not a package")
    place = f"{names[0].partition('/')[0]}/{FOLDER}"
    new = {f"{place}/{name}": data for name, data in found.items()}
    new = {path: data for path, data in new.items() if path not in names}
    if new:
        _append(Path(package), new)
    return len(found)


def _append(package: Path, files: Files) -> None:
    """Adds files to an archive. The new files overwrite the archive's table of contents, which is
    then written after them. If an error occurs, for example on a full disk, the old table of
    contents is restored."""
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
    """Stores the kernels and times of a package in the caches. Returns how many of them could be
    stored. Call this function before the first run of the package.

    It is not an error if the package has no kernels. The kernels are executed, so load only
    packages that you trust. Raises OSError if the file cannot be read, and zipfile.BadZipFile if it
    is not a package.
    """
    with zipfile.ZipFile(package) as archive:
        found = [(path, path.partition(f"/{FOLDER}/")[2]) for path in archive.namelist()]
        return sum(deliver(name, _content(archive, path)) for path, name in found if name)


def _content(archive: zipfile.ZipFile, path: str) -> bytes:
    """Returns the contents of a file of an archive. If the file cannot be read, returns no bytes,
    which are not a valid parcel."""
    try:
        with archive.open(path) as file:
            return file.read(MOST_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError):  # damaged or encrypted
        return b""
