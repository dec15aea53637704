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
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.codegen.build.cache import KernelCache, observers
from tilewright.codegen.build.cache.folder import warn_once

Files = Mapping[str, bytes]

CACHED = ("source", "tuned")
TRITON = "triton"
#: Where the parcels lie in a package of AOTInductor, below the folder that all of it is in.
FOLDER = "extra/tilewright"

_KEY = re.compile(r"[0-9a-f]{64}\Z")
_lock = threading.Lock()
_parcels: dict[str, bytes] = {}
#: Told of each new parcel: its name, `kind/key`, and its bytes.
listeners: list[Callable[[str, bytes], None]] = []


def parcels() -> dict[str, bytes]:
    """What this process has used so far, by `kind/key`."""
    with _lock:
        return dict(_parcels)


def _add(kind: str, key: str, files: Files) -> None:
    name = f"{kind}/{key}"
    with _lock:
        if name in _parcels:
            return
        _parcels[name] = data = packed(files)
    for told in listeners:
        told(name, data)


def _used(kind: str, key: str, files: Files) -> None:
    if kind in CACHED:
        _add(kind, key, files)


observers.append(_used)


@contextlib.contextmanager
def noting_triton() -> Iterator[None]:
    """Around a compilation: what Triton makes, or finds in its cache, becomes a parcel."""
    from triton import knobs

    before = knobs.compilation.listener

    def note(**said: Any) -> None:
        with contextlib.suppress(OSError):  # a cache that is being cleared
            paths = said["metadata_group"].items()
            files = {name: Path(path).read_bytes() for name, path in paths}
            _add(TRITON, said["metadata"]["hash"], files)
        if before is not None:
            before(**said)

    knobs.compilation.listener = note
    try:
        yield
    finally:
        knobs.compilation.listener = before


def packed(files: Files) -> bytes:
    """Files as one text, compressed; ASCII, for torch reads as text what a package has besides."""
    texts = {name: data.decode("latin-1") for name, data in sorted(files.items())}
    return base64.b64encode(zlib.compress(json.dumps(texts).encode(), 1))


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of :func:`packed`. Raises ValueError for anything else, and for names that would
    leave their folder."""
    try:
        texts = json.loads(zlib.decompress(base64.b64decode(data, validate=True)))
        files = {name: text.encode("latin-1") for name, text in texts.items()}
    except (zlib.error, AttributeError, TypeError) as error:
        raise ValueError(f"no parcel of kernels: {error}") from error
    outside = [name for name in files if name in ("", ".", "..") or Path(name).name != name]
    if outside or not files:
        raise ValueError(f"a parcel of kernels with files {sorted(files)}")
    return files


def deliver(name: str, data: bytes) -> bool:
    """Puts a parcel where kernels are looked for; whether it could be. What is there stays."""
    try:
        kind, _, key = name.partition("/")
        if kind not in (*CACHED, TRITON) or not _KEY.match(key):
            raise ValueError(f"a parcel of kernels called {name!r}")
        files = unpacked(data)
        if kind == TRITON:
            _put_in_triton_s_cache(key, files)
        elif not KernelCache().has(kind, key):
            KernelCache().put(kind, key, files)
    except (OSError, ValueError) as error:
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
    manager = get_cache_manager(key)
    if manager.get_group(group) is None:
        manager.put_group(group, {name: manager.put(data, name) for name, data in files.items()})


def pack_kernels(package: str | Path) -> int:
    """Adds what this process has used to a package of AOTInductor (`model.pt2`), which runs as
    before; how many parcels there were. Run the package once before, so that its kernels are made.

    Raises OSError, and zipfile.BadZipFile for what is no package.
    """
    found = parcels()
    with zipfile.ZipFile(package, "a") as archive:
        names = archive.namelist()
        place = f"{names[0].partition('/')[0]}/{FOLDER}"
        new = {f"{place}/{name}": data for name, data in found.items()}
        for path, data in new.items():
            if path not in names:
                archive.writestr(path, data)
    return len(found)


def load_kernels(package: str | Path) -> int:
    """Puts the kernels and times of a package where they are looked for; how many could be. Call it
    before the package's first run.

    A package without any is no error. What it brings is run: it must come from whom you trust.
    """
    with zipfile.ZipFile(package) as archive:
        found = [(path, path.partition(f"/{FOLDER}/")[2]) for path in archive.namelist()]
        return sum(deliver(name, archive.read(path)) for path, name in found if name)
