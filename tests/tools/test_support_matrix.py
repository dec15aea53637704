"""Tests the table of docs/support.md: what it contains, and what its rows promise."""

from __future__ import annotations

import importlib.metadata
from itertools import takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.tools.matrix import support_matrix
from tilewright.tools.matrix.releases import RELEASED, ROWS, newest_tried, release
from tilewright.tools.matrix.support_matrix import (
    Count,
    Outcome,
    counted,
    line,
    made_of,
    requirements,
    with_lines,
)

ROOT = Path(__file__).resolve().parents[2]
JUNIT = """
<testsuites><testsuite>
  <testcase classname="a" name="good"/>
  <testcase classname="a" name="bad"><failure message="x">x</failure></testcase>
  <testcase classname="a" name="broken"><error message="x">x</error></testcase>
  <testcase classname="a" name="elsewhere"><skipped message="x">x</skipped></testcase>
</testsuite></testsuites>
"""


def versions(row):
    return {name: getattr(row, name) for name in ("python", "torch", "triton", "transformers")}


def test_tests_are_counted_and_skipped_ones_are_not(tmp_path):
    (tmp_path / "x.xml").write_text(JUNIT)
    count = counted(tmp_path / "x.xml")
    assert count == Count(1, ("a::bad", "a::broken"))
    assert str(count) == "2 of 3 fail"


def test_a_row_that_is_run_again_replaces_its_line_and_leaves_the_others():
    first, second = ROWS[:2]
    header = f"before\n\n{support_matrix.HEADER}\n{'|---' * 12}|\n"
    good = {kind: Count(3) for kind in first.runs}
    failed = line(Outcome(first, versions(first), "RuntimeError: no", {}), "1999-01-01")
    other = line(Outcome(second, versions(second), "", good), "1999-01-01")
    again = line(Outcome(first, versions(first), "", good), "2000-01-01")
    text = with_lines(with_lines(header, [other, failed]), [again])
    assert text == f"{header}{again}\n{other}\n"
    rest = "\nWords.\n\n| another | table |\n|---|---|\n| is | kept |\n"
    assert with_lines(text + rest, [failed]) == f"{header}{failed}\n{other}\n{rest}"
    assert "| not run |" in failed
    assert "| 3 pass |" in again


def test_a_row_that_fails_is_not_good():
    good = {"graphs": Count(3)}
    assert Outcome(ROWS[0], {}, "", good).good
    assert not Outcome(ROWS[0], {}, "boom", good).good
    assert not Outcome(ROWS[0], {}, "", {"graphs": Count(3, ("a::b",))}).good
    assert not Outcome(ROWS[0], {}, "", {"graphs": Count(0, error="no end")}).good


def test_every_row_is_pinned_but_the_one_that_takes_what_is_out_today():
    assert all(f"torch=={row.torch}" in requirements(row) for row in ROWS)
    assert requirements(RELEASED)[:3] == ["torch", "triton", "transformers"]


def test_the_quantised_row_has_the_libraries_and_runs_what_needs_them():
    (row,) = (row for row in ROWS if row.name == "quantised")
    assert {name.partition("==")[0] for name in row.besides} == {
        "torchao", "compressed-tensors", "optimum", "optimum-quanto", "bitsandbytes", "hqq",
        "gptqmodel",
    }  # fmt: skip
    assert set(row.besides) < set(requirements(row))
    good = line(Outcome(row, versions(row), "", {"quantised": Count(7)}), "2000-01-01")
    assert "| good | - | - | - | 7 pass |" in good
    assert {kind for other in ROWS for kind in other.runs} == set(support_matrix.TESTS)


def test_an_environment_is_known_by_row_checkout_and_project(tmp_path):
    """An environment is identified by its row, the checkout and the project. If its editable
    install leads to another place, it is made again."""
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text("[project]\n")
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    first = made_of(ROWS[0], here)
    assert first == made_of(ROWS[0], here)
    assert first not in (made_of(ROWS[1], here), made_of(ROWS[0], elsewhere))
    (here / "pyproject.toml").write_text("[project]\ndependencies = []\n")
    assert first != made_of(ROWS[0], here)


def test_versions_are_compared_as_numbers():
    assert release("2.13.0+cpu") == release("2.13.0") < release("2.100.0rc1") == (2, 100, 0)
    assert newest_tried("rich") is None


def test_the_bounds_of_the_packages_are_those_of_the_rows():
    (oldest,) = (row for row in ROWS if row.name == "oldest")
    assert importlib.metadata.metadata("tilewright")["Requires-Python"] == f">={oldest.python}"
    needed = importlib.metadata.requires("tilewright") or []
    for name in ("torch", "triton", "transformers"):
        (bound,) = (b.partition(";")[0] for b in needed if b.startswith(f"{name}>="))
        lowest = release(bound.partition(">=")[2].strip())
        assert release(getattr(oldest, name))[: len(lowest)] == lowest
    torch, triton = (newest_tried(name).rpartition(".")[0] for name in ("torch", "triton"))
    stated = f"tried up to {torch}, with Triton up to {triton}: docs/support.md"
    assert stated in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("path", [p for paths in support_matrix.TESTS.values() for p in paths])
def test_what_a_row_runs_is_there(path):
    assert (ROOT / path).exists()


def test_the_lines_of_the_table_are_rows_in_their_order():
    text = (ROOT / support_matrix.TABLE).read_text("utf-8")
    _, header, after = text.partition(f"\n{support_matrix.HEADER}\n")
    assert header
    table = takewhile(lambda line: line.startswith("|"), after.splitlines())
    tried = [row.split("|")[1].strip() for row in table if row.startswith("| ")]
    assert tried == [row.name for row in ROWS if row.name in tried]


def test_an_unknown_row_is_refused():
    app = support_matrix.typer.Typer()
    app.command()(support_matrix.main)
    done = CliRunner().invoke(app, ["--rows", "newest,sideways"])
    assert done.exit_code == 2
    assert "sideways" in done.output
