"""Kernels and times of one machine, found by another: through torch's artifacts and a package."""

from __future__ import annotations

import logging
import os
import zipfile
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
from tilewright.ops import load_kernels, pack_kernels
from tilewright.ops.runtime.launch import compiled_kernel

TIMES = {"times.json": b'{"machine": "a", "seconds": {"library": 1e-06}}'}
TUNED = key_of("times of a case")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(name): from here on this process has that machine's folders, and a GPU's compiler."""
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
    """What a call and its tuning leave in the caches."""
    compiled_kernel(ADD, 0)
    KernelCache().get_or_make("tuned", TUNED, lambda: TIMES)


def is_warm(monkeypatch) -> list[bool]:
    """Whether source, times and Triton's kernel are there; the last by what Triton says."""
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


def test_what_is_there_stays(machine):
    machine("one")
    entry = emitted(ADD)
    key = source_fingerprint(ADD)
    assert travel.deliver(f"source/{key}", travel.packed({"other.py": b"x"}))
    assert KernelCache().find("source", key).files == entry.files


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (f"source/{TUNED}", travel.packed({"../../out.py": b"x"})),
        (f"source/{TUNED}", travel.packed({})),
        (f"source/{TUNED}", b"no parcel"),
        (f"binary/{TUNED}", travel.packed({"a.py": b"x"})),
        ("source/../../../out", travel.packed({"a.py": b"x"})),
        (f"triton/{TUNED}", travel.packed({"kernel.cubin": b"x"})),
    ],
    ids=["path", "empty", "bytes", "kind", "key", "group"],
)
def test_what_is_no_parcel_is_left_with_a_warning(machine, name, data, caplog):
    """And the loading of the others goes on."""
    folder = machine("one")
    with caplog.at_level(logging.WARNING, logger="tilewright"):
        assert not travel.deliver(name, data)
    assert "brought along are not used" in caplog.text
    assert [place for place in Path(folder).parent.rglob("*") if place.is_file()] == []
    assert os.environ["TILEWRIGHT_CACHE_DIR"].startswith(str(folder))


def test_a_listener_of_triton_s_hears_too(machine, monkeypatch):
    machine("one")
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **said: heard.append(said))
    compiled_kernel(ADD, 0)
    assert [said["cache_hit"] for said in heard] == [False]
    assert {"src", "metadata", "metadata_group", "times"} <= set(heard[0])


def test_a_torch_with_another_interface_is_no_error(monkeypatch):
    from tilewright.compiler import _compat

    monkeypatch.delattr(torch.compiler._cache, "CacheArtifactFactory")
    assert _compat.register_artifacts("other", lambda key, content: None) is None
