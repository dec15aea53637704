"""Fixtures of the tests that run commands, or pytest, inside this process."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from _pytest.pytester import SysModulesSnapshot
from typer.testing import CliRunner

from tests.tools.test_cli import CACHE_MODEL
from tilewright.tools.cli import app

REAL_MODELS = """
    import torch

    def make_real(device="cpu"):
        torch.manual_seed(0)
        model = mine.Model(mine.by_index).to(torch.bfloat16).requires_grad_(False)
        return model, (torch.randn(3, 128, dtype=torch.bfloat16), torch.tensor([1, 5, 40])), {}
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Returns `command(*arguments)`, which runs the program in a folder that holds mine.py and
    real.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(CACHE_MODEL))
    (tmp_path / "real.py").write_text("import mine\n" + textwrap.dedent(REAL_MODELS))
    for name in ("mine", "real"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    torch._dynamo.reset()
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def _modules_are_loaded_once(monkeypatch):
    """Keeps the modules that a run inside this process imports, except for files that the test
    wrote.

    pytester would remove all of them from `sys.modules`. But code that holds a module does not see
    a second copy of the module. For example, Triton's interpreter stores nothing if Triton's
    language still calls the first copy.
    """

    def snapshot(pytester: pytest.Pytester) -> SysModulesSnapshot:
        return SysModulesSnapshot(preserve=lambda name: not _lies_in(pytester.path, name))

    monkeypatch.setattr(pytest.Pytester, "_Pytester__take_sys_modules_snapshot", snapshot)


def _lies_in(folder: Path, name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)
