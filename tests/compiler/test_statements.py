"""Statements in graphs that fuse: see :mod:`tests.compiler.statements`."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.compiler import statement_programs, statements
from tests.compiler.statement_programs import FORMS, turns

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FIRST, COUNT = 100_800, len(turns())


@pytest.fixture(autouse=True)
def quiet():
    """Programs that the dice did not make valid are talked about by torch."""
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def test_a_graph_with_statements_computes_what_it_did():
    """Each kind of statement in each spelling in each family's graph. In processes of their own:
    torch may take one down, whose programs are then left out."""
    command = [sys.executable, "-m", "tests.compiler.statements"]
    done = subprocess.run(
        [*command, "--seeds", f"{FIRST}:{FIRST + COUNT}"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    made, fused = re.search(r"(\d+) programs, (\d+) with a rewrite", done.stdout).groups()
    assert int(made) > COUNT * 0.9
    assert int(fused) > int(made) / 2
    assert "not drawn: []" in done.stdout or "took its process down" in done.stdout, done.stdout


def test_turns_are_all_that_a_statement_can_be():
    drawn = set(turns())
    for family in statement_programs.FAMILIES:
        spelled = {
            kind: {f for g, k, f in drawn if (g, k) == (family, kind)} for _, kind, _ in drawn
        }
        assert spelled["writes"] == spelled["out"] == set(FORMS)
        assert spelled["aliases"] == set(FORMS) - {"checkpoint", "cond"}
        assert spelled["reads"]


def test_the_operators_are_those_that_torch_registers():
    """New ones of a newer torch are drawn too; there are hundreds of each kind."""
    counts = {
        kind: len(statement_programs.overloads(kind)) for kind in ("writes", "out", "aliases")
    }
    assert counts["writes"] > 250
    assert counts["out"] > 500
    assert counts["aliases"] > 40


def test_every_family_fuses_as_it_is():
    for family in statement_programs.FAMILIES:
        base = statement_programs.base(family)
        report = statements.fuse(base.module, statements.OPTIONS)
        assert report.matches, family


def test_a_wrong_rewrite_is_seen(monkeypatch):
    """With the rules of legality switched off, statements make wrong results."""
    monkeypatch.setattr("tilewright.compiler.fuse.check_legality", lambda match, flow: None)
    outcomes = map(statements.tried, range(60))
    assert any(outcome is not None and outcome.wrong for outcome in outcomes)
