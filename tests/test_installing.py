"""Tests that the wheel that is built from the sdist has every module, and works after it is
installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

from tests.test_packages import LAYERS, ROOT

PARTS = ("src", *LAYERS, "docs", "README.md", "LICENSE", "MANIFEST.in", "pyproject.toml")


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    """Returns the output of a program. Only `path` comes before the installed packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Returns the file that setuptools, the project's build backend, builds from a folder."""
    out.mkdir()
    code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(out)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, Path]:
    """Returns the sdist of a copy of the checkout, and the wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("published")
    copy = folder / "copy"
    copy.mkdir()
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            no_caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / part, symlinks=True, ignore=no_caches)
        else:
            shutil.copy(source, copy)
    sdist = build("sdist", copy, folder / "sdist")
    with tarfile.open(sdist) as archive:
        # Some releases of Python warn if no filter is given, and other releases have no such
        # filter.
        filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder / "unpacked", **filtered)
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", unpacked, folder / "wheel")


def test_the_wheel_holds_every_module_and_what_they_read(published):
    with zipfile.ZipFile(published[1]) as wheel:
        names = set(wheel.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        said = BytesParser().parsebytes(wheel.read(metadata))
    read = ("*.py", "*.json", "*.j2", "*.md", "py.typed")
    ours = {path for layer in LAYERS for kind in read for path in (ROOT / layer).rglob(kind)}
    assert {f"tilewright/{path.relative_to(ROOT)}" for path in ours} <= names
    assert (said["Name"], said["Description-Content-Type"]) == ("tilewright", "text/markdown")
    assert said.get_payload().startswith((ROOT / "README.md").read_text("utf-8")[:80])


def test_the_sdist_has_no_part_of_the_tests(published):
    with tarfile.open(published[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "src/tilewright/patterns/miss-codes.md"} <= inside
    assert not [name for name in inside if name.startswith("tests/")]


def test_the_files_pass_twine_s_check(published):
    """PyPI requires this check. Warnings count, too."""
    check = pytest.importorskip("twine.commands.check", reason="twine is in the extra 'dev'")
    assert check.check([str(path) for path in published], strict=True) is False


ENTRY_POINTS = """
from importlib.metadata import distribution, entry_points
groups = ("console_scripts", "pytest11", "torch_dynamo_backends")
print(*(len(entry_points(group=group, name="tilewright")) for group in groups))
print(distribution("tilewright").locate_file(""))
"""


def test_the_wheel_is_installed_into_an_empty_environment_and_starts(published, tmp_path):
    """pip finds each requirement among the installed packages of this environment, as it would on
    an index. No file of this checkout is used."""
    run(sys.executable, "-m", "venv", "--without-pip", "new", cwd=tmp_path)
    python = str(tmp_path / "new" / "bin" / "python")
    (own,) = (tmp_path / "new").glob("lib/python*/site-packages")
    (own / "requirements.pth").write_text("\n".join(installed_here()) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "-q", "--no-index", "--no-compile", str(published[1]), cwd=tmp_path)
    program = str(tmp_path / "new" / "bin" / "tilewright")
    said = run(program, "--version", cwd=tmp_path)
    assert said == f"tilewright {published[1].name.split('-')[1]}\n"
    assert "static cache" in run(program, "explain", "GROWING_CACHE", cwd=tmp_path)
    found, place = run(python, "-c", ENTRY_POINTS, cwd=tmp_path).splitlines()
    assert (found, Path(place)) == ("1 1 1", own)
    # A folder with the package's name, such as a clone, must not hide the installed package.
    (tmp_path / "tilewright" / "compiler").mkdir(parents=True)
    read = run(python, "-c", "import tilewright; print(tilewright.__version__)", cwd=tmp_path)
    assert f"tilewright {read}" == said


def installed_here() -> list[str]:
    """Returns the folders of installed packages, without checkouts that are installed in editable
    mode."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


UNINSTALLED = """
import {module}
import torch
from importlib.metadata import entry_points

assert not entry_points(group="torch_dynamo_backends", name="tilewright")
function = torch.compile(lambda x: x + 1, backend="tilewright", options={{"inner": "eager"}})
print(function(torch.zeros(1)).item())
"""


@pytest.mark.parametrize("module", ["backend", "serving.batching"])
def test_the_backend_has_its_name_where_the_sources_are_only_on_the_path(tmp_path, module):
    """The backend has its name even if the sources are only on the path, so that no entry point
    tells Dynamo the name."""
    if module == "serving.batching":
        pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    for folder in installed_here():
        for path in Path(folder).iterdir():
            link = tmp_path / path.name
            if "tilewright" not in path.name and not link.exists():
                link.symlink_to(path)
    (tmp_path / "tilewright").symlink_to(ROOT / "src" / "tilewright")
    code = UNINSTALLED.format(module=f"tilewright.compiler.{module}")
    assert run(sys.executable, "-S", "-c", code, cwd=tmp_path, path=tmp_path) == "1.0\n"
