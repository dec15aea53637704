"""Tests the plugin as users run it: a snapshot is written, compared, lost and written again."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from tests.tools.test_cli import CACHE_MODEL
from tilewright.tools.pytest_plugin import FOLDER
from tilewright.tools.report.snapshot import SnapshotError, parse_snapshot

pytest_plugins = ["pytester"]

USERS_TESTS = """
    import os
    import mine

    def write():
        return mine.by_addition if os.environ.get("BROKEN") else mine.by_index

    def test_snapshot(tilewright):
        model, args, kwargs = mine.make(write())
        tilewright.check(model, args, kwargs)

    def test_counts(tilewright):
        model, args, kwargs = mine.make(write())
        tilewright.assert_matches(model, args, kwargs, qkv_cache=2)

    def test_twin(tilewright):
        model, args, kwargs = mine.make(mine.by_addition)
        tilewright.assert_misses(model, args, kwargs, qkv_cache="ACCUMULATED_WRITE")
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """Returns `project(*arguments)`, which runs pytest in a folder with a model and its tests."""
    pytester.makepyfile(mine=CACHE_MODEL, test_mine=USERS_TESTS)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:xdist -p no:hypothesispytest\n")
    monkeypatch.syspath_prepend(pytester.path)

    def run(*arguments: str):
        torch._dynamo.reset()
        return pytester.runpytest_inprocess(*arguments)

    return run


def test_a_run_inside_this_process_loads_a_module_once(pytester, monkeypatch):
    """A run inside this process loads a module only once. The modules that it imports stay, except
    for the files that the test wrote."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    pytester.makepyfile(written="", test_it="import colorsys, written\ndef test_nothing(): pass")
    monkeypatch.syspath_prepend(pytester.path)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
    assert "colorsys" in sys.modules
    assert "written" not in sys.modules


def test_a_lost_match_fails_with_its_miss_until_the_snapshot_is_updated(
    project, pytester, monkeypatch
):
    missing = project("-k", "snapshot")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*write it with pytest --tilewright-update*"])

    project("--tilewright-update", "-k", "snapshot").assert_outcomes(passed=1)
    path = pytester.path / FOLDER / "test_mine" / "test_snapshot.snapshot"
    first = path.read_text()
    assert first.startswith("# torch ")
    (line,) = parse_snapshot(first)
    assert (line.scope, line.count) == ("layers.*", 2)
    assert line.what.startswith("qkv_cache -> fused_qkv_paged  ")
    project("-k", "snapshot").assert_outcomes(passed=1)

    monkeypatch.setenv("BROKEN", "1")
    lost = project("-k", "snapshot")
    lost.assert_outcomes(failed=1)
    lost.stdout.fnmatch_lines(
        [
            "*the matches differ from *test_snapshot.snapshot:*",
            "*- layers.*  qkv_cache -> fused_qkv_paged*(2 -> 0)*",
            "*+ layers.*  missed qkv_cache  anchored, ACCUMULATED_WRITE*(0 -> 2)*",
            "*missed qkv_cache: layers.0 (mine.py:*ACCUMULATED_WRITE*",
        ]
    )
    assert path.read_text() == first
    project("--tilewright-update", "-k", "snapshot").assert_outcomes(passed=1)
    project("-k", "snapshot").assert_outcomes(passed=1)
    assert "ACCUMULATED_WRITE" in path.read_text()


def test_counts_and_negative_twins(project, monkeypatch):
    project("-k", "counts or twin").assert_outcomes(passed=2)
    monkeypatch.setenv("BROKEN", "1")
    broken = project("-k", "counts or twin")
    broken.assert_outcomes(passed=1, failed=1)
    broken.stdout.fnmatch_lines(["*qkv_cache: 0, expected 2*", "*ACCUMULATED_WRITE*"])


def test_a_failure_shows_its_message_and_not_torch_s_trace(project, monkeypatch):
    """A failure shows its message, and not torch's trace. The trace must not reach the logger to
    which pytest listens."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    monkeypatch.setenv("BROKEN", "1")
    broken = project("-k", "counts")
    broken.assert_outcomes(failed=1)
    broken.stdout.no_fnmatch_line("*torch.__trace*")
    broken.stdout.no_fnmatch_line("*Captured log*")


def test_a_miss_by_any_pattern(project, pytester):
    pytester.makepyfile(
        test_any="""
        import mine, pytest

        def test_missed(tilewright):
            tilewright.assert_misses(*mine.make_missed(), code="ACCUMULATED_WRITE")

        def test_other_code(tilewright):
            tilewright.assert_misses(*mine.make_missed(), code="ESCAPES")

        def test_not_missed(tilewright):
            tilewright.assert_misses(*mine.make(), code="ACCUMULATED_WRITE")

        def test_no_code(tilewright):
            with pytest.raises(ValueError, match="no miss codes"):
                tilewright.assert_misses(*mine.make_missed(), code="ESCAPED")
        """
    )
    done = project("test_any.py")
    done.assert_outcomes(passed=2, failed=2)
    done.stdout.fnmatch_lines(["no miss ESCAPES", "no miss ACCUMULATED_WRITE"])


def test_workers_and_no_logging_plugin(pytester, project):
    """The plugin works with `pytest-xdist`, whose workers get its option, and without pytest's
    logging plugin."""
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    project("-p", "no:logging", "-k", "snapshot").assert_outcomes(failed=1)
    workers = ("-n", "1", "-p", "no:logging", "-k", "snapshot", "--tilewright-update")
    project(*workers).assert_outcomes(passed=1)


def test_tests_of_two_classes_have_a_snapshot_each(project, pytester):
    pytester.makepyfile(
        test_classes="""
        import mine

        class TestOne:
            def test_it(self, tilewright):
                tilewright.check(*mine.make())

        class TestOther:
            def test_it(self, tilewright):
                tilewright.check(*mine.make(mine.by_addition))
        """
    )
    project("--tilewright-update", "test_classes.py").assert_outcomes(passed=2)
    project("test_classes.py").assert_outcomes(passed=2)


def test_an_expectation_that_cannot_fail_is_refused(project, pytester):
    pytester.makepyfile(
        test_typos="""
        import mine, pytest

        @pytest.mark.parametrize("expected", [{"qkv_cahce": 0}, {}])
        def test_counts(tilewright, expected):
            with pytest.raises(ValueError, match="qkv_cache"):
                tilewright.assert_matches(*mine.make(), **expected)

        def test_codes(tilewright):
            with pytest.raises(ValueError, match="K_PAHT"):
                tilewright.assert_misses(*mine.make(), qkv_cache="K_PAHT")
        """
    )
    project("test_typos.py").assert_outcomes(passed=3)


def test_a_corrupt_snapshot_fails_and_says_what_to_do(project, pytester):
    folder = pytester.path / FOLDER / "test_mine"
    folder.mkdir(parents=True)
    (folder / "test_snapshot.snapshot").write_bytes(b"\xff\xfe\x00")
    corrupt = project("-k", "snapshot")
    corrupt.assert_outcomes(failed=1)
    corrupt.stdout.fnmatch_lines(["*write it anew with pytest --tilewright-update*"])


@pytest.mark.parametrize("text", ["", "# torch 2.13\n", "oneword\n", "{}"])
def test_what_is_no_snapshot_is_refused(text):
    with pytest.raises(SnapshotError):
        parse_snapshot(text)


def test_the_plugin_imports_no_torch():
    """Every pytest run in an environment loads the plugin, so it must cost nothing."""
    script = "import sys, tilewright.tools.pytest_plugin; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
