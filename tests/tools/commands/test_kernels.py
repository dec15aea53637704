"""Tests the command `kernels`: the files that it writes, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.tools.schemas import schema_checked
from tilewright.codegen.build import BuildError


def test_kernels_writes_every_file_and_a_second_run_compiles_nothing(
    command, tmp_path, monkeypatch
):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ("kernels", "mine.py:make", "-o", "out/nested", "--target", "sm90", "--json")
    done = command(*arguments)
    assert done.exit_code == 0, done.stderr
    manifest = schema_checked("kernels", done.stdout)
    folder = tmp_path / "out" / "nested"
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    assert manifest["kernels"]
    for kernel in manifest["kernels"]:
        suffixes = {name.removeprefix(kernel["name"]) for name in kernel["files"]}
        assert suffixes == {".py", ".ptx", ".cubin", ".audit.json"}
        assert all((folder / name).stat().st_size for name in kernel["files"])
    assert {p.name for p in folder.iterdir()} == {
        "manifest.json",
        *(name for kernel in manifest["kernels"] for name in kernel["files"]),
    }
    compiled = "tilewright.codegen.build._run_worker"
    monkeypatch.setattr(compiled, lambda *a: pytest.fail("compiled again"))
    torch._dynamo.reset()
    assert command(*arguments).exit_code == 0
    torch._dynamo.reset()
    there = set(tmp_path.rglob("*"))
    told = command("kernels", "mine.py:make", "--target", "sm90", "--json")
    audits = [kernel | {"files": []} for kernel in manifest["kernels"]]
    assert schema_checked("kernels", told.stdout)["kernels"] == audits
    assert set(tmp_path.rglob("*")) == there, "without -o nothing is written"


@pytest.fixture
def without_compiler(monkeypatch):
    """Makes the compilation of emitted kernels fail."""

    def fail(*arguments):
        raise BuildError("ptxas: out of registers")

    monkeypatch.setattr("tilewright.codegen.build._run_worker", fail)


def test_a_folder_loses_an_earlier_model_s_kernels_and_nothing_else(
    command, tmp_path, monkeypatch, without_compiler
):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    folder, outside = tmp_path / "out", tmp_path / "outside.py"
    command("kernels", "mine.py:make", "-o", "out")
    old = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert old
    for mine in (folder / "mine.py", folder / "notes.txt", outside):
        mine.write_text("the user's own")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["kernels"][0]["files"] += ["notes.txt", "../outside.py", "", "."]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    kept = {"mine.py", "notes.txt", "manifest.json"}
    for model, kernels in (("mine.py:make", old), ("mine.py:make_missed", set())):
        torch._dynamo.reset()
        command("kernels", model, "-o", "out")
        assert {path.name for path in folder.iterdir()} == kept | kernels
    assert outside.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"name": "an app"}', '{"kernels": 3}'])
def test_a_manifest_of_somebody_else_is_left_alone(command, tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    done = command("kernels", "mine.py:make", "-o", ".")
    assert done.exit_code == 2
    assert "manifest.json is not a manifest of kernels" in done.stderr
    assert (tmp_path / "manifest.json").read_text() == content


def test_a_kernel_that_does_not_compile_is_exit_code_one(
    command, tmp_path, monkeypatch, without_compiler
):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    done = command("kernels", "mine.py:make", "-o", "out", "--json")
    assert done.exit_code == 1
    (kernel,) = schema_checked("kernels", done.stdout)["kernels"]
    assert "out of registers" in kernel["error"]
    assert [Path(name).suffix for name in kernel["files"]] == [".py"]


def test_kernels_are_audited_without_a_cache_that_can_be_written(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    done = command("inspect", "mine.py:make", "--json")
    assert done.exit_code == 0
    kernels = schema_checked("inspect", done.stdout)["kernels"]
    assert kernels
    assert all(kernel["audit"]["registers"] for kernel in kernels)


def test_no_folder_to_compile_in_is_one_line(command, monkeypatch):
    def nowhere(*arguments, **options):
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tilewright.codegen.build.private_folder", nowhere)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "/proc/no/such/cache")
    done = command("inspect", "mine.py:make")
    assert done.exit_code == 2
    assert "No usable temporary directory" in done.stderr.splitlines()[-1]
    assert "set TMPDIR to another folder" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
