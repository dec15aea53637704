"""Fixtures of the tests that run pytest inside this process."""

import sys
from pathlib import Path

import pytest
from _pytest.pytester import SysModulesSnapshot


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
