"""Tests kernels from the cache: which bytes run, and that kernels run wherever a folder can be
written."""

from __future__ import annotations

import errno
import importlib.util
import inspect
import json
import logging
import os
import shutil
import stat
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.another_user import give_away, in_a_child
from tilewright.codegen import build
from tilewright.codegen.build import BuildError, compile_for, emitted_path, load_interpreted, worker
from tilewright.codegen.build import cache as cache_module
from tilewright.codegen.build.cache import KernelCache
from tilewright.codegen.build.cache import folder as cache_folder
from tilewright.codegen.build.cache.folder import private_folder
from tilewright.codegen.emit import emit
from tilewright.codegen.spec import KernelSpec
from tilewright.ops.runtime import launch as kernel_launch

ADD = KernelSpec.make(
    "sample_templates.kernels",
    "vector_add",
    {"ALPHA": 2.0, "BLOCK": 1024},
    {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"},
)
PLANTED = emit(ADD).replace("2.0", "3.0")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    root = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(root))
    build.load_jit.cache_clear()
    yield root
    build.load_jit.cache_clear()


def kernel_adds():
    """Returns the factor of y that the interpreted kernel adds to x."""
    x, y, out = torch.zeros(8), torch.ones(8), torch.zeros(8)
    load_interpreted(ADD)[(1,)](x_ptr=x, y_ptr=y, out_ptr=out, n=8)
    return out[0].item()


def byte_code_marks(path, mark):
    """Writes byte code that Python would run in place of the file, without comparing the two. The
    byte code leaves a mark."""
    cached = importlib.util.cache_from_source(str(path))
    os.makedirs(os.path.dirname(cached), exist_ok=True)
    from importlib._bootstrap_external import _code_to_hash_pyc

    code = compile(f"open({str(mark)!r}, 'w').close()\n" + emit(ADD), str(path), "exec")
    with open(cached, "wb") as file:
        file.write(_code_to_hash_pyc(code, bytes(8), checked=False))


@pytest.mark.parametrize("load", [build.load_jit, load_interpreted], ids=["jit", "interpreted"])
def test_no_byte_code_of_the_cache_runs_or_is_written(load, tmp_path, fresh_cache):
    mark = tmp_path / "ran"
    load(ADD)
    assert list(fresh_cache.rglob("*.pyc")) == []
    build.load_jit.cache_clear()
    byte_code_marks(emitted_path(ADD), mark)
    load(ADD)
    assert not mark.exists()


def test_a_manifest_that_vouches_for_nothing_vouches_for_no_file():
    path = emitted_path(ADD)
    path.write_text(PLANTED)
    path.with_name("manifest.json").write_text("{}")
    assert kernel_adds() == 2.0
    assert emitted_path(ADD).read_text() == emit(ADD)


def test_the_bytes_that_were_compared_are_the_bytes_that_run(monkeypatch):
    """The file changes after it is checked and before it is used. The kernel that runs and its
    source must be the old ones."""
    emitted_path(ADD)
    find = KernelCache.find

    def change_after_check(store, kind, key):
        found = find(store, kind, key)
        if found is not None:
            (found.folder / f"{ADD.name}.py").write_text(PLANTED)
        return found

    monkeypatch.setattr(KernelCache, "find", change_after_check)
    function = build.load_jit(ADD).function
    assert "2.0" in function.src
    assert "3.0" not in function.src
    assert "3.0" not in inspect.getsource(function.fn)


def test_a_kernel_that_another_user_planted_does_not_run(monkeypatch):
    """The planted kernel has the right hashes and place, but its file belongs to another user."""
    path = emitted_path(ADD)
    shutil.rmtree(path.parent)
    monkeypatch.setattr(build.emitter, "emit", lambda spec: PLANTED)
    assert emitted_path(ADD).read_text() == PLANTED
    monkeypatch.undo()
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(path.parents[3]))
    assert kernel_adds() == 3.0  # the control: an entry of the user is used
    for planted in (path.parent, *path.parent.iterdir()):
        give_away(planted, monkeypatch)
    assert kernel_adds() == 2.0


