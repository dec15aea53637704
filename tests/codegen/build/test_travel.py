"""Tests that a machine can use the kernels and times of another machine, through torch's artifacts
and through a package."""

from __future__ import annotations

import base64
import json
import logging
import os
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from tests.codegen.build.test_cached_kernels import ADD
from tilewright.codegen.build import emitted, load_jit, travel
from tilewright.codegen.build.cache import KernelCache, key_of
from tilewright.codegen.build.cache import folder as cache_folder
from tilewright.codegen.emit import source_fingerprint
from tilewright.compiler import artifacts
from tilewright.compiler._compat import inductor
from tilewright.ops import load_kernels, pack_kernels
from tilewright.ops.runtime.launch import compiled_kernel

TIMES = {"times.json": b'{"machine": "a", "seconds": {"library": 1e-06}}'}
TUNED = key_of("times of a case")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns a function `machine(name)`. After this call, the process uses the cache folders of
    the machine with this name, and has the compiler of a GPU."""
    target = GPUTarget("cuda", 90, 32)
    active = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(travel, "_parcels", {})
    monkeypatch.setattr(cache_folder, "_said", set())

    def go_to(name: str) -> Path:
        monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / name / "kernels"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name / "triton"))
        compiled_kernel.cache_clear()
        load_jit.cache_clear()
        return tmp_path / name

    yield go_to
    compiled_kernel.cache_clear()
    load_jit.cache_clear()


def work() -> None:
    """Fills the caches as a call and its tuning do."""
    compiled_kernel(ADD, 0)
    KernelCache().get_or_make("tuned", TUNED, lambda: TIMES)


def is_warm(monkeypatch) -> list[bool]:
    """Returns whether the source, the times and Triton's kernel are in the caches. Triton itself
    reports the last."""
    hits = []
    with monkeypatch.context() as patch:
        said = lambda **said: hits.append(said["cache_hit"])  # noqa: E731
        patch.setattr(knobs.compilation, "listener", said)
        cache = KernelCache()
        found = [cache.has("source", source_fingerprint(ADD)), cache.has("tuned", TUNED)]
        compiled_kernel(ADD, 0)
    return [*found, *hits]


def test_what_a_process_used_travels_among_torch_s_artifacts(machine, monkeypatch):
    machine("one")
    torch.compiler._cache.CacheArtifactManager.clear()
    work()
    data, info = torch.compiler.save_cache_artifacts()
    names = info.artifacts[artifacts.TYPE]
    assert sorted(name.partition("/")[0] for name in names) == ["source", "triton", "tuned"]

    machine("cold")
    assert is_warm(monkeypatch) == [False, False, False]
    machine("other")
    loaded = torch.compiler.load_cache_artifacts(data)
    assert sorted(loaded.artifacts[artifacts.TYPE]) == sorted(names)
    assert is_warm(monkeypatch) == [True, True, True]
    assert KernelCache().find("tuned", TUNED).files == TIMES


def test_a_package_brings_them(machine, monkeypatch, tmp_path):
    package = tmp_path / "model.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("model/data/aotinductor/model/x.so", b"code")
    assert load_kernels(package) == 0
    machine("one")
    work()
    assert pack_kernels(package) == pack_kernels(package) == 3
    machine("other")
    assert load_kernels(package) == 3
    assert is_warm(monkeypatch) == [True, True, True]
    with zipfile.ZipFile(package) as archive:
        assert len(archive.namelist()) == len(set(archive.namelist())) == 4
        assert archive.read("model/data/aotinductor/model/x.so") == b"code"


def test_what_is_there_stays(machine, monkeypatch):
    """Unpacking a bundle replaces no existing entry, even if another process makes the entry
    meanwhile.

    It also replaces no compiled kernel of Triton if the bundle has the kernel's files under another
    description.
    """
    machine("one")
    entry = emitted(ADD)
    key = source_fingerprint(ADD)
    assert travel.deliver(f"source/{key}", travel.packed({"other.py": b"x"}))
    assert KernelCache().find("source", key).files == entry.files
    with monkeypatch.context() as patch:
        known = iter([False])
        has = KernelCache.has
        patch.setattr(KernelCache, "has", lambda *given: next(known, has(*given)))
        assert travel.deliver(f"source/{key}", travel.packed({"other.py": b"x"}))
    assert KernelCache().find("source", key).files == entry.files

    kernel = compiled_kernel(ADD, 0)
    cubin = Path(next(p for n, p in kernel.metadata_group.items() if n.endswith(".cubin")))
    before = cubin.read_bytes()
    files = {"other.json": json.dumps({"hash": kernel.hash}).encode(), cubin.name: b"poison"}
    assert travel.deliver(f"triton/{kernel.hash}", travel.packed(files))
    assert cubin.read_bytes() == before


def test_an_entry_with_other_files_is_made_again(machine):
    machine("one")
    key = source_fingerprint(ADD)
    assert travel.deliver(f"source/{key}", travel.packed({"other.py": b"x"}))
    assert f"{ADD.name}.py" in emitted(ADD).files
    assert f"{ADD.name}.py" in travel.unpacked(travel.parcels()[f"source/{key}"])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (f"source/{TUNED}", travel.packed({"../../out.py": b"x"})),
        (f"source/{TUNED}", travel.packed({})),
        (f"source/{TUNED}", b"no parcel"),
        (f"binary/{TUNED}", travel.packed({"a.py": b"x"})),
        ("source/../../../out", travel.packed({"a.py": b"x"})),
        (f"triton/{TUNED}", travel.packed({"kernel.cubin": b"x"})),
        (f"triton/{TUNED}", travel.packed({"kernel.json": b'{"hash": "another"}'})),
        (f"source/{TUNED}", travel.packed({"a.py": b"x", "manifest.json": b"{}"})),
        (f"source/{TUNED}", travel.packed({"a\0.py": b"x"})),
        (f"source/{TUNED}", travel.packed({"a.py": b"x"})[:-8]),
        (f"source/{TUNED}", base64.b64encode(zlib.compress(b"[" * 10**5))),
        (f"source/{TUNED}", base64.b64encode(zlib.compress(b" " * 2**21))),
    ],
    ids=[
        "path",
        "empty",
        "bytes",
        "kind",
        "key",
        "group",
        "another",
        "manifest",
        "nul",
        "cut",
        "deep",
        "huge",
    ],
)
def test_what_is_no_parcel_is_left_with_a_warning(machine, monkeypatch, name, data, caplog):
    """The other artifacts are still loaded."""
    monkeypatch.setattr(travel, "MOST_BYTES", 2**20)
    folder = machine("one")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert not travel.deliver(name, data)
    assert "packed kernels are not used" in caplog.text
    assert [place for place in Path(folder).parent.rglob("*") if place.is_file()] == []
    assert os.environ["TILEWRIGHT_CACHE_DIR"].startswith(str(folder))


def test_triton_s_listener_is_the_user_s(machine, monkeypatch):
    """Tests that Triton's listener is left to the user. It belongs to the whole process: two
    threads that compile would each restore the listener that they found."""
    machine("one")
    heard = []

    def listener(**said):
        heard.append((said["cache_hit"], knobs.compilation.listener is listener))

    monkeypatch.setattr(knobs.compilation, "listener", listener)
    kernel = compiled_kernel(ADD, 0)
    assert heard == [(False, True)]
    assert f"triton/{kernel.hash}" in travel.parcels()


def test_a_triton_that_keeps_its_files_otherwise_is_no_error(machine):
    machine("builder")
    for kernel in (SimpleNamespace(), SimpleNamespace(metadata_group={"a": "b"}, hash=7)):
        travel.note_triton(kernel)
    assert not travel.parcels()


def test_no_package_is_left_as_it_was(machine, tmp_path, monkeypatch):
    """Tests that a bad package is left unchanged: one that does not exist, a file that is no
    package, and a package on a full disk."""
    machine("one")
    KernelCache().get_or_make("tuned", TUNED, lambda: TIMES)
    with pytest.raises(FileNotFoundError):
        pack_kernels(tmp_path / "absent.pt2")
    assert not (tmp_path / "absent.pt2").exists()
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(zipfile.BadZipFile):
        pack_kernels(other)
    assert other.read_text() == "mine"

    package = tmp_path / "model.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("model/x.so", b"code" * 100)
    before = package.read_bytes()
    monkeypatch.setattr(zipfile.ZipFile, "writestr", _fail_half_way)
    with pytest.raises(OSError, match="full"):
        pack_kernels(package)
    assert package.read_bytes() == before


def _fail_half_way(archive, *given):
    archive.fp.write(b"half")
    archive._didModify = True
    raise OSError(28, "the disk is full")


def test_a_damaged_parcel_of_a_package_is_left_out(machine, tmp_path):
    machine("one")
    package = tmp_path / "model.pt2"
    with zipfile.ZipFile(package, "w") as archive:
        for key in (TUNED, key_of("more")):
            archive.writestr(f"model/{travel.FOLDER}/tuned/{key}", travel.packed(TIMES))
    data = bytearray(package.read_bytes())
    data[data.index(travel.packed(TIMES))] ^= 1
    package.write_bytes(data)
    assert load_kernels(package) == 1


def test_a_torch_with_another_interface_is_no_error(monkeypatch):

    monkeypatch.delattr(torch.compiler._cache, "CacheArtifactFactory")
    assert inductor.register_artifacts("other", lambda key, content: None) is None
