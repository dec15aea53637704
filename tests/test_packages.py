"""Every folder of code is a package that is installed, and every module is found by its name."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
from setuptools.config.pyprojecttoml import read_configuration

from tilewright.codegen.emit.source import Imported, parse_module
from tilewright.codegen.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("codegen", "ops", "patterns", "compiler", "tools")
MOST_FILES = 20


def folders() -> list[Path]:
    """Where Python files of the package lie."""
    return sorted({path.parent for floor in FLOORS for path in (ROOT / floor).rglob("*.py")})


def name_of(folder: Path) -> str:
    return ".".join(("tilewright", *folder.relative_to(ROOT).parts))


def test_every_folder_is_a_package_that_pyproject_installs():
    setuptools = read_configuration(ROOT / "pyproject.toml", expand=False)["tool"]["setuptools"]
    names = {name_of(folder): str(folder.relative_to(ROOT)) for folder in folders()}
    assert setuptools["packages"] == sorted(names)
    assert setuptools["package-dir"] == names
    assert all((folder / "__init__.py").is_file() for folder in folders())


def test_pytest_leaves_out_no_folder_of_tests(pytestconfig):
    left_out = pytestconfig.getini("norecursedirs")
    tests = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {part for folder in tests for part in folder.parts}
    assert "build" in parts
    assert not [part for part in parts if any(fnmatch(part, pattern) for pattern in left_out)]


def test_no_folder_holds_more_files_than_one_takes_in():
    counts = {name_of(folder): len(list(folder.glob("*.py"))) - 1 for folder in folders()}
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


def shadowed(modules: dict[str, ModuleType]) -> list[str]:
    """Modules whose package has something else by their name."""
    ours = [name for name in modules if name.startswith("tilewright.") and name.count(".") > 1]
    parts = {name: name.rpartition(".") for name in ours}
    return [
        name
        for name, (package, _, last) in parts.items()
        if getattr(modules[package], last, None) is not modules[name]
    ]


def test_no_module_is_hidden_by_a_function_of_its_name():
    for floor in FLOORS:
        package = importlib.import_module(f"tilewright.{floor}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    assert shadowed(dict(sys.modules)) == []


def test_a_hidden_module_would_be_seen():
    package, hidden, seen = (ModuleType(name) for name in ("package", "hidden", "seen"))
    package.hidden, package.seen = print, seen
    names = ("tilewright.ops", "tilewright.ops.hidden", "tilewright.ops.seen")
    modules = dict(zip(names, (package, hidden, seen), strict=True))
    assert shadowed(modules) == ["tilewright.ops.hidden"]


@pytest.mark.parametrize(
    ("template", "module"),
    [
        ("qkv.tiled", "tilewright.codegen.qkv.templates.tiled"),
        ("grouped.gemm", "tilewright.codegen.grouped.templates.gemm"),
        ("codes", "tilewright.codegen.templates.codes"),
        ("mine.kernels", "mine.kernels"),
        ("emit.values", "emit.values"),
        ("qkv.templates.tiled", "qkv.templates.tiled"),
    ],
)
def test_a_family_s_template_is_named_by_family_and_module(template, module):
    assert KernelSpec.make(template, "kernel", {}, {}).module == module


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("tilewright.codegen.templates.places", True),
        ("tilewright.codegen.moe.templates.gemm", True),
        ("tilewright.codegen.qkv.templates.loads", True),
        ("tilewright.codegen.qkv.problem", False),
    ],
)
def test_a_template_takes_from_every_folder_of_templates(source, taken):
    text = f"from {source} import helper\n"
    module = parse_module("tilewright.codegen.qkv.templates.tiled", text)
    assert module.imports == ({"helper": Imported(source, "helper")} if taken else {})