@pytest.fixture
def no_folder(tmp_path):
    """Returns a path at which no user, not even root, can create a folder."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "cache"


def loaded_and_compiled():
    launchable = build.load_jit(ADD)
    artifact = compile_for(ADD, "sm90")
    again = compile_for(ADD, "sm90")
    named = launchable.function.__name__
    return kernel_adds(), named, artifact.audit.registers > 0, again.folder == artifact.folder


def test_kernels_are_emitted_and_compiled_without_a_cache(no_folder, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(no_folder))
    assert loaded_and_compiled() == (2.0, ADD.name, True, True)


def test_kernels_run_from_memory_where_no_disk_takes_them(no_folder, monkeypatch):
    def nowhere():
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(no_folder))
    monkeypatch.setattr(cache_module, "private_folder", nowhere)
    cache_module._private_roots.clear()
    assert build.emitted(ADD).folder is None
    function = build.load_jit(ADD).function
    assert function.src.startswith(f"def {ADD.name}(")
    assert inspect.getsource(function.fn) in emit(ADD)
    assert kernel_adds() == 2.0


def launch_path(home):
    """Runs the steps of a launch as on a GPU, up to the compiled kernel."""
    os.environ.pop("TRITON_CACHE_DIR", None)
    os.environ["TRITON_HOME"] = str(home)
    target = GPUTarget("cuda", 90, 32)
    active = SimpleNamespace(get_current_target=lambda: target)
    triton.runtime.driver = SimpleNamespace(active=active)
    kernel = kernel_launch.compiled_kernel(ADD, 0)
    chosen = os.environ.get("TRITON_CACHE_DIR", "")
    return kernel.metadata.name, chosen.startswith(f"{private_folder()}/")


def test_a_launch_needs_no_home_to_write_to(no_folder, monkeypatch):
    """Neither tilewright's cache nor Triton's cache can be written. The kernel is compiled, and the
    reference does not run."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(no_folder))
    assert in_a_child(launch_path, no_folder) == (ADD.name, True)


def test_a_triton_cache_that_can_be_written_is_triton_s(tmp_path):
    assert in_a_child(launch_path, tmp_path) == (ADD.name, False)
    assert list((tmp_path / ".triton" / "cache").rglob("*.cubin"))


def test_a_triton_cache_that_the_user_chose_is_left_and_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache_folder, "_said", set())
    build.find_triton_a_cache.cache_clear()
    caplog.set_level(logging.WARNING, logger="tilewright")
    (tmp_path / "file").touch()
    chosen = str(tmp_path / "file" / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", chosen)
    build.find_triton_a_cache()
    build.find_triton_a_cache.cache_clear()
    assert os.environ["TRITON_CACHE_DIR"] == chosen
    assert f"Triton's cache {chosen} cannot be written" in caplog.text


def test_the_worker_tells_a_full_disk_from_a_kernel_that_fails(monkeypatch, tmp_path):
    def full(request):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker, "compile_kernel", full)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # the main function sets it
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")  # the main function sets it, too
    (tmp_path / "request.json").write_text(json.dumps({"out": str(tmp_path)}))
    monkeypatch.setattr(sys, "argv", ["worker.py", str(tmp_path / "request.json")])
    with pytest.raises(SystemExit) as ended:
        worker.main()
    script = tmp_path / "python"
    for code, error in ((ended.value.code, OSError), (1, BuildError)):
        script.write_text(f"#!/bin/sh\necho OSError: No space left >&2\nexit {code}\n")
        script.chmod(0o755)
        with pytest.raises(error, match="No space left"):
            build._run_worker(str(script), tmp_path, {})


def test_a_compiled_kernel_is_kept_without_triton_s_own_cache(fresh_cache):
    folder = compile_for(ADD, "sm90").folder
    names = {path.name for path in folder.iterdir()}
    stages = {f"kernel.{stage}" for stage in worker.STAGES}
    assert names == {"source.py", "metadata.json", "audit.json", "manifest.json", *stages}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~0o022 & ~_umask()
    assert list(private_folder().glob("tmp*")) == []


def _umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask
