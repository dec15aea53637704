"""Tests that imports run downwards only: tools -> compiler -> patterns -> ops -> codegen."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("codegen", "ops", "patterns", "compiler", "tools")
# Modules that worker processes and audits load. They must start on a machine without torch.
WITHOUT_TORCH = (
    "audit",
    "audit.sass",
    "build",
    "build.cache",
    "build.worker",
    "emit",
    "spec",
    "targets",
)


@cache
def imported(path: Path) -> list[str]:
    """Returns every module that a file imports, anywhere in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def upward(path: Path) -> list[str]:
    """Returns the imports of a layer above the file's own layer."""
    own = LAYERS.index(path.relative_to(ROOT).parts[0])
    ours = [n.split(".")[1] for n in imported(path) if n.startswith("tilewright.")]
    return [layer for layer in ours if LAYERS.index(layer) > own]


FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def test_a_file_imports_its_own_layer_and_those_below():
    taken = {path: upward(path) for path in FILES}
    assert not any(taken.values()), {path: names for path, names in taken.items() if names}


def test_an_upward_import_would_be_seen(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "imported", lambda path: ["tilewright.tools.cli"])
    assert upward(ROOT / "codegen" / "spec.py") == ["tools"]


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_codegen_loads_without_torch(module):
    code = f"""
import sys
sys.modules["torch"] = None  # importing it raises
import tilewright.codegen.{module}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Modules that decide whether a kernel is fast enough. Patterns use the op's `slower` instead.
COST_MODELS = {"plan", "time", "tune", "candidates"}


def asked_of_kernels(path: Path) -> list[str]:
    """Returns the plans and cost models in `codegen/` that a file imports."""
    taken = [name.split(".") for name in imported(path) if name.startswith("tilewright.codegen.")]
    return [".".join(parts) for parts in taken if COST_MODELS.intersection(parts[2:])]


@pytest.mark.parametrize("layer", ["patterns", "compiler"])
def test_ops_alone_say_whether_a_kernel_is_of_use(layer):
    taken = {path: asked_of_kernels(path) for path in FILES if path.is_relative_to(ROOT / layer)}
    assert not any(taken.values()), {path: names for path, names in taken.items() if names}


def test_a_plan_among_the_imports_would_be_seen(monkeypatch):
    taken = ["tilewright.codegen.mlp.plan.MOST_TOKENS", "tilewright.codegen.targets.Target"]
    monkeypatch.setattr(sys.modules[__name__], "imported", lambda path: taken)
    assert asked_of_kernels(ROOT / "patterns" / "mlp" / "linears.py") == taken[:1]


# Families are folders that have kernels. The shared folder of projections may keep the imports that
# it has now.
FAMILIES = {room.parent.name for room in (ROOT / "codegen").glob("*/templates")} | {"projection"}
# The families from which each family may import.
EDGES = {
    ("moe", "grouped"),
    ("mlp", "collective"),
    ("qkv", "collective"),
    ("mla", "attention"),
    ("qkv", "projection"),
    ("mla", "projection"),
    ("qkv", "lora"),
    ("projection", "lora"),
}
# The longest chain of modules of `ops/` that import each other.
LONGEST_CHAIN = 9


def family_of(module: str) -> str | None:
    """Returns "qkv" for tilewright.ops.qkv.checks. Returns None for a module that families
    share."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in FAMILIES else None


def sideways(path: Path) -> list[str]:
    """Returns the imports of a file from a family from which it may not import."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    own = family_of(".".join(("tilewright", *parts)))
    taken = [name for name in imported(path) if name.startswith("tilewright.")]
    others = [name for name in taken if family_of(name) not in (None, own)]
    return [name for name in others if (own, family_of(name)) not in EDGES]


# These may import every family: the compiler, the tools, and the two lists of registered modules.
BELOW = [
    path
    for path in FILES
    if path.relative_to(ROOT).parts[0] in LAYERS[:3]
    and path.relative_to(ROOT).parts[1:] != ("__init__.py",)
]


def test_families_take_from_each_other_along_the_known_edges_only():
    """Shared folders import from no family."""
    taken = {path: sideways(path) for path in BELOW}
    assert not any(taken.values()), {path: names for path, names in taken.items() if names}


def test_nobody_climbs_more_than_so_many_modules_of_ops():
    graph = networkx.DiGraph()
    for path in (ROOT / "ops").rglob("*.py"):
        if path.name != "__init__.py":
            own = ".".join(("tilewright", *path.relative_to(ROOT).with_suffix("").parts))
            graph.add_edges_from((own, module_of(name)) for name in imported(path))
    ours = graph.subgraph(n for n in graph if n.startswith("tilewright.ops."))
    longest = networkx.dag_longest_path(ours)  # raises an error if there is a cycle
    assert len(longest) <= LONGEST_CHAIN, longest


def module_of(name: str) -> str:
    """Returns the module of an imported name. The name may itself be a module."""
    parts = name.split(".")
    file = ROOT.joinpath(*parts[1:]).with_suffix(".py")
    return name if file.is_file() else ".".join(parts[:-1])


def test_every_known_edge_is_one():
    """Every listed edge is used. An edge that no import uses any more must be removed from the
    list."""
    used = {
        (family_of(".".join(("tilewright", *path.relative_to(ROOT).parts))), family_of(name))
        for path in BELOW
        for name in imported(path)
        if name.startswith("tilewright.")
    }
    assert used >= EDGES


def test_a_step_aside_would_be_seen(monkeypatch):
    taken = ["tilewright.ops.moe.operands.moe_problem", "tilewright.ops.formats.fp4.pack"]
    monkeypatch.setattr(sys.modules[__name__], "imported", lambda path: taken)
    assert sideways(ROOT / "ops" / "grouped" / "cases.py") == taken[:1]
    assert sideways(ROOT / "ops" / "formats" / "fp8.py") == taken[:1]
    assert sideways(ROOT / "ops" / "moe" / "lowering.py") == []


# The packages that a machine needs to collect the tests: those that the package itself needs, and
# those that run the tests.
COLLECTING = {
    *("torch", "triton", "sympy", "networkx", "numpy", "filelock", "jinja2", "pygments", "rich"),
    *("typer", "click", "setuptools", "pytest", "hypothesis", "tests", "tilewright"),
}


def imported_on_top(body: list[ast.stmt]) -> Iterator[str]:
    """Yields modules that a file's own statements import, without the imports of its functions."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def skipped_on_top(body: list[ast.stmt]) -> Iterator[str]:
    """Yields modules without which the whole file is skipped."""
    for node in body:
        call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.importorskip":
            assert isinstance(call.args[0], ast.Constant)
            yield str(call.args[0].value)


def optional_packages(path: Path) -> set[str]:
    """Returns packages, other than those in COLLECTING, that a file of tests needs to be
    imported."""
    body = ast.parse(path.read_text("utf-8")).body
    needed, skipped = (
        {name.partition(".")[0] for name in names}
        for names in (imported_on_top(body), skipped_on_top(body))
    )
    folders = (path.parent, ROOT / "benchmarks")
    beside = {path.parent.name, *(file.stem for one in folders for file in one.glob("*.py"))}
    return needed - skipped - beside - COLLECTING - set(sys.stdlib_module_names)


def test_tests_are_collected_without_what_is_optional():
    files = (ROOT / "tests").rglob("test_*.py")
    found = {str(path.relative_to(ROOT)): optional_packages(path) for path in files}
    assert {path: names for path, names in found.items() if names} == {}
