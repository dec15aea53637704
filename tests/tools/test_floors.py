"""Imports run downwards only: tools -> compiler -> patterns -> ops -> codegen."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("codegen", "ops", "patterns", "compiler", "tools")
# What worker processes and audits load must start where torch is not installed.
WITHOUT_TORCH = ("audit", "build", "cache", "emit", "sass", "spec", "targets", "worker")


def imported(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward(path: Path) -> list[str]:
    """Imports of a higher floor than the file's own."""
    own = FLOORS.index(path.relative_to(ROOT).parts[0])
    ours = [n.split(".")[1] for n in imported(path) if n.startswith("tilewright.")]
    return [floor for floor in ours if FLOORS.index(floor) > own]


FILES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_its_own_floor_and_those_below(path):
    assert upward(path) == []


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
