"""What the tests that run pytest inside this process share."""

import sys
from pathlib import Path

import pytest
from _pytest.pytester import SysModulesSnapshot


@pytest.fixture(autouse=True)
def _modules_are_loaded_once(monkeypatch):
    """Keeps what a run inside this process imports, except for the files that the test wrote.

    pytester forgets all of it. A module loaded a second time is another one to everything that
    holds the first: Triton's interpreter stores nothing where its language still calls the first.
    """

    def snapshot(pytester: pytest.Pytester) -> SysModulesSnapshot:
        return SysModulesSnapshot(preserve=lambda name: not _lies_in(pytester.path, name))

    monkeypatch.setattr(pytest.Pytester, "_Pytester__take_sys_modules_snapshot", snapshot)


def _lies_in(folder: Path, name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)
