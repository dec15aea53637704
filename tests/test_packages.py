"""Tests that every folder of code is an installed package, and that every module is found by its
name."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

import pytest
from setuptools import find_packages
from setuptools.config.pyprojecttoml import read_configuration

import tilewright
from tilewright import compiler
from tilewright.codegen.emit.source import Imported, parse_module
from tilewright.codegen.spec import KernelSpec

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tilewright"
LAYERS = ("codegen", "ops", "patterns", "compiler", "tools")
MOST_FILES = 20


def folders() -> list[Path]:
    """Yields the folders that hold Python files of the package."""
    return sorted({path.parent for layer in LAYERS for path in (ROOT / layer).rglob("*.py")})


def name_of(folder: Path) -> str:
    return ".".join(("tilewright", *folder.relative_to(ROOT).parts))


def test_every_folder_is_a_package_that_is_installed():
    """setuptools follows the links in `src/tilewright`."""
    links = {link.name: link.resolve() for link in SOURCE.iterdir() if link.is_symlink()}
    assert links == {layer: ROOT / layer for layer in LAYERS}
    assert read_configuration(ROOT / "pyproject.toml", expand=False)["tool"]["setuptools"][
        "packages"
    ] == {"find": {"where": ["src"]}}
    found = find_packages(str(SOURCE.parent))
    assert sorted(found) == sorted(["tilewright", *map(name_of, folders())])


def test_public_names_are_imported_when_they_are_used_and_are_the_compiler_s():
    """A public name stands for the same object in `tilewright` and in `tilewright.compiler`, and is
    imported only when it is used. `import tilewright` does not import torch."""
    assert {"lower", "reports", "PagedCache"} <= set(tilewright.__all__) <= set(dir(tilewright))
    for name in tilewright.__all__:
        value = getattr(tilewright, name)
        assert value is getattr(compiler, name, value)
    with pytest.raises(AttributeError, match="'tilewright' has no attribute 'lowered'") as raised:
        _ = tilewright.lowered
    assert (raised.value.name, raised.value.obj) == ("lowered", tilewright)
    code = "import sys, tilewright; tilewright.__version__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_version_is_in_one_place():
    """The version is in one place. Files that cannot read it from there repeat it, and must
    agree."""
    assert (
        "version" in read_configuration(ROOT / "pyproject.toml", expand=False)["project"]["dynamic"]
    )
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    logged = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert cited is not None
    assert logged is not None
    assert {cited[1], logged[1]} == {tilewright.__version__}


def test_the_workflow_runs_the_two_commands_of_the_makefile():
    """The hosted workflow runs the same two commands as `.ci/run`: each is a target of the
    Makefile, and nothing else is run."""
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra 'docs'")
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert all(f"\n{command.removeprefix('make ')}:" in makefile for command in commands)


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
    """Returns the modules whose package has another object of the same name."""
    ours = [name for name in modules if name.startswith("tilewright.") and name.count(".") > 1]
    parts = {name: name.rpartition(".") for name in ours}
    return [
        name
        for name, (package, _, last) in parts.items()
        if getattr(modules[package], last, None) is not modules[name]
    ]


def test_no_module_is_hidden_by_a_function_of_its_name():
    for layer in LAYERS:
        package = importlib.import_module(f"tilewright.{layer}")
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


@pytest.mark.parametrize(
    ("setting", "printed"),
    [
        ("", "tilewright: nothing was fused"),
        ("logging.basicConfig()", "WARNING:tilewright:nothing was fused"),
        ("log.addHandler(logging.StreamHandler())", "nothing was fused"),
    ],
)
def test_a_warning_names_the_library_where_no_logging_is_set_up(setting, printed):
    """The program's own logging prints a warning once, in its own form."""
    code = (
        "import logging, tilewright; log = logging.getLogger('tilewright')\n"
        f"{setting}\nlog.info('unseen'); log.warning('nothing was %s', 'fused')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == f"{printed}\n"
